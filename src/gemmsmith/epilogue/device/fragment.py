"""Pieces of a matrix between a warpgroup's accumulator fragment and shared memory, in the swizzled layout TMA uses.

A piece of a row-major matrix lies there as a K-major tile, one of a column-major matrix as an MN-major one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemmsmith import hw
from gemmsmith.collective.accumulator import Index
from gemmsmith.collective.swizzle import chunk_offset
from gemmsmith.core.dtypes import INT32, DType
from gemmsmith.core.mma import CHUNK, HALF_ROWS, WGMMA_M, fragment_column, fragment_row
from gemmsmith.core.tile import Tile
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import F32, I32, U16, U32, Type
from gemmsmith.lang.values import Registers, Value

Pair = Callable[[Any, int], tuple[Value, Value]]
"""(chunk, half) -> the thread's two neighboring elements, fp32, or int32 for a tile of that. Where rows are paired the
only half is 0."""


def write(tile: Tile, buffer: Value, chunk: Index, count: int, pair: Pair, pack: Callable[[Registers], None]) -> None:
    """Writes `count` (1 or 2) chunks of 8 columns from `chunk` on of a piece, rounded to the tile's dtype.

    `pack` fills registers with pairs of 16-bit elements: of each chunk one for each of the warp's halves.
    """
    halves = _halves(tile)
    if tile.dtype.bits == 16:
        values = current().registers(U32, halves * count, "packed")
        pack(values)
        if current().chip.has("sm_90"):
            hw.store_matrix(values, buffer + _matrix_row(tile, chunk, count), tile.major == "MN")
            return
        for i in range(halves * count):
            _store_pair(tile, buffer, chunk + i // halves, i % halves, values[i])
        return
    for i in range(halves * count):
        low, high = pair(i // halves, i % halves)
        if tile.major == "MN":
            for x, offset in zip((low, high), _element_offsets(tile, chunk + i // halves, i % halves), strict=True):
                hw.store_shared_word(buffer + offset, x, "element")
            continue
        address = buffer + _pair_offset(tile, chunk + i // halves, i % halves)
        if tile.dtype.bits == 32:
            values = current().registers(_register(tile.dtype), 2, "pair")
            values[0], values[1] = low, high
            hw.store_shared(values, address)
        else:
            hw.store_shared_16(address, hw.pack_fp8(low, high, tile.dtype.ptx))


def _store_pair(tile: Tile, buffer: Value, chunk: Index, half: int, pair: Value) -> None:
    """What stmatrix does with one matrix, without it."""
    if tile.major == "MN":
        for i, offset in enumerate(_element_offsets(tile, chunk, half)):
            hw.store_shared_16(buffer + offset, (pair >> (16 * i)).to(U16))
        return
    one = current().registers(U32, 1, "one")
    one[0] = pair
    hw.store_shared(one, buffer + _pair_offset(tile, chunk, half))


def read(tile: Tile, buffer: Value, first: int, chunks: int) -> Pair:
    """Reads so many chunks of a piece likewise, before any is used: gives (chunk from `first` on, half) -> elements."""
    k, halves = current(), _halves(tile)
    if tile.dtype.bits == 16:
        count = 2 if chunks % 2 == 0 else 1
        held = k.registers(U32, halves * chunks, "loaded")
        with k.unroll(0, chunks, count, name="chunk") as chunk:
            values = k.registers(U32, halves * count, "matrices")
            hw.load_matrix(values, buffer + _matrix_row(tile, chunk + first, count), tile.major == "MN")
            for i in range(halves * count):
                held[chunk * halves + i] = values[i]
        return lambda chunk, half: hw.unpack_pair(held[chunk * halves + half], tile.dtype)
    held = k.registers(F32, 2 * halves * chunks, "loaded")
    with k.unroll(chunks, name="chunk") as chunk:
        for half in range(halves):
            values = k.registers(F32, 2, "pair")
            if tile.major == "MN":
                for i, offset in enumerate(_element_offsets(tile, chunk + first, half)):
                    values[i] = hw.load_shared_word(buffer + offset, F32, "element")
            else:
                hw.load_shared(values, buffer + _pair_offset(tile, chunk + first, half))
            for i in range(2):
                held[chunk * (2 * halves) + (2 * half + i)] = values[i]
    return held_pairs(held, halves)


def held_pairs(held: Registers, halves: int) -> Pair:
    """Of registers that hold chunk after chunk, of each so many halves, two elements each."""

    def pair(chunk: Any, half: int) -> tuple[Value, Value]:
        first = chunk * (2 * halves) + 2 * half
        return held[first], held[first + 1]

    return pair


def _register(dtype: DType) -> Type:
    """What holds an element of 32 bits."""
    return I32 if dtype == INT32 else F32


def _halves(tile: Tile) -> int:
    """How many halves a warp's rows have: two of 8 in a piece of 64 rows, one in a piece of 32."""
    return tile.mn // (4 * HALF_ROWS)


def _matrix_row(tile: Tile, chunk: Index, count: int) -> Value:
    """Where this lane's row of a ldmatrix or stmatrix lies: the halves of the warp's rows, chunk by chunk. Of an
    MN-major tile it is a column of those rows, and the instruction transposes."""
    k, halves = current(), _halves(tile)
    rows = halves * HALF_ROWS
    chunk = k.lane // rows + chunk if count == 2 else chunk
    if tile.major == "MN":
        half = (k.warp_index % 4) * 2 + k.lane // 8 % 2 if halves == 2 else k.warp_index % 4
        return chunk_offset(tile, (chunk * CHUNK + k.lane % CHUNK).named("column"), half, 0)
    return chunk_offset(tile, ((k.warp_index % 4) * rows + k.lane % rows).named("row"), chunk, 0)


def _row(tile: Tile, half: int) -> Value:
    """This lane's row in that half of the warp's rows."""
    k = current()
    row: Value = fragment_row(k.warp_index % 4, k.lane, WGMMA_M // tile.mn) + HALF_ROWS * half
    return row.named("row")


def _pair_offset(tile: Tile, chunk: Index, half: int) -> Value:
    """Where this lane's pair of a chunk lies, in that half of the warp's rows."""
    k, row, size = current(), _row(tile, half), tile.dtype.bytes
    if tile.dtype.bits == 32:  # 8 columns are two 16-byte chunks, a pair is half of one
        return chunk_offset(tile, row, k.lane % 4 // 2 + 2 * chunk, k.lane % 2 * 8)
    if tile.dtype.bits == 16:
        return chunk_offset(tile, row, chunk, fragment_column(k.lane) * size)
    return chunk_offset(tile, row, chunk * size // 2, fragment_column(k.lane) * size + chunk % 2 * 8)


def _element_offsets(tile: Tile, chunk: Index, half: int) -> list[Value]:
    """Where the two elements of this lane's pair of a chunk lie."""
    row, first = _row(tile, half), (chunk * CHUNK + fragment_column(current().lane)).named("column")
    return [element_offset(tile, row, first + i) for i in range(2)]


def element_offset(tile: Tile, row: Value, column: Value) -> Value:
    """Byte offset of an element."""
    size = tile.dtype.bytes
    if tile.major == "MN":
        row, column = column, row
    return chunk_offset(tile, row, column * size // 16, column * size % 16)
