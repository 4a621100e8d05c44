"""What orders what, and how far: phases, scopes, fences, lanes, atomics, grids. Each mistake is found whatever the
schedule, beside the same kernel without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.backends.sim.tiny import kernel, kinds, run, word
from tests.conformance.case import sync_cluster
from tests.instructions import bulk_wait, cluster_arrive, store_cluster

from gemmsmith import hw
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32, U64
from gemmsmith.lang.values import Constant, Value

SEEDS = range(8)
DATA, FLAG = 0, 2048
"""Bytes from `out` on."""


def found(record: Callable[[Builder, Value], None], threads: int = 64, grid: int = 1, cluster: int = 1) -> set[str]:
    """The kinds that every schedule reports: none of them may report others."""
    reported = [kinds(run(record, threads=threads, grid=grid, cluster=cluster, seed=seed)) for seed in SEEDS]
    assert all(bool(each) == bool(reported[0]) for each in reported), reported
    return set.union(*reported)


def barrier_of(k: Builder, count: int) -> Value:
    barrier = k.shared(8, alignment=8, name="b")
    with k.when(k.thread == 0):
        hw.mbarrier_init(barrier[0], count)
        hw.fence_mbarrier_init()
    sync_cluster() if k.cluster[0] > 1 else hw.sync_threads()
    return barrier[0].address


# -- phases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [True, False])
def test_a_first_wait_that_passes_at_once_may_come_too_late(ordered: bool) -> None:
    """A producer that waits for parity 1 on a fresh barrier, whose first phase completes without it: where it comes
    later it waits for ever."""

    def record(k: Builder, out: Value) -> None:
        empty, full = barrier_of(k, 1), k.shared(8, alignment=8, name="full")
        with k.when(k.thread == 0):
            hw.mbarrier_init(full[0], 1)
        hw.sync_threads()
        with k.when(k.thread == 0):
            hw.mbarrier_wait(empty, 1)
            hw.mbarrier_arrive(full[0])
        with k.when(k.thread == 32):
            if ordered:
                hw.mbarrier_wait(full[0], 0)
            hw.mbarrier_arrive(empty)

    reported = found(record)
    assert reported == set() if ordered else "phase aliasing" in reported


@pytest.mark.parametrize("ordered", [True, False])
def test_every_warp_must_have_seen_a_phase_before_the_next_completes(ordered: bool) -> None:
    """One of the waiting warps starts the next phase; the other may still be waiting for the last."""

    def record(k: Builder, out: Value) -> None:
        barrier = barrier_of(k, 1)
        with k.when(k.thread == 0):
            hw.mbarrier_arrive(barrier)
        hw.mbarrier_wait(barrier, 0)
        if ordered:
            hw.sync_threads()
        with k.when(k.thread == 0):
            hw.mbarrier_arrive(barrier)
        with k.when(k.thread == 0):
            hw.mbarrier_wait(barrier, 1)

    reported = found(record, threads=256)
    assert reported == set() if ordered else "phase aliasing" in reported


@pytest.mark.parametrize("meet", ["after the wait", "before it", ""])
def test_lanes_may_lag_behind_in_a_wait(meet: str) -> None:
    """One lane starts the next phase for its warp: the others have seen the last one if all have met since."""

    def record(k: Builder, out: Value) -> None:
        barrier = barrier_of(k, 1)
        with k.when(k.thread == 0):
            hw.mbarrier_arrive(barrier)
        if meet == "before it":
            hw.elect_one()
        hw.mbarrier_wait(barrier, 0)
        if meet == "after the wait":
            hw.elect_one()
        with k.when(k.thread == 0):
            hw.mbarrier_arrive(barrier)

    assert found(record, threads=32) == (set() if meet == "after the wait" else {"phase aliasing"})


# -- scopes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("release", "acquire"), [("cluster", "cluster"), ("cta", "cluster"), ("cluster", "cta")])
def test_what_ld_has_read_is_handed_back_at_the_clusters_scope(release: str, acquire: str) -> None:
    """CTA 0 reads its shared memory and tells CTA 1, which overwrites it."""

    def record(k: Builder, out: Value) -> None:
        smem, barrier = k.shared(128, name="slot"), barrier_of(k, 1)
        with k.when((k.thread == 0) & (hw.cluster_rank() == 0)):
            hw.store_shared(word(k, k.smem), smem[0].address)
            hw.load_shared(k.registers(U32, 1, "got"), smem[0].address)
            hw.mbarrier_arrive_remote(barrier, Constant(U32, 1), release)
        with k.when((k.thread == 0) & (hw.cluster_rank() == 1)):
            hw.mbarrier_wait(barrier, 0, acquire)
            store_cluster(word(k, k.smem), hw.mapa(smem[0], Constant(U32, 0)))
        sync_cluster()

    right = release == acquire == "cluster"
    assert found(record, grid=2, cluster=2) == (set() if right else {"race"})


@pytest.mark.parametrize("acquire", ["cluster", "cta"])
def test_what_another_cta_stores_is_seen_at_the_clusters_scope(acquire: str) -> None:
    def record(k: Builder, out: Value) -> None:
        smem, barrier = k.shared(128, name="slot"), barrier_of(k, 1)
        rank = hw.cluster_rank()
        with k.when((k.thread == 0) & (rank == 0)):
            there = hw.mapa(smem[0], Constant(U32, 1))
            hw.store_async(word(k, k.smem), there, hw.mapa(barrier, Constant(U32, 1)))
        with k.when((k.thread == 0) & (rank == 1)):
            hw.mbarrier_arrive_expect_tx(barrier, 4)
            hw.mbarrier_wait(barrier, 0, acquire)
            hw.load_shared(k.registers(U32, 1, "got"), smem[0].address)
        sync_cluster()

    reported = found(record, grid=2, cluster=2)
    assert reported == set() if acquire == "cluster" else "race" in reported


def message(
    k: Builder, out: Value, write: tuple[str, str], read: tuple[str, str], before: str = "", after: str = ""
) -> None:
    """CTA 0 writes a word and raises a flag by (order, scope); the last CTA waits for it and reads the word. Fences of
    the scopes `before` and `after` stand between."""
    with k.when((k.thread == 0) & (hw.block_index() == 0)):
        hw.store_global(word(k, k.smem), out + DATA, True)
        if before:
            hw.fence_acq_rel(before)
        hw.store_strong(out + FLAG, Constant(U32, 1), *write)
    with k.when((k.thread == 0) & (hw.block_index() == hw.grid_size() - 1)):
        if read[0] == "acquire":
            hw.spin_until_equal(out + FLAG, Constant(U32, 1), read[1])
        else:
            hw.spin_until_at_least(out + FLAG, Constant(U32, 1), Constant(U32, 1 << 20))
        if after:
            hw.fence_acq_rel(after)
        hw.load_global(k.registers(U32, 1, "got"), out + DATA, True)


RELEASE, ACQUIRE, RELAXED = ("release", "gpu"), ("acquire", "gpu"), ("relaxed", "gpu")


@pytest.mark.parametrize(
    ("write", "read", "before", "after", "right"),
    [
        (RELEASE, ACQUIRE, "", "", True),
        (RELAXED, ACQUIRE, "", "", False),
        (RELEASE, RELAXED, "", "", False),
        (("release", "cluster"), ACQUIRE, "", "", False),
        (RELEASE, ("acquire", "cluster"), "", "", False),
        (RELAXED, RELAXED, "gpu", "gpu", True),
        (RELAXED, RELAXED, "gpu", "", False),
        (RELAXED, RELAXED, "", "gpu", False),
        (RELAXED, RELAXED, "cta", "gpu", False),
        (RELAXED, RELAXED, "gpu", "cluster", False),
        (RELAXED, ACQUIRE, "gpu", "", True),
        (RELEASE, RELAXED, "", "gpu", True),
    ],
)
def test_messages_between_ctas(
    write: tuple[str, str], read: tuple[str, str], before: str, after: str, right: bool
) -> None:
    def record(k: Builder, out: Value) -> None:
        message(k, out, write, read, before, after)

    reported = found(record, threads=32, grid=2)
    assert reported == (set() if right else {"race"})


@pytest.mark.parametrize(("scope", "cluster"), [("cluster", 2), ("cluster", 1), ("gpu", 1)])
def test_a_scope_reaches_as_far_as_it_says(scope: str, cluster: int) -> None:
    """The same flag between two CTAs, of one cluster or of two."""

    def record(k: Builder, out: Value) -> None:
        message(k, out, ("release", scope), ("acquire", scope))

    right = scope == "gpu" or cluster == 2
    assert found(record, threads=32, grid=2, cluster=cluster) == (set() if right else {"race"})


@pytest.mark.parametrize(("everybody", "storing"), [(True, 0), (False, 0), (True, 1)])
def test_a_fence_of_all_lanes_is_one_of_each(everybody: bool, storing: int) -> None:
    """A lane that has acted alone before executes it too; a fence of another lane says nothing of this one's stores,
    nor does this lane's flag of another lane's."""

    def record(k: Builder, out: Value) -> None:
        with k.when((k.thread == 0) & (hw.block_index() == 0)):
            hw.store_global(word(k, k.smem), out + DATA + 64, True)
        with k.when((k.thread == storing) & (hw.block_index() == 0)):
            hw.store_global(word(k, k.smem), out + DATA, True)
        with k.when((k.lane == 1) | everybody):
            hw.fence_acq_rel()
        with k.when((k.thread == 0) & (hw.block_index() == 0)):
            hw.store_strong(out + FLAG, Constant(U32, 1), "relaxed", "gpu")
        with k.when((k.thread == 0) & (hw.block_index() == 1)):
            hw.spin_until_equal(out + FLAG, Constant(U32, 1))
            hw.load_global(k.registers(U32, 1, "got"), out + DATA, True)

    assert found(record, threads=32, grid=2) == (set() if everybody and storing == 0 else {"race"})


# -- atomics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordinary", ["store", "load", ""])
@pytest.mark.parametrize("atomic", [hw.atom_add_u32, hw.red_add_u32])
def test_an_ordinary_access_beside_an_atomic_is_a_race(ordinary: str, atomic: Callable[..., Value]) -> None:
    """Atomics of several CTAs are none among themselves."""

    def record(k: Builder, out: Value) -> None:
        atomic(out + FLAG, Constant(U32, 1))
        with k.when((k.thread == 0) & (hw.block_index() == 1)):
            if ordinary == "store":
                hw.store_global(word(k, k.smem), out + FLAG, True)
            elif ordinary:
                hw.load_global(k.registers(U32, 1, "got"), out + FLAG, True)

    assert found(record, threads=32, grid=2) == ({"race"} if ordinary else set())


def test_an_atomic_of_too_small_a_scope_is_a_race() -> None:
    def record(k: Builder, out: Value, scope: str) -> None:
        with k.when(k.thread == 0):
            hw.atom_add_u32(out + FLAG, Constant(U32, 1), "relaxed", scope)

    assert found(lambda k, out: record(k, out, "gpu"), threads=32, grid=2) == set()
    assert found(lambda k, out: record(k, out, "cluster"), threads=32, grid=2) == {"race"}
    assert found(lambda k, out: record(k, out, "cluster"), threads=32, grid=2, cluster=2) == set()


@pytest.mark.parametrize("fenced", [True, False])
def test_a_count_that_its_last_makes_zero_again(fenced: bool) -> None:
    """Two counters: what all have added to the first must come before the last's zero, which fences see to."""

    def record(k: Builder, out: Value) -> None:
        with k.when(k.thread == 0):
            hw.red_add_u32(out + FLAG, Constant(U32, 1))
            if fenced:
                hw.fence_acq_rel()
            before = hw.atom_add_u32(out + FLAG + 4, Constant(U32, 1))
            with k.when(before == hw.grid_size().to(U32) - 1):
                if fenced:
                    hw.fence_acq_rel()
                hw.store_strong(out + FLAG, Constant(U32, 0), "relaxed", "gpu")

    assert found(record, threads=32, grid=4) == (set() if fenced else {"race"})


def test_an_atomic_hands_on_what_it_read() -> None:
    """A release, another thread's relaxed atomic, an acquire of what that left: a chain that a store would break."""

    def record(k: Builder, out: Value, chained: bool) -> None:
        with k.when((k.thread == 0) & (hw.block_index() == 0)):
            hw.store_global(word(k, k.smem), out + DATA, True)
            hw.atom_add_u32(out + FLAG, Constant(U32, 1), "release", "gpu")
        with k.when((k.thread == 0) & (hw.block_index() == 1)):
            hw.spin_until_at_least(out + FLAG, Constant(U32, 1), Constant(U32, 1 << 20))
            if chained:
                hw.atom_add_u32(out + FLAG, Constant(U32, 1))
            else:
                hw.store_strong(out + FLAG, Constant(U32, 2), "relaxed", "gpu")
        with k.when((k.thread == 0) & (hw.block_index() == 2)):
            hw.spin_until_equal(out + FLAG, Constant(U32, 2))
            hw.load_global(k.registers(U32, 1, "got"), out + DATA, True)

    assert found(lambda k, out: record(k, out, True), threads=32, grid=3) == set()
    assert found(lambda k, out: record(k, out, False), threads=32, grid=3) == {"race"}


# -- lanes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_lane_sees_its_own_word_and_others_after_a_syncwarp(shift: int, ordered: bool) -> None:
    def record(k: Builder, out: Value) -> None:
        smem = k.shared(128, name="words")
        hw.store_shared(word(k, k.lane.to(U32)), smem[0].address + (k.lane * 4).to(U32))
        if ordered:
            hw.sync_warp()
        hw.load_shared(k.registers(U32, 1, "got"), smem[0].address + ((k.lane ^ shift) * 4).to(U32))

    assert found(record, threads=32) == (set() if ordered or not shift else {"race"})


@pytest.mark.parametrize("ordered", [True, False])
def test_two_single_lanes(ordered: bool) -> None:
    def record(k: Builder, out: Value) -> None:
        smem = k.shared(128, name="word")
        with k.when(k.lane == 0):
            hw.store_shared(word(k, k.smem), smem[0].address)
        if ordered:
            hw.sync_warp()
        with k.when(k.lane == 1):
            hw.load_shared(k.registers(U32, 1, "got"), smem[0].address)

    assert found(record, threads=32) == (set() if ordered else {"race"})


@pytest.mark.parametrize("value", ["lane", "same", "own word"])
@pytest.mark.parametrize("access", ["shared", "global", "strong", "atomic"])
def test_lanes_that_store_to_one_address_in_one_instruction(access: str, value: str) -> None:
    """Which of the values stays is undefined, unless they are the same or the accesses are strong."""

    def record(k: Builder, out: Value) -> None:
        shift = k.lane * (4 if value == "own word" else 0)
        number = Constant(U32, 7) if value == "same" else k.lane.to(U32)
        if access == "atomic":
            hw.red_add_u32(out + shift.to(U64), number)
        elif access == "strong":
            hw.store_strong(out + shift.to(U64), number, "relaxed", "gpu")
        elif access == "global":
            hw.store_global(word(k, number), out + shift.to(U64), True)
        else:
            hw.store_shared(word(k, number), k.shared(128, name="words")[0].address + shift.to(U32))

    races = value == "lane" and access in ("shared", "global")
    assert found(record, threads=32) == ({"race"} if races else set())


@pytest.mark.parametrize("places", [32, 31])
def test_lanes_that_copy_to_one_address(places: int) -> None:
    def record(k: Builder, out: Value) -> None:
        tile = k.shared(512, alignment=16, name="tile")[0]
        hw.cp_async_copy(tile.address + (k.lane % places * 16).to(U32), out + (k.lane * 16).to(U64), 16, 16)
        hw.cp_async_commit()
        hw.cp_async_wait(0)

    assert found(record, threads=32) == (set() if places == 32 else {"race"})


@pytest.mark.parametrize("same", [True, False])
def test_a_wait_is_known_to_the_lane_that_waited(same: bool) -> None:
    """Lane 0 waits for what another warp stored; lane 1 does not know."""

    def record(k: Builder, out: Value) -> None:
        smem, barrier = k.shared(128, name="word"), barrier_of(k, 1)
        with k.when(k.thread == 32):
            hw.store_shared(word(k, k.smem), smem[0].address)
            hw.mbarrier_arrive(barrier)
        with k.when(k.thread == 0):
            hw.mbarrier_wait(barrier, 0)
        with k.when(k.thread == (0 if same else 1)):
            hw.load_shared(k.registers(U32, 1, "got"), smem[0].address)

    assert found(record) == (set() if same else {"race"})


@pytest.mark.parametrize("ordered", [True, False])
def test_one_lane_arrives_for_all_once_they_have_met(ordered: bool) -> None:
    def record(k: Builder, out: Value) -> None:
        smem, barrier = k.shared(128, name="words"), barrier_of(k, 1)
        with k.when(k.warp_index == 0):
            hw.store_shared(word(k, k.smem), smem[0].address + (k.lane * 4).to(U32))
            if ordered:
                hw.sync_warp()
            with k.when(k.lane == 0):
                hw.mbarrier_arrive(barrier)
        with k.when(k.thread == 32):
            hw.mbarrier_wait(barrier, 0)
            hw.load_shared(k.registers(U32, 1, "got"), smem[0].address + 124)

    assert found(record) == (set() if ordered else {"race"})


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("what", ["syncwarp", "shuffle", "elect", "ldmatrix", "stmatrix", "barrier", "setmaxnreg"])
def test_what_all_lanes_must_execute(what: str, whole: bool) -> None:
    def record(k: Builder, out: Value) -> None:
        smem = k.shared(2048, name="rows")
        mine = smem[0].address + (k.thread * 16).to(U32)
        register = word(k, k.smem)
        four = k.registers(U32, 4, "four")
        for i in range(4):
            four[i] = k.smem
        hw.store_shared(four, mine)
        hw.sync_warp()
        with k.when((k.lane < 16) | whole):
            if what == "syncwarp":
                hw.sync_warp()
            elif what == "shuffle":
                hw.shuffle_xor(register[0], 1)
            elif what == "elect":
                hw.elect_one()
            elif what == "ldmatrix":
                hw.load_matrix(k.registers(U32, 4, "got"), mine)
            elif what == "stmatrix":
                hw.store_matrix(four, mine)
            elif what == "barrier":
                hw.barrier_sync(1, 128 if whole else 64)
            else:
                hw.set_registers(64)

    reported = kinds(run(lambda k, out: warps_apart(k, record, out)))
    assert ("divergence" in reported) != whole
    assert reported == set() or not whole


def warps_apart(k: Builder, record: Callable[[Builder, Value], None], out: Value) -> None:
    with k.warpgroup(0):
        record(k, out)


# -- barriers of threads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [1, 2])
def test_two_warpgroups_that_share_a_named_barrier_mix(other: int) -> None:
    """A warp is what a named barrier counts: half of each may make up its threads."""

    def record(k: Builder, out: Value) -> None:
        with k.warpgroup(0):
            hw.barrier_sync(1, 128)
        with k.warpgroup(1):
            hw.barrier_sync(other, 128)

    assert found(record, threads=256) == (set() if other == 2 else {"barrier"})


@pytest.mark.parametrize("between", [True, False])
def test_a_named_barrier_may_be_used_again_by_others_later(between: bool) -> None:
    def record(k: Builder, out: Value) -> None:
        with k.warpgroup(0):
            hw.barrier_sync(1, 128)
        if between:
            hw.sync_threads()
        with k.warpgroup(1):
            hw.barrier_sync(1, 128)

    assert found(record, threads=256) == (set() if between else {"barrier"})


def test_a_cluster_arrival_may_be_split_over_branches() -> None:
    """By warps: each arrives once."""

    def record(k: Builder, out: Value, twice: bool) -> None:
        with k.when(k.warp_index == 0):
            cluster_arrive()
        with k.when((k.warp_index != 0) | twice):
            hw.cluster_arrive_relaxed()
        hw.cluster_wait()

    assert found(lambda k, out: record(k, out, False), grid=2, cluster=2) == set()
    assert "barrier" in found(lambda k, out: record(k, out, True), grid=2, cluster=2)


# -- fences, grids, registers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fence", [hw.fence_mbarrier_init, hw.fence_proxy_async, None])
def test_an_init_is_fenced_before_the_copy_engine_uses_the_barrier(fence: Callable[[], Value] | None) -> None:
    def record(k: Builder, out: Value) -> None:
        tile, barrier = k.shared(512, alignment=128, name="tile"), k.shared(8, alignment=8, name="b")
        box = k.tensor_map("map")
        with k.when(k.thread == 0):
            hw.mbarrier_init(barrier[0], 1)
            if fence:
                fence()
        hw.sync_threads()
        with k.when(k.thread == 0):
            hw.mbarrier_arrive_expect_tx(barrier[0], 512)
            hw.tma_load(box, 0, 0, 0, tile[0], barrier[0], 0)
        hw.mbarrier_wait(barrier[0], 0)

    assert found(record) == (set() if fence else {"barrier"})


@pytest.mark.parametrize("fences", ["those who wrote", "others", "nobody"])
def test_a_fence_of_all_lanes_is_one_of_those_that_wrote_before_a_barrier(fences: str) -> None:
    def record(k: Builder, out: Value) -> None:
        tile, box = k.shared(512, alignment=128, name="tile"), k.tensor_map("map")
        values = k.registers(U32, 4, "values")
        for i in range(4):
            values[i] = 0
        for half in range(2):  # each half of the lanes writes alone
            with k.when((k.thread < 32) & (k.lane // 16 == half)):
                hw.store_shared(values, tile[0].address + (k.thread * 16).to(U32))
        hw.sync_threads()
        if fences != "nobody":
            with k.when(k.thread // 32 == int(fences == "others")):
                hw.fence_proxy_async()
        hw.sync_threads()
        with k.when(k.thread == 0):
            hw.tma_store(box, 0, 0, 0, tile[0])
            hw.bulk_commit()
            bulk_wait(0)

    assert found(record) == (set() if fences == "those who wrote" else {"missing proxy fence"})


@pytest.mark.parametrize("fence", ["shared::cta", "global", ""])
@pytest.mark.parametrize("by", ["writers", "reader"])
@pytest.mark.parametrize("strong", [True, False])
def test_a_fence_of_global_memory_between_stores_and_tma(strong: bool, by: str, fence: Any) -> None:
    """What threads have stored, or atomics added, is read by TMA: a fence of shared memory does not suffice."""

    def record(k: Builder, out: Value) -> None:
        tile, full, box = k.shared(512, alignment=128, name="tile"), barrier_of(k, 1), k.tensor_map("map")
        if strong:
            hw.red_add_u32(out + (k.thread * 4).to(U64), Constant(U32, 1))
        else:
            hw.store_global(word(k, k.thread.to(U32)), out + (k.thread * 4).to(U64), True)
        if fence and by == "writers":
            hw.fence_proxy_async(fence)
        hw.sync_threads()
        with k.when(k.thread == 0):
            if fence and by == "reader":
                hw.fence_proxy_async(fence)
            hw.mbarrier_arrive_expect_tx(full, 512)
            hw.tma_load(box, 0, 0, 0, tile[0], full, 0)
        hw.mbarrier_wait(full, 0)

    assert found(record, threads=128) == (set() if fence == "global" else {"missing proxy fence"})


@pytest.mark.parametrize("by", ["readers", "issuer", "nobody"])
def test_a_stage_that_threads_have_read_is_loaded_again(by: str) -> None:
    """TMA writes what threads have read by ld: the barrier between orders accesses of one proxy only."""

    def record(k: Builder, out: Value) -> None:
        stage, full, box = k.shared(512, alignment=128, name="stage"), barrier_of(k, 1), k.tensor_map("map")
        for phase in range(2):
            with k.when(k.thread == 0):
                if by == "issuer":
                    hw.fence_proxy_async()
                hw.mbarrier_arrive_expect_tx(full, 512)
                hw.tma_load(box, 0, 0, 0, stage[0], full, 0)
            hw.mbarrier_wait(full, phase)
            hw.load_shared(k.registers(U32, 1, "got"), stage[0].address + (k.thread * 4).to(U32))
            if by == "readers":
                hw.fence_proxy_async()
            hw.sync_threads()

    assert found(record, threads=128) == (set() if by == "readers" else {"missing proxy fence"})


@pytest.mark.parametrize("waits", ["everybody", "one, then a barrier", "one", "nobody"])
def test_a_dependent_grid_waits_before_it_touches_memory(waits: str) -> None:
    def record(k: Builder, out: Value) -> None:
        if waits != "nobody":
            with k.when((k.thread == 0) | (waits == "everybody")):
                hw.grid_dependency_wait()
        if "barrier" in waits:
            hw.sync_threads()
        hw.load_global(k.registers(U32, 1, "got"), out + (k.thread * 4).to(U64), True)

    import numpy as np

    for dependent in (True, False):
        memory = GlobalMemory()
        address = memory.add_buffer(np.zeros(4096, np.uint8), "out", writable=False)
        result = simulate(kernel(record, 64), 1, {"out": address}, memory, is_dependent_launch=dependent)
        right = not dependent or waits in ("everybody", "one, then a barrier")
        assert kinds(result) == (set() if right else {"race"})


def test_setmaxnreg_the_wrong_way_round_and_by_some_warps() -> None:
    def wrong(k: Builder, out: Value) -> None:
        with k.warpgroup(0):
            hw.register.SetMaxNReg("dec", 200).issue()
        with k.warpgroup(1):
            hw.register.SetMaxNReg("inc", 24).issue()

    def some(k: Builder, out: Value) -> None:
        with k.warpgroup(0), k.warp(1):
            hw.set_registers(64)

    assert "registers" in found(wrong, threads=512)
    assert found(some, threads=128) == {"registers"}
