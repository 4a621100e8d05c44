"""CuPy's arrays, and anything else with __cuda_array_interface__."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmsmith.arrays.adapter import (
    Adapter,
    UnsupportedArrayError,
    byte_strides,
    element_strides,
    make_adapter,
    storage_elements,
)
from gemmsmith.arrays.array_info import ArrayInfo, row_major
from gemmsmith.arrays.numpy_arrays import supported_dtype
from gemmsmith.core.dtypes import DType


def make_cupy_adapter(cupy: Any) -> Adapter:
    """Return the adapter of CuPy's arrays."""

    def array_info(x: Any) -> ArrayInfo:
        strides = element_strides(x.strides, x.itemsize)
        return ArrayInfo(supported_dtype(x.dtype), x.shape, strides, x.data.ptr, "cuda", x.device.id, True)

    def stream(x: Any) -> int:
        with x.device:
            return int(cupy.cuda.get_current_stream().ptr)

    def empty(x: Any, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...]) -> Any:
        with x.device:
            memory = cupy.empty(storage_elements(shape, strides), dtype.numpy)
            return cupy.ndarray(shape, dtype.numpy, memory.data, byte_strides(strides, dtype))

    return make_adapter(array_info, stream=stream, empty=empty)


def read_interface(x: Any) -> ArrayInfo:
    """Describe an array by its `__cuda_array_interface__`. Raises UnsupportedArrayError for a masked array.

    The interface names neither the device nor bf16: these come from DLPack or the driver, and from x.dtype.

    Source: Numba, "CUDA Array Interface (Version 3)".
    """
    interface = x.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise UnsupportedArrayError("got a masked array; use one without a mask")
    dtype = supported_dtype(np.dtype(getattr(x, "dtype", None) or interface["typestr"]))
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    elements = row_major(shape) if strides is None else element_strides(tuple(strides), dtype.bytes)
    address, read_only = interface["data"]
    return ArrayInfo(dtype, shape, elements, address or 0, "cuda", _device_of(x, address), not read_only)


def interface_stream(x: Any) -> int:
    """Return the stream that `__cuda_array_interface__` names, or 0."""
    return int(x.__cuda_array_interface__.get("stream") or 0)


def _device_of(x: Any, address: int) -> int:
    """Return the index of the CUDA device that has an array, from DLPack or, without that, from the driver.

    An empty array without an address is on device 0. Raises UnsupportedArrayError if the driver does not know the
    address.
    """
    if hasattr(x, "__dlpack_device__"):
        return int(x.__dlpack_device__()[1])
    if not address:
        return 0
    from cuda.bindings import driver  # only for arrays of libraries without DLPack

    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    error, index = driver.cuPointerGetAttribute(attribute, address)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise UnsupportedArrayError(
            f"address {address:#x} is not known to the driver ({error.name}); use device memory"
        )
    return int(index)
