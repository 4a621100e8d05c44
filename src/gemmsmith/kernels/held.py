"""A tile that a CTA holds in registers: what the kernels that quantize and dequantize share.

A thread holds 8 chunks of 8 neighbors of a row: of 8 rows, or, where a tile is wider than a chunk for every thread, of
fewer rows. `Threads` says which.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

from gemmsmith import hw
from gemmsmith.core.dtypes import FP16, FP32, INT8, DType
from gemmsmith.epilogue.device.addressed import Addressed
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import F32, I32, U16, U32, U64
from gemmsmith.lang.values import Value, ValueLike, as_value

THREADS = 256
WARPS = THREADS // 32
CHUNK = 8
"""Elements of a row that a thread loads at once."""
CHUNKS = 8
"""Chunks of a tile that a thread holds."""
ELEMENTS = THREADS * CHUNKS * CHUNK
"""Of a tile."""
BLOCK = 128
"""Elements of a row, or of a column, that share a scale; and the sides of a square tile."""


@dataclass(frozen=True)
class Threads:
    """Which elements of a tile of `columns` columns a thread holds."""

    columns: int

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return ELEMENTS // self.columns

    @property
    def lanes(self) -> int:
        """Threads that share a row."""
        return min(self.columns // CHUNK, THREADS)

    @property
    def parts(self) -> int:
        """Chunks of a row that a thread holds."""
        return self.columns // CHUNK // self.lanes

    @property
    def thread_rows(self) -> int:
        """Rows of which a thread holds chunks."""
        return CHUNKS // self.parts

    def row(self, chunk: ValueLike) -> Value:
        """The row in the tile."""
        return current().thread // self.lanes * self.thread_rows + as_value(chunk, I32) // self.parts

    def column(self, chunk: ValueLike) -> Value:
        """The column in the tile of a chunk's first element."""
        part = as_value(chunk, I32) % self.parts
        return (part * self.lanes + current().thread % self.lanes) * CHUNK


class HeldTile:
    """A tile in registers; zeros stand for what is outside of the matrix. `chunked`: rows are whole 16-byte chunks."""

    def __init__(self, source: Addressed, threads: Threads, extents: tuple[Value, Value], *, chunked: bool) -> None:
        self.source, self.threads, self.extents, self.chunked = source, threads, extents, chunked
        self.dtype = source.dtype
        registers = CHUNK * self.dtype.bytes // 4
        self.words = -(-registers // 4)
        """Loads of a chunk."""
        type = F32 if self.dtype == FP32 else U32
        self.held = current().register_rows(type, CHUNKS * self.words, registers // self.words, "held")

    def load(self, batch: Value, row: Value, column: Value) -> None:
        """The tile whose first element is there; all loads are in flight at once."""
        rows, columns = self.extents
        top, left = (row + self.threads.row(0)).named("top"), (column + self.threads.column(0)).named("left")
        start, pitch = self.source.at(batch, top, left), pitch_of(self.source)
        for chunk in range(CHUNKS):
            below, right = divmod(chunk, self.threads.parts)
            start = start + pitch if below and not right else start
            right *= self.threads.lanes * CHUNK
            where, inside = start, top + below < rows
            if self.chunked:
                where, inside = where + right * self.dtype.bytes, inside & (left + right < columns)
                for word in range(self.words):
                    hw.load_global(self.held.rows[chunk * self.words + word], where + word * 16, inside)
            else:
                self._gather(chunk, where, inside, left, right)

    def _gather(self, chunk: int, row: Value, inside: Value, left: Value, right: int) -> None:
        """Loads a chunk element by element; `row`: the address of element `left` of its row."""
        assert self.source.column_stride is not None
        stride = (self.source.column_stride * self.dtype.bytes).to(U64).named("stride")
        loaded = []
        for i in range(right, right + CHUNK):
            where, there = row + stride * i, inside & (left + i < self.extents[1])
            if self.dtype == FP32:
                loaded.append(hw.load_global_word(where, there, F32, "element"))
            else:
                loaded.append(hw.load_global_narrow(where, there, self.dtype.bits).to(U32))
        bits = self.dtype.bits
        while len(loaded) > len(self.held.rows[0]) * self.words:  # neighbors share a register
            loaded = [loaded[i] | loaded[i + 1] << bits for i in range(0, len(loaded), 2)]
            bits *= 2
        for i, x in enumerate(loaded):
            self.held.rows[chunk * self.words + i // 4][i % 4] = x

    def forget(self) -> None:
        """What was computed of the elements is computed again behind this, instead of being kept in registers."""
        for registers in self.held:
            hw.compiler_fence(registers)

    def element(self, chunk: ValueLike, i: int) -> Value:
        """Element `i` of a chunk, as fp32; `chunk` is known at build time or the index of k.unroll."""
        if self.dtype == FP32:
            return self.held[as_value(chunk, I32) * 2 + i // 4][i % 4]
        if self.dtype == INT8:
            return ((self.held[chunk][i // 4] << (24 - i % 4 * 8)).to(I32) >> 24).to(F32)
        if self.dtype.bits == 8:
            pair = self.held[chunk][i // 4] >> (i // 2 % 2 * 16)
            return hw.unpack(hw.unpack_fp8(pair.to(U16), self.dtype.ptx), i % 2, FP16)
        return hw.unpack(self.held[chunk][i // 2], i % 2, self.dtype)


def held_tile(dtype: DType, columns: int, *, chunked: bool) -> HeldTile:
    """A tile of the matrix `source` of what the kernel is launched for."""
    k = current()
    source = Addressed("source", "source", dtype, m=True, n=True)
    extents = k.parameter("rows", bind=lambda p: p.source.rows), k.parameter("columns", bind=lambda p: p.source.cols)
    return HeldTile(source, Threads(columns), extents, chunked=chunked)


@contextmanager
def each_tile() -> Iterator[tuple[Value, Value, Value]]:
    """A grid-stride loop: batch, tile of rows, tile of columns."""
    k = current()
    down, abreast = k.parameter("down", bind=lambda p: p.grid[1]), k.parameter("abreast", bind=lambda p: p.grid[2])
    total = k.parameter("total", bind=lambda p: prod(p.grid))
    with k.range(hw.block_index(), total, hw.grid_size(), name="tile") as tile:
        yield (tile // abreast // down).named("batch"), (tile // abreast % down).named("i"), (tile % abreast).named("j")


def pitch_of(array: Addressed) -> Value:
    """Bytes from one row of a matrix to the next."""
    assert array.row_stride is not None
    return (array.row_stride * array.dtype.bytes).to(U64).named("pitch")
