"""Loads overlapped with math by double buffering, and a grouped tile order.

A wave of CTAs then reads few different tiles, which hit the L2.
"""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import DType
from gemmsmith.ladder.gemm_arguments import GROUP_SIZE_N, GemmArguments, SharedMatrix, zeros
from gemmsmith.ladder.thread_tile import THREAD_TILE, THREADS, TILE_K, TILE_MN
from gemmsmith.ladder.vectorized import load_vectors, multiply, store, thread_vector
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import I32


def double_buffer(dtype: DType, chip: Chip) -> Kernel:
    """Build the kernel: that of ladder/vectorized.py with two stages of shared memory.

    While one stage is multiplied the next k-tile is loaded to registers, and from there stored to the other stage, so
    one barrier per k-tile suffices. CTAs take tiles in groups of 8 columns of tiles.
    """
    min_ctas_per_sm = 2 if chip.supports("sm_90") else 1  # for earlier chips ptxas spills with 128 registers
    with Builder(f"double_buffer_{GROUP_SIZE_N}", threads=THREADS, chip=chip, min_ctas_per_sm=min_ctas_per_sm) as k:
        gemm = GemmArguments(dtype, dtype, TILE_MN, TILE_MN)
        gemm.use_grouped_order()
        a, b = (SharedMatrix(name, TILE_K, TILE_MN, stages=2) for name in "AB")
        vector_k, vector_mn = thread_vector()
        stage, accumulators = k.var(I32, 0, "stage"), zeros(THREAD_TILE, THREAD_TILE)
        a_vector, b_vector = load_vectors(gemm, vector_k, vector_mn)
        a.store(vector_k, vector_mn, a_vector)
        b.store(vector_k, vector_mn, b_vector)
        k.comment("all threads have written the stage that is read now")
        hw.sync_threads()
        with k.range(0, gemm.k, TILE_K, name="k0") as k0:
            a_vector, b_vector = load_vectors(gemm, k0 + TILE_K + vector_k, vector_mn)
            a.stage = b.stage = stage.get()
            multiply(accumulators, a, b)
            stage.set(1 - stage.get())
            a.stage = b.stage = stage.get()
            a.store(vector_k, vector_mn, a_vector)
            b.store(vector_k, vector_mn, b_vector)
            k.comment("all threads have written the stage that is read next, and read the one that is overwritten next")
            hw.sync_threads()
        store(gemm, accumulators)
        return k.finish()
