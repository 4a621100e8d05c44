"""int8 without tensor cores: dp4a accumulates four products at once; 4x4 results per thread, from words along K."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import INT32, DType
from gemmsmith.ladder.gemm_arguments import ZERO, GemmArguments, SharedMatrix, zeros
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import I32, U32

TILE_MN = 64
"""Rows and columns of a CTA's tile."""
TILE_K_WORDS = 8
"""4-byte words per row of a k-tile."""
THREAD_TILE = 4
"""Rows and columns per thread."""
THREADS = (TILE_MN // THREAD_TILE) ** 2
"""Threads per CTA."""
WORD_BYTES = 4
"""Bytes per word."""
THREAD_STEP = TILE_MN // THREAD_TILE
"""Distance of a thread's rows, and of its columns."""


def dp4a(dtype: DType, chip: Chip) -> Kernel:
    """Build the kernel: int32 D = int8 A @ int8 B by dp4a, where a CTA computes 64x64 results, and a thread 4x4.

    A and B must be contiguous along K, in whole 16-byte vectors; `ladder_launches` packs other operands. The kernel
    itself copies them by words of 4 elements, the operands of dp4a. Rows in shared memory are padded by one word, so
    that a warp's lanes read from different banks.
    """
    with Builder("dp4a", threads=THREADS, chip=chip) as k:
        gemm = GemmArguments(dtype, INT32, TILE_MN, TILE_MN)
        a, b = (SharedMatrix(name, TILE_MN, TILE_K_WORDS, pitch=TILE_K_WORDS + 1, type=U32) for name in "AB")
        row, column = (k.thread // THREAD_STEP).named("row"), (k.thread % THREAD_STEP).named("column")
        accumulators = zeros(THREAD_TILE, THREAD_TILE, I32)
        with k.range(0, gemm.k, TILE_K_WORDS * WORD_BYTES, name="k0") as k0:
            with k.unroll(TILE_MN * TILE_K_WORDS // THREADS, name="copy_iter") as copy_iter:
                smem_row, word = (k.thread + copy_iter * THREADS) // TILE_K_WORDS, k.thread % TILE_K_WORDS
                k_index = k0 + word * WORD_BYTES
                a_word, b_word = (k.registers(U32, 1, name) for name in ("a_word", "b_word"))
                m, n, in_bounds = gemm.row + smem_row, gemm.column + smem_row, k_index < gemm.k
                hw.load_global(a_word, gemm.a.element_address(ZERO, m, k_index), in_bounds & (m < gemm.m))
                hw.load_global(b_word, gemm.b.element_address(ZERO, k_index, n), in_bounds & (n < gemm.n))
                a.store(smem_row, word, a_word)
                b.store(smem_row, word, b_word)
            k.comment("all threads have written the tiles that are read now")
            hw.sync_threads()
            with k.unroll(TILE_K_WORDS, name="word") as word:
                a_fragment = k.registers(U32, THREAD_TILE, "a_fragment")
                b_fragment = k.registers(U32, THREAD_TILE, "b_fragment")
                with k.unroll(THREAD_TILE, name="i") as i:
                    a_fragment[i] = a.load(row + i * THREAD_STEP, word)[0]
                    b_fragment[i] = b.load(column + i * THREAD_STEP, word)[0]
                with k.unroll(THREAD_TILE, name="i") as i, k.unroll(THREAD_TILE, name="j") as j:
                    accumulators[i][j] = hw.dp4a(a_fragment[i], b_fragment[j], accumulators[i][j])
            k.comment("all threads have read the tiles that are overwritten next")
            hw.sync_threads()
        with k.unroll(THREAD_TILE, name="i") as i, k.unroll(THREAD_TILE, name="j") as j:
            gemm.store(gemm.row + row + i * THREAD_STEP, gemm.column + column + j * THREAD_STEP, accumulators[i][j])
        return k.finish()
