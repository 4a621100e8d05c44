"""Ordinary writes to shared memory are read by an engine, with no fence.proxy.async.

Sources: TileOPs #1574, where threads write a tile of results that one of them stores by TMA, and copies of it were
corrupt in 3 % of the launches; cudnn-frontend #784, the same behind a named barrier; tilelang #2634, where sparse
products read operands that threads had written, by wgmma; sglang #39124, where other products do; pytorch/ao #4278,
where the threads of quantization kernels met first and fenced then, so that thread 0 stored before the others had
fenced.
A barrier orders threads; TMA and wgmma see shared memory through the async proxy, which a barrier says nothing to.
Mended: each writer fences, then all meet, then the engine starts.
"""

from __future__ import annotations

import pytest
from tests.backends.sim.tiny import kinds, run, word
from tests.instructions import bulk_wait

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.core.dtypes import BF16, FP32
from gemmsmith.core.mma import select_mma
from gemmsmith.core.tile import Tile
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Value

SEEDS = range(6)
CASES = [("writers", True, set()), ("nobody", True, {"missing proxy fence"}), ("reader", True, {"missing proxy fence"}),
         ("writers", False, {"race"}), ("late", True, {"missing proxy fence"})]  # fmt: skip
"""Who fences, whether all meet before the engine starts, and what is found."""


def publish(k: Builder, fences: str, meets: bool) -> None:
    """What comes between the writes and the engine's read."""
    if fences == "writers":
        hw.fence_proxy_async()
    if meets:
        hw.sync_threads()
    if fences == "late":  # nobody knows of the others' fences
        hw.fence_proxy_async()
    if fences == "reader":  # too late: a fence is for what its own thread has written
        with k.when(k.thread == 0):
            hw.fence_proxy_async()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("fences", "meets", "found"), CASES)
def test_by_a_tma_store(fences: str, meets: bool, found: set[str], seed: int) -> None:
    def record(k: Builder, out: Value) -> None:
        box = k.tensor_map("map")
        tile = k.shared(512, alignment=128, name="C")
        hw.store_shared(word(k, k.thread.to(U32)), tile[0].address + (k.thread * 4).to(U32))
        publish(k, fences, meets)
        with k.when(k.thread == 0):
            hw.tma_store(box, 0, 0, 0, tile[0])
            hw.bulk_commit()
            bulk_wait(0)

    assert kinds(run(record, seed=seed)) == found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("fences", "meets", "found"), CASES)
def test_by_wgmma(fences: str, meets: bool, found: set[str], seed: int) -> None:
    def record(k: Builder, out: Value) -> None:
        tile = Tile(BF16, 64, 16, "K")
        a, b = k.shared(tile, name="A"), k.shared(tile, name="B")
        for view in (a[0], b[0]):
            for step in range(tile.bytes // 1024):
                hw.store_shared(word(k, k.thread.to(U32)), view.address + ((k.thread + step * 256) * 4).to(U32))
        publish(k, fences, meets)
        accumulator = Accumulator(select_mma(BF16, BF16, FP32), 64, 64)
        accumulator.multiply(a[0], b[0], False)
        accumulator.wait(pending=0)

    got = kinds(run(record, threads=256, seed=seed))
    assert got >= found
    assert found or not got
