"""What is asked of an array, as functions for each type of array."""

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
    """Functions for one type of array.

    `cache_key_and_address`: None if the key is what `array_info` returns, without the address.
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
    """Return an adapter; without `empty`, it allocates arrays on the CPU only."""

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
    """Return the number of elements from an array's first to its last in memory."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def byte_strides(strides: tuple[int, ...], dtype: DType) -> tuple[int, ...]:
    """Return strides in bytes of strides in elements."""
    return tuple(s * dtype.bytes for s in strides)


def element_strides(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return strides in elements of strides in bytes. Raises UnsupportedArrayError if they are no multiples."""
    if any(s % itemsize for s in strides):
        raise UnsupportedArrayError(f"got strides of {strides} bytes; use multiples of the element's {itemsize}")
    return tuple(s // itemsize for s in strides)
