"""May this CTA exit?

python examples/races/cluster_exit.py

The two CTAs of a cluster add up the rows of a matrix. For each row, a CTA loads one half and multicasts it to both.
When its threads have read the row, they arrive at the `empty` barrier of both CTAs, so that neither loads the next half
too early. The results are right, but some launches fail with "cluster target block not present". Why?

Answer: After its last row a CTA has nothing to wait for, and exits. Its peer may be slower, and arrives at an mbarrier
in the shared memory of a CTA that has exited.

Mend: Both CTAs meet at a barrier of the cluster before they exit. Or each waits for the arrivals of the last row.

Source: https://github.com/facebookexperimental/triton/pull/1105 and https://github.com/triton-lang/triton/pull/11731,
which add a barrier to the end of every kernel with clusters.
"""

from __future__ import annotations

import numpy as np

from gemmsmith import Simulation, hw, simulate_launch
from gemmsmith.lang import F32, FP32, U32, U64, Builder, Constant, Kernel, Pointer, TensorMap

STEPS, HALF = 3, 32


def kernel(mended: bool) -> Kernel:
    """Build the kernel: target (2, 64), a row of each CTA = the sum of source (STEPS, 64) times (1 + rank), fp32."""
    with Builder("sums", threads=64, cluster=(2, 1, 1)) as k:
        source = k.tensor_map("source_map", lambda _: TensorMap(
            Pointer("source"), FP32, (2 * HALF, STEPS, 1), (8 * HALF, 0), (HALF, 1, 1), swizzle=0))  # fmt: skip
        target, rank, total = k.pointer("target"), hw.cluster_rank(), k.var(F32, 0.0, "total")
        tile = k.shared(8 * HALF, alignment=256, name="tile")[0]
        full, empty = k.shared(8, name="full")[0], k.shared(8, name="empty")[0]
        with k.when(k.thread == 0):
            hw.mbarrier_init(full, 1)
            hw.mbarrier_init(empty, 2 * 64)
            hw.fence_mbarrier_init()
        hw.cluster_arrive_relaxed()
        hw.cluster_wait()
        for step in range(STEPS):
            with k.when(k.thread == 0):
                hw.mbarrier_wait(empty, (step + 1) % 2, "cluster")
                hw.mbarrier_arrive_expect_tx(full, 8 * HALF)
                half = tile.address + (rank * 4 * HALF).to(U32)
                hw.tma_load_multicast(source, rank * HALF, step, 0, half, full, 3, 0x1000000000000000)
            hw.sync_threads()
            hw.mbarrier_wait(full, step % 2)
            total.set(total.get() + hw.load_shared_word(tile.address + (k.thread * 4).to(U32), F32, "x"))
            hw.fence_proxy_async()  # TMA writes next what was read here
            for peer in range(2):
                hw.mbarrier_arrive_remote(empty, Constant(U32, peer), "cluster")
        row = target + ((rank * 64 + k.thread) * 4).to(U64)
        hw.store_global_word(row, total.get() * (rank + 1).to(F32), True, "result")
        if mended:
            hw.cluster_arrive_relaxed()
            hw.cluster_wait()
        return k.finish()


def simulate(mended: bool = False, seed: int = 0) -> Simulation:
    """Simulate the kernel on random numbers; `seed`: of the numbers and of the schedule."""
    x = np.random.default_rng(seed).standard_normal((STEPS, 2 * HALF), np.float32)
    arrays = {"source": x, "target": np.full((2, 2 * HALF), np.nan, np.float32)}
    return simulate_launch(kernel(mended), None, arrays, seed=seed, record=True)


def expected(source: np.ndarray) -> np.ndarray:
    """Return what the target should be."""
    return np.outer([1, 2], source.sum(0, dtype=float))


if __name__ == "__main__":
    print(simulate().hazards[0])
    done = simulate(mended=True)
    np.testing.assert_allclose(done.result["target"], expected(done.result["source"]), rtol=1e-5, atol=1e-5)
    print(f"mended: {done.verdict}")
