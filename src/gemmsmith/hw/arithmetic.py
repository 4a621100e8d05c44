"""fp32 arithmetic beyond C's operators: fused multiply-add, the special-function unit, CUDA's math library.

PTX ISA, "Floating Point Instructions"; errors of the approximations are stated there: ex2 and lg2 2 ulp and
2^-22.6, rcp and rsqrt 1 ulp and 2^-22.4, tanh 2^-11 relative. CUDA C++ Programming Guide, "Mathematical Functions".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmsmith.core.errors import KernelError
from gemmsmith.lang.instruction import Instruction, f32, i32, u32
from gemmsmith.lang.machine import Machine
from gemmsmith.lang.types import F32, I32, U32

Array = np.ndarray[Any, Any]


def _single(meaning: Callable[..., Array], *operands: Array) -> Array:
    """Computed in float64 and rounded once."""
    with np.errstate(all="ignore"):
        return np.asarray(meaning(*(x.astype(np.float64) for x in operands))).astype(np.float32)


class FusedMultiplyAdd(Instruction):
    """a * b + c, rounded once."""

    a: f32
    b: f32
    c: f32
    result = F32
    pure = True
    products = 1
    ptx = "fma.rn.f32 {result}, {a}, {b}, {c};"

    def simulate(self, m: Machine) -> Array:
        a, b, c = (np.asarray(m.column(x)) for x in (self.a, self.b, self.c))
        return _fused(a, b, c, np.float32)


def _fused(a: Array, b: Array, c: Array, dtype: Any) -> Array:
    """a * b + c of fp32 or fp16, rounded once: the sum in float64, where the product is exact, is rounded to odd. Boldo
    and Melquiond, "Emulation of FMA and correctly rounded sums", 2008."""
    a, b, c = (x.astype(np.float64) for x in (a, b, c))
    with np.errstate(all="ignore"):
        product = a * b
        total = product + c
        back = total - product
        error = (product - (total - back)) + (c - back)
        inexact = np.isfinite(total) & (error != 0)
        away = inexact & (np.signbit(error) != np.signbit(total))
        odd: Array = ((np.atleast_1d(total).view(np.int64) - away) | inexact).view(np.float64).reshape(total.shape)
        rounded: Array = odd.astype(dtype)
        return rounded


class FusedMultiplyAddFp16(Instruction):
    """The same of two pairs of fp16."""

    a: u32
    b: u32
    c: u32
    result = U32
    pure = True
    products = 2
    ptx = "fma.rn.f16x2 {result}, {a}, {b}, {c};"

    def simulate(self, m: Machine) -> Array:
        a, b, c = (
            np.ascontiguousarray(m.column(x).astype(np.uint32)).view(np.float16) for x in (self.a, self.b, self.c)
        )
        found = _fused(a, b, c, np.float16)
        bits = np.where(np.isnan(found), np.uint16(0x7FFF), found.view(np.uint16))  # the canonical NaN
        return np.ascontiguousarray(bits).view(np.uint32).astype(np.int64)


class DotProduct4(Instruction):
    """c + the sum of the products of four signed bytes of a with those of b, modulo 2^32."""

    a: u32
    b: u32
    c: i32
    result = I32
    pure = True
    products = 4
    ptx = "dp4a.s32.s32 {result}, {a}, {b}, {c};"

    def simulate(self, m: Machine) -> Array:
        a, b = (
            np.ascontiguousarray(m.column(x).astype(np.uint32)).view(np.int8).reshape(-1, 4) for x in (self.a, self.b)
        )
        products = (a.astype(np.int64) * b).sum(1)
        total: Array = (m.column(self.c) + products).astype(np.int32).astype(np.int64)
        return total


class MaximumNan(Instruction):
    """The larger, of zeros +0; NaN where either is, as IEEE 754-2019's maximum."""

    a: f32
    b: f32
    result = F32
    pure = True
    ptx = "max.NaN.f32 {result}, {a}, {b};"

    def simulate(self, m: Machine) -> Array:
        a, b = m.column(self.a), m.column(self.b)
        with np.errstate(all="ignore"):
            return np.asarray(np.where((a == 0) & (b == 0), a + b, np.maximum(a, b)))


class MinimumNan(Instruction):
    """The smaller, likewise."""

    a: f32
    b: f32
    result = F32
    pure = True
    ptx = "min.NaN.f32 {result}, {a}, {b};"

    def simulate(self, m: Machine) -> Array:
        a, b = m.column(self.a), m.column(self.b)
        with np.errstate(all="ignore"):
            return np.asarray(np.where((a == 0) & (b == 0), -(-a - b), np.minimum(a, b)))


class DivideFull(Instruction):
    """a / b to 2 ulp over the whole range."""

    a: f32
    b: f32
    result = F32
    pure = True
    ptx = "div.full.f32 {result}, {a}, {b};"

    def simulate(self, m: Machine) -> Array:
        return _single(np.divide, m.column(self.a), m.column(self.b))


_APPROXIMATIONS: dict[str, Callable[..., Any]] = {
    "ex2.approx.ftz": np.exp2,
    "lg2.approx.ftz": np.log2,
    "tanh.approx": np.tanh,
    "rcp.approx.ftz": lambda x: 1 / x,
    "rsqrt.approx.ftz": lambda x: 1 / np.sqrt(x),
    "sqrt.approx.ftz": np.sqrt,
    "sin.approx.ftz": np.sin,
    "cos.approx.ftz": np.cos,
}


class Approximate(Instruction):
    """One operation of the special-function unit, named as in PTX: `ex2.approx.ftz` and so on. With .ftz subnormal
    numbers are zeros."""

    function: str
    x: f32
    result = F32
    pure = True
    ptx = "{function}.f32 {result}, {x};"

    def check(self) -> None:
        if self.function not in _APPROXIMATIONS:
            raise KernelError(f"{self.function!r}: use one of {', '.join(_APPROXIMATIONS)}")

    def simulate(self, m: Machine) -> Array:
        meaning, x = _APPROXIMATIONS[self.function], m.column(self.x)
        if not self.function.endswith(".ftz"):
            return _single(meaning, x)
        return _flushed(_single(meaning, _flushed(x)))


def _flushed(x: Array) -> Array:
    """fp32 with zeros, of the same sign, for subnormal numbers."""
    return np.where(np.abs(x) < np.finfo(np.float32).smallest_normal, np.copysign(0, x), x).astype(np.float32)


_LIBRARY: dict[str, Callable[..., Array]] = {
    "expf": np.exp, "exp2f": np.exp2, "expm1f": np.expm1, "logf": np.log, "log2f": np.log2, "log1pf": np.log1p,
    "sinf": np.sin, "cosf": np.cos, "tanhf": np.tanh, "erff": np.vectorize(math.erf, otypes=[np.float64]),
    "fabsf": np.abs, "floorf": np.floor, "rintf": np.rint, "sqrtf": np.sqrt,
}  # fmt: skip


class Library(Instruction):
    """A function of CUDA's math library of one argument, correct to 2 ulp or better."""

    function: str
    x: f32
    result = F32
    pure = True
    cuda = "{function}({x})"

    def check(self) -> None:
        if self.function not in _LIBRARY:
            raise KernelError(f"{self.function!r}: use one of {', '.join(_LIBRARY)}")

    def simulate(self, m: Machine) -> Array:
        return _single(_LIBRARY[self.function], m.column(self.x))


class Power(Instruction):
    """powf: x to the y, to 4 ulp."""

    x: f32
    y: f32
    result = F32
    pure = True
    cuda = "powf({x}, {y})"

    def simulate(self, m: Machine) -> Array:
        return _single(np.power, m.column(self.x), m.column(self.y))
