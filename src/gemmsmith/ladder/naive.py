"""One thread per result: the assignment of threads to results decides how coalesced the loads of a warp are."""

from __future__ import annotations

from typing import Literal

from gemmsmith import hw
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import DType
from gemmsmith.ladder.gemm_arguments import GemmArguments
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32

TILE = 16
"""Extents of a CTA's tile."""


def naive(dtype: DType, chip: Chip, order: Literal["m", "n"] = "n") -> Kernel:
    """Build the kernel: D = A @ B with one thread per element of D, accumulated in fp32.

    `dtype`: that of A, B and D. `order`: with "n" consecutive threads compute consecutive columns of D (coalesced reads
    of B), with "m" consecutive rows (strided reads of A).
    """
    with Builder(f"naive_{dtype}_{order}", threads=TILE * TILE, chip=chip) as k:
        gemm = GemmArguments(dtype, dtype, TILE, TILE)
        inner, outer = k.thread % TILE, k.thread // TILE
        m, n = (outer, inner) if order == "n" else (inner, outer)
        row, column = gemm.row + m, gemm.column + n
        accumulator = k.var(F32, 0.0, "accumulator")
        with k.range(gemm.k, name="k_index") as k_index:
            accumulator.set(hw.fma(gemm.load_a(row, k_index), gemm.load_b(k_index, column), accumulator.get()))
        gemm.store(row, column, accumulator.get())
        return k.finish()
