"""Tile of a matrix in a CTA's registers, which the quantization and dequantization kernels share.

A thread has 8 vectors of 8 consecutive elements of a row: of 8 rows, or of fewer rows if a row has more vectors than
the CTA has threads (`ThreadLayout`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

from gemmsmith import hw
from gemmsmith.collective.global_array import GlobalArray
from gemmsmith.core.dtypes import FP16, FP32, INT8, DType
from gemmsmith.core.problem import Matrix
from gemmsmith.core.scalars import ceil_div
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import F32, I32, U16, U32, U64
from gemmsmith.lang.values import Value, ValueLike, as_value

THREADS = 256
"""Threads per CTA."""
WARPS = THREADS // 32
"""Warps per CTA."""
VECTOR_ELEMENTS = 8
"""Elements per vector, consecutive in a row."""
VECTORS_PER_THREAD = 8
"""Vectors of a tile per thread."""
TILE_ELEMENTS = THREADS * VECTORS_PER_THREAD * VECTOR_ELEMENTS
"""Elements per tile."""
QUANTIZATION_BLOCK = 128
"""Elements of a row or column that share a scale, and the extents of a square tile."""


@dataclass(frozen=True)
class ThreadLayout:
    """Mapping of threads and their vectors to the elements of a tile of `columns` columns (CuTe: TV layout)."""

    columns: int

    @property
    def rows(self) -> int:
        return TILE_ELEMENTS // self.columns

    @property
    def threads_per_row(self) -> int:
        return min(self.columns // VECTOR_ELEMENTS, THREADS)

    @property
    def vectors_per_row_per_thread(self) -> int:
        """Vectors per thread in each of its rows."""
        return self.columns // VECTOR_ELEMENTS // self.threads_per_row

    @property
    def rows_per_thread(self) -> int:
        return VECTORS_PER_THREAD // self.vectors_per_row_per_thread

    def row(self, vector: ValueLike) -> Value:
        first_row = current_builder().thread // self.threads_per_row * self.rows_per_thread
        return first_row + as_value(vector, I32) // self.vectors_per_row_per_thread

    def column(self, vector: ValueLike) -> Value:
        first_vector = as_value(vector, I32) % self.vectors_per_row_per_thread * self.threads_per_row
        return (first_vector + current_builder().thread % self.threads_per_row) * VECTOR_ELEMENTS


@dataclass(frozen=True)
class BoundTiles:
    """Launch arguments of a kernel that loops over the tiles of the matrix "source"; matrices are at their Pointers."""

    arrays: Mapping[str, Matrix]

    @property
    def source(self) -> Matrix:
        return self.arrays["source"]

    @property
    def grid(self) -> tuple[int, ...]:
        """Batches, square tiles along M, and along N."""
        x = self.source
        return x.batch, ceil_div(x.rows, QUANTIZATION_BLOCK), ceil_div(x.cols, QUANTIZATION_BLOCK)


class RegisterTile:
    """A tile, of `columns` columns, of the matrix "source" of BoundTiles in a CTA's registers.

    Elements outside of the matrix are zero. `vectorizable`: the matrix's rows are whole aligned vectors of
    VECTOR_ELEMENTS elements.
    """

    def __init__(self, dtype: DType, columns: int, *, vectorizable: bool) -> None:
        k = current_builder()
        self.source, self.layout = GlobalArray("source", "source", dtype), ThreadLayout(columns)
        rows = k.parameter("rows", compute=lambda p: p.source.rows)
        self.extents = rows, k.parameter("columns", compute=lambda p: p.source.cols)
        self.dtype, self.vectorizable = dtype, vectorizable
        registers_per_vector = VECTOR_ELEMENTS * self.dtype.bytes // 4
        self.loads_per_vector = ceil_div(registers_per_vector, 4)
        """16-byte loads per vector."""
        loads, type = VECTORS_PER_THREAD * self.loads_per_vector, F32 if dtype == FP32 else U32
        self.registers = k.registers_2d(type, loads, registers_per_vector // self.loads_per_vector, "tile_registers")

    def load(self, batch: Value, row: Value, column: Value, end: Value | None = None) -> None:
        """Load the tile whose first element is (row, column); all loads are in flight at once.

        Rows from `end` on are zero; None: those past the end of the matrix.
        """
        rows, columns = self.extents[0] if end is None else end, self.extents[1]
        row0, col0 = (row + self.layout.row(0)).named("row0"), (column + self.layout.column(0)).named("col0")
        start, row_pitch = self.source.element_address(batch, row0, col0), row_pitch_bytes(self.source)
        for vector in range(VECTORS_PER_THREAD):
            row_offset, column_offset = divmod(vector, self.layout.vectors_per_row_per_thread)
            start = start + row_pitch if row_offset and not column_offset else start
            column_offset *= self.layout.threads_per_row * VECTOR_ELEMENTS
            address, in_bounds = start, row0 + row_offset < rows
            if self.vectorizable:
                address = address + column_offset * self.dtype.bytes
                in_bounds = in_bounds & (col0 + column_offset < columns)
                for i in range(self.loads_per_vector):
                    registers = self.registers.rows[vector * self.loads_per_vector + i]
                    hw.load_global(registers, address + i * 16, in_bounds)
            else:
                self._gather(vector, address, in_bounds, col0, column_offset)

    def _gather(self, vector: int, row_address: Value, row_in_bounds: Value, col0: Value, column_offset: int) -> None:
        """Load this thread's vector number `vector` element by element, and pack the elements into its registers.

        `row_address`: that of the element in column `col0` of the vector's row. `col0`: first column of vector 0;
        `column_offset`: columns from there to this vector.
        """
        assert self.source.column_stride is not None
        stride = (self.source.column_stride * self.dtype.bytes).to(U64).named("stride")
        loaded = []
        for i in range(column_offset, column_offset + VECTOR_ELEMENTS):
            address, element_in_bounds = row_address + stride * i, row_in_bounds & (col0 + i < self.extents[1])
            if self.dtype == FP32:
                loaded.append(hw.load_global_word(address, element_in_bounds, F32, "element"))
            else:
                loaded.append(hw.load_global_u8_or_u16(address, element_in_bounds, self.dtype.bits).to(U32))
        bits = self.dtype.bits
        while len(loaded) > len(self.registers.rows[0]) * self.loads_per_vector:  # pack neighbors into one register
            loaded = [loaded[i] | loaded[i + 1] << bits for i in range(0, len(loaded), 2)]
            bits *= 2
        for i, x in enumerate(loaded):
            self.registers.rows[vector * self.loads_per_vector + i // 4][i % 4] = x

    def prevent_reuse(self) -> None:
        """Force values derived from the elements to be recomputed after this point instead of kept in registers."""
        for vector in self.registers:
            hw.fence_operand(vector)

    def element(self, vector: ValueLike, i: int) -> Value:
        """Return element `i` of a vector as fp32; `vector` is known at build time or an index of k.unroll."""
        if self.dtype == FP32:
            return self.registers[as_value(vector, I32) * 2 + i // 4][i % 4]
        if self.dtype == INT8:
            return ((self.registers[vector][i // 4] << (24 - i % 4 * 8)).to(I32) >> 24).to(F32)
        if self.dtype.bits == 8:
            pair = self.registers[vector][i // 4] >> (i // 2 % 2 * 16)
            return hw.unpack(hw.unpack_fp8(pair.to(U16), self.dtype.ptx), i % 2, FP16)
        return hw.unpack(self.registers[vector][i // 2], i % 2, self.dtype)


@contextmanager
def grid_stride_tile_loop() -> Iterator[tuple[Value, Value, Value]]:
    """Open a loop over the tiles of a launch's `grid`, divided among its CTAs (grid-stride).

    Yields the batch, and the tile's indices along M and along N.
    """
    k = current_builder()
    tiles_m = k.parameter("tiles_m", compute=lambda p: p.grid[1])
    tiles_n = k.parameter("tiles_n", compute=lambda p: p.grid[2])
    num_tiles = k.parameter("num_tiles", compute=lambda p: prod(p.grid))
    with k.range(hw.block_index(), num_tiles, hw.grid_size(), name="tile") as tile:
        batch = (tile // tiles_n // tiles_m).named("batch")
        yield batch, (tile // tiles_n % tiles_m).named("tile_m"), (tile % tiles_n).named("tile_n")


def row_pitch_bytes(array: GlobalArray) -> Value:
    """Return the bytes from one row of a matrix to the next."""
    assert array.row_stride is not None
    return (array.row_stride * array.dtype.bytes).to(U64).named("row_pitch")
