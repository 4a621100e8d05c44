"""Whose writes does a fence cover?

python examples/races/fence_after_barrier.py

The threads write squares to a tile in shared memory, meet at a barrier, and execute fence.proxy.async. Then thread 0
stores the tile by TMA. Both the barrier and the fence are there. Still, some of the stored bytes are old. Why?

Answer: A fence covers the writes of the thread that executes it. All 128 threads have written, so all 128 fences must
come before the store, and only a barrier after the fences ensures that. Here thread 0 passes the barrier, executes its
own fence and issues the store, while another warp may not have executed its fence.

Mend: Fence first, then meet.

Source: https://github.com/pytorch/ao/pull/4278. Two kernels that quantize to mxfp8 had them in the other order.
"""

from __future__ import annotations

import numpy as np

from gemmsmith import Simulation, hw, simulate_launch
from gemmsmith.lang import F32, FP32, U32, U64, Builder, Kernel, Pointer, TensorMap

THREADS = 128


def kernel(mended: bool) -> Kernel:
    """Build the kernel: target (1, 128) = source (1, 128) squared, fp32."""
    with Builder("squares", threads=THREADS) as k:
        source = k.pointer("source")
        target = k.tensor_map("target_map", lambda _: TensorMap(
            Pointer("target"), FP32, (THREADS, 1, 1), (4 * THREADS, 0), (THREADS, 1, 1), swizzle=0))  # fmt: skip
        tile = k.shared(4 * THREADS, alignment=128, name="tile")[0]
        x = hw.load_global_word(source + (k.thread * 4).to(U64), True, F32, "x")
        hw.store_shared_word(tile.address + (k.thread * 4).to(U32), x * x, "square")
        if mended:
            hw.fence_proxy_async()
            hw.sync_threads()
        else:
            hw.sync_threads()
            hw.fence_proxy_async()
        with k.when(k.thread == 0):
            hw.tma_store(target, 0, 0, 0, tile)
            hw.bulk_commit()
            hw.bulk_wait_read(0)
        return k.finish()


def simulate(mended: bool = False, seed: int = 0) -> Simulation:
    """Simulate the kernel on random numbers; `seed`: of the numbers and of the schedule."""
    x = np.random.default_rng(seed).standard_normal(THREADS, np.float32)
    arrays = {"source": x, "target": np.full_like(x, np.nan)}
    return simulate_launch(kernel(mended), None, arrays, seed=seed, record=True)


def expected(source: np.ndarray) -> np.ndarray:
    """Return what the target should be."""
    return source * source


if __name__ == "__main__":
    print(simulate().hazards[0])
    done = simulate(mended=True)
    np.testing.assert_array_equal(done.result["target"], expected(done.result["source"]))
    print(f"mended: {done.verdict}")
