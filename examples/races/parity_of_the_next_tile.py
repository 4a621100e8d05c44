"""Which phase does the second tile wait for?

python examples/races/parity_of_the_next_tile.py

A persistent kernel computes three tiles, of three k-tiles each. One warp loads the k-tiles into a ring of two stages,
and another one adds them up. For k-tile k of a tile, the stage is k % 2 and the parity of the phase is k // 2 % 2. With
one tile, or with four k-tiles, the results are right. Here they are wrong. Why?

Answer: k begins at 0 in each tile, but the phases of a barrier go on from tile to tile. The first tile has used stage 0
twice and stage 1 once. The second tile waits for parity 0 on stage 1's `full` barrier. That phase has completed in the
first tile: the wait returns at once, and old data is read.

Mend: Count the k-tiles of all tiles, and compute stage and parity from that.

Source: https://github.com/tile-ai/tilelang/pull/2674. A review found that the results were right only if the number of
k-tiles was a multiple of twice the stages.
"""

from __future__ import annotations

import numpy as np

from gemmsmith import Simulation, hw, simulate_launch
from gemmsmith.lang import F32, FP32, U32, U64, Builder, Kernel, Pointer, TensorMap

COLUMNS, TILES, K_TILES, STAGES = 32, 3, 3, 2


def kernel(mended: bool) -> Kernel:
    """Build the kernel: target (TILES, COLUMNS) = the sums of source (TILES, K_TILES, COLUMNS) over k, fp32."""
    with Builder("sums", threads=64) as k:
        source = k.tensor_map("source_map", lambda _: TensorMap(
            Pointer("source"), FP32, (COLUMNS, K_TILES, TILES), (4 * COLUMNS, 4 * COLUMNS * K_TILES),
            (COLUMNS, 1, 1), swizzle=0))  # fmt: skip
        target, slots = k.pointer("target"), k.shared(4 * COLUMNS, stages=STAGES, alignment=128, name="stage")
        full, empty = (k.shared(8, stages=STAGES, name=name) for name in ("full", "empty"))
        with k.when(k.thread == 0):
            for i in range(STAGES):
                hw.mbarrier_init(full[i], 1)
                hw.mbarrier_init(empty[i], 32)
            hw.fence_mbarrier_init()
        hw.sync_threads()
        with k.when(k.warp_index == 0), k.range(TILES, name="tile") as tile, k.range(K_TILES, name="k_tile") as k_tile:
            count = tile * K_TILES + k_tile if mended else k_tile
            stage, phase = count % STAGES, (count // STAGES % 2).to(U32)
            with k.when(k.lane == 0):
                hw.mbarrier_wait(empty[stage], phase ^ 1)
                hw.mbarrier_arrive_expect_tx(full[stage], 4 * COLUMNS)
                hw.tma_load(source, 0, k_tile, tile, slots[stage], full[stage])
        with k.when(k.warp_index == 1), k.range(TILES, name="tile") as tile:
            total = k.var(F32, 0.0, "total")
            with k.range(K_TILES, name="k_tile") as k_tile:
                count = tile * K_TILES + k_tile if mended else k_tile
                stage, phase = count % STAGES, (count // STAGES % 2).to(U32)
                hw.mbarrier_wait(full[stage], phase)
                address = slots[stage].address + (k.lane * 4).to(U32)
                total.set(total.get() + hw.load_shared_word(address, F32, "element"))
                hw.fence_proxy_async()  # TMA writes next what was read here
                hw.mbarrier_arrive(empty[stage])
            hw.store_global_word(target + ((tile * COLUMNS + k.lane) * 4).to(U64), total.get(), True, "sum")
        return k.finish()


def simulate(mended: bool = False, seed: int = 0) -> Simulation:
    """Simulate the kernel on random numbers; `seed`: of the numbers and of the schedule."""
    x = np.random.default_rng(seed).standard_normal((TILES, K_TILES, COLUMNS), np.float32)
    arrays = {"source": x, "target": np.full((TILES, COLUMNS), np.nan, np.float32)}
    return simulate_launch(kernel(mended), None, arrays, seed=seed, record=True)


def expected(source: np.ndarray) -> np.ndarray:
    """Return what the target should be."""
    return source.sum(1, dtype=float)


if __name__ == "__main__":
    print(simulate().hazards[0])
    done = simulate(mended=True)
    np.testing.assert_allclose(done.result["target"], expected(done.result["source"]), rtol=1e-5, atol=1e-5)
    print(f"mended: {done.verdict}")
