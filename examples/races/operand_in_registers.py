"""Who reads these registers?

python examples/races/operand_in_registers.py

A warpgroup multiplies A by B. B is in shared memory, and each thread has four registers for its part of A. In each
k-step it loads that part, starts the wgmma and commits it. It waits with one group pending, to keep the tensor core
busy. Results differ from run to run. Why?

Answer: wgmma reads the registers of A while it executes, not when it is issued. A group may be pending when the next
part of A is loaded into the same registers. Until the wait, a wgmma owns these, too, not only its accumulator.

Mend: Wait for the group before its registers are overwritten, or use two arrays in turn.

Source: https://github.com/deepseek-ai/DeepGEMM/issues/449, a TF32 kernel for Hopper.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from gemmsmith import Simulation, hw, simulate_launch
from gemmsmith.kernels import A_FRAGMENT, D_FRAGMENT, select_mma
from gemmsmith.lang import BF16, F32, FP32, U32, U64, Builder, Kernel, Pointer, TensorMap, Tile

TILE, MMA = Tile(BF16, 64, 64, "K"), select_mma(BF16, BF16, FP32)


def kernel(mended: bool) -> Kernel:
    """Build the kernel: target (64, 64) in fp32 = source source^T, with source (64, 64) in bf16."""
    with Builder("gram", threads=128) as k:
        source_map = k.tensor_map("source_map", lambda _: TensorMap(
            Pointer("source"), BF16, (64, 64, 1), (128, 0), (64, 64, 1), swizzle=128))  # fmt: skip
        source, target = k.pointer("source"), k.pointer("target")
        b, full = k.shared(TILE, name="B")[0], k.shared(8, name="full")[0]
        with k.when(k.thread == 0):
            hw.mbarrier_init(full, 1)
            hw.fence_mbarrier_init()
            hw.mbarrier_arrive_expect_tx(full, TILE.bytes)
            hw.tma_load(source_map, 0, 0, 0, b, full)
        hw.sync_threads()
        hw.mbarrier_wait(full, 0)
        a, d = k.registers(U32, A_FRAGMENT.registers, "a"), k.registers(F32, MMA.accumulator_registers(64), "d")
        for step in range(64 // MMA.k):
            for i in range(a.count):
                row, word = A_FRAGMENT.element(k.thread, i)  # a word has two elements of bf16
                a[i] = hw.load_global_word(source + (row * 128 + step * 32 + word * 4).to(U64), True, U32, "pair")
            hw.wgmma_fence()
            hw.wgmma_mma_rs(d, a, hw.descriptor(b, step), step > 0, 64, MMA)
            hw.wgmma_commit()
            hw.wgmma_wait(0 if mended else 1)
            hw.fence_operand(a)
        hw.wgmma_wait(0)
        hw.fence_operand(d)
        with k.unroll(d.count) as i:
            row, column = D_FRAGMENT.element(k.thread, i)
            hw.store_global_word(target + ((row * 64 + column) * 4).to(U64), d[i], True, "element")
        return k.finish()


def simulate(mended: bool = False, seed: int = 0) -> Simulation:
    """Simulate the kernel on random numbers; `seed`: of the numbers and of the schedule."""
    x = np.random.default_rng(seed).standard_normal((64, 64)).astype(ml_dtypes.bfloat16)
    arrays = {"source": x, "target": np.full((64, 64), np.nan, np.float32)}
    return simulate_launch(kernel(mended), None, arrays, seed=seed, record=True)


def expected(source: np.ndarray) -> np.ndarray:
    """Return what the target should be."""
    return source.astype(float) @ source.astype(float).T


if __name__ == "__main__":
    print(simulate().hazards[0])
    done = simulate(mended=True)
    np.testing.assert_allclose(done.result["target"], expected(done.result["source"]), rtol=1e-4, atol=1e-4)
    print(f"mended: {done.verdict}")
