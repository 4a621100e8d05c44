"""A tensor map in memory is rewritten while copies still read it, or copies do not see that it has been.

Sources: DeepGEMM #343 and, for another architecture, #430; flashinfer #5438. A grouped kernel keeps the tensor maps of
A and B in global memory and rewrites them (tensormap.replace) where the next group begins, without waiting for the
copies that it has started: these may read half of the old map and half of the new. Errors were rare and small; results
differed from run to run. Mended: who rewrites a map has waited for the last copies that use it.
cudnn-frontend #1126: the warp that issues the copies does not acquire a map that others have written. TMA reads it
through another proxy, so that a barrier between the warps is not enough. Mended: the issuer fences for that proxy, once
it has acquired what the writer released (PTX ISA, "membar / fence", fence.proxy.tensormap).
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.backends.sim.tiny import kinds, run
from tests.conformance.case import barriers

from gemmsmith import hw
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.instruction import Instruction, u32, u64
from gemmsmith.lang.types import U32, U64
from gemmsmith.lang.values import Value
from gemmsmith.machine import Access, AsyncOperation, Machine

MAP_BYTES = 128
BYTES = 128
"""Of a copy."""


class ReplaceAddress(Instruction):
    """The map in memory at `map` is one of the data at `data` now, fenced for copies that are issued
    later; `is_fenced` False leaves the fence out. It stands for those of tensor maps."""

    map: u64
    data: u64
    is_fenced: bool = True

    def simulate(self, m: Machine) -> None:
        words = np.zeros((len(m.threads), MAP_BYTES // 8), np.uint64)
        words[:, 0] = m.per_thread(self.data).astype(np.uint64)
        m.memory.store("global", m.per_thread(self.map), words.view(np.uint8))
        if self.is_fenced:
            m.fence("proxy.async.global")


class LoadByMap(Instruction):
    """Copies the data of the map at `map` to shared memory; its bytes complete on `barrier`."""

    map: u64
    destination: u32
    barrier: u32

    def simulate(self, m: Machine) -> None:
        destination = Access("shared", np.array([m.uniform(self.destination)]), BYTES)
        map = Access("global", np.array([m.uniform(self.map)]), MAP_BYTES)

        def data() -> Access:
            return Access("global", m.memory.peek(map).view(np.int64)[0, :1], BYTES)

        m.async_operations.start(
            AsyncOperation(
                "TMA load by a map in memory",
                "tma",
                perform=lambda: m.memory.poke(destination, m.memory.peek(data())),
                reads=[map, data()],
                writes=[destination],
                complete_tx=[(None, m.uniform(self.barrier), BYTES)],
                nbytes=BYTES,
            )
        )


class AcquireMaps(Instruction):
    """Stands for fence.proxy.tensormap::generic.acquire: what the thread knows of, its copies see."""

    def simulate(self, m: Machine) -> None:
        m.fence("proxy.async.global")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("waits", "fences", "found"),
    [(True, True, set()), (False, True, {"race"}), (True, False, {"missing proxy fence"})],
)
def test_a_map_is_rewritten_for_the_next_group(
    waits: bool, fences: bool, found: set[str], seed: int, rng: np.random.Generator
) -> None:
    def record(k: Builder, out: Value) -> None:
        tile = k.shared(BYTES, stages=2, alignment=128, name="tile")
        full = k.shared(8, stages=2, alignment=8, name="full")
        with k.when(k.thread == 0):
            for group in range(2):
                hw.mbarrier_init(full[group], 1)
            hw.fence_mbarrier_init()
        hw.sync_threads()
        with k.when(k.thread == 0):
            for group in range(2):
                if group and waits:
                    hw.mbarrier_wait(full[group - 1], 0)
                ReplaceAddress(out, out + 1024 * (group + 1), fences).issue()
                hw.mbarrier_arrive_expect_tx(full[group], BYTES)
                LoadByMap(out, tile[group], full[group]).issue()
        got = k.registers(U32, 1, "got")
        for group in range(2):
            hw.mbarrier_wait(full[group], 0)
            hw.load_shared(got, tile[group].address + (k.lane * 4).to(U32))
            hw.store_global(got, out + 3072 + (k.lane * 4 + group * BYTES).to(U64), True)

    memory = rng.integers(2**32, size=1024, dtype=np.uint32)
    groups = memory[256 : 256 + 32].copy(), memory[512 : 512 + 32].copy()
    result = run(record, threads=32, seed=seed, out=memory.view(np.uint8))
    assert kinds(result) == found
    if not found:
        assert np.array_equal(memory[768 : 768 + 64].reshape(2, 32), groups)
    else:
        assert "read of TMA load by a map in memory" in str(result.hazards[0])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("acquires", "found"),
    [("after the barrier", set()), ("before it", {"missing proxy fence"}), ("", {"missing proxy fence"})],
)
def test_a_map_that_another_warp_writes(acquires: str, found: set[str], seed: int, rng: np.random.Generator) -> None:
    def record(k: Builder, out: Value) -> None:
        tile, (full,) = k.shared(BYTES, alignment=128, name="tile")[0], barriers(1)
        with k.when(k.thread == 32):
            ReplaceAddress(out, out + 1024, is_fenced=False).issue()
        if acquires == "before it":
            with k.when(k.thread == 0):
                AcquireMaps().issue()
        hw.sync_threads()
        with k.when(k.thread == 0):
            if acquires == "after the barrier":
                AcquireMaps().issue()
            hw.mbarrier_arrive_expect_tx(full, BYTES)
            LoadByMap(out, tile, full).issue()
        hw.mbarrier_wait(full, 0)

    memory = rng.integers(2**32, size=1024, dtype=np.uint32)
    assert kinds(run(record, threads=64, seed=seed, out=memory.view(np.uint8))) == found
