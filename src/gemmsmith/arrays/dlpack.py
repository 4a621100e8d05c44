"""DLPack: reads an array of any library from its capsule. Source: dlpack.h."""

from __future__ import annotations

import ctypes
from typing import Any

from gemmsmith.arrays.adapter import UnsupportedArrayError
from gemmsmith.arrays.array_info import ArrayInfo, row_major
from gemmsmith.core.dtypes import BF16, BOOL, E4M3, E5M2, FP16, FP32, INT8, INT32, INT64, UE8M0


class _Tensor(ctypes.Structure):
    """The C struct DLTensor: data, device, ndim, dtype, shape, strides (elements), byte_offset."""

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
    """The C struct DLManagedTensorVersioned: version, manager_ctx, deleter, flags, dl_tensor."""

    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_READ_ONLY = 1
"""Flag of a read-only tensor. Source: dlpack.h, DLPACK_FLAG_BITMASK_READ_ONLY."""
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


DLPACK_DTYPES = {
    (2, 16, 1): FP16, (2, 32, 1): FP32, (4, 16, 1): BF16, (10, 8, 1): E4M3, (12, 8, 1): E5M2,
    (0, 8, 1): INT8, (0, 32, 1): INT32, (0, 64, 1): INT64, (6, 8, 1): BOOL,
    (1, 8, 1): UE8M0, (14, 8, 1): UE8M0,
}  # fmt: skip
"""Dtypes by their code, bits and lanes."""
_DLPACK_DEVICES = {1: "cpu", 3: "cpu", 2: "cuda", 13: "cuda"}  # 3: pinned, 13: managed


def read_dlpack(x: Any) -> ArrayInfo:
    """Return the description of an array with `__dlpack__`, as the C struct in its capsule gives it.

    The capsule is released at the end, and the address stays valid as long as x lives. Before DLPack 1.0 a capsule has
    no flags; the array then counts as read-only. Raises UnsupportedArrayError for an unsupported dtype or device.
    """
    try:
        capsule = x.__dlpack__(max_version=(1, 0))
    except TypeError:  # libraries before DLPack 1.0
        capsule = x.__dlpack__()
    if '"dltensor_versioned"' in repr(capsule):
        managed = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned") or 0)
        tensor, writable = managed.tensor, not managed.flags & _READ_ONLY
    else:
        tensor, writable = _Tensor.from_address(_get_pointer(capsule, b"dltensor") or 0), False
    dtype = DLPACK_DTYPES.get((tensor.code, tensor.bits, tensor.lanes))
    device = _DLPACK_DEVICES.get(tensor.device_type)
    if dtype is None or device is None:
        raise UnsupportedArrayError(
            f"got DLPack dtype (code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes) on device type "
            f"{tensor.device_type}; use bf16, fp16 or fp32 on the CPU or a CUDA device"
        )
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else row_major(shape)
    index = tensor.device_id if device == "cuda" else 0
    return ArrayInfo(dtype, shape, strides, (tensor.data or 0) + tensor.byte_offset, device, index, writable)
