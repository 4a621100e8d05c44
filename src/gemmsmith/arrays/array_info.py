"""What is known of an array: dtype, shape, strides, address, device; and stand-ins for arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gemmsmith.core.dtypes import DType, as_dtype
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.mma import N8_COLUMNS


class ArrayInfo(NamedTuple):
    """Description of an array, with strides in elements; `address` is 0 for a `Spec`.

    `device` is "cpu", "cuda" or "spec" (no data); `device_index` is CUDA's device number, 0 otherwise.
    `interleave_stride`: not 0 for two arrays whose columns alternate: the elements from the first to the second, each
    with these strides and half of the columns. `address` is the lower one. `interleave_columns`: columns of one array
    that are contiguous, 8 as `interleave` copies them; 1 for scales, each of 128 columns.
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
        """Size of an element in bytes."""
        return self.dtype.bytes

    @property
    def alignment(self) -> int:
        """The largest power of two, at most 16, that divides the address."""
        return (self.address | 16) & -(self.address | 16)

    @property
    def parts(self) -> tuple[ArrayInfo, ...]:
        """The two arrays whose columns alternate; the array itself if it is one."""
        if not (stride := self.interleave_stride * self.itemsize):
            return (self,)
        half = self._replace(shape=(*self.shape[:-1], self.shape[-1] // 2), interleave_stride=0)
        first = self.address - min(stride, 0)
        return half._replace(address=first), half._replace(address=first + stride)

    def as_elements(self, dtype: DType, axis: int) -> ArrayInfo:
        """Return the same memory as elements of `dtype`; narrower ones lie side by side along `axis`, of stride 1."""
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
    """Return the first address of a nonempty array and the one past the last."""
    first, last, size = x.address, x.address, x.itemsize
    for n, s in zip(x.shape, x.strides, strict=True):
        if s < 0:
            first += (n - 1) * s * size
        else:
            last += (n - 1) * s * size
    return first, last + size
