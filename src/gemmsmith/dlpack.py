"""DLPack: an array of any library, read from the capsule that it gives. Source: dlpack.h."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple


class _Tensor(ctypes.Structure):
    """DLTensor: data, device, ndim, dtype, shape, strides (elements), byte_offset."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned: version, manager_ctx, deleter, flags, dl_tensor."""

    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_READ_ONLY = 1
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class Contents(NamedTuple):
    """What an array says of itself: its dtype as code, bits and lanes; its device as type and number; strides in
    elements, None where it is contiguous. A capsule without flags counts as read-only."""

    dtype: tuple[int, int, int]
    device: tuple[int, int]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    address: int
    writable: bool


def contents(x: Any) -> Contents:
    """Reads the capsule and releases it; x keeps the memory."""
    try:
        held = x.__dlpack__(max_version=(1, 0))
    except TypeError:  # before version 1
        held = x.__dlpack__()
    if '"dltensor_versioned"' in repr(held):
        managed = _Versioned.from_address(_pointer(held, b"dltensor_versioned") or 0)
        t, writable = managed.tensor, not managed.flags & _READ_ONLY
    else:
        t, writable = _Tensor.from_address(_pointer(held, b"dltensor") or 0), False
    strides = tuple(t.strides[: t.ndim]) if t.strides else None
    return Contents(
        (t.code, t.bits, t.lanes), (t.device_type, t.device_id), tuple(t.shape[: t.ndim]), strides,
        (t.data or 0) + t.byte_offset, writable,
    )  # fmt: skip
