"""Tiles in shared memory: each element of A and B that a CTA needs is loaded once and used by 32 threads."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import DType
from gemmsmith.ladder.gemm_arguments import GemmArguments, SharedMatrix
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32

TILE = 32
"""Extents of a CTA's tile, and of its k-tiles."""


def block_tile(dtype: DType, chip: Chip) -> Kernel:
    """Build the kernel: D = A @ B of matrices of `dtype`, where a CTA computes 32x32 results, one per thread.

    All threads copy a tile of A and one of B, synchronize, multiply them, and synchronize again before the next tiles
    overwrite them.
    """
    with Builder(f"block_tile_{dtype}", threads=TILE * TILE, chip=chip) as k:
        gemm = GemmArguments(dtype, dtype, TILE, TILE)
        a, b = SharedMatrix("A", TILE, TILE), SharedMatrix("B", TILE, TILE)
        row, column = (k.thread // TILE).named("row"), (k.thread % TILE).named("column")
        accumulator = k.var(F32, 0.0, "accumulator")
        with k.range(0, gemm.k, TILE, name="k0") as k0:
            a.store_element(row, column, gemm.load_a(gemm.row + row, k0 + column))
            b.store_element(row, column, gemm.load_b(k0 + row, gemm.column + column))
            k.comment("all threads have written the tiles that are read now")
            hw.sync_threads()
            with k.unroll(TILE, name="kk") as kk:
                accumulator.set(hw.fma(a.load(row, kk)[0], b.load(kk, column)[0], accumulator.get()))
            k.comment("all threads have read the tiles that are overwritten next")
            hw.sync_threads()
        gemm.store(gemm.row + row, gemm.column + column, accumulator.get())
        return k.finish()
