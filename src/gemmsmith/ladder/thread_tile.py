"""8x8 results per thread: 16 loads from shared memory per 64 multiply-adds instead of 2 per multiply-add."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import DType
from gemmsmith.ladder.gemm_arguments import GemmArguments, SharedMatrix, zeros
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32

TILE_MN = 128
"""Rows and columns of a CTA's tile."""
TILE_K = 8
"""K of a k-tile."""
THREAD_TILE = 8
"""Rows and columns per thread."""
THREADS = (TILE_MN // THREAD_TILE) ** 2
"""Threads per CTA."""
THREADS_PER_ROW = TILE_MN // THREAD_TILE
"""Threads along N."""


def thread_tile(dtype: DType, chip: Chip) -> Kernel:
    """Build the kernel: D = A @ B of matrices of `dtype`.

    A CTA computes 128x128 results, and a thread 8x8 of them in registers.
    """
    with Builder(f"thread_tile_{dtype}", threads=THREADS, chip=chip) as k:
        gemm = GemmArguments(dtype, dtype, TILE_MN, TILE_MN)
        a, b = SharedMatrix("A", TILE_K, TILE_MN), SharedMatrix("B", TILE_K, TILE_MN)  # A transposed
        row = (k.thread // THREADS_PER_ROW * THREAD_TILE).named("row")
        column = (k.thread % THREADS_PER_ROW * THREAD_TILE).named("column")
        accumulators = zeros(THREAD_TILE, THREAD_TILE)
        a_fragment, b_fragment = (k.registers(F32, THREAD_TILE, name) for name in ("a_fragment", "b_fragment"))
        with k.range(0, gemm.k, TILE_K, name="k0") as k0:
            with k.unroll(TILE_MN * TILE_K // THREADS, name="copy_iter") as copy_iter:
                element = (copy_iter * THREADS + k.thread).named("element")
                m, a_k, n, b_k = element // TILE_K, element % TILE_K, element % TILE_MN, element // TILE_MN
                a.store_element(a_k, m, gemm.load_a(gemm.row + m, k0 + a_k))
                b.store_element(b_k, n, gemm.load_b(k0 + b_k, gemm.column + n))
            k.comment("all threads have written the tiles that are read now")
            hw.sync_threads()
            with k.unroll(TILE_K, name="kk") as kk:
                with k.unroll(THREAD_TILE, name="i") as i:
                    a_fragment[i], b_fragment[i] = a.load(kk, row + i)[0], b.load(kk, column + i)[0]
                with k.unroll(THREAD_TILE, name="i") as i, k.unroll(THREAD_TILE, name="j") as j:
                    accumulators[i][j] = hw.fma(a_fragment[i], b_fragment[j], accumulators[i][j])
            k.comment("all threads have read the tiles that are overwritten next")
            hw.sync_threads()
        with k.unroll(THREAD_TILE, name="i") as i, k.unroll(THREAD_TILE, name="j") as j:
            gemm.store(gemm.row + row + i, gemm.column + column + j, accumulators[i][j])
        return k.finish()
