"""Calls a function of TVM-FFI with arrays that exist only as DLPack's structs; a program of test_tvm_ffi.py.

It reads JSON of the library, the name, and the calls; of each it prints what the stand-in launches, " # ", and "ok" or
the error. The first line is the address of the scratch memory, which is the environment's only allocation.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from typing import Any

import tvm_ffi

libc = ctypes.CDLL(None)
NO_RESERVE = 0x4000  # only pages that are written take memory
SCRATCH = mmap.mmap(-1, 1 << 36, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
START = ctypes.addressof(ctypes.c_char.from_buffer(SCRATCH)) + 1


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = [
        ("version", ctypes.c_uint32 * 2), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64), ("tensor", Tensor),
    ]  # fmt: skip


class Array:
    """An array of any address, half of which is in byte_offset."""

    def __init__(self, address: int, shape: list[int], strides: list[int], dtype: list[int], device: list[int]) -> None:
        sizes = ctypes.c_int64 * len(shape)
        self.device, self.kept = device, (sizes(*shape), sizes(*strides))
        half = address // 2
        tensor = Tensor(address - half, *device, len(shape), *dtype, self.kept[0], self.kept[1], half)
        self.managed = Managed(tensor, None, None)

    def __dlpack_device__(self) -> tuple[int, ...]:
        return tuple(self.device)

    def __dlpack__(self, **_: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.managed), b"dltensor", None)


@ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Tensor), ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_void_p
)
def allocate(prototype: Any, out: Any, *_: Any) -> int:
    """The environment's allocator: always the same memory."""
    given = prototype.contents
    assert given.shape[0] < len(SCRATCH)
    tensor = Tensor(START, given.device_type, given.device_id, 1, given.code, given.bits,
                    given.lanes, KEPT[0], KEPT[1], 0)  # fmt: skip
    KEPT[0][0] = given.shape[0]
    result = Versioned((ctypes.c_uint32 * 2)(1, 1), None, None, 0, tensor)
    KEPT.append(result)
    out[0] = ctypes.addressof(result)
    return 0


KEPT: list[Any] = [(ctypes.c_int64 * 1)(), (ctypes.c_int64 * 1)(1)]


def main() -> None:
    """Call all."""
    given = json.load(sys.stdin)
    function = getattr(tvm_ffi.load_module(given["library"]), given["name"])
    if given["allocates"]:
        tvm_ffi.LIB.TVMFFIEnvSetDLPackManagedTensorAllocator(allocate, 1, None)
    libc.printf(b"%lld\n", ctypes.c_longlong(START))
    for call in given["calls"]:
        arrays = [Array(*x) for x in call["arrays"]]
        KEPT.extend(arrays)
        try:
            with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 3), 77):
                function(*map(tvm_ffi.from_dlpack, arrays), *call["numbers"])
            text = "ok"
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
        libc.printf(b" # %s\n", text.encode())
    libc.fflush(None)


if __name__ == "__main__":
    main()
