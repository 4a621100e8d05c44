"""Copies between a warpgroup's accumulator fragment and a subtile in shared memory, in the swizzled layout TMA uses.

A subtile of a row-major matrix is stored there as a K-major tile, one of a column-major matrix as an MN-major tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemmsmith import hw
from gemmsmith.collective.accumulator import RegisterIndex
from gemmsmith.collective.swizzle import swizzled_vector_offset
from gemmsmith.core.dtypes import BOOL, INT32, DType
from gemmsmith.core.mma import FRAGMENT_HALF_ROWS, N8_COLUMNS, WGMMA_M, fragment_column, fragment_row
from gemmsmith.core.tile import Tile
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import F32, I32, U16, U32, ScalarType
from gemmsmith.lang.values import Constant, RegisterArray, Value, as_value

LoadPair = Callable[[Any, int], tuple[Value, Value]]
"""(n8, row_half) -> the thread's two adjacent elements in a group of 8 columns and a half of the warp's rows.

They are fp32, or int32 for a tile of int32. If a value exists once per two rows, the only row half is 0.
"""


def write(
    tile: Tile, buffer: Value, n8: RegisterIndex, count: int, pair: LoadPair, pack: Callable[[RegisterArray], None]
) -> None:
    """Write this thread's elements in `count` (1 or 2) groups of 8 columns of a subtile to shared memory.

    `pair` returns the elements (offset from `n8`, row_half), for 8-bit and 32-bit dtypes. For 16-bit dtypes `pack`
    fills registers with packed pairs instead, one per group and row half.
    """
    halves = _row_halves_per_warp(tile)
    if tile.dtype.bits == 16:
        values = current_builder().registers(U32, halves * count, "packed")
        pack(values)
        if current_builder().chip.supports("sm_90"):
            hw.store_matrix(values, buffer + _matrix_row_offset(tile, n8, count), tile.major == "MN")
            return
        for i in range(halves * count):
            _store_pair(tile, buffer, n8_plus(n8, i // halves), i % halves, values[i])
        return
    for i in range(halves * count):
        low, high = pair(i // halves, i % halves)
        if tile.major == "MN":
            for x, offset in zip(
                (low, high), _element_offsets(tile, n8_plus(n8, i // halves), i % halves), strict=True
            ):
                hw.store_shared_word(buffer + offset, x, "element")
            continue
        address = buffer + _pair_offset(tile, n8_plus(n8, i // halves), i % halves)
        if tile.dtype.bits == 32:
            values = current_builder().registers(_register_type(tile.dtype), 2, "pair")
            values[0], values[1] = low, high
            hw.store_shared(values, address)
        else:
            hw.store_shared_u16(address, hw.pack_fp8(low, high, tile.dtype.ptx))


def n8_plus(n8: RegisterIndex, offset: int) -> Any:
    """Return n8 + offset. If it is computed in the kernel, the kernel's text names it."""
    if isinstance(n8, Value) and offset:
        return (n8 + offset).with_name_hint(f"n8_plus_{offset}")
    return n8 + offset


def _store_pair(tile: Tile, buffer: Value, n8: RegisterIndex, row_half: int, pair: Value) -> None:
    """Store this lane's two 16-bit elements in group `n8` and `row_half`, packed in `pair`: chips without stmatrix."""
    if tile.major == "MN":
        for i, offset in enumerate(_element_offsets(tile, n8, row_half)):
            hw.store_shared_u16(buffer + offset, (pair >> (16 * i)).to(U16))
        return
    packed_pair = current_builder().registers(U32, 1, "packed_pair")
    packed_pair[0] = pair
    hw.store_shared(packed_pair, buffer + _pair_offset(tile, n8, row_half))


def read(tile: Tile, buffer: Value, first_n8: int, n8_count: int, name: str) -> LoadPair:
    """Load `n8_count` groups of 8 columns of a subtile, from group `first_n8` on, into a register array.

    The result is a function of (n8 relative to `first_n8`, row_half) that returns the thread's two elements.
    """
    k, halves = current_builder(), _row_halves_per_warp(tile)
    if tile.dtype.bits == 16:
        count = 2 if n8_count % 2 == 0 else 1
        registers = k.registers(U32, halves * n8_count, f"{name}_frag")
        with k.unroll(0, n8_count, count, name="n8") as n8:
            address = buffer + _matrix_row_offset(tile, n8 + first_n8, count)
            hw.load_matrix(registers.slice(n8 * halves, halves * count), address, tile.major == "MN")
        return lambda n8, row_half: hw.unpack_pair(registers[n8 * halves + row_half], tile.dtype)
    registers = k.registers(F32, 2 * halves * n8_count, f"{name}_frag")
    with k.unroll(n8_count, name="n8") as n8:
        for row_half in range(halves):
            for i, x in enumerate(_load_pair(tile, buffer, n8 + first_n8, row_half)):
                registers[n8 * (2 * halves) + (2 * row_half + i)] = x
    return pairs_from_registers(registers, halves)


def _load_pair(tile: Tile, buffer: Value, n8: RegisterIndex, row_half: int) -> tuple[Value, ...]:
    """Load this lane's two elements, bools or of 32 bits, in group `n8` and `row_half`, as fp32."""
    if tile.major == "MN":
        addresses = [buffer + x for x in _element_offsets(tile, n8, row_half)]
        if tile.dtype == BOOL:
            return tuple(_bool_as_fp32(hw.load_shared_u8_or_u16(x, 8).to(U32)) for x in addresses)
        return tuple(hw.load_shared_word(x, _register_type(tile.dtype), "element").to(F32) for x in addresses)
    address = buffer + _pair_offset(tile, n8, row_half)
    if tile.dtype == BOOL:
        pair = hw.load_shared_u8_or_u16(address, 16).to(U32)
        return _bool_as_fp32(pair & 0xFF), _bool_as_fp32(pair & 0xFF00)
    values = current_builder().registers(_register_type(tile.dtype), 2, "pair")
    hw.load_shared(values, address)
    return values[0].to(F32), values[1].to(F32)


def _bool_as_fp32(bits: Value) -> Value:
    """Return 1 if any of the bits is set, else 0."""
    return current_builder().select(bits != 0, 1.0, Constant(F32, 0.0))


def pairs_from_registers(registers: RegisterArray, halves: int) -> LoadPair:
    """Return a function that reads pairs from registers, which are ordered by (n8, row half, element of the pair).

    `halves`: 1 if two rows share a value, else 2.
    """

    def pair(n8: Any, row_half: int) -> tuple[Value, Value]:
        index = as_value(n8 * (2 * halves) + 2 * row_half, I32).with_name_hint("index")
        return registers[index], registers[index + 1]

    return pair


def _register_type(dtype: DType) -> ScalarType:
    return I32 if dtype == INT32 else F32


def _row_halves_per_warp(tile: Tile) -> int:
    """Return the number of 8-row halves per warp: 2 in a subtile of 64 rows, 1 in one of 32 (a value per two rows)."""
    return tile.mn // (4 * FRAGMENT_HALF_ROWS)


def _matrix_row_offset(tile: Tile, n8: RegisterIndex, num_n8: int) -> Value:
    """Return the byte offset of the row of an 8x8 matrix that this lane passes to ldmatrix or stmatrix.

    Lanes 8i to 8i + 7 pass the rows of matrix i. It has 8 rows of the warp, from row 8 * (i % halves) on, in the group
    n8 + i // halves of 8 columns. In an MN-major tile a matrix's row is a column of the subtile, and the instruction
    transposes.
    """
    k, halves = current_builder(), _row_halves_per_warp(tile)
    rows = halves * FRAGMENT_HALF_ROWS
    n8 = k.lane // rows + n8 if num_n8 == 2 else n8
    if tile.major == "MN":
        row_half = (k.warp_index % 4) * 2 + k.lane // 8 % 2 if halves == 2 else k.warp_index % 4
        column = (n8 * N8_COLUMNS + k.lane % N8_COLUMNS).named("column_in_subtile")
        return swizzled_vector_offset(tile, column, row_half, 0)
    row = ((k.warp_index % 4) * rows + k.lane % rows).named("row_in_subtile")
    return swizzled_vector_offset(tile, row, n8, 0)


def _lane_row(tile: Tile, row_half: int) -> Value:
    """Return this lane's row of the subtile, in the half `row_half` of the warp's rows."""
    k = current_builder()
    row: Value = fragment_row(k.warp_index % 4, k.lane, WGMMA_M // tile.mn) + FRAGMENT_HALF_ROWS * row_half
    return row.named("row_in_subtile")


def _pair_offset(tile: Tile, n8: RegisterIndex, row_half: int) -> Value:
    """For row-major subtiles, in which a pair is contiguous."""
    k, row = current_builder(), _lane_row(tile, row_half)
    if tile.dtype.bits == 32:  # 8 columns are two 16-byte vectors, a pair is half of one
        vector_idx = (k.lane % 4 // 2 + 2 * n8).with_name_hint("vector_idx")
        return swizzled_vector_offset(tile, row, vector_idx, k.lane % 2 * 8)
    if tile.dtype.bits == 16:
        return swizzled_vector_offset(tile, row, n8, fragment_column(k.lane) * 2)
    # 8-bit: 8 columns are half of a 16-byte vector
    return swizzled_vector_offset(tile, row, n8 // 2, fragment_column(k.lane) + n8 % 2 * 8)


def _element_offsets(tile: Tile, n8: RegisterIndex, row_half: int) -> list[Value]:
    """For column-major subtiles."""
    row = _lane_row(tile, row_half)
    column = (n8 * N8_COLUMNS + fragment_column(current_builder().lane)).named("column_in_subtile")
    return [element_offset(tile, row, (column + i).with_name_hint("column_in_subtile")) for i in range(2)]


def element_offset(tile: Tile, row: Value, column: Value) -> Value:
    """Return the byte offset in a subtile of the element at (row, column)."""
    size = tile.dtype.bytes
    if tile.major == "MN":
        row, column = column, row
    return swizzled_vector_offset(tile, row, (column * size // 16).with_name_hint("vector_idx"), column * size % 16)
