"""One store may be pending: which one?

python examples/races/store_buffer_reused.py

One thread copies rows through two buffers in shared memory: a TMA load fills a buffer, and a TMA store writes it to
global memory. Then the buffer is loaded again, with the row after the next. Before that the thread waits with one store
pending, because there are two buffers. Why are some rows wrong?

Answer: The store that may be pending is the latest one, and that is the store from the buffer that is loaded next. In
the first iteration it is the only store, so the wait returns at once.

Mend: Wait for all stores. Or load the buffer of the store before the latest: then one may be pending, and loads and
stores overlap.

Source: https://github.com/deepseek-ai/DeepEP/issues/657. https://github.com/deepseek-ai/DeepEP/pull/660 waits for all.
"""

from __future__ import annotations

import numpy as np

from gemmsmith import Simulation, hw, simulate_launch
from gemmsmith.lang import FP32, Builder, Kernel, Pointer, TensorMap

COLUMNS, TILES, BUFFERS = 64, 6, 2


def kernel(mended: bool) -> Kernel:
    """Build the kernel: target = source, both (TILES, COLUMNS) in fp32, a row at a time."""
    with Builder("copy", threads=32) as k:
        source, target = (
            k.tensor_map(f"{x}_map", lambda _, x=x: TensorMap(
                Pointer(x), FP32, (COLUMNS, TILES, 1), (4 * COLUMNS, 0), (COLUMNS, 1, 1), swizzle=0))
            for x in ("source", "target")
        )  # fmt: skip
        buffers = k.shared(4 * COLUMNS, stages=BUFFERS, alignment=128, name="buffer")
        full = k.shared(8, stages=BUFFERS, name="full")

        def load(tile: int) -> None:
            hw.mbarrier_arrive_expect_tx(full[tile % BUFFERS], 4 * COLUMNS)
            hw.tma_load(source, 0, tile, 0, buffers[tile % BUFFERS], full[tile % BUFFERS])

        with k.when(k.thread == 0):
            for i in range(BUFFERS):
                hw.mbarrier_init(full[i], 1)
            hw.fence_mbarrier_init()
            for tile in range(BUFFERS):
                load(tile)
            for tile in range(TILES):
                hw.mbarrier_wait(full[tile % BUFFERS], tile // BUFFERS % 2)
                hw.tma_store(target, 0, tile, 0, buffers[tile % BUFFERS])
                hw.bulk_commit()
                if tile + BUFFERS < TILES:
                    hw.bulk_wait_read(0 if mended else BUFFERS - 1)
                    load(tile + BUFFERS)
            hw.bulk_wait_read(0)
        return k.finish()


def simulate(mended: bool = False, seed: int = 0) -> Simulation:
    """Simulate the kernel on random numbers; `seed`: of the numbers and of the schedule."""
    x = np.random.default_rng(seed).standard_normal((TILES, COLUMNS), np.float32)
    arrays = {"source": x, "target": np.full_like(x, np.nan)}
    return simulate_launch(kernel(mended), None, arrays, seed=seed, record=True)


def expected(source: np.ndarray) -> np.ndarray:
    """Return what the target should be."""
    return source


if __name__ == "__main__":
    print(simulate().hazards[0])
    done = simulate(mended=True)
    np.testing.assert_array_equal(done.result["target"], expected(done.result["source"]))
    print(f"mended: {done.verdict}")
