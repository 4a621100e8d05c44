"""The elementwise functions of epilogues: each one's meaning in float64 and its instructions, side by side.

Three precisions. `lower` is the default: within 2^-18 of the exact value, relative, or of 1 where the function
crosses zero. `coarse`, where there is one, uses tanh.approx: within 2^-11 |x|; taken when every result that depends
on it is stored in bf16 or fp8. `exact`, on request, is CUDA's math library and IEEE division.

`gradient`, of (g, y, *inputs), y being the function's value and g what multiplies its derivative, gives one for each
input; None where the derivative is 0 wherever there is one. It calls operators and methods that traced values and
tensors of torch have.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemmsmith import hw
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import F32
from gemmsmith.lang.values import Constant, Value

Array = np.ndarray[Any, Any]
Lowering = Callable[..., Value]

LOG2_E, LN_2 = math.log2(math.e), math.log(2)
GELU_A, GELU_B = math.sqrt(2 / math.pi), 0.044715
"""Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016."""


@dataclass(frozen=True)
class Function:
    """An elementwise function: its float64 meaning on arrays, and how it is computed on kernel values."""

    name: str
    arity: int
    meaning: Callable[..., Array]
    lower: Lowering
    coarse: Lowering | None = None
    exact: Lowering | None = None
    gradient: Callable[..., Any] | None = None


def _library(name: str) -> Lowering:
    return lambda x: hw.library(name, x)


def _select(condition: Value, a: Value | float, b: Value | float) -> Value:
    return current().select(condition, *(x if isinstance(x, Value) else Constant(F32, x) for x in (a, b)))


def fast_exp(x: Value) -> Value:
    """e^x by the special-function unit."""
    return hw.approximate("ex2.approx.ftz", x * LOG2_E)


def _log(x: Value) -> Value:
    return hw.approximate("lg2.approx.ftz", x) * LN_2


def _sqrt(x: Value) -> Value:
    return hw.approximate("sqrt.approx.ftz", x)


def _reciprocal(x: Value) -> Value:
    return hw.approximate("rcp.approx.ftz", x)


def _tanh(x: Value) -> Value:
    return hw.approximate("tanh.approx", x)


def _sigmoid(x: Value) -> Value:
    return _reciprocal(fast_exp(-x) + 1)


def _sigmoid_exact(x: Value) -> Value:
    return 1 / (hw.library("expf", -x) + 1)


def _relu(x: Value) -> Value:
    return hw.maximum_nan(x, 0.0)


def _softplus(x: Value, log1p: Lowering, exp: Lowering) -> Value:
    """max(x, 0) + log(1 + exp(-|x|)), which does not overflow."""
    return _relu(x) + log1p(exp(-hw.library("fabsf", x)))


def _mish(x: Value, exp: Lowering, divide: Lowering) -> Value:
    """x tanh(log(1 + e)) = x n / (n + 2), n = e (e + 2); beyond 20 it is x."""
    e = exp(hw.minimum_nan(x, 20.0))
    n = e * (e + 2)
    return x * divide(n, n + 2)


def _gelu(x: Value) -> Value:
    half = x * 0.5
    return hw.fma(half, hw.library("erff", x * math.sqrt(0.5)), half)


def _gelu_tanh(x: Value, tanh: Lowering) -> Value:
    half = x * 0.5
    return hw.fma(half, tanh(x * hw.fma(x * x, GELU_A * GELU_B, GELU_A)), half)


def _silu_coarse(x: Value) -> Value:
    half = x * 0.5
    return hw.fma(half, _tanh(half), half)


def _sign(x: Value) -> Value:
    return _select(x > 0.0, 1.0, _select(x < 0.0, -1.0, 0.0))


def _hypot(x: Value, y: Value, sqrt: Lowering) -> Value:
    """Of both scaled by a power of two where a square would be beyond fp32."""
    x, y = (hw.library("fabsf", z).named("magnitude") for z in (x, y))
    largest = hw.maximum_nan(x, y).named("largest")
    large, small = largest > 2.0**60, largest < 2.0**-60
    scale = _select(large, 2.0**-68, _select(small, 2.0**100, 1.0)).named("scale")
    back = _select(large, 2.0**68, _select(small, 2.0**-100, 1.0))
    a, b = (x * scale).named("scaled"), (y * scale).named("scaled")
    return _select((x == math.inf) | (y == math.inf), math.inf, sqrt(hw.fma(a, a, b * b)) * back)


def _logaddexp(x: Value, y: Value, log1p: Lowering, exp: Lowering) -> Value:
    """If both are equal, which they may be as infinities, their difference is not used."""
    apart = hw.maximum_nan(x, y) + log1p(exp(-hw.library("fabsf", x - y)))
    return _select(x == y, x + LN_2, apart)


def _d_gelu(g: Any, y: Any, x: Any) -> Any:
    """Phi(x) + x phi(x), of the normal distribution and its density."""
    density = (x * x * -0.5).exp() * (1 / math.sqrt(2 * math.pi))
    return g * (0.5 + 0.5 * (x * math.sqrt(0.5)).erf() + x * density)


def _d_gelu_tanh(g: Any, y: Any, x: Any) -> Any:
    """The derivative of x (1 + t) / 2, t = tanh(a (x + b x^3)), by the product and chain rules."""
    t = (x * (GELU_A + GELU_A * GELU_B * x * x)).tanh()
    inner = GELU_A + 3 * GELU_A * GELU_B * x * x
    return g * (0.5 + 0.5 * t + 0.5 * x * (1 - t * t) * inner)


def _d_silu(g: Any, y: Any, x: Any) -> Any:
    s = x.sigmoid()
    return g * (s * (1 + x * (1 - s)))


def _d_mish(g: Any, y: Any, x: Any) -> Any:
    """The derivative of x * t, t = tanh(softplus(x)): softplus' = sigmoid."""
    t = x.exp().log1p().tanh()
    return g * (t + x * x.sigmoid() * (1 - t * t))


def _d_hardswish(g: Any, y: Any, x: Any) -> Any:
    """0 below -3, 1 above 3, x / 3 + 1 / 2 between."""
    return g.where(x >= 3, (g * (x / 3 + 0.5)).where(~(x <= -3), 0.0))


def _d_pow(g: Any, y: Any, x: Any, p: Any) -> Any:
    """For x = 0 the limits, as in torch: 0 for p = 0, and of p's for p >= 0."""
    return (g * p * x ** (p - 1)).where(p != 0, 0.0), (g * y * x.log()).where(~((x == 0) & (p >= 0)), 0.0)


def _d_extremum(g: Any, a: Any, b: Any, above: Any, below: Any) -> Any:
    """Of two equal values each gets a half, and all of it if one is NaN; what is bounded by a constant gets all where
    they are equal, and nothing if it is NaN: as in torch.maximum and torch.clamp."""
    if "constant" in (getattr(a, "op", ""), getattr(b, "op", "")):
        return tuple(g.where((a == b) | chosen, 0.0) for chosen in (above, below))
    return tuple((g * 0.5).where(a == b, g.where(~other, 0.0)) for other in (below, above))


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid_64(x: Array) -> Array:
    return np.exp(-np.logaddexp(0, -x))


_TABLE = [
    # name, arity, meaning, lower, coarse, exact, gradient
    Function("detach", 1, lambda x: x, lambda x: x),  # until the passes
    Function("neg", 1, np.negative, lambda x: -x, gradient=lambda g, y, x: -g),
    Function("abs", 1, np.abs, _library("fabsf"), gradient=lambda g, y, x: g * x.sign()),
    Function("sign", 1, lambda x: np.where(np.isnan(x), 0, np.sign(x)), _sign),
    Function("floor", 1, np.floor, _library("floorf")),
    Function("round", 1, np.rint, _library("rintf")),
    Function("exp", 1, np.exp, fast_exp, exact=_library("expf"), gradient=lambda g, y, x: g * y),
    Function("exp2", 1, np.exp2, lambda x: hw.approximate("ex2.approx.ftz", x), exact=_library("exp2f"),
             gradient=lambda g, y, x: g * (y * LN_2)),
    Function("expm1", 1, np.expm1, _library("expm1f"), gradient=lambda g, y, x: g * (y + 1)),
    Function("log", 1, np.log, _log, exact=_library("logf"), gradient=lambda g, y, x: g / x),
    Function("log2", 1, np.log2, lambda x: hw.approximate("lg2.approx.ftz", x), exact=_library("log2f"),
             gradient=lambda g, y, x: g / (x * LN_2)),
    Function("log1p", 1, np.log1p, _library("log1pf"), gradient=lambda g, y, x: g / (x + 1)),
    Function("sqrt", 1, np.sqrt, _sqrt, exact=_library("sqrtf"),
             gradient=lambda g, y, x: g / (y * 2)),
    Function("rsqrt", 1, lambda x: 1 / np.sqrt(x), lambda x: hw.approximate("rsqrt.approx.ftz", x),
             exact=lambda x: 1 / hw.library("sqrtf", x), gradient=lambda g, y, x: g * (y * y * y * -0.5)),
    Function("reciprocal", 1, lambda x: 1 / x, _reciprocal, exact=lambda x: 1 / x,
             gradient=lambda g, y, x: g * (y * y * -1)),
    Function("sin", 1, np.sin, _library("sinf"), gradient=lambda g, y, x: g * x.cos()),
    Function("cos", 1, np.cos, _library("cosf"), gradient=lambda g, y, x: g * -x.sin()),
    Function("tanh", 1, np.tanh, _library("tanhf"), coarse=_tanh, gradient=lambda g, y, x: g * (1 - y * y)),
    Function("sigmoid", 1, _sigmoid_64, _sigmoid, exact=_sigmoid_exact, gradient=lambda g, y, x: g * (y * (1 - y))),
    Function("softplus", 1, lambda x: np.logaddexp(0, x), lambda x: _softplus(x, _library("log1pf"), fast_exp),
             coarse=lambda x: _softplus(x, lambda e: _log(e + 1), fast_exp),
             exact=lambda x: _softplus(x, _library("log1pf"), _library("expf")),
             gradient=lambda g, y, x: g * x.sigmoid()),
    Function("erf", 1, _erf, _library("erff"),
             gradient=lambda g, y, x: g * ((x * x * -1).exp() * (2 / math.sqrt(math.pi)))),
    Function("relu", 1, lambda x: np.maximum(x, 0), _relu, gradient=lambda g, y, x: g.where(~(y <= 0), 0.0)),
    Function("gelu", 1, lambda x: 0.5 * x * (1 + _erf(x * math.sqrt(0.5))), _gelu, gradient=_d_gelu),
    Function("gelu_tanh", 1, lambda x: 0.5 * x * (1 + np.tanh(GELU_A * (x + GELU_B * x * x * x))),
             lambda x: _gelu_tanh(x, _library("tanhf")), coarse=lambda x: _gelu_tanh(x, _tanh), gradient=_d_gelu_tanh),
    Function("silu", 1, lambda x: x * _sigmoid_64(x), lambda x: x * _sigmoid(x), coarse=_silu_coarse,
             exact=lambda x: x * _sigmoid_exact(x), gradient=_d_silu),
    Function("mish", 1, lambda x: x * np.tanh(np.logaddexp(0, x)), lambda x: _mish(x, fast_exp, hw.divide_full),
             exact=lambda x: _mish(x, _library("expf"), lambda a, b: a / b), gradient=_d_mish),
    Function("hardswish", 1, lambda x: x * np.clip(x + 3, 0, 6) / 6,
             lambda x: x * (hw.minimum_nan(hw.maximum_nan(x + 3, 0.0), 6.0) * (1 / 6)), gradient=_d_hardswish),
    Function("not", 1, np.logical_not, operator.invert),
    Function("add", 2, np.add, lambda a, b: a + b, gradient=lambda g, y, a, b: (g, g)),
    Function("sub", 2, np.subtract, lambda a, b: a - b, gradient=lambda g, y, a, b: (g, -g)),
    Function("mul", 2, np.multiply, lambda a, b: a * b, gradient=lambda g, y, a, b: (g * b, g * a)),
    Function("div", 2, np.divide, hw.divide_full, exact=lambda a, b: a / b,
             gradient=lambda g, y, a, b: (g / b, -g * y / b)),
    Function("maximum", 2, np.maximum, hw.maximum_nan,
             gradient=lambda g, y, a, b: _d_extremum(g, a, b, a > b, b > a)),
    Function("minimum", 2, np.minimum, hw.minimum_nan,
             gradient=lambda g, y, a, b: _d_extremum(g, a, b, a < b, b < a)),
    Function("hypot", 2, np.hypot, lambda x, y: _hypot(x, y, _sqrt),
             exact=lambda x, y: _hypot(x, y, _library("sqrtf")),
             gradient=lambda g, y, a, b: (g * (a / y), g * (b / y))),
    Function("logaddexp", 2, np.logaddexp, lambda x, y: _logaddexp(x, y, _library("log1pf"), fast_exp),
             coarse=lambda x, y: _logaddexp(x, y, lambda e: _log(e + 1), fast_exp),
             exact=lambda x, y: _logaddexp(x, y, _library("log1pf"), _library("expf")),
             gradient=lambda g, y, a, b: (g / ((b - a).exp() + 1), g / ((a - b).exp() + 1))),
    Function("pow", 2, np.float_power, hw.power, gradient=_d_pow),
    Function("leaky_relu", 2, lambda x, slope: np.where(x > 0, x, x * slope), lambda x, s: _select(x > 0.0, x, x * s),
             gradient=lambda g, y, x, slope: (g.where(x > 0, g * slope), (g * x).where(x <= 0, 0.0))),
    Function("elu", 2, lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
             lambda x, a: _select(x > 0.0, x, a * hw.library("expm1f", x)),
             coarse=lambda x, a: _select(x > 0.0, x, a * (fast_exp(x) - 1)),
             gradient=lambda g, y, x, a: (g.where(x > 0, g * (a * x.exp())), (g * x.expm1()).where(x <= 0, 0.0))),
    Function("lt", 2, np.less, lambda a, b: a < b),
    Function("le", 2, np.less_equal, lambda a, b: a <= b),
    Function("gt", 2, np.greater, lambda a, b: a > b),
    Function("ge", 2, np.greater_equal, lambda a, b: a >= b),
    Function("eq", 2, np.equal, lambda a, b: a == b),
    Function("ne", 2, np.not_equal, lambda a, b: a != b),
    Function("and", 2, np.logical_and, operator.and_),
    Function("or", 2, np.logical_or, operator.or_),
    Function("where", 3, np.where, _select,
             gradient=lambda g, y, c, a, b: (None, g.where(c != 0, 0.0), g.where(c == 0, 0.0))),
    Function("hardtanh", 3, lambda x, low, high: np.clip(x, low, high),
             lambda x, low, high: hw.minimum_nan(hw.maximum_nan(x, low), high),
             gradient=lambda g, y, x, low, high: (
                 g.where((x > low) & (x < high), 0.0), g.where((x <= low) & (low < high), 0.0),
                 g.where((x >= high) | (low >= high), 0.0),
             )),
    Function("fma", 3, lambda a, b, c: a * b + c, hw.fma, gradient=lambda g, y, a, b, c: (g * b, g * a, g)),
]  # fmt: skip

FUNCTIONS: dict[str, Function] = {f.name: f for f in _TABLE}
PREDICATES = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "one_hot"})
"""Functions whose result is true or false, as the first input of `where` must be."""
