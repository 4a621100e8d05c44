"""A TMA tensor map as data: backends encode it (CUDA) or decode it (simulator)."""

from __future__ import annotations

from dataclasses import dataclass

from gemmsmith.core.dtypes import DType
from gemmsmith.core.pointer import Pointer


@dataclass(frozen=True)
class TensorMap:
    """A tensor map of rank 3: (inner, outer, batch), in elements; strides of outer and batch in bytes.

    `address`: the tensor's base address, or a Pointer until that is known. Source: CUDA driver API,
    cuTensorMapEncodeTiled.
    """

    address: int | Pointer
    dtype: DType
    extents: tuple[int, int, int]
    strides: tuple[int, int]  # bytes; of outer, of batch
    box: tuple[int, int, int]
    swizzle: int  # bytes: 128, 64, 32 or 0

    @property
    def box_bytes(self) -> int:
        """Bytes that a load of a box writes to shared memory, including zeros for elements outside of the tensor."""
        return self.box[0] * self.box[1] * self.box[2] * self.dtype.bytes
