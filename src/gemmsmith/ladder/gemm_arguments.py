"""Arguments of the ladder's kernels, with access by element, and matrices in shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gemmsmith import hw
from gemmsmith.collective.global_array import GlobalArray
from gemmsmith.core.dtypes import DType
from gemmsmith.core.problem import Matrix
from gemmsmith.core.product import Role
from gemmsmith.core.scalars import ceil_div
from gemmsmith.epilogue.outputs import store_rounded
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.location import hide_frames
from gemmsmith.lang.types import F32, I32, U32, ScalarType
from gemmsmith.lang.values import Constant, RegisterArray, RegisterArray2D, Value, ValueLike

hide_frames(__file__)
ZERO = Constant(I32, 0)
"""The batch index: the ladder's kernels have no batch."""
GROUP_SIZE_N = 8
"""Tiles along N per group of the tile order (Triton: GROUP_SIZE_M)."""


@dataclass(frozen=True)
class GemmArrays:
    """Launch arguments: the matrices "a" (m, k), "b" (k, n) and "d" (m, n), each stored at the Pointer of its name."""

    arrays: Mapping[str, Matrix]


class GemmArguments:
    """Kernel arguments of D = A @ B with operands of `dtype` and D of `output`, in tiles of rows x columns.

    The arguments are m, n, k, and the address and strides of each matrix. Each CTA has one tile, which begins at
    element (`row`, `column`).
    """

    def __init__(self, dtype: DType, output: DType, rows: int, columns: int) -> None:
        """Declare the arguments, and locate the CTA's tile: tiles are numbered row by row."""
        k = current_builder()
        k.work_clusters = lambda p: ceil_div(p.arrays["d"].rows, rows) * ceil_div(p.arrays["d"].cols, columns)
        self.m = k.parameter("m", compute=lambda p: p.arrays["d"].rows)
        self.n = k.parameter("n", compute=lambda p: p.arrays["d"].cols)
        self.k = k.parameter("k", compute=lambda p: p.arrays["a"].cols)
        self.a, self.b = GlobalArray("a", "a", dtype), GlobalArray("b", "b", dtype)
        self.d = GlobalArray("d", "d", output)
        hw.grid_dependency_wait()
        self.tiles_m, self.tiles_n = (self.m + (rows - 1)) // rows, (self.n + (columns - 1)) // columns
        self._rows, self._columns = rows, columns
        self.row, self.column = self._origin(hw.block_index() // self.tiles_n, hw.block_index() % self.tiles_n)

    def _origin(self, m: Value, n: Value) -> tuple[Value, Value]:
        return (m * self._rows).named("first_row"), (n * self._columns).named("first_column")

    def use_grouped_order(self) -> None:
        """Order the tiles in groups of GROUP_SIZE_N columns of tiles, and row by row within a group.

        CTAs that run at the same time then share rows of A and columns of B, which raises the L2 hit rate.
        """
        group_tiles = (self.tiles_m * GROUP_SIZE_N).named("group_tiles")
        group_index = (hw.block_index() // group_tiles).named("group_index")
        offset_in_group = (hw.block_index() % group_tiles).named("offset_in_group")
        width = current_builder().minimum(self.tiles_n - group_index * GROUP_SIZE_N, GROUP_SIZE_N).named("group_width")
        m, n = offset_in_group // width, group_index * GROUP_SIZE_N + offset_in_group % width
        self.row, self.column = self._origin(m, n)

    def locate(self, operand: Role, mn: Value, k_index: Value) -> tuple[Value, Value]:
        """Return (address, exists) of an element of A in row `mn` of the CTA's tile, or of B in column `mn`.

        `exists`: whether there is such a row (column). K is not checked.
        """
        if operand == "a":
            return self.a.element_address(ZERO, self.row + mn, k_index), self.row + mn < self.m
        return self.b.element_address(ZERO, k_index, self.column + mn), self.column + mn < self.n

    def load_a(self, row: Value, k_index: Value) -> Value:
        """Load element (row, k_index) of A as fp32; zero if out of bounds."""
        return self.a.load(self.a.element_address(ZERO, row, k_index), (row < self.m) & (k_index < self.k))

    def load_b(self, k_index: Value, column: Value) -> Value:
        """Load element (k_index, column) of B as fp32; zero if out of bounds."""
        return self.b.load(self.b.element_address(ZERO, k_index, column), (k_index < self.k) & (column < self.n))

    def store(self, row: Value, column: Value, value: Value) -> None:
        """Store element (row, column) of D, if in bounds."""
        in_bounds = (row < self.m) & (column < self.n)
        store_rounded(value, self.d.element_address(ZERO, row, column), in_bounds, self.d.dtype)


class SharedMatrix:
    """Matrix of rows x columns 4-byte words in shared memory, with `pitch` words from one row to the next."""

    def __init__(
        self, name: str, rows: int, columns: int, pitch: int = 0, type: ScalarType = F32, stages: int = 1
    ) -> None:
        """Allocate `stages` such matrices, of which the methods access number `stage`. `pitch` 0: rows without padding.

        `name` is that of the buffer, and `type` that of loaded registers.
        """
        self._pitch, self._type = pitch or columns, type
        self._buffer = current_builder().shared(4 * rows * self._pitch, stages=stages, name=name)
        self.stage: ValueLike = 0

    def address(self, row: ValueLike, column: ValueLike) -> Value:
        """Return the shared-memory address of an element."""
        offset = (row * self._pitch + column) * 4
        buffer = self._buffer[self.stage]
        return buffer.address + offset.to(U32) if isinstance(offset, Value) else buffer.at(offset).address

    def load(self, row: ValueLike, column: ValueLike, count: int = 1) -> RegisterArray:
        """Load `count` consecutive elements of a row: 1, 2 or 4."""
        values = current_builder().registers(self._type, count, "loaded")
        hw.load_shared(values, self.address(row, column))
        return values

    def store(self, row: ValueLike, column: ValueLike, values: RegisterArray) -> None:
        """Store consecutive elements of a row."""
        hw.store_shared(values, self.address(row, column))

    def store_element(self, row: ValueLike, column: ValueLike, value: Value) -> None:
        """Store one element."""
        hw.store_shared_word(self.address(row, column), value, "element")


def zeros(rows: int, count: int, type: ScalarType = F32, name: str = "results") -> RegisterArray2D:
    """Return a thread's results, `rows` arrays of `count` registers each, set to zero."""
    k = current_builder()
    registers = k.registers_2d(type, rows, count, name)
    with k.unroll(rows, name="i") as i, k.unroll(count, name="j") as j:
        registers[i][j] = 0
    return registers
