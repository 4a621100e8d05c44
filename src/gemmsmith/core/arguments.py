"""Kernel arguments as data: addresses known only at launch, and TMA tensor maps, which backends encode or decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemmsmith.core.dtypes import DType

INTERLEAVED_ROWS = 16
"""Rows of which the first half are one tensor's and the others another's."""


@dataclass(frozen=True)
class Pointer:
    """The address `offset` bytes into the array `name`; the value itself if the operand `name` is a scalar.

    `reaches_other`: the address is that of the second of two arrays whose columns alternate. `offset` is then their
    distance, which a launch with other arrays replaces by the distance of those.
    """

    name: str
    offset: int = 0
    reaches_other: bool = False

    def __add__(self, nbytes: int) -> Pointer:
        return Pointer(self.name, self.offset + nbytes, self.reaches_other)


@dataclass(frozen=True)
class TensorMap:
    """A tensor map of rank 3: (inner, outer, batch), in elements; strides of outer and batch in bytes.

    `address`: the tensor's base address, or a Pointer until that is known. `interleave_stride`: if the rows alternate
    between two tensors in groups of 8, the bytes from one tensor to the other, else 0. The driver then gets a map of
    rank 5: (inner, 8 rows, 2 tensors, groups of 8 rows, batch). Source: CUDA driver API, cuTensorMapEncodeTiled.
    """

    address: int | Pointer
    dtype: DType
    extents: tuple[int, int, int]
    strides: tuple[int, int]  # bytes; of outer, of batch
    box: tuple[int, int, int]
    swizzle: int  # bytes: 128, 64, 32 or 0
    interleave_stride: int = 0

    @property
    def box_bytes(self) -> int:
        """Bytes that a load of a box writes to shared memory, including zeros for elements outside of the tensor."""
        return self.box[0] * self.box[1] * self.box[2] * self.dtype.bytes

    def row_offset(self, row: Any) -> Any:
        """Return the byte offset of `row`, an int or an array of ints, from the start of its matrix of the batch.

        Of every 16 interleaved rows, the first 8 are in the one tensor, the last 8 in the other.
        """
        if not self.interleave_stride:
            return row * self.strides[0]
        group, row_of_pair = row // INTERLEAVED_ROWS, row % INTERLEAVED_ROWS
        first = (group * (INTERLEAVED_ROWS // 2) + row_of_pair % (INTERLEAVED_ROWS // 2)) * self.strides[0]
        return first + row_of_pair // (INTERLEAVED_ROWS // 2) * self.interleave_stride

    def encoded(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return (extents, strides, box) as the driver encodes them, innermost dimension first.

        The strides are in bytes and leave out the innermost one. Interleaved rows have rank 5, see the class.
        """
        if not self.interleave_stride:
            return self.extents, self.strides, self.box
        (columns, rows, batch), (row_stride, batch_stride), half = self.extents, self.strides, INTERLEAVED_ROWS // 2
        return (
            (columns, half, 2, rows // INTERLEAVED_ROWS, batch),
            (row_stride, self.interleave_stride, half * row_stride, batch_stride),
            (self.box[0], half, 2, self.box[1] // INTERLEAVED_ROWS, self.box[2]),
        )
