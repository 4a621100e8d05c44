"""Arrays of any library, each by the adapter of its type; those on the CPU as numpy arrays; which ones overlap."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from functools import partial
from typing import Any

import numpy as np

from gemmsmith.arrays.adapter import (
    Adapter,
    UnsupportedArrayError,
    make_adapter,
)
from gemmsmith.arrays.array_info import ArrayInfo, Spec, byte_range, row_major
from gemmsmith.arrays.cuda_arrays import interface_stream, make_cupy_adapter, read_interface
from gemmsmith.arrays.dlpack import read_dlpack
from gemmsmith.arrays.interleaved_pair import INTERLEAVE_COLUMNS, make_pair_adapter
from gemmsmith.arrays.numpy_arrays import read_numpy
from gemmsmith.arrays.torch_tensors import make_torch_adapter
from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import ArgumentError, did_you_mean


def describe(x: Any, argument: str = "array") -> ArrayInfo:
    """Return the description of an array of any library; an ArrayInfo is returned as it is.

    Raises ArgumentError naming `argument` for other objects, dtypes that are not in core/dtypes.py, sparse or masked
    arrays, and arrays on a device that is neither a CPU nor CUDA.
    """
    adapter = _ADAPTERS.get(type(x)) or _adapter_for(x, argument)
    try:
        return adapter.array_info(x)
    except UnsupportedArrayError as error:
        raise ArgumentError(f"{argument}: {error}") from None


def cache_key_and_address(x: Any, argument: str = "array") -> tuple[Hashable, int]:
    """Return a hashable key (dtype, shape, strides, device) and the address.

    Faster than `describe`. Raises ArgumentError naming `argument`, also for a torch tensor that requires grad, whose
    gradient would be lost.
    """
    adapter = _ADAPTERS.get(type(x)) or _adapter_for(x, argument)
    try:
        if adapter.cache_key_and_address:
            return adapter.cache_key_and_address(x)
        info = adapter.array_info(x)
        return info._replace(shape=tuple(info.shape), strides=tuple(info.strides), address=0), info.address
    except UnsupportedArrayError as error:
        raise ArgumentError(f"{argument}: {error}") from None


def is_array(x: Any) -> bool:
    """Return whether an array of x's type has been described before. Fast; False does not mean that x is no array."""
    return type(x) in _ADAPTERS


def adapter_of(x: Any) -> Adapter:
    """Return the functions for arrays of x's type."""
    return _ADAPTERS.get(type(x)) or _adapter_for(x, "array")


def current_stream(x: Any) -> int:
    """Return the current CUDA stream (a handle) of x's library on x's device, or 0, the default stream."""
    return adapter_of(x).stream(x)


def address_of(x: Any) -> int:
    """Return the address of an array that `empty_like_kind` allocated, without checks."""
    return adapter_of(x).address(x)


def empty_like_kind(x: Any, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...] | None = None) -> Any:
    """Allocate an uninitialized array in x's library on x's device; `strides` in elements, by default row-major.

    Supports torch, CuPy and anything on the CPU. Raises ArgumentError for libraries that cannot allocate a writable
    array: `out` must then be passed.
    """
    adapter = _ADAPTERS.get(type(x)) or _adapter_for(x, "array")
    return adapter.empty(x, shape, dtype, strides or row_major(shape))


_ADAPTERS: dict[type, Adapter] = {}
"""Adapters by type, so that a type that was seen before costs one look-up. `_adapter_for` fills it; if two threads do
so concurrently, both write equal adapters."""


def _adapter_for(x: Any, argument: str) -> Adapter:
    """Choose the adapter of x's type, store it in `_ADAPTERS`, and return it.

    A tuple of two arrays has an adapter by `argument`'s name instead, which is not stored. Raises ArgumentError, naming
    `argument`, for an object that is not an array.
    """
    if type(x) is tuple and argument in _PAIRS:
        return _PAIRS[argument]
    torch = sys.modules.get("torch")
    if isinstance(x, ArrayInfo):
        adapter = make_adapter(lambda info: info)
    elif isinstance(x, Spec):
        adapter = make_adapter(lambda s: ArrayInfo(s.dtype, s.shape, s.strides, 0, "spec", 0, True))
    elif torch is not None and isinstance(x, torch.Tensor):
        adapter = make_torch_adapter(torch)
    elif isinstance(x, np.ma.MaskedArray):
        raise ArgumentError(f"{argument}: got a masked array; use x.filled(...)")
    elif isinstance(x, np.ndarray):
        adapter = make_adapter(read_numpy)
    elif type(x).__module__.partition(".")[0] == "cupy":
        adapter = make_cupy_adapter(sys.modules["cupy"])
    elif hasattr(x, "__cuda_array_interface__"):
        adapter = make_adapter(read_interface, stream=interface_stream)
    elif hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        adapter = make_adapter(read_dlpack)
    else:
        raise ArgumentError(
            f"{argument}: got {type(x).__module__}.{type(x).__qualname__}; use a torch tensor, a numpy or CuPy array, "
            f"or an object with __cuda_array_interface__ or __dlpack__{did_you_mean(argument)}"
        )
    return _ADAPTERS.setdefault(type(x), adapter)


_PAIRS = {
    name: make_pair_adapter(partial(describe, argument=name), partial(cache_key_and_address, argument=name), columns)
    for name, columns in (("b", INTERLEAVE_COLUMNS), ("scale_b", 1))
}
"""Adapters of the arguments that may be a tuple of two arrays, whose columns alternate as if they were one array."""


def as_numpy(x: Any, argument: str = "array") -> np.ndarray[Any, Any]:
    """Return a numpy view (no copy) of an array on the CPU, which keeps x alive; bf16 becomes ml_dtypes.bfloat16.

    A tuple of two arrays, whose columns alternate, is copied into one array.

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
    """Return whether some byte belongs to both arrays.

    If numpy needs more than MAX_OVERLAP_STEPS steps, return True, since their address ranges overlap. `y` may be two
    arrays whose columns alternate, and x may not.
    """
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
    """An object from which numpy makes an array at x's address without a copy, by __array_interface__.

    Elements are unsigned integers of the same size, since numpy knows no bf16 or fp8. `owner`: the array that must stay
    alive as long as numpy's.
    """

    def __init__(self, x: ArrayInfo, owner: Any = None) -> None:
        """Describe x by the fields of numpy's array interface, version 3."""
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (x.address, not x.writable),
            "typestr": f"<u{x.itemsize}",
            "shape": tuple(x.shape),
            "strides": tuple(s * x.itemsize for s in x.strides),
        }
