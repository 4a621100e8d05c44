"""Element types of arrays, and their names in torch, numpy and PTX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from gemmsmith.core.errors import ArgumentError

Count = TypeVar("Count")


@dataclass(frozen=True, eq=False)
class DType:
    """An element type: bits in memory, stored `mantissa` bits (unit roundoff 2^-(mantissa+1)), and PTX's name.

    There is one object of each, so that they are compared by identity, and hashed fast.
    """

    name: str
    bits: int
    mantissa: int
    numpy: np.dtype
    ptx: str

    @property
    def bytes(self) -> int:
        """Bytes of an element in memory. Raises ArgumentError if several elements share a byte."""
        if self.bits < 8:
            raise ArgumentError(f"dtype: got {self}, of which {8 // self.bits} elements share a byte; use a wider one")
        return self.bits // 8

    def bytes_of(self, count: Count) -> Count:
        """Return the bytes of `count` contiguous elements, which fill whole bytes: an int, an array or a Value."""
        x: Any = count
        nbytes: Count = x * self.bytes if self.bits >= 8 else x // (8 // self.bits)
        return nbytes

    def elements_in(self, nbytes: int) -> int:
        """Return the number of elements in so many bytes."""
        return nbytes * 8 // self.bits

    @property
    def is_integer(self) -> bool:
        """True if it is an integer type or bool. Epilogues convert these to fp32."""
        return self.numpy.kind in "iub"

    @property
    def roundoff(self) -> float:
        """Unit roundoff u of round-to-nearest."""
        return 2.0 ** -(self.mantissa + 1)

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:  # a pickle or a deep copy is the same object
        return _dtype_named, (self.name,)


BF16 = DType("bf16", 16, 7, np.dtype(ml_dtypes.bfloat16), "bf16")
"""bf16 in memory."""
FP16 = DType("fp16", 16, 10, np.dtype(np.float16), "f16")
"""fp16 in memory."""
FP32 = DType("fp32", 32, 23, np.dtype(np.float32), "f32")
"""fp32 in memory."""
TF32 = DType("tf32", 32, 10, np.dtype(np.float32), "tf32")
"""fp32 in memory; tensor cores read the upper 19 bits."""
TF32_BITS = np.uint32(0xFFFFE000)
"""Mask of the float32 bits that TF32 keeps."""

E4M3 = DType("fp8_e4m3", 8, 3, np.dtype(ml_dtypes.float8_e4m3fn), "e4m3")
"""fp8 with 4 bits of exponent: up to 448, no infinity."""
E5M2 = DType("fp8_e5m2", 8, 2, np.dtype(ml_dtypes.float8_e5m2), "e5m2")
"""fp8 with 5 bits of exponent: up to 57344, and infinity."""

UE8M0 = DType("ue8m0", 8, 0, np.dtype(ml_dtypes.float8_e8m0fnu), "ue8m0")
"""Byte b encodes 2^(b - 127); 255 is NaN. Used for scales only."""

INT4 = DType("int4", 4, 3, np.dtype(ml_dtypes.int4), "s4")
"""Two's complement; of the two elements in a byte of memory the first is in the lower bits. An operand's dtype only."""
INT8 = DType("int8", 8, 7, np.dtype(np.int8), "s8")
"""int8 in memory."""
INT32 = DType("int32", 32, 31, np.dtype(np.int32), "s32")
"""int32 in memory."""
INT64 = DType("int64", 64, 63, np.dtype(np.int64), "s64")
BOOL = DType("bool", 8, 1, np.dtype(np.bool_), "u8")

MAX_FINITE = {E4M3: 448.0, E5M2: 57344.0, INT8: 127.0}
"""Largest magnitude that is representable with both signs (OCP 8-bit floating point specification)."""

MIN_SCALE = 2.0**-126
"""Smallest scale of 8-bit values: neither it nor its reciprocal is subnormal or infinite in fp32."""

_ALL = (BF16, FP16, FP32, E4M3, E5M2)
_INTEGERS = {d.name: d for d in (INT8, INT32, INT64, BOOL, UE8M0)}
_NAMES = {**{d.name: d for d in _ALL}, **{d.numpy.name: d for d in _ALL}, "half": FP16, "float": FP32}


def _dtype_named(name: str) -> DType:
    return next(x for x in globals().values() if isinstance(x, DType) and x.name == name)


def as_dtype(value: Any, argument: str = "dtype", allow_integers: bool = False, among: Sequence[DType] = ()) -> DType:
    """Return the `DType` for a name ("bf16"), a numpy or ml_dtypes dtype, or a torch dtype.

    `allow_integers`: accept integer types, bool and ue8m0, too. `among`: accept only these, if there are any. Raises
    ArgumentError for other values; its message calls the value `argument`.
    """
    if isinstance(value, DType) and (not among or value in among):
        return value
    names = _NAMES | _INTEGERS if allow_integers or among else _NAMES
    if among:
        names = {name: dtype for name, dtype in names.items() if dtype in among}
    name = value if isinstance(value, str) else str(value).removeprefix("torch.")
    if name not in names and not isinstance(value, str):
        try:
            name = np.dtype(value).name
        except (TypeError, ValueError):
            pass
    if name in names:
        return names[name]
    offered = among or (_NAMES if name == "float64" else names).values()
    raise ArgumentError(f"{argument}: got {value!r}; use one of {', '.join(dict.fromkeys(map(repr, offered)))}")


def validate_fp32_scalar(name: str, x: Any) -> float:
    """Return a real number for an operand that the kernel gets as fp32. Raises ArgumentError if it overflows fp32."""
    if math.isinf(overflow_as_fp32(x)) and abs(x) != math.inf:
        raise ArgumentError(f"{name}: got {x}; use a number that fp32 can hold")
    return float(x)


def overflow_as_fp32(x: Any) -> float:
    """Return x as a float, but inf if it overflows fp32, and 0 if it underflows. It is not rounded to fp32."""
    try:
        number = float(x)
    except OverflowError:  # a Python int beyond float64
        number = math.inf if x > 0 else -math.inf
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(number))
    return rounded if math.isinf(rounded) or rounded == 0 else number
