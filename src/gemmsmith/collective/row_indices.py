"""Row indices of a grouped GEMM: which row of an array a row of the product is, for gathers and scatters.

With a scatter, row i of D is row scatter[i] of the result's array.
"""

from __future__ import annotations

from collections.abc import Callable

from gemmsmith import hw
from gemmsmith.core.grouping import SCATTER, Grouping
from gemmsmith.core.problem import BoundProblem, operand_getter
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import I32, I64, U32, U64
from gemmsmith.lang.values import Value


class RowIndices:
    """The int32 array of indices `name`: entry i is the row of the array `of` for row i of the product.

    Kernel arguments: `of`_`name`, the address of the indices; `of`_rows, the array's rows, which `extent` returns;
    other indices are of no row.
    """

    def __init__(self, name: str, of: str, extent: Callable[[BoundProblem], int]) -> None:
        k, source = current_builder(), operand_getter(name)
        self.name = f"{of}_{name}"
        self._address = k.pointer(self.name, lambda p: source(p)[1])
        self._extent = k.parameter(f"{of}_rows", compute=extent)

    def load(self, row: Value, in_bounds: Value) -> Value:
        """Return the array's row for a row of the product; -1 if it is not `in_bounds`, or has none."""
        address = self._address + (row.to(I64) * 4).to(U64)
        index = hw.load_global_word(address, in_bounds, I32, self.name)
        # One comparison also excludes negative indices, which are large as unsigned numbers.
        is_row = in_bounds & (index.to(U32) < self._extent.to(U32))
        return current_builder().select(is_row, index, -1)


class Scatter:
    """Where the rows of D are stored: row i is row scatter[i] of the results' arrays.

    If the kernel computes D^T, for "rows" read "columns".

    Kernel arguments: those of RowIndices, with the prefix "out".
    """

    def __init__(self, grouping: Grouping) -> None:
        self._role = grouping.role
        self._indices = RowIndices(SCATTER, "out", self._extent)

    def _extent(self, p: BoundProblem) -> int:
        return p.d.rows if self._role == "a" else p.d.cols

    def locate(self, row: Value, column: Value, in_bounds: Value) -> tuple[Value, Value, Value]:
        """Return (row, column, is_stored) of an element of D in the results' arrays."""
        index = self._indices.load(row if self._role == "a" else column, in_bounds)
        is_stored = in_bounds & (index >= 0)
        return (index, column, is_stored) if self._role == "a" else (row, index, is_stored)
