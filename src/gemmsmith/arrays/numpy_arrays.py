"""numpy's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmsmith.arrays.adapter import UnsupportedArrayError, element_strides
from gemmsmith.arrays.array_info import ArrayInfo
from gemmsmith.core.dtypes import BF16, BOOL, E4M3, E5M2, FP16, FP32, INT8, INT32, INT64, UE8M0, DType

_NUMPY = {dtype.numpy: dtype for dtype in (BF16, FP16, FP32, E4M3, E5M2, INT8, INT32, INT64, BOOL, UE8M0)}
_NUMPY[np.dtype(np.uint8)] = UE8M0


def supported_dtype(dtype: np.dtype[Any]) -> DType:
    """Return the DType of a numpy dtype. Raises UnsupportedArrayError if there is none."""
    if dtype not in _NUMPY:
        if dtype == np.float64:
            raise UnsupportedArrayError("got dtype float64; use fp32, bf16 or fp16, such as x.astype(numpy.float32)")
        raise UnsupportedArrayError(
            f"got dtype {dtype}; use one of bf16, fp16, fp32, fp8_e4m3, fp8_e5m2, int8 (bf16 and fp8: ml_dtypes), in "
            "native byte order; an epilogue's operand may also be int32, int64 or bool"
        )
    return _NUMPY[dtype]


def read_numpy(x: np.ndarray[Any, Any]) -> ArrayInfo:
    """Return the description of an array."""
    address, read_only = x.__array_interface__["data"]
    return ArrayInfo(
        supported_dtype(x.dtype), x.shape, element_strides(x.strides, x.itemsize), address, "cpu", 0, not read_only
    )
