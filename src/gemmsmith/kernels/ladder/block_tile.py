"""Tiles in shared memory: each element of A and B that a CTA needs is read once, and used by 32 threads."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import DType
from gemmsmith.kernels.ladder.product import Product, SharedMatrix
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32

SIDE = 32


def block_tile(dtype: DType, chip: Chip) -> Kernel:
    """A CTA has 32x32 results, a thread one. All copy a tile of A and one of B, and meet; multiply them, and meet
    again before the next tiles take their place."""
    with Builder(f"block_tile_{dtype}", threads=SIDE * SIDE, chip=chip) as k:
        x = Product(dtype, dtype, SIDE, SIDE)
        a, b = SharedMatrix("A", SIDE, SIDE), SharedMatrix("B", SIDE, SIDE)
        i, j = (k.thread // SIDE).named("i"), (k.thread % SIDE).named("j")
        total = k.var(F32, 0.0, "total")
        with k.range(0, x.k, SIDE, name="first") as first:
            a.put(i, j, x.load_a(x.row + i, first + j))
            b.put(i, j, x.load_b(first + i, x.column + j))
            hw.sync_threads()
            with k.unroll(SIDE, name="depth") as depth:
                total.set(hw.fma(a.load(i, depth)[0], b.load(depth, j)[0], total.get()))
            hw.sync_threads()
        x.store(x.row + i, x.column + j, total.get())
        return k.finish()
