"""The epilogue's results are written over a stage that is still in use.

Sources: mKernel #18; lablup/mlxcel #923, where cp.async copies of k-tiles that are not read any more were not waited
for. To save shared memory the epilogue's C lies where stages of A and B do. A copy that is in flight, for the next tile
or behind the last k-tile, may land on it; and another warpgroup or warp may still read what is overwritten.
Mended: before C is written, nothing is in flight to those stages and all consumers are past the mainloop.
"""

from __future__ import annotations

import pytest
from tests.backends.sim.tiny import kinds, run, word

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.core.dtypes import BF16, FP32
from gemmsmith.core.mma import select_mma
from gemmsmith.core.tile import Tile
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import U32, U64
from gemmsmith.lang.values import Value

SEEDS = range(6)


def fill(k: Builder, view: SharedView, nbytes: int, threads: int) -> None:
    """Writes the first bytes of a buffer, 4 a thread and step."""
    for step in range(nbytes // (4 * threads)):
        hw.store_shared(word(k, k.thread.to(U32)), view.address + ((k.thread + step * threads) * 4).to(U32))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("waits", [True, False])
def test_over_a_copy_in_flight(waits: bool, seed: int) -> None:
    def record(k: Builder, out: Value) -> None:
        box = k.tensor_map("map")
        stage = k.shared(512, alignment=128, name="stage")
        full = k.shared(8, alignment=8, name="full")
        with k.when(k.thread == 0):
            hw.mbarrier_init(full[0], 1)
            hw.fence_mbarrier_init()
        hw.sync_threads()
        with k.when(k.thread == 0):
            hw.mbarrier_arrive_expect_tx(full[0], 512)
            hw.tma_load(box, 0, 0, 0, stage[0], full[0], 0)
        if waits:
            hw.mbarrier_wait(full[0], 0)
        fill(k, stage[0], 512, 128)
        if not waits:
            hw.mbarrier_wait(full[0], 0)

    result = run(record, seed=seed)
    assert kinds(result) == (set() if waits else {"race"})
    assert waits or "write after write of stage" in str(result.hazards[0])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("drains", "meet"), [(True, True), (False, True), (True, False), (False, False)])
def test_over_copies_behind_the_last_k_tile(drains: bool, meet: bool, seed: int) -> None:
    """A cp.async loop of three stages that copies two k-tiles ahead, whether there are more or not."""

    def record(k: Builder, out: Value) -> None:
        stages, k_tiles = k.shared(16 * 64, stages=3, name="stage"), 4
        own, others = (k.thread * 16).to(U32), ((k.thread ^ 32) * 16).to(U32)

        def copy(k_tile: int) -> None:
            hw.cp_async_copy(stages[k_tile % 3].address + own, out + own.to(U64), 16, 16)
            hw.cp_async_commit()

        copy(0)
        copy(1)
        for k_tile in range(k_tiles):
            hw.cp_async_wait(1)
            hw.sync_threads()
            hw.load_shared(k.registers(U32, 4, "got"), stages[k_tile % 3].address + others)
            copy(k_tile + 2)
        if drains:
            hw.cp_async_wait(0)
        if meet:
            hw.sync_threads()
        for stage in range(3):  # C
            hw.store_shared(word(k, k.thread.to(U32)), stages[stage].address + others)
        if not drains:
            hw.cp_async_wait(0)

    assert kinds(run(record, threads=64, seed=seed)) == (set() if drains and meet else {"race"})


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("everybody", [True, False])
def test_over_the_b_that_another_warpgroup_multiplies(everybody: bool, seed: int) -> None:
    """Each warpgroup has waited for its own wgmma, which is not enough."""

    def record(k: Builder, out: Value) -> None:
        a_tile, b_tile = Tile(BF16, 128, 16, "K"), Tile(BF16, 64, 16, "K")
        a, b = k.shared(a_tile, name="A"), k.shared(b_tile, name="B")
        fill(k, a[0], a_tile.bytes, 256)
        fill(k, b[0], b_tile.bytes, 256)
        hw.fence_proxy_async()
        hw.sync_threads()
        accumulator = Accumulator(select_mma(BF16, BF16, FP32), 64, 64)
        accumulator.multiply(a[0].rows(k.warpgroup_index * 64, 64), b[0], False)
        accumulator.wait(pending=0)
        if everybody:
            hw.sync_threads()
        fill(k, b[0], b_tile.bytes, 256)

    result = run(record, threads=256, seed=seed)
    assert kinds(result) == (set() if everybody else {"race"})
    assert everybody or "of B" in str(result.hazards[0])
