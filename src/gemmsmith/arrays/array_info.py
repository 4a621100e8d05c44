"""What is known of an array: dtype, shape, strides, address, device; stand-ins for arrays; types for annotations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, SupportsFloat, TypeAlias, TypeVar

import numpy as np

from gemmsmith.core.dtypes import DType, as_dtype
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.mma import N8_COLUMNS


class ArrayInfo(NamedTuple):
    """Description of an array, or of two arrays whose columns alternate in one operand (`gemm` with b=(b0, b1)).

    Attributes:
        shape: Shape. Two arrays have the columns of both.
        strides: Strides in elements; of two arrays, the strides that each of them has.
        address: Address in bytes, the lower one of two arrays; 0 for a `Spec`.
        device: "cpu", "cuda", or "spec" (no data).
        device_index: CUDA's device number; 0 otherwise.
        writable: Whether results may be written to it.
        interleave_stride: Elements from the first to the second of two arrays, which may be negative; 0 for one array.
        interleave_columns: Columns that one of two arrays contributes before it is the other's turn: 8, as
            `interleave` copies them; 1 for scales, each of which is for 128 columns.
    """

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    device: str
    device_index: int
    writable: bool
    interleave_stride: int = 0
    interleave_columns: int = N8_COLUMNS

    @property
    def itemsize(self) -> int:
        return self.dtype.bytes

    @property
    def alignment(self) -> int:
        """The largest power of two, at most 16, that divides the address."""
        return (self.address | 16) & -(self.address | 16)  # x & -x is the lowest bit of x that is set

    @property
    def parts(self) -> tuple[ArrayInfo, ...]:
        """The descriptions of the two arrays whose columns alternate, first and second; or the one of a single array.

        `address` is the lower one, so that the first array is above it if the distance to the second is negative.
        """
        if not (stride := self.interleave_stride * self.itemsize):
            return (self,)
        half = self._replace(shape=(*self.shape[:-1], self.shape[-1] // 2), interleave_stride=0)
        first = self.address - min(stride, 0)
        return half._replace(address=first), half._replace(address=first + stride)

    def as_elements(self, dtype: DType, axis: int) -> ArrayInfo:
        """Return a description of the same memory with elements of `dtype`, as wide as those of the array or narrower.

        Narrower elements, such as 4-bit integers in bytes, are neighbors along `axis`, which must have stride 1.
        """
        count, shape, strides = self.dtype.bits // dtype.bits, list(self.shape), list(self.strides)
        if count == 1:
            return self._replace(dtype=dtype)
        shape[axis], strides = shape[axis] * count, [stride * count for stride in strides]
        strides[axis] = 1
        between = self.interleave_stride * count
        return self._replace(dtype=dtype, shape=tuple(shape), strides=tuple(strides), interleave_stride=between)

    @property
    def has_data(self) -> bool:
        """False for a `Spec`."""
        return self.device != "spec"

    @property
    def device_name(self) -> str:
        """The device as text: "cpu", "cuda:0", "spec"."""
        return f"cuda:{self.device_index}" if self.device == "cuda" else self.device


@dataclass(frozen=True)
class Spec:
    """A stand-in for an array, to plan for arrays that do not exist yet.

    The base address is assumed to be a multiple of 16 bytes.

    Attributes:
        shape: Extents, each >= 0.
        dtype: A name ("bf16"), or a torch, numpy or ml_dtypes dtype, also of integers.
        strides: Strides in elements. Default: row-major.

    Raises:
        ArgumentError: If the shape or strides are invalid for an array.
    """

    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check shape and strides, and store them as tuples of int, and the dtype as a DType."""
        shape = tuple(self.shape) if isinstance(self.shape, Iterable) else (None,)
        if not all(isinstance(n, (int, np.integer)) and n >= 0 for n in shape):
            raise ArgumentError(f"Spec.shape: got {self.shape!r}; use a tuple of integers >= 0")
        strides = row_major(shape) if self.strides is None else self.strides
        strides = tuple(strides) if isinstance(strides, Iterable) else (None,)
        if len(strides) != len(shape) or not all(isinstance(s, (int, np.integer)) for s in strides):
            raise ArgumentError(f"Spec.strides: got {self.strides!r}; use {len(shape)} integers, in elements")
        object.__setattr__(self, "shape", tuple(map(int, shape)))
        object.__setattr__(self, "strides", tuple(map(int, strides)))
        object.__setattr__(self, "dtype", as_dtype(self.dtype, "Spec.dtype", allow_integers=True))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous row-major array, in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def byte_range(x: ArrayInfo) -> tuple[int, int]:
    """Return the address of the first byte of a nonempty array, and the one past its last byte; strides may be < 0."""
    first, last, size = x.address, x.address, x.itemsize
    for n, s in zip(x.shape, x.strides, strict=True):
        if s < 0:
            first += (n - 1) * s * size
        else:
            last += (n - 1) * s * size
    return first, last + size


class SupportsDLPack(Protocol):
    """An array that can be exchanged by DLPack: of numpy, torch, CuPy, JAX."""

    def __dlpack_device__(self) -> Any: ...  # not __dlpack__, which numpy declares for its own dtypes only


class SupportsCudaArrayInterface(Protocol):
    """An array on a GPU that describes itself: of CuPy, Numba, torch."""

    @property
    def __cuda_array_interface__(self) -> Any: ...


ArrayLike: TypeAlias = SupportsDLPack | SupportsCudaArrayInterface | Spec
"""An array of any library, or a `Spec`, a stand-in for one."""
Operand: TypeAlias = ArrayLike | SupportsFloat
"""An operand of an epilogue: an array or a number."""
Pair: TypeAlias = tuple[ArrayLike, ArrayLike]
"""Two arrays b that are multiplied as one, or their scales."""
ArrayT = TypeVar("ArrayT", bound=ArrayLike)
"""The type of a, which a result without an epilogue has, too."""
