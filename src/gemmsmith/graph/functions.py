"""The elementwise functions of epilogues: float64 reference, torch's function, instructions and gradient, side by side.

There are three precisions. `lower` is the default: its error is at most 2^-18 (2^-17.9 in exp and expm1 beyond 2^64),
relative, or relative to 1 near the function's zeros. `approx`, if there is one, uses tanh.approx or shorter
polynomials, with an error of at most 2^-11, relative to the larger of 1 and |x|; it is used if every result that
depends on it is stored in bf16 or fp8. Both have no branches, except in sin, cos and pow (graph/approximations.py).
`exact`, used with fast_math=False, is CUDA's math library and IEEE division.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from gemmsmith import hw
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.frozen import cached_property
from gemmsmith.core.graph import EpilogueGraph, Linearity, Node, Operation, register_operation
from gemmsmith.graph import approximations
from gemmsmith.graph.approximations import GELU_A, GELU_B, LN_2, LOG2_E, absolute, select, tanh_approx
from gemmsmith.graph.function_costs import COSTS, Cost, Precision
from gemmsmith.graph.source_location import epilogue_error
from gemmsmith.lang.values import Value

Array = np.ndarray[Any, Any]
Lowering = Callable[..., Value]
ZERO = "zero"
"""The gradient of a function whose derivative is 0 wherever it exists."""


@dataclass(frozen=True)
class Refused:
    """In the place of a gradient or of torch's function: why there is none, and what to do instead."""

    reason: str


@dataclass(frozen=True, eq=False)
class Function(Operation):
    """An elementwise function.

    Args:
        name: Its name in graphs, and in trees, `Compute(name)`.
        arity: The number of its inputs.
        reference: A function of float64 arrays.
        lower: A function of kernel values that emits instructions; `approx` and `exact`: likewise, in other precisions.
        torch: The function's name in torch, torch.nn.functional or torch.special (default: the first of `names`), or a
            function of tensors.
        cost: The instructions of an element by precision, for each precision that has a lowering.
        gradient: A function `(g, y, *inputs)`, with y the function's value and g the upstream gradient, that returns
            one gradient per input, None for an input without one. It only uses operators and methods of both traced
            values and torch tensors. `ZERO`, or `Refused` with the reason, if there is none.
        names: The names, separated by spaces, under which torch, numpy or math call it with its inputs as arguments.
        num_predicates: How many of its inputs, from the first on, are predicates.
        is_predicate: Whether its value is a predicate.
        linearity: In which inputs it is linear; see `Linearity`.
        commutes_with_rounding: Whether rounding its value and rounding its input give the same, as for abs and relu.

    Raises:
        ArgumentError: Something is missing.
    """

    name: str
    arity: int
    reference: Callable[..., Array]
    lower: Lowering
    approx: Lowering | None = None
    exact: Lowering | None = None
    torch: str | Callable[..., Any] = ""
    cost: Mapping[Precision, Cost] | None = None
    gradient: Callable[..., Any] | Refused | Literal["zero"] | None = None
    names: str = ""
    num_predicates: int = 0
    is_predicate: bool = False
    linearity: Linearity = ""
    commutes_with_rounding: bool = False

    def __post_init__(self) -> None:
        if not self.torch and not self.names:
            raise ArgumentError(
                f"{self.name}: torch: got none; give the name of torch's function, or a function of tensors"
            )
        if self.cost is None or self.cost.keys() != self.lowerings.keys():
            raise ArgumentError(
                f"{self.name}: cost: got {self.cost and ', '.join(self.cost)}; give the instructions of an element in "
                f"each of its precisions, {', '.join(self.lowerings)}: {{'default': Cost(8, 1)}}, one of them special"
            )
        check_gradient(self.name, self.gradient, or_zero=True)

    @cached_property
    def lowerings(self) -> dict[Precision, Lowering]:
        others: tuple[tuple[Precision, Lowering | None], ...] = ("approx", self.approx), ("exact", self.exact)
        return {"default": self.lower, **{precision: lower for precision, lower in others if lower}}

    @property
    def has_gradient(self) -> bool:  # type: ignore[override]
        """False if the derivative is 0 wherever it exists."""
        return self.gradient != ZERO

    @property
    def style(self) -> Literal["compute", "special"]:  # type: ignore[override]
        """How plots show it: "special" if the special-function unit (MUFU) takes part, else "compute"."""
        return "special" if self.cost_per_element("default").special else "compute"

    def cost_per_element(self, precision: Precision) -> Cost:
        """Return the instructions of an element."""
        assert self.cost
        return self.cost[precision]

    def compute(self, arrays: Any, node: Node, *inputs: Any) -> Any:
        """Apply numpy's or torch's implementation to arrays; see `Operation.compute`."""
        return arrays.implementation(self)(*inputs)

    def backpropagate(self, node: Node, g: Any, y: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients of the inputs by the function's rule."""
        grads = gradient_rule(self.name, self.gradient, node)(g, y, *inputs)
        return grads if isinstance(grads, tuple) else (grads,)

    def label(self, graph: EpilogueGraph, node: Node) -> str:
        """Return CUTLASS's name of the visitor, with the function's name: "Compute(exp)"."""
        return f"Compute({self.name})"


def check_gradient(name: str, gradient: Any, or_zero: bool = False) -> None:
    """Raise ArgumentError if the `gradient` of the record `name` is neither a function nor `Refused`."""
    if not (callable(gradient) or isinstance(gradient, Refused) or (or_zero and gradient == ZERO)):
        zero = ", ZERO" if or_zero else ""
        raise ArgumentError(
            f"{name}: gradient: got {gradient!r}; give a function (g, y, *inputs) that returns one gradient per "
            f"input{zero}, or Refused with the reason why there is none"
        )


def gradient_rule(name: str, gradient: Any, node: Node) -> Callable[..., Any]:
    """Return the gradient function of the record `name`.

    Raises EpilogueError, with the record's reason and the source line of `node`, if the gradient is `Refused`.
    """
    if isinstance(gradient, Refused):
        raise epilogue_error(f"{name}: {gradient.reason}", node.location)
    return gradient  # type: ignore[no-any-return]


def _library(name: str) -> Lowering:
    return partial(hw.math_library_call, name)


def _sigmoid_exact(x: Value) -> Value:
    return 1 / (hw.math_library_call("expf", -x) + 1)


def _relu(x: Value) -> Value:
    return hw.maximum_nan(x, 0.0)


def _softplus_exact(x: Value) -> Value:
    """Compute max(x, 0) + log(1 + exp(-|x|)), which does not overflow."""
    return _relu(x) + hw.math_library_call("log1pf", hw.math_library_call("expf", -absolute(x)))


def _mish_exact(x: Value) -> Value:
    """Compute x n / (n + 2), n = e^x (e^x + 2). The bound 20, above which it is x in fp32, keeps n from overflowing."""
    e = hw.math_library_call("expf", hw.minimum_nan(x, 20.0))
    n = e * (e + 2)
    return x * (n / (n + 2))


def _gelu_exact(x: Value) -> Value:
    half = x * 0.5
    return hw.fma(half, hw.math_library_call("erff", x * math.sqrt(0.5)), half)


def _ndtr_exact(x: Value) -> Value:
    return hw.fma(hw.math_library_call("erff", x * math.sqrt(0.5)), 0.5, 0.5)


def _gelu_tanh(x: Value, tanh: Lowering) -> Value:
    half = x * 0.5
    return hw.fma(half, tanh(x * hw.fma(x * x, GELU_A * GELU_B, GELU_A)), half)


def _silu_approx(x: Value) -> Value:
    half = x * 0.5
    return hw.fma(half, tanh_approx(half), half)


def _sign(x: Value) -> Value:
    return select(x > 0.0, 1.0, select(x < 0.0, -1.0, 0.0))


def _hypot(x: Value, y: Value, sqrt: Lowering) -> Value:
    """Compute sqrt(x^2 + y^2). Both are scaled by a power of two if a square would overflow or underflow in fp32."""
    x, y = (absolute(z).named("magnitude") for z in (x, y))
    max_magnitude = hw.maximum_nan(x, y).named("max_magnitude")
    large, small = max_magnitude > 2.0**60, max_magnitude < 2.0**-60
    scale = select(large, 2.0**-68, select(small, 2.0**100, 1.0)).named("scale")
    inverse_scale = select(large, 2.0**68, select(small, 2.0**-100, 1.0))
    a, b = (x * scale).named("scaled"), (y * scale).named("scaled")
    return select((x == math.inf) | (y == math.inf), math.inf, sqrt(hw.fma(a, a, b * b)) * inverse_scale)


def _logaddexp_exact(x: Value, y: Value) -> Value:
    """Handle x == y separately: the difference of equal infinities is NaN."""
    e = hw.math_library_call("expf", -absolute(x - y))
    return select(x == y, x + LN_2, hw.maximum_nan(x, y) + hw.math_library_call("log1pf", e))


def _normal_density(x: Any) -> Any:
    return (x * x * (-0.5 * LOG2_E) - math.log2(2 * math.pi) / 2).exp2()


def _d_gelu(g: Any, y: Any, x: Any) -> Any:
    """Multiply g by ndtr(x) + x phi(x), the normal distribution function and its density; the passes know ndtr."""
    return g * (0.5 + 0.5 * (x * math.sqrt(0.5)).erf() + x * _normal_density(x))


def _d_gelu_tanh(g: Any, y: Any, x: Any) -> Any:
    """Multiply g by the derivative of x (1 + t) / 2, t = tanh(a (x + b x^3))."""
    t = (x * (GELU_A + GELU_A * GELU_B * x * x)).tanh()
    inner = GELU_A + 3 * GELU_A * GELU_B * x * x
    return g * (0.5 + 0.5 * t + 0.5 * x * (1 - t * t) * inner)


def _d_silu(g: Any, y: Any, x: Any) -> Any:
    s = x.sigmoid()
    return g * (s * (1 + x * (1 - s)))


def _d_mish(g: Any, y: Any, x: Any) -> Any:
    """Multiply g by the derivative of x t, t = tanh(softplus(x)) = n / (n + 2), as in `mish`; softplus' = sigmoid."""
    e = x.clamp(max=20).exp()
    n = e * (e + 2)
    t = n / (n + 2)
    return g * (t + x * (e * (1 / (e + 1))) * (1 - t * t))


def _d_hardswish(g: Any, y: Any, x: Any) -> Any:
    """Multiply g by 0 below -3, 1 above 3, and x / 3 + 1 / 2 in between."""
    return g.where(x >= 3, (g * (x / 3 + 0.5)).where(~(x <= -3), 0.0))


def _d_pow(g: Any, y: Any, x: Any, p: Any) -> Any:
    """Use the limits at x = 0, as torch does: the gradient of x is 0 for p = 0, that of p is 0 for p >= 0."""
    return (g * p * x ** (p - 1)).where(p != 0, 0.0), (g * y * x.log()).where(~((x == 0) & (p >= 0)), 0.0)


def _d_extremum(g: Any, a: Any, b: Any, above: Any, below: Any) -> Any:
    """Return the gradients of a and b for their maximum or minimum.

    `above`, `below`: predicates, whether a alone or b alone is selected. As in torch.maximum, equal values get half of
    g each, and both get g if one of them is NaN. If a or b is a constant, then as in torch.clamp since torch 2.14: the
    other one gets 0 if it is equal to the constant, or NaN.
    """
    if "constant" in (getattr(a, "op", ""), getattr(b, "op", "")):
        return g.where(above, 0.0), g.where(below, 0.0)
    return tuple((g * 0.5).where(a == b, g.where(~other, 0.0)) for other in (below, above))


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid_64(x: Array) -> Array:
    return np.exp(-np.logaddexp(0, -x))


def _softplus_of_sigmoid_64(x: Array, s: Array) -> Array:
    return np.asarray(np.maximum(x, 0) - np.log1p(-np.minimum(s, 1 - s)))


def _torch_gelu_tanh(x: Any) -> Any:
    from torch.nn import functional

    return functional.gelu(x, approximate="tanh")


def _function(
    name: str, arity: int, reference: Callable[..., Array], lower: Lowering, gradient: Any = ZERO, names: str = "",
    **others: Any,
) -> Function:  # fmt: skip
    """Return the record of a function of the package, with its measured cost.

    If neither `names` nor `torch` is given, torch's function has the record's name.
    """
    names = names or ("" if "torch" in others else name)
    return Function(name, arity, reference, lower, cost=COSTS[name], gradient=gradient, names=names, **others)


_TABLE = [
    # name, arity, reference, lower
    _function("detach", 1, lambda x: x, lambda x: x, names="detach", torch=lambda x: x),  # removed by the passes
    _function("neg", 1, np.negative, lambda x: -x, gradient=lambda g, y, x: -g, names="neg negative", linearity="sum",
             commutes_with_rounding=True),
    _function("abs", 1, np.abs, _library("fabsf"), gradient=lambda g, y, x: g * x.sign(), names="abs absolute fabs",
             commutes_with_rounding=True),
    _function("sign", 1, lambda x: np.where(np.isnan(x), 0, np.sign(x)), _sign, names="sign sgn"),
    _function("floor", 1, np.floor, _library("floorf")),
    _function("round", 1, np.rint, _library("rintf"), torch="round"),
    _function("exp", 1, np.exp, approximations.fast_exp, exact=_library("expf"), gradient=lambda g, y, x: g * y),
    _function("exp2", 1, np.exp2, approximations.exp2, exact=_library("exp2f"),
             gradient=lambda g, y, x: g * (y * LN_2), names="exp2 special_exp2"),
    _function("expm1", 1, np.expm1, approximations.expm1, exact=_library("expm1f"),
             gradient=lambda g, y, x: g * (y + 1)),
    _function("log", 1, np.log, approximations.log, exact=_library("logf"), gradient=lambda g, y, x: g / x,
             torch="log"),
    _function("log2", 1, np.log2, approximations.log2, exact=_library("log2f"),
             gradient=lambda g, y, x: g / (x * LN_2)),
    _function("log1p", 1, np.log1p, approximations.log1p, exact=_library("log1pf"),
             gradient=lambda g, y, x: g / (x + 1)),
    _function("sqrt", 1, np.sqrt, approximations.sqrt, exact=_library("sqrtf"), gradient=lambda g, y, x: g / (y * 2)),
    _function("rsqrt", 1, lambda x: 1 / np.sqrt(x), approximations.rsqrt,
             exact=lambda x: 1 / hw.math_library_call("sqrtf", x), gradient=lambda g, y, x: g * (y * y * y * -0.5)),
    _function("reciprocal", 1, lambda x: 1 / x, approximations.reciprocal, exact=lambda x: 1 / x,
             gradient=lambda g, y, x: g * (y * y * -1)),
    _function("sin", 1, np.sin, _library("sinf"), gradient=lambda g, y, x: g * x.cos()),
    _function("cos", 1, np.cos, _library("cosf"), gradient=lambda g, y, x: g * -x.sin()),
    _function("tanh", 1, np.tanh, approximations.tanh, approx=tanh_approx, exact=_library("tanhf"),
             gradient=lambda g, y, x: g * (1 - y * y)),
    _function("sigmoid", 1, _sigmoid_64, approximations.sigmoid, exact=_sigmoid_exact,
             gradient=lambda g, y, x: g * (y * (1 - y)), names="sigmoid expit"),
    _function("softplus", 1, lambda x: np.logaddexp(0, x), approximations.softplus,
             approx=lambda x: approximations.softplus(x, "log1p_unit_approx"), exact=_softplus_exact,
             gradient=lambda g, y, x: g * x.sigmoid(), torch="softplus"),
    _function("softplus_of_sigmoid", 2, _softplus_of_sigmoid_64, approximations.softplus_of_sigmoid,
             approx=lambda x, s: approximations.softplus_of_sigmoid(x, s, "log1p_half_approx"),
             exact=lambda x, s: _softplus_exact(x), gradient=lambda g, y, x, s: (g * x.sigmoid(), None),
             torch=lambda x, s: x.logaddexp(s.new_zeros(()))),
    _function("erf", 1, _erf, approximations.erf, exact=_library("erff"),
             gradient=lambda g, y, x: g * ((x * x * -1).exp() * (2 / math.sqrt(math.pi)))),
    _function("ndtr", 1, lambda x: 0.5 * (1 + _erf(x * math.sqrt(0.5))), approximations.ndtr,
             approx=lambda x: approximations.ndtr(x, "ndtr_approx"), exact=_ndtr_exact,
             gradient=lambda g, y, x: g * _normal_density(x), torch="ndtr"),
    _function("relu", 1, lambda x: np.maximum(x, 0), _relu,
             gradient=lambda g, y, x: g.where(~(y <= 0), 0.0), commutes_with_rounding=True),
    _function("gelu", 1, lambda x: 0.5 * x * (1 + _erf(x * math.sqrt(0.5))), lambda x: x * approximations.ndtr(x),
             approx=lambda x: x * approximations.ndtr(x, "ndtr_approx"), exact=_gelu_exact, gradient=_d_gelu,
             torch="gelu"),
    _function("gelu_tanh", 1, lambda x: 0.5 * x * (1 + np.tanh(GELU_A * (x + GELU_B * x * x * x))),
             approximations.gelu_tanh, approx=lambda x: _gelu_tanh(x, tanh_approx),
             exact=lambda x: _gelu_tanh(x, _library("tanhf")), gradient=_d_gelu_tanh, torch=_torch_gelu_tanh),
    _function("silu", 1, lambda x: x * _sigmoid_64(x), lambda x: x * approximations.sigmoid(x), approx=_silu_approx,
             exact=lambda x: x * _sigmoid_exact(x), gradient=_d_silu, names="silu swish"),
    _function("mish", 1, lambda x: x * np.tanh(np.logaddexp(0, x)), approximations.mish,
             exact=_mish_exact, gradient=_d_mish),
    _function("hardswish", 1, lambda x: x * np.clip(x + 3, 0, 6) / 6,
             lambda x: x * (hw.minimum_nan(hw.maximum_nan(x + 3, 0.0), 6.0) * (1 / 6)), gradient=_d_hardswish),
    _function("not", 1, np.logical_not, operator.invert, names="logical_not", num_predicates=1, is_predicate=True),
    _function("add", 2, np.add, lambda a, b: a + b, gradient=lambda g, y, a, b: (g, g), torch="add", linearity="sum"),
    _function("sub", 2, np.subtract, lambda a, b: a - b, gradient=lambda g, y, a, b: (g, -g),
             torch="sub", linearity="sum"),
    _function("mul", 2, np.multiply, lambda a, b: a * b, gradient=lambda g, y, a, b: (g * b, g * a),
             names="mul multiply", linearity="product"),
    _function("div", 2, np.divide, hw.divide_full, exact=lambda a, b: a / b,
             gradient=lambda g, y, a, b: (g / b, -g * y / b), torch="div", linearity="quotient"),
    _function("maximum", 2, np.maximum, hw.maximum_nan, gradient=lambda g, y, a, b: _d_extremum(g, a, b, a > b, b > a)),
    _function("minimum", 2, np.minimum, hw.minimum_nan, gradient=lambda g, y, a, b: _d_extremum(g, a, b, a < b, b < a)),
    _function("hypot", 2, np.hypot, lambda x, y: _hypot(x, y, approximations.sqrt),
             exact=lambda x, y: _hypot(x, y, _library("sqrtf")),
             gradient=lambda g, y, a, b: (g * (a / y), g * (b / y))),
    _function("logaddexp", 2, np.logaddexp, approximations.logaddexp,
             approx=lambda x, y: approximations.logaddexp(x, y, "log1p_unit_approx"), exact=_logaddexp_exact,
             gradient=lambda g, y, a, b: (g / ((b - a).exp() + 1), g / ((a - b).exp() + 1))),
    _function("pow", 2, np.float_power, hw.power, gradient=_d_pow, torch="pow"),
    _function("leaky_relu", 2, lambda x, slope: np.where(x > 0, x, x * slope), lambda x, s: select(x > 0.0, x, x * s),
             gradient=lambda g, y, x, slope: (g.where(x > 0, g * slope), (g * x).where(x <= 0, 0.0)),
             torch=lambda x, slope: x.where(x > 0, x * slope)),
    _function("elu", 2, lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
             lambda x, a: hw.select_less(0.0, x, x, a * approximations.expm1(x)),
             approx=lambda x, a: hw.select_less(0.0, x, x, a * (approximations.fast_exp(x) - 1)),
             exact=lambda x, a: select(x > 0.0, x, a * hw.math_library_call("expm1f", x)),
             gradient=lambda g, y, x, a: (g.where(x > 0, g * (a * x.exp())), (g * x.expm1()).where(x <= 0, 0.0)),
             torch=lambda x, alpha: x.where(x > 0, alpha * x.clamp(max=0).expm1())),
    _function("lt", 2, np.less, lambda a, b: a < b, names="lt less", is_predicate=True),
    _function("le", 2, np.less_equal, lambda a, b: a <= b, names="le less_equal", is_predicate=True),
    _function("gt", 2, np.greater, lambda a, b: a > b, names="gt greater", is_predicate=True),
    _function("ge", 2, np.greater_equal, lambda a, b: a >= b, names="ge greater_equal", is_predicate=True),
    _function("eq", 2, np.equal, lambda a, b: a == b, is_predicate=True),
    _function("ne", 2, np.not_equal, lambda a, b: a != b, names="ne not_equal", is_predicate=True),
    _function("and", 2, np.logical_and, operator.and_, names="logical_and", num_predicates=2, is_predicate=True),
    _function("or", 2, np.logical_or, operator.or_, names="logical_or", num_predicates=2, is_predicate=True),
    _function("where", 3, np.where, select,
             gradient=lambda g, y, c, a, b: (None, g.where(c != 0, 0.0), g.where(c == 0, 0.0)),
             torch=lambda c, x, y: x.where(c != 0, y), num_predicates=1),
    _function("hardtanh", 3, lambda x, low, high: np.clip(x, low, high),
             lambda x, low, high: hw.minimum_nan(hw.maximum_nan(x, low), high), gradient=lambda g, y, x, low, high: (
                 g.where((x > low) & (x < high), 0.0), g.where((x <= low) & (low < high), 0.0),
                 g.where((x >= high) | (low >= high), 0.0),
             ), torch=lambda x, low, high: x.maximum(low).minimum(high)),
    _function("fma", 3, lambda a, b, c: a * b + c, hw.fma,
             gradient=lambda g, y, a, b, c: (g * b, g * a, g), names="fma", torch=lambda a, b, c: a * b + c),
]  # fmt: skip

FUNCTIONS: dict[str, Function] = {f.name: f for f in _TABLE}
"""The package's own; `OPERATIONS` has others' too."""
for _f in _TABLE:
    register_operation(_f)
