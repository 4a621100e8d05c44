"""mma.sync itself: which lane holds which element of a fragment, and how ldmatrix loads it."""

from __future__ import annotations

from itertools import product

from gemmsmith import hw
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import FP32, DType
from gemmsmith.core.mma import D_FRAGMENT, MMA_SYNC, select_mma
from gemmsmith.ladder.gemm_arguments import GemmArguments, zeros
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import U16, U32

TILE_MN = 64
"""Rows and columns of a CTA's tile."""
WARP_TILE = 32
"""Rows and columns per warp."""
THREADS = 128
"""Threads per CTA."""
TILE_K = 16
"""K of a k-tile."""
MMA_M = 16
"""Rows of an instruction's results (PTX: m16n8k16)."""
MMA_N = 8
"""Columns of an instruction's results."""
PITCH_BYTES = 2 * TILE_K
"""Bytes per row of a k-tile."""
MMA_M_ITERS = range(WARP_TILE // MMA_M)
"""Instructions of a warp along M."""
MMA_N_ITERS = range(WARP_TILE // MMA_N)
"""Instructions of a warp along N."""


def mma_naive(dtype: DType, chip: Chip) -> Kernel:
    """Build the kernel: fp32 D = A @ B by mma.sync, where a CTA has four warps with 32x32 results each.

    Tiles of A and B are both stored along K in shared memory, A row by row and B column by column, 16 elements of 16
    bits each. ldmatrix loads 8 rows of 16 bytes, whose addresses 8 lanes pass, and returns a pair of elements per lane.
    """
    mma = select_mma(dtype, dtype, FP32, MMA_SYNC)
    with Builder(f"mma_naive_{dtype}", threads=THREADS, chip=chip) as k:
        gemm = GemmArguments(dtype, FP32, TILE_MN, TILE_MN)
        a_tile, b_tile = (k.shared(TILE_MN * PITCH_BYTES, name=name)[0] for name in "AB")
        a = [k.registers(U32, 4, "a_fragment") for _ in MMA_M_ITERS]
        b = [k.registers(U32, 2, "b_fragment") for _ in MMA_N_ITERS]
        d = [zeros(len(MMA_N_ITERS), 4, name="d_fragments").rows for _ in MMA_M_ITERS]
        first_row, first_column = k.warp_index // 2 * WARP_TILE, k.warp_index % 2 * WARP_TILE
        # Lane l passes row l % 8 of matrix l / 8: of A rows 0..7 and 8..15 of the first half of K, then of the second.
        a_address = a_tile.address + ((first_row + k.lane % 16) * PITCH_BYTES + k.lane // 16 * 16).to(U32)
        b_address = b_tile.address + ((first_column + k.lane % 8) * PITCH_BYTES + k.lane // 8 % 2 * 16).to(U32)
        with k.range(0, gemm.k, TILE_K, name="k0") as k0:
            for tile in a_tile, b_tile:
                with k.unroll(TILE_MN * TILE_K // THREADS, name="copy_iter") as copy_iter:
                    element = (copy_iter * THREADS + k.thread).named("element")
                    smem_row, k_index = element // TILE_K, k0 + element % TILE_K
                    if tile is a_tile:
                        value = gemm.load_a(gemm.row + smem_row, k_index)
                    else:
                        value = gemm.load_b(k_index, gemm.column + smem_row)
                    hw.store_shared_u16(tile.address + (element * 2).to(U32), hw.pack(value, value, dtype).to(U16))
            k.comment("all threads have written the tiles that are read now")
            hw.sync_threads()
            for i in MMA_M_ITERS:
                hw.load_matrix(a[i], a_address + i * MMA_M * PITCH_BYTES)
            for j in MMA_N_ITERS:
                hw.load_matrix(b[j], b_address + j * MMA_N * PITCH_BYTES)
            for i, j in product(MMA_M_ITERS, MMA_N_ITERS):
                hw.mma_sync(d[i][j], a[i], b[j], mma)
            k.comment("all threads have read the tiles that are overwritten next")
            hw.sync_threads()
        for i, j, e in product(MMA_M_ITERS, MMA_N_ITERS, range(4)):
            row, column = D_FRAGMENT.element(k.lane, e)
            row, column = first_row + i * MMA_M + row, first_column + j * MMA_N + column
            gemm.store(gemm.row + row, gemm.column + column, d[i][j][e])
        return k.finish()
