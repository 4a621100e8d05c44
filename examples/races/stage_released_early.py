"""When has wgmma read its operands?

python examples/races/stage_released_early.py

A warp loads k-tiles into a ring of two stages, and a warpgroup multiplies them. It waits for the `full` barrier, starts
the wgmmas of the stage, commits them, and arrives at the `empty` barrier, so that the stage is loaded again. All tests
pass, and compute-sanitizer finds nothing. What is missing?

Answer: wgmma is asynchronous. A commit only ends the group, which may read shared memory until a wait for it returns.
Here the stage is released while the tensor core may still read it. A load usually takes longer than the four wgmmas,
so nobody saw a wrong result.

Mend: Wait for the group before the arrival. Fast kernels wait with one group pending, and release the stage of the
k-tile before.

Source: https://github.com/NVIDIA/Fuser/issues/3561. The generated kernel did not commit its wgmmas or wait for them.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from gemmsmith import Simulation, hw, simulate_launch
from gemmsmith.kernels import D_FRAGMENT, select_mma
from gemmsmith.lang import BF16, F32, FP32, U32, U64, Builder, Kernel, Pointer, TensorMap, Tile

K_TILES, STAGES = 6, 2
TILE, MMA = Tile(BF16, 64, 64, "K"), select_mma(BF16, BF16, FP32)


def kernel(mended: bool) -> Kernel:
    """Build the kernel: target (64, 64) in fp32 = source source^T, with source (64, 64 * K_TILES) in bf16."""
    with Builder("gram", threads=256) as k:
        source = k.tensor_map("source_map", lambda _: TensorMap(
            Pointer("source"), BF16, (64 * K_TILES, 64, 1), (128 * K_TILES, 0), (64, 64, 1), swizzle=128))  # fmt: skip
        target, tiles = k.pointer("target"), k.shared(TILE, stages=STAGES, name="tile")
        full, empty = (k.shared(8, stages=STAGES, name=name) for name in ("full", "empty"))
        with k.when(k.thread == 0):
            for i in range(STAGES):
                hw.mbarrier_init(full[i], 1)
                hw.mbarrier_init(empty[i], 128)
            hw.fence_mbarrier_init()
        hw.sync_threads()
        with k.warpgroup(0), k.warp(0, "producer"), k.when(hw.elect_one()), k.range(K_TILES, name="k_tile") as k_tile:
            stage, phase = k_tile % STAGES, (k_tile // STAGES % 2).to(U32)
            hw.mbarrier_wait(empty[stage], phase ^ 1)
            hw.mbarrier_arrive_expect_tx(full[stage], TILE.bytes)
            hw.tma_load(source, k_tile * 64, 0, 0, tiles[stage], full[stage])
        with k.warpgroup(1, "consumer"):
            d = k.registers(F32, MMA.accumulator_registers(64), "d")
            with k.range(K_TILES, name="k_tile") as k_tile:
                stage, phase = k_tile % STAGES, (k_tile // STAGES % 2).to(U32)
                hw.mbarrier_wait(full[stage], phase)
                hw.wgmma_fence()
                for step in range(4):
                    operand = hw.descriptor(tiles[stage], step)
                    hw.wgmma_mma(d, operand, operand, step > 0 or k_tile > 0, 64, MMA)
                hw.wgmma_commit()
                if mended:
                    hw.wgmma_wait(0)
                hw.mbarrier_arrive(empty[stage])
            hw.wgmma_wait(0)
            hw.fence_operand(d)
            with k.unroll(d.count) as i:
                row, column = D_FRAGMENT.element(k.thread % 128, i)
                hw.store_global_word(target + ((row * 64 + column) * 4).to(U64), d[i], True, "element")
        return k.finish()


def simulate(mended: bool = False, seed: int = 0) -> Simulation:
    """Simulate the kernel on random numbers; `seed`: of the numbers and of the schedule."""
    x = np.random.default_rng(seed).standard_normal((64, 64 * K_TILES)).astype(ml_dtypes.bfloat16)
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
