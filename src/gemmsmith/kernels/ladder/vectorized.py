"""16 bytes at once, from global memory and from shared memory, without two lanes of a warp in one bank."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import DType
from gemmsmith.kernels.ladder.product import ZERO, Product, SharedMatrix, zeros
from gemmsmith.lang.builder import Builder, current
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32
from gemmsmith.lang.values import RegisterRows, Registers, Value

SIDE, DEPTH, VECTOR, OWN = 128, 8, 4, 8
THREADS = (SIDE // OWN) ** 2
HALVES = (0, SIDE // 2)
"""Where a thread's two groups of rows, and of columns, begin."""


def vectorized(dtype: DType, chip: Chip) -> Kernel:
    """A's columns and B's rows are contiguous and whole chunks of 16 bytes; what lies otherwise is packed so. A thread
    has 4x4 results in each quarter of the tile: so lanes read neighboring chunks, or the same."""
    with Builder("vectorized", threads=THREADS, chip=chip) as k:
        x = Product(dtype, dtype, SIDE, SIDE)
        a, b = SharedMatrix("A", DEPTH, SIDE), SharedMatrix("B", DEPTH, SIDE)
        deep, along = own_chunk()
        results = zeros(OWN, OWN)
        with k.range(0, x.k, DEPTH, name="first") as first:
            of_a, of_b = load_chunks(x, first + deep, along)
            a.store(deep, along, of_a)
            b.store(deep, along, of_b)
            hw.sync_threads()
            multiply(results, a, b)
            hw.sync_threads()
        store(x, results)
        return k.finish()


def own_chunk() -> tuple[Value, Value]:
    """The depth and the row (column) where the chunk of A (of B) begins that this thread brings of a k-tile."""
    thread, across = current().thread, SIDE // VECTOR
    return (thread // across).named("deep"), (thread % across * VECTOR).named("along")


def load_chunks(x: Product, depth: Value, along: Value) -> tuple[Registers, Registers]:
    """Four neighbors of A's tile and four of B's at a depth; zeros outside."""
    of_a, of_b = (current().registers(F32, VECTOR, name) for name in ("chunk_of_a", "chunk_of_b"))
    row, column, inside = x.row + along, x.column + along, depth < x.k
    hw.load_global(of_a, x.a.at(ZERO, row, depth), inside & (row < x.m))
    hw.load_global(of_b, x.b.at(ZERO, depth, column), inside & (column < x.n))
    return of_a, of_b


def multiply(results: RegisterRows, a: SharedMatrix, b: SharedMatrix) -> None:
    """results += the product of a k-tile of A, transposed, and of B."""
    k, (row, column) = current(), own_results()
    with k.unroll(DEPTH, name="depth") as depth:
        of_a = [a.load(depth, row + half, VECTOR) for half in HALVES]
        of_b = [b.load(depth, column + half, VECTOR) for half in HALVES]
        for p, chunk_of_a in enumerate(of_a):
            for q, chunk_of_b in enumerate(of_b):
                with k.unroll(VECTOR, name="i") as i, k.unroll(VECTOR, name="j") as j:
                    result = results[i + p * VECTOR]
                    result[j + q * VECTOR] = hw.fma(chunk_of_a[i], chunk_of_b[j], result[j + q * VECTOR])


def store(x: Product, results: RegisterRows) -> None:
    """Element by element: D may lie in any layout."""
    k, (row, column) = current(), own_results()
    for p, down in enumerate(HALVES):
        for q, right in enumerate(HALVES):
            with k.unroll(VECTOR, name="i") as i, k.unroll(VECTOR, name="j") as j:
                value = results[i + p * VECTOR][j + q * VECTOR]
                x.store(x.row + row + down + i, x.column + column + right + j, value)


def own_results() -> tuple[Value, Value]:
    """Where this thread's rows and columns begin in a half of the tile."""
    thread, across = current().thread, SIDE // OWN
    return (thread // across * VECTOR).named("row"), (thread % across * VECTOR).named("column")
