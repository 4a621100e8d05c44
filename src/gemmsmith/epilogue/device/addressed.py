"""Arrays in global memory that threads read and write element by element, in any layout."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.dtypes import BF16, BOOL, FP16, FP32, INT32, INT64, UE8M0, DType
from gemmsmith.core.pointer import Pointer
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import F32, I32, I64, U32, U64
from gemmsmith.lang.values import Constant, Value


class Addressed:
    """The array `name` of what the kernel is launched for. Kernel arguments: `argument`, its address, and the strides
    that it needs: of rows if it varies along M (`m`), of columns if along N (`n`), of the batch."""

    def __init__(self, argument: str, name: str, dtype: DType, *, m: bool, n: bool) -> None:
        def stride(along: str, attribute: str) -> Value:
            bind = lambda p: getattr(p.arrays[name], attribute)  # noqa: E731
            return k.parameter(f"{along}_stride_{argument}", I64, bind)

        k = current()
        self.name, self.dtype = name, dtype
        self.address = k.pointer(argument, lambda p: Pointer(argument))
        self.row_stride = stride("row", "row_stride") if m else None
        self.column_stride = stride("column", "col_stride") if n else None
        self.batch_stride = stride("batch", "batch_stride")

    def at(self, batch: Value, row: Value | None = None, column: Value | None = None) -> Value:
        """The byte address of an element."""
        offset = batch.to(I64) * self.batch_stride
        if self.row_stride is not None and row is not None:
            offset = offset + row.to(I64) * self.row_stride
        if self.column_stride is not None and column is not None:
            offset = offset + column.to(I64) * self.column_stride
        return self.address + (offset * self.dtype.bytes).to(U64)

    def load(self, where: Value, inside: Value) -> Value:
        """An element as fp32, zero where not `inside`; an integer is rounded, exact up to 2^24."""
        if self.dtype == BOOL:
            return current().select(hw.load_global_narrow(where, inside, 8).to(U32) != 0, 1.0, Constant(F32, 0.0))
        if self.dtype == UE8M0:
            return hw.unpack_ue8m0(hw.load_global_narrow(where, inside, 8).to(U32))
        if self.dtype.bytes == 2:
            return _as_fp32(hw.load_global_narrow(where, inside, 16).to(U32), self.dtype)
        words = current().registers(F32 if self.dtype == FP32 else U32, self.dtype.bytes // 4, "element")
        hw.load_global(words, where, inside)
        if self.dtype == INT64:
            return (words[1].to(U64) << 32 | words[0].to(U64)).to(I64).to(F32)
        return words[0].to(I32).to(F32) if self.dtype == INT32 else words[0]


def _as_fp32(bits: Value, dtype: DType) -> Value:
    """16 bits in a u32, as fp32."""
    if dtype == BF16:
        return hw.as_float(bits << 16)
    assert dtype == FP16, dtype
    return hw.unpack(bits, 0, FP16)
