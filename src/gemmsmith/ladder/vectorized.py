"""16-byte vector loads from global and from shared memory, without bank conflicts."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import DType
from gemmsmith.ladder.gemm_arguments import ZERO, GemmArguments, SharedMatrix, zeros
from gemmsmith.ladder.thread_tile import THREAD_TILE, THREADS, TILE_K, TILE_MN
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32
from gemmsmith.lang.values import RegisterArray, RegisterArray2D, Value

VECTOR_ELEMENTS = 4
"""fp32 elements per 16-byte vector."""
FRAGMENT_HALF_OFFSETS = (0, TILE_MN // 2)
"""Offsets of a thread's two groups of rows, and of columns."""


def vectorized(dtype: DType, chip: Chip) -> Kernel:
    """Build the kernel: D = A @ B in fp32, where a CTA computes 128x128 results with 16-byte vector loads.

    A must be contiguous along M and B along N, in whole 16-byte vectors; `ladder_launches` packs other operands. A
    thread has 4x4 results in each quarter of the tile, so that lanes load adjacent vectors, or the same vector, from
    shared memory, without bank conflicts.
    """
    with Builder("vectorized", threads=THREADS, chip=chip) as k:
        gemm = GemmArguments(dtype, dtype, TILE_MN, TILE_MN)
        a, b = SharedMatrix("A", TILE_K, TILE_MN), SharedMatrix("B", TILE_K, TILE_MN)
        vector_k, vector_mn = thread_vector()
        accumulators = zeros(THREAD_TILE, THREAD_TILE)
        with k.range(0, gemm.k, TILE_K, name="k0") as k0:
            a_vector, b_vector = load_vectors(gemm, k0 + vector_k, vector_mn)
            a.store(vector_k, vector_mn, a_vector)
            b.store(vector_k, vector_mn, b_vector)
            k.comment("all threads have written the tiles that are read now")
            hw.sync_threads()
            multiply(accumulators, a, b)
            k.comment("all threads have read the tiles that are overwritten next")
            hw.sync_threads()
        store(gemm, accumulators)
        return k.finish()


def thread_vector() -> tuple[Value, Value]:
    """Return (k, row of A or column of B) of the first element of the vector of a k-tile that this thread copies."""
    thread, vectors_per_row = current_builder().thread, TILE_MN // VECTOR_ELEMENTS
    vector_k = (thread // vectors_per_row).named("vector_k")
    return vector_k, (thread % vectors_per_row * VECTOR_ELEMENTS).named("vector_mn")


def load_vectors(gemm: GemmArguments, k_index: Value, vector_mn: Value) -> tuple[RegisterArray, RegisterArray]:
    """Load a vector of A's tile and one of B's; zeros out of bounds.

    `k_index`: their index along K. `vector_mn`: their first row of A's tile, and column of B's tile.
    """
    a_vector, b_vector = (current_builder().registers(F32, VECTOR_ELEMENTS, name) for name in ("a_vector", "b_vector"))
    row, column, in_bounds = gemm.row + vector_mn, gemm.column + vector_mn, k_index < gemm.k
    hw.load_global(a_vector, gemm.a.element_address(ZERO, row, k_index), in_bounds & (row < gemm.m))
    hw.load_global(b_vector, gemm.b.element_address(ZERO, k_index, column), in_bounds & (column < gemm.n))
    return a_vector, b_vector


def multiply(accumulators: RegisterArray2D, a: SharedMatrix, b: SharedMatrix) -> None:
    """Add the product of a k-tile to this thread's 8x8 results.

    `a`, `b`: the tiles in shared memory, with K as rows; A's is stored transposed.
    """
    k, (row, column) = current_builder(), thread_result_coord()
    with k.unroll(TILE_K, name="kk") as kk:
        a_vectors = [a.load(kk, row + half_offset, VECTOR_ELEMENTS) for half_offset in FRAGMENT_HALF_OFFSETS]
        b_vectors = [b.load(kk, column + half_offset, VECTOR_ELEMENTS) for half_offset in FRAGMENT_HALF_OFFSETS]
        for p, a_vector in enumerate(a_vectors):
            for q, b_vector in enumerate(b_vectors):
                with k.unroll(VECTOR_ELEMENTS, name="i") as i, k.unroll(VECTOR_ELEMENTS, name="j") as j:
                    result = accumulators[i + p * VECTOR_ELEMENTS]
                    result[j + q * VECTOR_ELEMENTS] = hw.fma(a_vector[i], b_vector[j], result[j + q * VECTOR_ELEMENTS])


def store(gemm: GemmArguments, accumulators: RegisterArray2D) -> None:
    """Store this thread's results to D, element by element, since D may have any layout."""
    k, (row, column) = current_builder(), thread_result_coord()
    for p, row_offset in enumerate(FRAGMENT_HALF_OFFSETS):
        for q, column_offset in enumerate(FRAGMENT_HALF_OFFSETS):
            with k.unroll(VECTOR_ELEMENTS, name="i") as i, k.unroll(VECTOR_ELEMENTS, name="j") as j:
                value = accumulators[i + p * VECTOR_ELEMENTS][j + q * VECTOR_ELEMENTS]
                gemm.store(gemm.row + row + row_offset + i, gemm.column + column + column_offset + j, value)


def thread_result_coord() -> tuple[Value, Value]:
    """Return the row and column of the first of this thread's 4x4 results in the first quarter of the tile.

    The other quarters have the same coordinates, from their first row and column on.
    """
    thread, threads_per_row = current_builder().thread, TILE_MN // THREAD_TILE
    row, column = thread // threads_per_row * VECTOR_ELEMENTS, thread % threads_per_row * VECTOR_ELEMENTS
    return row.named("row"), column.named("column")
