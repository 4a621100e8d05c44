"""Arithmetic without a C operator: fused multiply-add, dp4a, the special-function unit, CUDA's math library.

PTX ISA, "Floating Point Instructions", which states the maximum errors of the approximations: ex2 and lg2 2 ulp and
2^-22.6, rcp and rsqrt 1 ulp and 2^-22.4, tanh 2^-11 relative. CUDA C++ Programming Guide, "Mathematical Functions".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from gemmsmith.core.errors import KernelError
from gemmsmith.lang.instruction import Instruction, f32, i32, pred, u32
from gemmsmith.lang.types import F32, I32
from gemmsmith.machine import Machine

Array = np.ndarray[Any, Any]


class Elementwise(Instruction):
    """An instruction whose result is a pure function of its operands in the same thread.

    `compute` evaluates it. Its arguments are arrays with one element per thread: int64, float32 or bool. The result is
    fp32, unless a class has another `result`.
    """

    result = F32
    pure = True
    compute: ClassVar[Callable[..., Array]]

    def simulate(self, m: Machine) -> Array:
        return self.compute(*(m.per_thread(getattr(self, name)) for name in self.operand_types))


def _round_once_to_fp32(reference_fn: Callable[..., Array], *operands: Array) -> Array:
    """Return `reference_fn` of the operands, evaluated in float64 and rounded to fp32."""
    with np.errstate(all="ignore"):
        return np.asarray(reference_fn(*(x.astype(np.float64) for x in operands))).astype(np.float32)


class FusedMultiplyAdd(Elementwise):
    """fma.rn.f32: a * b + c, rounded once.

    The simulator rounds the float64 sum, in which the product is exact, to odd (Boldo and Melquiond, "Emulation of FMA
    and correctly rounded sums", 2008).
    """

    a: f32
    b: f32
    c: f32
    macs_per_thread = 1
    ptx = "fma.rn.f32 {result}, {a}, {b}, {c};"

    def compute(self, a: Array, b: Array, c: Array) -> Array:
        """Return a * b + c, rounded to odd in float64 and then to nearest in fp32, which is one correct rounding."""
        a, b, c = (x.astype(np.float64) for x in (a, b, c))
        with np.errstate(all="ignore"):
            product = a * b
            total = product + c
            c_in_total = total - product  # Knuth's two-sum: `error` is exactly what `total` lacks
            error = (product - (total - c_in_total)) + (c - c_in_total)
            if not np.count_nonzero(error):
                return total.astype(np.float32)
            inexact = np.isfinite(total) & (error != 0)
            # To odd: one step back if the sum was rounded away from zero; then set the last bit.
            away = inexact & (np.signbit(error) != np.signbit(total))
            odd: Array = ((total.view(np.int64) - away) | inexact).view(np.float64)
            return odd.astype(np.float32)


class Dp4a(Elementwise):
    """dp4a: c plus the dot product of four signed bytes of a and b, modulo 2^32."""

    a: u32
    b: u32
    c: i32
    result = I32
    macs_per_thread = 4
    ptx = "dp4a.s32.s32 {result}, {a}, {b}, {c};"

    def compute(self, a: Array, b: Array, c: Array) -> Array:
        """Return c plus the dot product of the bytes, of each thread, as int64."""
        bytes_a, bytes_b = (np.ascontiguousarray(x.astype(np.uint32)).view(np.int8).reshape(-1, 4) for x in (a, b))
        total: Array = (c + (bytes_a.astype(np.int64) * bytes_b).sum(1)).astype(np.int32).astype(np.int64)
        return total


class MaximumNan(Elementwise):
    """IEEE 754-2019 maximum: propagates NaN; max(-0, +0) = +0."""

    a: f32
    b: f32
    ptx = "max.NaN.f32 {result}, {a}, {b};"

    def compute(self, a: Array, b: Array) -> Array:
        with np.errstate(all="ignore"):
            # Of two zeros the sum has the sign of the maximum.
            return np.asarray(np.where((a == 0) & (b == 0), a + b, np.maximum(a, b)))


class MinimumNan(Elementwise):
    """IEEE 754-2019 minimum: propagates NaN; min(-0, +0) = -0."""

    a: f32
    b: f32
    ptx = "min.NaN.f32 {result}, {a}, {b};"

    def compute(self, a: Array, b: Array) -> Array:
        with np.errstate(all="ignore"):
            # Of two zeros this has the sign of the minimum.
            return np.asarray(np.where((a == 0) & (b == 0), -(-a - b), np.minimum(a, b)))


class Select(Elementwise):
    """condition ? x : y, by selp.

    The compiler may make a branch of a C++ expression, but not of selp.
    """

    condition: pred
    x: f32
    y: f32
    ptx = """{
    .reg .pred p;
    setp.ne.b32 p, {condition}, 0;
    selp.f32 {result}, {x}, {y}, p;
    }"""

    def compute(self, condition: Array, x: Array, y: Array) -> Array:
        return np.where(condition != 0, x, y)


class SelectLess(Elementwise):
    """a < b ? x : y, by setp and selp, of which the compiler makes no branch (as `Select`)."""

    a: f32
    b: f32
    x: f32
    y: f32
    ptx = """{
    .reg .pred less;
    setp.lt.f32 less, {a}, {b};
    selp.f32 {result}, {x}, {y}, less;
    }"""

    def compute(self, a: Array, b: Array, x: Array, y: Array) -> Array:
        return np.where(a < b, x, y)


class DivideFull(Elementwise):
    """div.full: a / b with a maximum error of 2 ulp over the full range."""

    a: f32
    b: f32
    ptx = "div.full.f32 {result}, {a}, {b};"

    def compute(self, a: Array, b: Array) -> Array:
        return _round_once_to_fp32(np.divide, a, b)


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


class SfuApproximation(Elementwise):
    """An operation of the special-function unit. `function`: its PTX name, such as "ex2.approx.ftz".

    With .ftz subnormal operands and results are flushed to zero.
    """

    function: str
    x: f32
    ptx = "{function}.f32 {result}, {x};"
    wrapper = "{function}"

    def check(self) -> None:
        if self.function not in _APPROXIMATIONS:
            raise KernelError(f"{self.function!r}: use one of {', '.join(_APPROXIMATIONS)}")

    def compute(self, x: Array) -> Array:
        """Return the exact result rounded to fp32; the hardware's may differ by its maximum error."""
        reference_fn = _APPROXIMATIONS[self.function]
        if not self.function.endswith(".ftz"):
            return _round_once_to_fp32(reference_fn, x)
        return _flush_subnormals(_round_once_to_fp32(reference_fn, _flush_subnormals(x)))


def _flush_subnormals(x: Array) -> Array:
    """Replace subnormal fp32 numbers by zeros of the same sign."""
    return np.where(np.abs(x) < np.finfo(np.float32).smallest_normal, np.copysign(0, x), x).astype(np.float32)


_MATH_FUNCTIONS: dict[str, Callable[..., Array]] = {
    "expf": np.exp, "exp2f": np.exp2, "expm1f": np.expm1, "logf": np.log, "log2f": np.log2, "log1pf": np.log1p,
    "sinf": np.sin, "cosf": np.cos, "tanhf": np.tanh, "erff": np.vectorize(math.erf, otypes=[np.float64]),
    "fabsf": np.abs, "floorf": np.floor, "rintf": np.rint, "sqrtf": np.sqrt,
}  # fmt: skip


class MathLibraryCall(Elementwise):
    """A one-argument function of CUDA's math library, with a maximum error of 2 ulp."""

    function: str
    x: f32
    cuda = "{function}({x})"

    def check(self) -> None:
        if self.function not in _MATH_FUNCTIONS:
            raise KernelError(f"{self.function!r}: use one of {', '.join(_MATH_FUNCTIONS)}")

    def compute(self, x: Array) -> Array:
        return _round_once_to_fp32(_MATH_FUNCTIONS[self.function], x)


class Power(Elementwise):
    """powf: x to the power y, with a maximum error of 4 ulp."""

    x: f32
    y: f32
    cuda = "powf({x}, {y})"

    def compute(self, x: Array, y: Array) -> Array:
        return _round_once_to_fp32(np.power, x, y)
