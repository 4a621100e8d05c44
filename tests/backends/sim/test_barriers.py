"""Barriers and clusters: waits that repeat, threads that do not add up, CTAs that have not started or have ended."""

from __future__ import annotations

import pytest
from tests.backends.sim.tiny import kinds, run, word
from tests.conformance.case import sync_cluster
from tests.instructions import load_cluster, store_cluster

from gemmsmith import hw
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Value


def test_asking_again_for_a_phase_counts_once() -> None:
    """A token, then a wait for the same phase; a later wait that is two phases behind is still found."""

    def record(k: Builder, out: Value, more: int) -> None:
        barrier = k.shared(8, alignment=8, name="b")
        with k.when(k.thread == 0):
            hw.mbarrier_init(barrier[0], 1)
            hw.mbarrier_arrive(barrier[0])
            hw.mbarrier_test_wait(barrier[0], 0)
            hw.mbarrier_wait(barrier[0], 0)
            for _ in range(more):
                hw.mbarrier_arrive(barrier[0])
            hw.mbarrier_wait(barrier[0], 1)

    assert kinds(run(lambda k, out: record(k, out, 1), threads=32)) == set()
    assert "phase aliasing" in kinds(run(lambda k, out: record(k, out, 2), threads=32))


def test_the_lane_that_initializes_may_expect_bytes() -> None:
    def record(k: Builder, out: Value) -> None:
        barrier = k.shared(8, alignment=8, name="b")
        with k.when(k.thread == 0):
            hw.mbarrier_init(barrier[0], 1)
            hw.mbarrier_expect_tx(barrier[0], 0)
            hw.mbarrier_arrive(barrier[0])

    assert kinds(run(record, threads=32)) == set()


def test_a_phase_left_half_done_names_the_barrier_and_its_init() -> None:
    def record(k: Builder, out: Value) -> None:
        barrier = k.shared(8, stages=2, alignment=8, name="full")
        with k.when(k.thread == 0):
            hw.mbarrier_init(barrier[1], 3)
            hw.mbarrier_arrive(barrier[1])

    (hazard,) = run(record).hazards
    assert hazard.kind == "barrier"
    assert hazard.message == "full[1] is in the middle of phase 0: 2 of 3 arrivals and 0 bytes missing"
    assert hazard.location.file == __file__


def test_data_over_an_mbarrier_and_one_that_is_not_aligned() -> None:
    def over(k: Builder, out: Value) -> None:
        tile = k.shared(64, name="tile")
        barrier = k.shared(8, alignment=8, name="b")
        with k.when(k.thread == 0):
            hw.mbarrier_init(barrier[0], 1)
        hw.sync_threads()
        with k.when(k.thread < 17):  # one word too many
            hw.store_shared(word(k, k.smem), tile[0].address + (k.thread * 4).to(U32))

    def askew(k: Builder, out: Value) -> None:
        with k.when(k.thread == 0):
            hw.mbarrier_init(k.shared(16, alignment=8, name="b")[0].address + 4, 1)

    assert kinds(run(over, threads=32)) == {"barrier"}
    assert kinds(run(askew, threads=32)) == {"alignment"}


@pytest.mark.parametrize(
    ("identifier", "threads", "found"),
    [(1, 128, set()), (1, 96, {"barrier", "deadlock"}), (16, 128, {"barrier"}), (1, 129, {"barrier", "deadlock"})],
)
def test_named_barriers(identifier: int, threads: int, found: set[str]) -> None:
    assert kinds(run(lambda k, out: hw.barrier_sync(identifier, threads))) == found


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("relaxed", [False, True])
@pytest.mark.parametrize(("before", "after"), [(True, True), (False, True), (True, False)])
def test_distributed_shared_memory_needs_its_cta(before: bool, after: bool, relaxed: bool, seed: int) -> None:
    """A peer must have started, and must not have ended."""

    def record(k: Builder, out: Value) -> None:
        smem = k.shared(128, name="s")
        if before:
            sync_cluster(relaxed=relaxed)
        there = hw.mapa(smem[0], (hw.cluster_rank() ^ 1).to(U32))
        with k.when(k.thread == 0):
            store_cluster(word(k, k.smem), there)
        if after:
            sync_cluster()

    expected = set() if before and after else {"barrier"} if after else {"access to exited CTA"}
    assert kinds(run(record, threads=64, grid=2, cluster=2, seed=seed)) == expected


@pytest.mark.parametrize("relaxed", [False, True])
def test_a_relaxed_arrival_releases_no_write(relaxed: bool) -> None:
    """Neither to the cluster's other CTAs nor to the CTA's other warps, nor to a warp's other lanes."""

    def record(k: Builder, out: Value, reads: str) -> None:
        smem = k.shared(256, name="s")
        with k.when(k.thread == 0):
            hw.store_shared(word(k, k.smem), smem[0].address)
        sync_cluster(relaxed=relaxed)
        got = k.registers(U32, 1, "got")
        with k.when({"peer": k.thread == 0, "warp": k.thread == 32, "lanes": k.thread < 32}[reads]):
            if reads == "peer":
                load_cluster(got, hw.mapa(smem[0], (hw.cluster_rank() ^ 1).to(U32)))
            else:
                hw.load_shared(got, smem[0].address)
        sync_cluster()

    for reads in ("peer", "warp", "lanes"):
        found = kinds(run(lambda k, out, reads=reads: record(k, out, reads), threads=64, grid=2, cluster=2))
        assert found == ({"race"} if relaxed else set()), reads


@pytest.mark.parametrize("fenced", [False, True])
def test_a_relaxed_arrival_makes_fenced_inits_known(fenced: bool) -> None:
    """To the whole cluster; inits after the fence are not, nor is any without one."""

    def record(k: Builder, out: Value, late: bool) -> None:
        barrier = k.shared(8, alignment=8, name="b")
        with k.when(k.thread == 0):
            if late and fenced:
                hw.fence_mbarrier_init()
            hw.mbarrier_init(barrier[0], 2)
            if fenced and not late:
                hw.fence_mbarrier_init()
        sync_cluster(relaxed=True)
        with k.when(k.thread < 2):
            hw.mbarrier_arrive_remote(barrier[0], k.thread.to(U32), "cta")
        with k.when(k.thread == 32):
            hw.mbarrier_wait(barrier[0], 0)

    right = run(lambda k, out: record(k, out, False), threads=64, grid=2, cluster=2)
    assert kinds(right) == (set() if fenced else {"barrier"})
    assert kinds(run(lambda k, out: record(k, out, True), threads=64, grid=2, cluster=2)) == {"barrier"}


def test_a_rank_that_no_cta_has() -> None:
    def record(k: Builder, out: Value) -> None:
        there = hw.mapa(k.shared(128, name="s")[0], hw.cluster_rank().to(U32) + 5)
        with k.when(k.thread == 0):
            store_cluster(word(k, k.smem), there)

    result = run(record, threads=64, grid=2, cluster=2)
    assert kinds(result) == {"out of bounds"}
    assert "CTA 5 of a cluster of 2" in str(result.hazards[0])
