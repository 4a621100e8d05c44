"""Row indices of a grouped GEMM: which row of an array a row of the product is, for gathers and scatters."""

from __future__ import annotations

from collections.abc import Callable

from gemmsmith import hw
from gemmsmith.core.problem import BoundProblem, operand_getter
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import I32, I64, U32, U64
from gemmsmith.lang.values import Value


class RowIndices:
    """The int32 array `name`, with a row of the array `of`, which has `extent` rows, for each row of the product.

    Kernel arguments: `of`_`name`, its address; `of`_rows, the extent.
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
        # As unsigned numbers, negative ones are large
        is_row = in_bounds & (index.to(U32) < self._extent.to(U32))
        return current_builder().select(is_row, index, -1)
