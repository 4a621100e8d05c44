"""A tuple of two arrays that a GEMM reads as one operand, whose columns are theirs in turns: two weights at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from gemmsmith.arrays.adapter import (
    Adapter,
    UnsupportedArrayError,
    make_adapter,
)
from gemmsmith.arrays.array_info import ArrayInfo
from gemmsmith.core.mma import N8_COLUMNS

INTERLEAVE_COLUMNS = N8_COLUMNS
"""Columns of one array before the other's turn. With 8, a thread's accumulator has both arrays' results of a column."""


def _describe_pair(describe: Callable[[Any], ArrayInfo], group: int, arrays: Any) -> ArrayInfo:
    """Describe two arrays of equal layouts as one array, whose columns are theirs in turns, `group` at a time.

    Raises UnsupportedArrayError if they are not two, or differ in more than their addresses.
    """
    if len(arrays) != 2:
        raise UnsupportedArrayError(f"got a tuple of {len(arrays)} arrays; use one array, or a tuple of two")
    first, second = map(describe, arrays)
    for name in ("dtype", "shape", "strides", "device", "device_index"):
        if (x := getattr(first, name)) != (y := getattr(second, name)):
            raise UnsupportedArrayError(f"got two arrays of {name} {x} and {y}; use the same")
    *leading, columns = first.shape or (0,)
    if columns % group:
        raise UnsupportedArrayError(
            f"got two arrays of {columns} columns, which alternate in groups of {group}; use a multiple"
        )
    distance = second.address - first.address
    stride = distance // first.itemsize
    if distance % first.itemsize:
        raise UnsupportedArrayError(f"got an address that is not a multiple of the element's {first.itemsize} bytes")
    if not stride and first.has_data and 0 not in first.shape:
        raise UnsupportedArrayError("got the same array twice; use two arrays")
    if not stride:  # Specs, which have no address: as if they followed one another
        stride = max([n * s for n, s in zip(first.shape, first.strides, strict=True)])
    return first._replace(
        shape=(*leading, 2 * columns), address=min(first.address, second.address), interleave_stride=stride,
        interleave_columns=group,
    )  # fmt: skip


def make_pair_adapter(
    describe: Callable[[Any], ArrayInfo], cache_key_and_address: Callable[[Any], tuple[Hashable, int]], group: int
) -> Adapter:
    """Return the adapter of tuples of two arrays that are read as one array, whose columns are theirs in turns.

    `group`: consecutive columns of one array before the other's turn.
    """
    describe_pair = partial(_describe_pair, describe, group)

    def cache_key_and_address_of_both(arrays: Any) -> tuple[Hashable, int]:
        # One address (the lower) is passed to a launch, so that the distance of the arrays is part of the key
        info, keys = describe_pair(arrays), [cache_key_and_address(x)[0] for x in arrays]
        return (*keys, info.interleave_stride), info.address

    return make_adapter(describe_pair, cache_key_and_address_of_both)
