"""All bytes have come: why does it wait?

python examples/races/bytes_but_no_arrival.py

One thread tells an mbarrier how many bytes to expect, and starts a copy. All threads wait. The copy completes, no byte
is missing, and the kernel hangs. Why?

Answer: A phase completes when no byte and no arrival is missing. The barrier was initialized for one arrival, and
mbarrier.expect_tx is not an arrival.

Mend: mbarrier.arrive.expect_tx, which adds the bytes and then arrives.

Source: https://github.com/tile-ai/tilelang/issues/2566. A loop of one iteration was compiled to a copy without a tensor
map, which expected the bytes and did not arrive.
"""

from __future__ import annotations

import numpy as np

from gemmsmith import Simulation, hw, simulate_launch
from gemmsmith.lang import F32, FP32, U32, U64, Builder, Kernel, Pointer, TensorMap

THREADS = 128


def kernel(mended: bool) -> Kernel:
    """Build the kernel: target (1, 128) = 2 source (1, 128), fp32."""
    with Builder("doubles", threads=THREADS) as k:
        source = k.tensor_map("source_map", lambda _: TensorMap(
            Pointer("source"), FP32, (THREADS, 1, 1), (4 * THREADS, 0), (THREADS, 1, 1), swizzle=0))  # fmt: skip
        target = k.pointer("target")
        tile, full = k.shared(4 * THREADS, alignment=128, name="tile")[0], k.shared(8, name="full")[0]
        with k.when(k.thread == 0):
            hw.mbarrier_init(full, 1)
            hw.fence_mbarrier_init()
            if mended:
                hw.mbarrier_arrive_expect_tx(full, 4 * THREADS)
            else:
                hw.mbarrier_expect_tx(full, 4 * THREADS)
            hw.tma_load(source, 0, 0, 0, tile, full)
        hw.sync_threads()
        hw.mbarrier_wait(full, 0)
        x = hw.load_shared_word(tile.address + (k.thread * 4).to(U32), F32, "x")
        hw.store_global_word(target + (k.thread * 4).to(U64), x + x, True, "result")
        return k.finish()


def simulate(mended: bool = False, seed: int = 0) -> Simulation:
    """Simulate the kernel on random numbers; `seed`: of the numbers and of the schedule."""
    x = np.random.default_rng(seed).standard_normal(THREADS, np.float32)
    arrays = {"source": x, "target": np.full_like(x, np.nan)}
    return simulate_launch(kernel(mended), None, arrays, seed=seed, record=True)


def expected(source: np.ndarray) -> np.ndarray:
    """Return what the target should be."""
    return 2 * source


if __name__ == "__main__":
    print(simulate().hazards[0])
    done = simulate(mended=True)
    np.testing.assert_array_equal(done.result["target"], expected(done.result["source"]))
    print(f"mended: {done.verdict}")
