"""8x8 results a thread: 16 loads from shared memory for 64 products, where one result takes 2 for each."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import DType
from gemmsmith.kernels.ladder.product import Product, SharedMatrix, zeros
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32

SIDE, DEPTH, OWN = 128, 8, 8
"""Of a CTA's tile, of its k-tiles, and of a thread's part of it."""
THREADS = (SIDE // OWN) ** 2


def thread_tile(dtype: DType, chip: Chip) -> Kernel:
    """A CTA has 128x128 results, a thread 8x8 of them, which it keeps in registers."""
    with Builder(f"thread_tile_{dtype}", threads=THREADS, chip=chip) as k:
        x = Product(dtype, dtype, SIDE, SIDE)
        a, b = SharedMatrix("A", DEPTH, SIDE), SharedMatrix("B", DEPTH, SIDE)  # A transposed
        row, column = (k.thread // (SIDE // OWN) * OWN).named("row"), (k.thread % (SIDE // OWN) * OWN).named("column")
        results = zeros(OWN, OWN)
        of_a, of_b = k.registers(F32, OWN, "of_a"), k.registers(F32, OWN, "of_b")
        with k.range(0, x.k, DEPTH, name="first") as first:
            with k.unroll(SIDE * DEPTH // THREADS, name="turn") as turn:
                element = (turn * THREADS + k.thread).named("element")
                m, deep, n, depth = element // DEPTH, element % DEPTH, element % SIDE, element // SIDE
                a.put(deep, m, x.load_a(x.row + m, first + deep))
                b.put(depth, n, x.load_b(first + depth, x.column + n))
            hw.sync_threads()
            with k.unroll(DEPTH, name="depth") as at:
                with k.unroll(OWN, name="i") as i:
                    of_a[i], of_b[i] = a.load(at, row + i)[0], b.load(at, column + i)[0]
                with k.unroll(OWN, name="i") as i, k.unroll(OWN, name="j") as j:
                    results[i][j] = hw.fma(of_a[i], of_b[j], results[i][j])
            hw.sync_threads()
        with k.unroll(OWN, name="i") as i, k.unroll(OWN, name="j") as j:
            x.store(x.row + row + i, x.column + column + j, results[i][j])
        return k.finish()
