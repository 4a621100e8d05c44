"""How far ahead may an arrival be?

python examples/races/arrivals_run_ahead.py

A math warp writes results to two buffers in turn, and arrives at a named barrier of 64 threads without waiting. An
output warp waits at the barrier, stores the results, and hands the buffer back by an mbarrier. With two buffers the
math warp may be one tile ahead. The kernel hangs, rarely, and on one kind of GPU only. Why?

Answer: A named barrier counts 64 arrivals and does not know who makes them. A math warp that is a tile ahead arrives
twice before the output warp has arrived once. This completes the phase without the output warp, and a later phase
never completes. PTX forbids such an arrival.

Mend: Two barriers that take turns, like the buffers. The math warp cannot get further ahead than that.

Source: https://github.com/flashinfer-ai/flashinfer/pull/4732, a sparse attention kernel that hung on one chip.
"""

from __future__ import annotations

import numpy as np

from gemmsmith import Simulation, hw, simulate_launch
from gemmsmith.lang import F32, U32, U64, Builder, Kernel

TILES = 5


def kernel(mended: bool) -> Kernel:
    """Build the kernel: target (TILES, 32) = source (TILES, 32) squared, fp32."""
    with Builder("squares", threads=128) as k:
        source, target = k.pointer("source"), k.pointer("target")
        buffers, empty = k.shared(128, stages=2, name="buffer"), k.shared(8, stages=2, name="empty")
        with k.when(k.thread == 0):
            for i in range(2):
                hw.mbarrier_init(empty[i], 32)
            hw.fence_mbarrier_init()
        hw.sync_threads()
        own = (k.lane * 4).to(U32)
        with k.warpgroup(0):
            with k.warp(0, "math"):
                for tile in range(TILES):
                    x = hw.load_global_word(source + (own + tile * 128).to(U64), True, F32, "x")
                    hw.mbarrier_wait(empty[tile % 2], (tile // 2 + 1) % 2)
                    hw.store_shared_word(buffers[tile % 2].address + own, x * x, "square")
                    hw.barrier_arrive(1 + tile % 2 if mended else 1, 64)
            with k.warp(1, "output"):
                for tile in range(TILES):
                    hw.barrier_sync(1 + tile % 2 if mended else 1, 64)
                    x = hw.load_shared_word(buffers[tile % 2].address + own, F32, "x")
                    hw.store_global_word(target + (own + tile * 128).to(U64), x, True, "result")
                    hw.mbarrier_arrive(empty[tile % 2])
        return k.finish()


def simulate(mended: bool = False, seed: int = 0) -> Simulation:
    """Simulate the kernel on random numbers; `seed`: of the numbers and of the schedule."""
    x = np.random.default_rng(seed).standard_normal((TILES, 32), np.float32)
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
