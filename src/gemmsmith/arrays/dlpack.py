"""DLPack: reads an array of any library from its capsule. Source: dlpack.h."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from gemmsmith.arrays.adapter import UnsupportedArrayError
from gemmsmith.arrays.array_info import ArrayInfo, row_major
from gemmsmith.core.dtypes import BF16, BOOL, E4M3, E5M2, FP16, FP32, INT8, INT32, INT64, UE8M0


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
"""Flag of a read-only tensor. Source: dlpack.h, DLPACK_FLAG_BITMASK_READ_ONLY."""
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class DLPackInfo(NamedTuple):
    """Description of an array, read from its DLPack capsule.

    `dtype`: (code, bits, lanes); `device`: (type, index); `strides`: in elements, None if contiguous. A capsule without
    flags counts as read-only.
    """

    dtype: tuple[int, int, int]
    device: tuple[int, int]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    address: int
    writable: bool


def read_capsule(x: Any) -> DLPackInfo:
    """Read the array's DLPack capsule and release it; x keeps the memory."""
    try:
        capsule = x.__dlpack__(max_version=(1, 0))
    except TypeError:  # libraries before DLPack 1.0
        capsule = x.__dlpack__()
    if '"dltensor_versioned"' in repr(capsule):
        managed = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned") or 0)
        tensor, writable = managed.tensor, not managed.flags & _READ_ONLY
    else:
        tensor, writable = _Tensor.from_address(_get_pointer(capsule, b"dltensor") or 0), False
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
    return DLPackInfo(
        (tensor.code, tensor.bits, tensor.lanes), (tensor.device_type, tensor.device_id),
        tuple(tensor.shape[: tensor.ndim]), strides, (tensor.data or 0) + tensor.byte_offset, writable,
    )  # fmt: skip


_DLPACK_DTYPES = {
    (2, 16, 1): FP16, (2, 32, 1): FP32, (4, 16, 1): BF16, (10, 8, 1): E4M3, (12, 8, 1): E5M2,
    (0, 8, 1): INT8, (0, 32, 1): INT32, (0, 64, 1): INT64, (6, 8, 1): BOOL,
    (1, 8, 1): UE8M0, (14, 8, 1): UE8M0,
}  # fmt: skip
_DLPACK_DEVICES = {1: "cpu", 3: "cpu", 2: "cuda", 13: "cuda"}  # 3: pinned, 13: managed


def read_dlpack(x: Any) -> ArrayInfo:
    """Return the description of an array with `__dlpack__`."""
    info = read_capsule(x)
    dtype, device = _DLPACK_DTYPES.get(info.dtype), _DLPACK_DEVICES.get(info.device[0])
    if dtype is None or device is None:
        code, bits, lanes = info.dtype
        raise UnsupportedArrayError(
            f"got DLPack dtype (code {code}, {bits} bits, {lanes} lanes) on device type {info.device[0]}; "
            "use bf16, fp16 or fp32 on the CPU or a CUDA device"
        )
    index = info.device[1] if device == "cuda" else 0
    return ArrayInfo(
        dtype, info.shape, info.strides or row_major(info.shape), info.address, device, index, info.writable
    )
