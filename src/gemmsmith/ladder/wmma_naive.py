"""Tensor cores in a dozen lines: a warp multiplies 16x16 tiles, and loads their fragments from global memory."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import FP32, DType
from gemmsmith.core.mma import MMA_SYNC, select_mma
from gemmsmith.hw.wmma import TILE_MN, fragment_registers
from gemmsmith.ladder.gemm_arguments import ZERO, GemmArguments
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32, U32


def wmma_naive(dtype: DType, chip: Chip) -> Kernel:
    """Build the kernel: fp32 D = A @ B by WMMA, where a CTA is one warp and computes one 16x16 tile of D.

    A and D are row-major, B is column-major; M, N and K are multiples of 16, all strides multiples of 16 bytes, and all
    three matrices are aligned to 32 bytes.
    """
    mma = select_mma(dtype, dtype, FP32, MMA_SYNC)
    with Builder(f"wmma_naive_{dtype}", threads=32, chip=chip) as k:
        gemm = GemmArguments(dtype, FP32, TILE_MN, TILE_MN)
        assert gemm.a.row_stride is not None
        assert gemm.b.column_stride is not None
        assert gemm.d.row_stride is not None
        a = k.registers(U32, fragment_registers(mma, "a"), "a_fragment")
        b = k.registers(U32, fragment_registers(mma, "b"), "b_fragment")
        d = k.registers(F32, fragment_registers(mma, "d"), "d_fragment")
        with k.unroll(d.count, name="i") as i:
            d[i] = 0.0
        with k.range(0, gemm.k, TILE_MN, name="k_index") as k_index:
            a_address = gemm.a.element_address(ZERO, gemm.row, k_index)
            hw.wmma_load_global(a, a_address, gemm.a.row_stride.to(U32), "a", "row", mma)
            b_address = gemm.b.element_address(ZERO, k_index, gemm.column)
            hw.wmma_load_global(b, b_address, gemm.b.column_stride.to(U32), "b", "col", mma)
            hw.wmma_mma(d, a, b, "row", "col", mma)
        d_address = gemm.d.element_address(ZERO, gemm.row, gemm.column)
        hw.wmma_store_global(d, d_address, gemm.d.row_stride.to(U32), "row", mma)
        return k.finish()
