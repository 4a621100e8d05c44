"""Arrays in global memory that threads read and write element by element, with any strides, or rows given by indices.

Row indices of a grouped GEMM are those of gathers and scatters: with a scatter, row i of D is row scatter[i] of the
result's array.
"""

from __future__ import annotations

from collections.abc import Callable

from gemmsmith import hw
from gemmsmith.core.arguments import Pointer
from gemmsmith.core.dtypes import BF16, BOOL, FP16, FP32, INT32, INT64, UE8M0, DType
from gemmsmith.core.grouping import SCATTER, Grouping
from gemmsmith.core.problem import BoundProblem, operand_getter
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import F32, I32, I64, U32, U64
from gemmsmith.lang.values import Constant, Value


class GlobalArray:
    """The array `name` of a launch, with any strides (in elements).

    Kernel arguments: `argument`, its address, and the strides that it needs: `argument`_row_stride if it varies along
    M, `argument`_column_stride if it varies along N, and `argument`_batch_stride.
    """

    def __init__(
        self, argument: str, name: str, dtype: DType, address: Pointer | None = None, *,
        varies_along_m: bool = True, varies_along_n: bool = True,
    ) -> None:  # fmt: skip
        """Declare the kernel arguments, whose names begin with `argument`.

        `name`: the array's name in the launch's `arrays`. `address`: where it is; None: at the Pointer `argument`. If
        all rows (columns) are the same, not `varies_along_m` (`varies_along_n`), it has no row (column) stride.
        """

        def stride(along: str, attribute: str) -> Value:
            return k.parameter(f"{argument}_{along}_stride", I64, lambda p: getattr(p.arrays[name], attribute))

        k = current_builder()
        self.name, self.dtype = name, dtype
        self.base_address = k.pointer(argument, lambda p: address or Pointer(argument))
        self.row_stride = stride("row", "row_stride") if varies_along_m else None
        self.column_stride = stride("column", "col_stride") if varies_along_n else None
        self.batch_stride = stride("batch", "batch_stride")

    def element_address(self, batch: Value, row: Value | None = None, column: Value | None = None) -> Value:
        """Return the byte address of element (batch, row, column).

        A row or column of None is number 0.
        """
        offset = batch.to(I64) * self.batch_stride
        if self.row_stride is not None and row is not None:
            offset = offset + row.to(I64) * self.row_stride
        if self.column_stride is not None and column is not None:
            offset = offset + column.to(I64) * self.column_stride
        return self.base_address + (offset * self.dtype.bytes).to(U64)

    def load(self, address: Value, in_bounds: Value) -> Value:
        """Load the element at `address` as fp32, or 0 if not `in_bounds`. A bool is 0 or 1.

        Integers are rounded to fp32, which is exact up to 2^24.
        """
        if self.dtype == BOOL:
            is_nonzero = hw.load_global_u8_or_u16(address, in_bounds, 8).to(U32) != 0
            return current_builder().select(is_nonzero, 1.0, Constant(F32, 0.0))
        if self.dtype == UE8M0:
            return hw.unpack_ue8m0(hw.load_global_u8_or_u16(address, in_bounds, 8).to(U32))
        if self.dtype.bytes == 2:
            bits = hw.load_global_u8_or_u16(address, in_bounds, 16).to(U32)
            return hw.as_float(bits << 16) if self.dtype == BF16 else hw.unpack(bits, 0, FP16)
        words = current_builder().registers(F32 if self.dtype == FP32 else U32, self.dtype.bytes // 4, "element")
        hw.load_global(words, address, in_bounds)
        if self.dtype == INT64:
            return (words[1].to(U64) << 32 | words[0].to(U64)).to(I64).to(F32)
        return words[0].to(I32).to(F32) if self.dtype == INT32 else words[0]


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
