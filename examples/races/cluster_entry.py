"""Is the peer ready?

python examples/races/cluster_entry.py

The two CTAs of a cluster exchange 32 numbers: each sends its own to the shared memory of the other by st.async, which
completes their bytes on an mbarrier there. Each CTA initializes its mbarriers, fences and synchronizes its threads
before it sends and waits. Now and then the kernel hangs. Why?

Answer: __syncthreads is for one CTA. Nothing orders the initialization in one CTA before the bytes that the other one
sends. They may complete on an mbarrier that is initialized later, which then waits for them forever.

Mend: A barrier of the cluster after the initialization. Its arrival may be relaxed, since fence.mbarrier_init makes the
initialization visible.

Source: https://github.com/facebookexperimental/triton/pull/652, which inserts the barrier into compiled kernels.
"""

from __future__ import annotations

import numpy as np

from gemmsmith import Simulation, hw, simulate_launch
from gemmsmith.lang import F32, U32, U64, Builder, Kernel


def kernel(mended: bool) -> Kernel:
    """Build the kernel: target (2, 32) = source (2, 32) minus its other row, fp32. A CTA has a row."""
    with Builder("differences", threads=32, cluster=(2, 1, 1)) as k:
        source, target, rank = k.pointer("source"), k.pointer("target"), hw.cluster_rank()
        slot, full, read = (k.shared(x, name=name)[0] for name, x in (("slot", 128), ("full", 8), ("read", 8)))
        own, row, x = (k.lane * 4).to(U32), (rank * 128 + k.lane * 4).to(U64), k.registers(F32, 1, "x")
        hw.load_global(x, source + row, True)
        with k.when(k.thread == 0):
            hw.mbarrier_init(full, 1)
            hw.mbarrier_init(read, 32)
            hw.fence_mbarrier_init()
            hw.mbarrier_arrive_expect_tx(full, 128)
        if mended:
            hw.cluster_arrive_relaxed()
            hw.cluster_wait()
        else:
            hw.sync_threads()
        peer = (rank ^ 1).to(U32)
        hw.store_async(x, hw.mapa(slot.address + own, peer), hw.mapa(full.address, peer))
        hw.mbarrier_wait(full, 0, "cluster")
        other = hw.load_shared_word(slot.address + own, F32, "other")
        hw.store_global_word(target + row, x[0] - other, True, "difference")
        hw.mbarrier_arrive_remote(read, peer, "cluster")
        hw.mbarrier_wait(read, 0, "cluster")  # no CTA exits before its peer has got the numbers
        return k.finish()


def simulate(mended: bool = False, seed: int = 0) -> Simulation:
    """Simulate the kernel on random numbers; `seed`: of the numbers and of the schedule."""
    x = np.random.default_rng(seed).standard_normal((2, 32), np.float32)
    arrays = {"source": x, "target": np.full_like(x, np.nan)}
    return simulate_launch(kernel(mended), None, arrays, seed=seed, record=True)


def expected(source: np.ndarray) -> np.ndarray:
    """Return what the target should be."""
    return source - source[::-1]


if __name__ == "__main__":
    print(simulate().hazards[0])
    done = simulate(mended=True)
    np.testing.assert_array_equal(done.result["target"], expected(done.result["source"]))
    print(f"mended: {done.verdict}")
