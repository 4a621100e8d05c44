"""Clusters: the PTX of ranks, barriers and distributed shared memory, the table of turns, and st.async's one CTA."""

from __future__ import annotations

import numpy as np
import pytest
from tests.backends.sim.tiny import kinds, run
from tests.conformance.case import at, poisoned, words
from tests.hw.one import Forms, ptx, registers
from tests.instructions import cluster_arrive, load_cluster, store_cluster

from gemmsmith import hw
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.hw.cluster import CLUSTER_PERMUTATION, MAX_CLUSTERS
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Value

ASYNC = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
FORMS: Forms = {
    "mov.u32 %0, %%cluster_ctarank;": lambda k: hw.cluster_rank(),
    "barrier.cluster.arrive.release.aligned;": lambda k: cluster_arrive(),
    "barrier.cluster.arrive.relaxed.aligned;": lambda k: hw.cluster_arrive_relaxed(),
    "barrier.cluster.wait.acquire.aligned;": lambda k: hw.cluster_wait(),
    "mapa.shared::cluster.u32 %0, %1, %2;": lambda k: hw.mapa(k.smem, 1),
    "ld.shared::cluster.b32 %0, [%1];": lambda k: load_cluster(registers(k, 1), k.smem),
    "ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];": lambda k: load_cluster(registers(k, 4), k.smem),
    "st.shared::cluster.v2.b32 [%2], {%0, %1};": lambda k: store_cluster(registers(k, 2), k.smem),
    f"{ASYNC}.b32 [%1], %0, [%2];": lambda k: hw.store_async(registers(k, 1), k.smem, k.smem),
    f"{ASYNC}.v4.b32 [%4], {{%0, %1, %2, %3}}, [%5];": lambda k: hw.store_async(registers(k, 4), k.smem, k.smem),
}


@pytest.mark.parametrize("text", FORMS)
def test_ptx(text: str) -> None:
    assert ptx(FORMS[text]) == text


def test_places_in_the_grid_are_cudas_variables() -> None:
    with Builder("k", threads=32) as k:
        order = k.parameter("cluster_permutation", CLUSTER_PERMUTATION)
        hw.store_global(
            words((hw.load_cluster_permutation(order, hw.block_index()) + hw.grid_size()).to(U32)), k.pointer("p"), True
        )
        source = k.finish().source
    for text in ("(int)cluster_permutation.cluster_idx[", "(int)blockIdx.x", "(int)gridDim.x"):
        assert text in source


def test_each_cluster_reads_its_turn(rng: np.random.Generator) -> None:
    with Builder("turns", threads=32) as k:
        order, out = k.parameter("cluster_permutation", CLUSTER_PERMUTATION), k.pointer("out")
        turn = hw.load_cluster_permutation(order, hw.block_index())
        hw.store_global(words(turn.to(U32)), at(out, hw.block_index(), 4), k.thread == 0)
        kernel = k.finish()
    table = tuple(int(x) for x in rng.permutation(MAX_CLUSTERS))
    memory, found = GlobalMemory(), poisoned((7,), np.uint32)
    done = simulate(kernel, 7, {"out": memory.add_buffer(found, "out"), "cluster_permutation": table}, memory)
    assert done.hazards == []
    assert tuple(found) == table[:7]


@pytest.mark.parametrize("barrier_rank", [0, 1])
def test_st_async_completes_where_it_stores(barrier_rank: int) -> None:
    """At the barrier of another CTA nobody would see the bytes."""

    def record(k: Builder, out: Value) -> None:
        slots, barrier = k.shared(128), k.shared(8, alignment=8)
        with k.when(k.thread == 0):
            hw.mbarrier_init(barrier[0], 1)
            hw.fence_mbarrier_init()
        cluster_arrive()
        hw.cluster_wait()
        with k.when(hw.cluster_rank() == 0):
            there = hw.mapa(slots[0].address + (k.lane * 4).to(U32), 1)
            hw.store_async(words(k.lane.to(U32)), there, hw.mapa(barrier[0], barrier_rank))
        with k.when(hw.cluster_rank() == barrier_rank):
            with k.when(k.thread == 0):
                hw.mbarrier_arrive_expect_tx(barrier[0], 128)
            hw.mbarrier_wait(barrier[0], 0, "cluster")
        cluster_arrive()
        hw.cluster_wait()

    done = run(record, threads=32, grid=2, cluster=2)
    assert kinds(done) == (set() if barrier_rank == 1 else {"out of bounds"})
    if barrier_rank == 0:
        assert "st.async: data go to CTA {1}, but the mbarrier is in CTA 0" in str(done.hazards[0]).replace(
            "np.int64(1)", "1"
        )
