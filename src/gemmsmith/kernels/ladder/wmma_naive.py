"""Tensor cores in a dozen lines: a warp multiplies 16x16 tiles, whose fragments it loads from global memory."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import FP32, DType
from gemmsmith.core.mma import find_mma
from gemmsmith.hw.wmma import SIDE, fragment_registers
from gemmsmith.kernels.ladder.product import ZERO, Product
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32, U32


def wmma_naive(dtype: DType, chip: Chip) -> Kernel:
    """One warp, and one tile of D, a CTA. A and D are row-major, B is column-major; M, N and K are multiples of 16, all
    rows (columns) of 16 bytes, and all three matrices aligned to 32."""
    mma = find_mma(dtype, dtype, FP32, "mma")
    with Builder(f"wmma_naive_{dtype}", threads=32, chip=chip) as k:
        x = Product(dtype, FP32, SIDE, SIDE)
        assert x.a.row_stride is not None
        assert x.b.column_stride is not None
        assert x.d.row_stride is not None
        a = k.registers(U32, fragment_registers(mma, "a"), "a_fragment")
        b = k.registers(U32, fragment_registers(mma, "b"), "b_fragment")
        d = k.registers(F32, fragment_registers(mma, "d"), "d_fragment")
        with k.unroll(d.count, name="i") as i:
            d[i] = 0.0
        with k.range(0, x.k, SIDE, name="depth") as depth:
            hw.wmma_load_global(a, x.a.at(ZERO, x.row, depth), x.a.row_stride.to(U32), "a", "row", mma)
            hw.wmma_load_global(b, x.b.at(ZERO, depth, x.column), x.b.column_stride.to(U32), "b", "col", mma)
            hw.wmma_mma(d, a, b, "row", "col", mma)
        hw.wmma_store_global(d, x.d.at(ZERO, x.row, x.column), x.d.row_stride.to(U32), "row", mma)
        return k.finish()
