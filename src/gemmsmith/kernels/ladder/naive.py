"""One thread a result: which threads are neighbors decides how much a warp reads."""

from __future__ import annotations

from typing import Literal

from gemmsmith import hw
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import DType
from gemmsmith.kernels.ladder.product import Product
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32

SIDE = 16


def naive(dtype: DType, chip: Chip, order: Literal["m", "n"] = "n") -> Kernel:
    """Neighboring threads have neighbors of a row of D ("n"), and read neighbors of a row of B together; or of a
    column ("m"), and read as many rows of A. fp16 is summed in fp32."""
    with Builder(f"naive_{dtype}_{order}", threads=SIDE * SIDE, chip=chip) as k:
        x = Product(dtype, dtype, SIDE, SIDE)
        along, across = k.thread % SIDE, k.thread // SIDE
        row, column = (x.row + across, x.column + along) if order == "n" else (x.row + along, x.column + across)
        total = k.var(F32, 0.0, "total")
        with k.range(x.k, name="depth") as depth:
            total.set(hw.fma(x.load_a(row, depth), x.load_b(depth, column), total.get()))
        x.store(row, column, total.get())
        return k.finish()
