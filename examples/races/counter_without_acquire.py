"""The last CTA adds up: what may it read?

python examples/races/counter_without_acquire.py

A sum has two steps. Each CTA writes a partial sum, fences, and increments a counter in global memory. The CTA that
finds the counter at its last value adds up the partial sums. It takes eight GPUs and a few minutes to see a wrong sum.
Which fence is missing?

Answer: The fence before the increment makes the partial sum visible to those that read the counter and acquire it. The
increment itself is relaxed. Without a fence after it, the last CTA may load partial sums before it reads the counter.

Mend: A fence after the increment, in the thread that executes it, before the barrier that tells the other threads.
(PyTorch's __threadfence() comes after that barrier; PTX's acquire pattern is a read and a fence of one thread.)

Source: https://github.com/pytorch/pytorch/pull/128455.
"""

from __future__ import annotations

import numpy as np

from gemmsmith import Simulation, hw, simulate_launch
from gemmsmith.lang import F32, U32, U64, Builder, Kernel

CTAS, THREADS = 3, 64


def kernel(mended: bool) -> Kernel:
    """Build the kernel: target (THREADS,) = the sum of source (CTAS, THREADS) over its rows, a CTA each, fp32."""
    with Builder("column_sums", threads=THREADS) as k:
        k.work_clusters = lambda _: CTAS
        source, target = k.pointer("source"), k.pointer("target")
        partials = k.scratch("partials", lambda _: 4 * CTAS * THREADS)
        counter, last = k.scratch("counter", lambda _: 4, zero_initialized=True), k.shared(4, name="last")[0]
        own, row = (k.thread * 4).to(U64), (hw.block_index() * 4 * THREADS).to(U64)
        x = hw.load_global_word(source + row + own, True, F32, "x")
        hw.store_global_word(partials + row + own, x, True, "partial")
        hw.sync_threads()
        with k.when(k.thread == 0):
            hw.fence_acq_rel()
            count = hw.atom_add_u32(counter, 1)
            if mended:
                hw.fence_acq_rel()
            hw.store_shared_word(last.address, count, "count")
        hw.sync_threads()
        with k.when(hw.load_shared_word(last.address, U32, "count") == CTAS - 1):
            total = k.var(F32, 0.0, "total")
            for i in range(CTAS):
                partial = hw.load_global_word(partials + own + 4 * THREADS * i, True, F32, "partial")
                total.set(total.get() + partial)
            hw.store_global_word(target + own, total.get(), True, "sum")
            with k.when(k.thread == 0):
                hw.store_strong(counter, 0, "relaxed", "gpu")  # for the next launch
        return k.finish()


def simulate(mended: bool = False, seed: int = 0) -> Simulation:
    """Simulate the kernel on random numbers; `seed`: of the numbers and of the schedule."""
    x = np.random.default_rng(seed).standard_normal((CTAS, THREADS), np.float32)
    arrays = {"source": x, "target": np.full(THREADS, np.nan, np.float32)}
    return simulate_launch(kernel(mended), None, arrays, seed=seed, record=True)


def expected(source: np.ndarray) -> np.ndarray:
    """Return what the target should be."""
    return source.sum(0, dtype=float)


if __name__ == "__main__":
    print(simulate().hazards[0])
    done = simulate(mended=True)
    np.testing.assert_allclose(done.result["target"], expected(done.result["source"]), rtol=1e-5, atol=1e-5)
    print(f"mended: {done.verdict}")
