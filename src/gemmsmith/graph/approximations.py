"""Elementwise functions by the special-function unit and polynomials, without branches.

The polynomials are minimax, fitted by `benchmarks/fit/polynomials.py`, which prints them; `POLYNOMIALS` states the
maximum error of each, in exact arithmetic. Where a formula loses digits near a zero of the function, a polynomial is
selected there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from gemmsmith import hw
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import F32
from gemmsmith.lang.values import Constant, Value

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
GELU_A = math.sqrt(2 / math.pi)
"""Factor of GELU's tanh approximation. Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016."""
GELU_B = 0.044715
"""Cubic coefficient of GELU's tanh approximation (same source)."""

POLYNOMIALS: dict[str, tuple[float, ...]] = {
    # (log1p(x) - x) / x^2, |x| <= 1/8; relative to log1p: 2^-21.5
    "log1p_small": (-0.499987259, 0.333317329, -0.253281748, 0.203198018),
    # (expm1(x) - x) / x^2, |x| <= 1/8; relative to expm1: 2^-21.4
    "expm1_small": (0.50000028, 0.166774551, 0.041659396),
    # (tanh(x) - x) / x^3 in x^2, |x| <= 1/4; relative to tanh: 2^-20.9
    "tanh_small": (-0.333245714, 0.128764212),
    # erf(x) / x in x^2, |x| <= 0.35; relative: 2^-19.5
    "erf_small": (1.12837766, -0.375906303, 0.108023487),
    # log2(erfc(x)) / x, x >= 0.35; relative to erf: 2^-20.7
    "erfc": (-1.62784442, -0.918699421, -0.148391642, 0.0294290103, -0.00291118838),
    # log1p(e) / e, 0 <= e <= 1; relative: 2^-19.5, and 2^-11.3
    "log1p_unit": (0.999998731, -0.499869653, 0.331094464, -0.235038518, 0.149223733, -0.0664016868, 0.0141409891),
    "log1p_unit_approx": (0.999607011, -0.486414047, 0.25402483, -0.0743430032),
    # -log1p(-p) / p, 0 <= p <= 1/2; relative: 2^-19.9, and 2^-11.6
    "log1p_half": (1.00000097, 0.499816735, 0.338911183, 0.187531207, 0.522749211, -0.637928071, 0.990586062),
    "log1p_half_approx": (0.999687534, 0.518808938, 0.164334144, 0.685485432),
    # log2(ndtr(-x)), x >= 0; absolute error of ndtr(x) max(x, 1): 2^-20.5, and 2^-13.0. Decreasing, also beyond 5.5.
    "ndtr": (-1.00000186, -1.15105205, -0.459414077, -0.0523432401, 0.007282378, -0.000500259519),
    "ndtr_approx": (-1.00033507, -1.14339375, -0.483818348, -0.029183766),
}
"""Coefficients from the constant on."""


def polynomial(x: Value, coefficients: Sequence[float]) -> Value:
    """Evaluate a polynomial by Horner's scheme; coefficients from the constant on."""
    *rest, last = coefficients
    value: Value = Constant(F32, last)
    for coefficient in reversed(rest):
        value = hw.fma(value, x, coefficient)
    return value


def select(condition: Value, a: Value | float, b: Value | float) -> Value:
    """Return condition ? a : b."""
    return current_builder().select(condition, *(x if isinstance(x, Value) else Constant(F32, x) for x in (a, b)))


absolute = partial(hw.math_library_call, "fabsf")
"""|x|."""
exp2 = partial(hw.sfu_approximation, "ex2.approx.ftz")
"""2^x."""
log2 = partial(hw.sfu_approximation, "lg2.approx.ftz")
"""The logarithm to base 2."""
sqrt = partial(hw.sfu_approximation, "sqrt.approx.ftz")
"""The square root."""
rsqrt = partial(hw.sfu_approximation, "rsqrt.approx.ftz")
"""1 / sqrt(x)."""
reciprocal = partial(hw.sfu_approximation, "rcp.approx.ftz")
"""1 / x."""
tanh_approx = partial(hw.sfu_approximation, "tanh.approx")
"""tanh(x), to 2^-11."""


def fast_exp(x: Value) -> Value:
    """Return e^x (fp32) by the special-function unit."""
    return exp2(x * LOG2_E)


def log(x: Value) -> Value:
    """Compute the natural logarithm."""
    return log2(x) * LN_2


def expm1(x: Value) -> Value:
    """Compute e^x - 1, near 0 by a polynomial."""
    small = hw.fma(x * x, polynomial(x, POLYNOMIALS["expm1_small"]), x)
    return hw.select_less(absolute(x), 0.125, small, fast_exp(x) - 1)


def log1p(x: Value) -> Value:
    """Compute log(1 + x), near 0 by a polynomial."""
    small = hw.fma(x * x, polynomial(x, POLYNOMIALS["log1p_small"]), x)
    return hw.select_less(absolute(x), 0.125, small, log(x + 1))


def tanh(x: Value) -> Value:
    """Compute 1 - 2 / (1 + e^2x), near 0 by a polynomial."""
    square = x * x
    small = hw.fma(x * square, polynomial(square, POLYNOMIALS["tanh_small"]), x)
    return hw.select_less(absolute(x), 0.25, small, hw.fma(reciprocal(exp2(x * (2 * LOG2_E)) + 1), -2.0, 1.0))


def sigmoid(x: Value) -> Value:
    """Compute 1 / (1 + e^-x)."""
    return reciprocal(fast_exp(-x) + 1)


def erf(x: Value) -> Value:
    """Compute 1 - erfc(|x|) with the sign of x, near 0 by an odd polynomial."""
    magnitude = absolute(x)
    erfc = exp2(magnitude * polynomial(magnitude, POLYNOMIALS["erfc"]))
    sign = hw.as_unsigned(x) & 0x80000000
    large = hw.as_float(hw.as_unsigned(1 - erfc) | sign)
    return hw.select_less(magnitude, 0.35, x * polynomial(x * x, POLYNOMIALS["erf_small"]), large)


def ndtr(x: Value, coefficients: str = "ndtr") -> Value:
    """Compute the normal distribution function from that of -|x|, the tail, or as 1 minus it.

    `coefficients`: the name of a polynomial of POLYNOMIALS, as in the functions below.
    """
    tail = exp2(polynomial(absolute(x), POLYNOMIALS[coefficients]))
    return select(x > 0.0, 1 - tail, tail)


def gelu_tanh(x: Value) -> Value:
    """Compute x (1 + tanh(u)) / 2 = x sigmoid(2u), u = GELU_A (x + GELU_B x^3)."""
    scale = -2 * LOG2_E * GELU_A
    return x * reciprocal(exp2(x * hw.fma(x * x, scale * GELU_B, scale)) + 1)


def softplus(x: Value, coefficients: str = "log1p_unit") -> Value:
    """Compute max(x, 0) + log1p(e), e = exp(-|x|), which does not overflow."""
    e = fast_exp(-absolute(x))
    return hw.fma(e, polynomial(e, POLYNOMIALS[coefficients]), hw.maximum_nan(x, 0.0))


def softplus_of_sigmoid(x: Value, s: Value, coefficients: str = "log1p_half") -> Value:
    """Compute max(x, 0) - log1p(-p), p = min(s, 1 - s) = sigmoid(-|x|), from s = sigmoid(x) or sigmoid(-x)."""
    p = hw.minimum_nan(s, 1 - s)
    return hw.fma(p, polynomial(p, POLYNOMIALS[coefficients]), hw.maximum_nan(x, 0.0))


def logaddexp(x: Value, y: Value, coefficients: str = "log1p_unit") -> Value:
    """Compute max(x, y) + log1p(exp(-|x - y|)). The difference of equal infinities, which is NaN, is taken as 0."""
    e = fast_exp(-absolute(select(x == y, 0.0, x - y)))
    return hw.fma(e, polynomial(e, POLYNOMIALS[coefficients]), hw.maximum_nan(x, y))


def mish(x: Value) -> Value:
    """Compute x tanh(log(1 + e^x)) = x n / (n + 2), n = e^x (e^x + 2); above 20 it is x."""
    e = fast_exp(hw.minimum_nan(x, 20.0))
    n = e * (e + 2)
    return x * (n * reciprocal(n + 2))
