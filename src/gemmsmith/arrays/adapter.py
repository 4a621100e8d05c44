"""The functions that read and allocate arrays of one type, and what several types share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

from gemmsmith.arrays.array_info import ArrayInfo
from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import ArgumentError


class UnsupportedArrayError(Exception):
    """Raised for an array that cannot be used; `describe` adds the argument's name to the message."""


class Adapter(NamedTuple):
    """Functions for one type of array. Those that get an array raise UnsupportedArrayError if it cannot be used.

    Attributes:
        cache_key_and_address: Returns a hashable key of everything but the address, and the address, faster than
            `array_info`; None if there is no faster way.
        stream: Returns the handle of the current CUDA stream of the array's library and device.
        empty: Allocates an array like the first argument, given the shape, dtype and strides in elements.
    """

    array_info: Callable[[Any], ArrayInfo]
    cache_key_and_address: Callable[[Any], tuple[Hashable, int]] | None
    address: Callable[[Any], int]
    stream: Callable[[Any], int]
    empty: Callable[[Any, tuple[int, ...], DType, tuple[int, ...]], Any]


def make_adapter(
    array_info: Callable[[Any], ArrayInfo],
    cache_key_and_address: Callable[[Any], tuple[Hashable, int]] | None = None,
    stream: Callable[[Any], int] = lambda x: 0,
    empty: Callable[[Any, tuple[int, ...], DType, tuple[int, ...]], Any] | None = None,
) -> Adapter:
    """Return an adapter of these functions (`Adapter` explains them), with defaults for the missing ones.

    Without `stream` it returns the default stream, 0. Without `empty` it allocates numpy arrays, on the CPU only.
    """

    def empty_on_cpu(x: Any, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...]) -> Any:
        """Allocate a numpy array, if x is on the CPU. Raises ArgumentError if it is not."""
        if array_info(x).device == "cpu":
            memory = np.empty(storage_elements(shape, strides), dtype.numpy)
            return np.ndarray(shape, dtype.numpy, memory, 0, byte_strides(strides, dtype))
        raise ArgumentError(
            f"out: cannot allocate an array of type {type(x).__module__}.{type(x).__qualname__}; pass `out`"
        )

    return Adapter(array_info, cache_key_and_address, lambda x: array_info(x).address, stream, empty or empty_on_cpu)


def storage_elements(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return how many elements the memory of an array has, from its first to its last one; `strides` in elements."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def byte_strides(strides: tuple[int, ...], dtype: DType) -> tuple[int, ...]:
    """Convert strides from elements to bytes."""
    return tuple(s * dtype.bytes for s in strides)


def element_strides(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Convert strides from bytes to elements of `itemsize` bytes.

    Raises UnsupportedArrayError if a stride is not a multiple of it.
    """
    if any(s % itemsize for s in strides):
        raise UnsupportedArrayError(f"got strides of {strides} bytes; use multiples of the element's {itemsize}")
    return tuple(s // itemsize for s in strides)
