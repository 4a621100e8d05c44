"""Results of a grouped GEMM whose rows are scattered: row i of D is row scatter[i] of the result's array."""

from __future__ import annotations

from gemmsmith.collective.row_indices import RowIndices
from gemmsmith.core.grouping import SCATTER, Grouping
from gemmsmith.core.problem import BoundProblem
from gemmsmith.lang.values import Value


class Scatter:
    """The rows of the results' arrays. With the groups along the columns of a transposed product, the columns.

    Kernel arguments: those of RowIndices, with the prefix "out".
    """

    def __init__(self, grouping: Grouping) -> None:
        self._role = grouping.role
        self._indices = RowIndices(SCATTER, "out", self._extent)

    def _extent(self, p: BoundProblem) -> int:
        return p.d.rows if self._role == "a" else p.d.cols

    def locate(self, row: Value, column: Value, in_bounds: Value) -> tuple[Value, Value, Value]:
        """Return where an element of D is in its array, and whether it is in bounds and anywhere."""
        index = self._indices.load(row if self._role == "a" else column, in_bounds)
        is_stored = in_bounds & (index >= 0)
        return (index, column, is_stored) if self._role == "a" else (row, index, is_stored)
