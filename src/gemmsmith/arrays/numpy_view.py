"""Arrays on the CPU as numpy arrays, and whether two arrays share memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmsmith.arrays.access import describe
from gemmsmith.arrays.array_info import ArrayInfo, byte_range
from gemmsmith.core.errors import ArgumentError


def as_numpy(x: Any, argument: str = "array") -> np.ndarray[Any, Any]:
    """Return a numpy view (no copy) of an array on the CPU, which keeps x alive; bf16 becomes ml_dtypes.bfloat16.

    Two arrays whose columns alternate are copied.

    Raises ArgumentError naming `argument` for an array that is not on the CPU.
    """
    info = describe(x, argument)
    if info.device != "cpu":
        raise ArgumentError(f"{argument}: got an array on {info.device_name}; use one on the CPU")
    if isinstance(x, np.ndarray):
        return np.asarray(x)
    if info.interleave_stride:
        first, second = (as_numpy(x).reshape(*x.shape[:-1], -1, info.interleave_columns) for x in info.parts)
        return np.stack([first, second], -2).reshape(info.shape)
    if 0 in info.shape:
        return np.empty(info.shape, info.dtype.numpy)
    return np.asarray(ArrayInterface(info, x)).view(info.dtype.numpy)


MAX_OVERLAP_STEPS = 10_000
"""Steps of numpy's solver after which only address ranges are compared. Chosen; not measured."""


def arrays_overlap(x: ArrayInfo, y: ArrayInfo) -> bool:
    """Return whether some byte belongs to both arrays; if numpy cannot decide, whether their address ranges overlap."""
    if not x.has_data or (x.device, x.device_index) != (y.device, y.device_index) or 0 in x.shape or 0 in y.shape:
        return False
    if y.interleave_stride:
        return any(arrays_overlap(x, part) for part in y.parts)
    (x_first, x_end), (y_first, y_end) = byte_range(x), byte_range(y)
    if x_end <= y_first or y_end <= x_first:
        return False
    effort: Any = MAX_OVERLAP_STEPS  # numpy's stubs have only 0 and -1
    try:  # solved on addresses alone: nothing is read, so device memory is allowed, too
        return bool(np.shares_memory(np.asarray(ArrayInterface(x)), np.asarray(ArrayInterface(y)), max_work=effort))
    except np.exceptions.TooHardError:
        return True


class ArrayInterface:
    """An object with numpy's __array_interface__ on an address, as integers of the element's size."""

    def __init__(self, x: ArrayInfo, owner: Any = None) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (x.address, not x.writable),
            "typestr": f"<u{x.itemsize}",
            "shape": tuple(x.shape),
            "strides": tuple(s * x.itemsize for s in x.strides),
        }
