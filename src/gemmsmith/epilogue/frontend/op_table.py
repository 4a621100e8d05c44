"""Dispatch table of the functions and methods of torch, numpy and math that an epilogue may use.

An entry takes the tracing `t` and the call's arguments, with torch's names; t("exp", x) adds an elementwise node. Other
argument names (axis, keepdims, a_min ...) are replaced by torch's before, and `inplace` and `out` are removed.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

from gemmsmith.epilogue.source_location import epilogue_error

OpLowering = Callable[..., Any]
"""(tracing, arguments of the call) -> the traced result."""

ARGUMENT_ALIASES = {"axis": "dim", "keepdims": "keepdim", "a_min": "min", "a_max": "max", "a": "input", "x": "input"}
"""Argument names of numpy -> torch's."""


def _unary(op: str) -> OpLowering:
    return lambda t, input: t(op, input)


def _binary(op: str) -> OpLowering:
    return lambda t, input, other: t(op, input, other)


def _predicate_op(op: str) -> OpLowering:
    """Return the lowering of & | ~ ^, which would be bitwise on numbers."""

    def entry(t: Any, *inputs: Any) -> Any:
        t.expect_bools(op, inputs)
        return t(op, *inputs)

    return entry


def _scaled(t: Any, x: Any, factor: Any) -> Any:
    return x if _is_number(factor, 1) else t("mul", x, factor)


def _accumulate(op: str) -> OpLowering:
    return lambda t, input, tensor1, tensor2, value=1: t("add", input, t(op, _scaled(t, tensor1, value), tensor2))


def _is_number(x: Any, number: float) -> bool:
    return isinstance(x, numbers.Real) and x == number


def _clamp(t: Any, input: Any, min: Any = None, max: Any = None) -> Any:
    if min is None and max is None:
        raise epilogue_error("clamp: got neither min nor max; pass at least one of them")
    x = input if min is None else t("maximum", input, min)
    return x if max is None else t("minimum", x, max)


def _reduction(kind: str) -> OpLowering:
    return lambda t, input, dim=None, keepdim=False, dtype=None: t.reduce(kind, input, dim, keepdim, dtype)


def _extremum(kind: str, pairwise: str) -> OpLowering:
    def entry(t: Any, input: Any, dim: Any = None, keepdim: Any = False, other: Any = None) -> Any:
        if other is None and not isinstance(dim, (numbers.Integral, tuple, list, type(None))):
            other = dim  # torch.max(a, b)
        return t.reduce(kind, input, dim, keepdim) if other is None else t(pairwise, input, other)

    return entry


def _gelu(t: Any, input: Any, approximate: str = "none") -> Any:
    if approximate not in ("none", "tanh"):
        raise epilogue_error(f"gelu: approximate: got {approximate!r}; use 'none' or 'tanh'")
    return t("gelu" if approximate == "none" else "gelu_tanh", input)


def _softplus(t: Any, input: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    y = _scaled(t, input, beta)
    soft = t("softplus", y)
    if not _is_number(beta, 1):
        soft = t("div", soft, beta)
    # above 20, softplus(x) is x in fp32
    return soft if _is_number(threshold, 20) else t("where", t("gt", y, threshold), input, soft)


def _celu(t: Any, input: Any, alpha: Any = 1) -> Any:
    below = t("mul", alpha, t("elu", t("div", input, alpha), 1))
    return t("where", t("gt", input, 0), input, below)


def _div(t: Any, input: Any, other: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode not in (None, "floor"):
        raise epilogue_error(f"div: rounding_mode: got {rounding_mode!r}; use None or 'floor'")
    quotient = t("div", input, other)
    return t("floor", quotient) if rounding_mode else quotient


def _round(t: Any, input: Any, decimals: int = 0) -> Any:
    if decimals:
        raise epilogue_error(f"round: decimals: got {decimals}; use 0, as in round(x * 100) / 100")
    return t("round", input)


def _log(t: Any, input: Any, base: Any = None) -> Any:
    if base is None:
        return t("log", input)
    return t("div", t("log", input), math.log(base) if isinstance(base, numbers.Real) else t("log", base))


def _dropout(t: Any, input: Any, p: Any = 0.5, training: Any = True) -> Any:
    if training and p:
        raise epilogue_error("dropout: got training=True; pass the mask as an operand and multiply by it")
    return input


def _ceil(t: Any, input: Any) -> Any:
    return t("neg", t("floor", t("neg", input)))


def _where(t: Any, condition: Any, input: Any = None, other: Any = None) -> Any:
    if input is None or other is None:
        raise epilogue_error("where: got a condition alone; use where(condition, a, b)")
    return t("where", condition, input, other)


_SELU_ALPHA = 1.6732632423543772
"""SELU's alpha. Klambauer et al., "Self-Normalizing Neural Networks", 2017."""
_SELU_SCALE = 1.0507009873554805
"""SELU's lambda (same source)."""

OPS: dict[str, OpLowering] = {
    **{op: _unary(op) for op in (
        "neg", "abs", "sign", "floor", "exp", "exp2", "expm1", "log2", "log1p", "sqrt", "rsqrt", "reciprocal", "sin",
        "cos", "tanh", "sigmoid", "erf", "relu", "silu", "mish", "hardswish",
        "detach",
    )},
    **{op: _binary(op) for op in (
        "mul", "maximum", "minimum", "hypot", "logaddexp", "lt", "le", "gt", "ge", "eq", "ne",
    )},
    "add": lambda t, input, other, alpha=1: t("add", input, _scaled(t, other, alpha)),
    "sub": lambda t, input, other, alpha=1: t("sub", input, _scaled(t, other, alpha)),
    "rsub": lambda t, input, other, alpha=1: t("sub", other, _scaled(t, input, alpha)),
    "div": _div,
    "pow": lambda t, input, exponent: t("pow", input, exponent),
    "square": lambda t, input: t("mul", input, input),
    "addcmul": _accumulate("mul"),
    "addcdiv": _accumulate("div"),
    "lerp": lambda t, input, end, weight: t("add", input, t("mul", weight, t("sub", end, input))),
    "fma": lambda t, a, b, c: t("fma", a, b, c),
    "tan": lambda t, input: t("div", t("sin", input), t("cos", input)),
    "log": _log,
    "log10": lambda t, input: t("mul", t("log2", input), math.log10(2)),
    "round": _round,
    "ceil": _ceil,
    "trunc": lambda t, input: t("where", t("lt", input, 0), _ceil(t, input), t("floor", input)),
    "isnan": lambda t, input: t("ne", input, input),
    "isinf": lambda t, input: t("eq", t("abs", input), math.inf),
    "isfinite": lambda t, input: t("lt", t("abs", input), math.inf),
    # activations
    "gelu": _gelu,
    "softplus": _softplus,
    "log_sigmoid": lambda t, input: t("neg", t("softplus", t("neg", input))),
    "leaky_relu": lambda t, input, negative_slope=0.01: t("leaky_relu", input, negative_slope),
    "prelu": lambda t, input, weight: t("where", t("gt", input, 0), input, t("mul", input, weight)),
    "elu": lambda t, input, alpha=1.0: t("elu", input, alpha),
    "celu": _celu,
    "selu": lambda t, input: t("mul", t("elu", input, _SELU_ALPHA), _SELU_SCALE),
    "relu6": lambda t, input: t("hardtanh", input, 0, 6),
    "hardtanh": lambda t, input, min_val=-1.0, max_val=1.0: t("hardtanh", input, min_val, max_val),
    "hardsigmoid": lambda t, input: t("div", t("hardtanh", t("add", input, 3), 0, 6), 6),
    "softsign": lambda t, input: t("div", input, t("add", t("abs", input), 1)),
    "tanhshrink": lambda t, input: t("sub", input, t("tanh", input)),
    "threshold": lambda t, input, threshold, value: t("where", t("le", input, threshold), value, input),
    # choices
    "clamp": _clamp,
    "clamp_min": lambda t, input, min: t("maximum", input, min),
    "clamp_max": lambda t, input, max: t("minimum", input, max),
    "where": _where,
    "masked_fill": lambda t, input, mask, value: t("where", mask, value, input),
    "logical_and": _binary("and"),
    "logical_or": _binary("or"),
    "logical_not": _unary("not"),
    "bitwise_and": _predicate_op("and"),
    "bitwise_or": _predicate_op("or"),
    "bitwise_not": _predicate_op("not"),
    "bitwise_xor": _predicate_op("ne"),
    # reductions
    "sum": _reduction("sum"),
    "mean": _reduction("mean"),
    "logsumexp": _reduction("logsumexp"),
    "max": _extremum("max", "maximum"),
    "min": _extremum("min", "minimum"),
    "count_nonzero": lambda t, input, dim=None, keepdim=False: t.reduce("sum", t("ne", input, 0), dim, keepdim),
    # casts, halves, and what changes nothing
    "to": lambda t, input, dtype, **_: t.cast(input, dtype),
    "type_as": lambda t, input, other: t.cast(input, other.dtype),
    "float": lambda t, input: t.cast(input, "fp32"),
    "half": lambda t, input: t.cast(input, "fp16"),
    "bfloat16": lambda t, input: t.cast(input, "bf16"),
    "dropout": _dropout,
    "one_hot": lambda t, input, num_classes: t.one_hot(input, num_classes),
    "clone": lambda t, input, **_: input,
}  # fmt: skip

_OP_ALIASES = {
    "neg": "negative", "abs": "absolute fabs", "sign": "sgn", "round": "rint around", "trunc": "fix",
    "exp2": "special_exp2", "sigmoid": "expit", "silu": "swish", "log_sigmoid": "logsigmoid",
    "sub": "subtract", "mul": "multiply", "div": "divide true_divide", "pow": "power float_power",
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "ne": "not_equal",
    "bitwise_not": "invert", "clamp": "clip", "max": "amax", "min": "amin",
    "to": "astype type", "clone": "contiguous copy positive",
}  # fmt: skip
OPS.update({alias: OPS[name] for name, aliases in _OP_ALIASES.items() for alias in aliases.split()})

METHODS: dict[str, OpLowering] = {"where": lambda t, input, condition, other: t("where", condition, input, other)}
"""Methods whose argument order differs from that of the function of the same name."""

_APPLY_AFTERWARDS = "return what it needs and apply it to the result afterwards"
_NEEDS_OTHER_ELEMENTS = "its result would depend on other elements of the accumulator; " + _APPLY_AFTERWARDS
_CHANGES_SHAPE = "values keep their shape in an epilogue; pass operands in the shape in which they broadcast"
_SECOND_GEMM = "an epilogue belongs to one GEMM; multiply elementwise, or call gemmsmith.gemm again"
_NOT_IN_ONE_TILE = (
    "no tile has elements of both halves; use gate, up = gemmsmith.deinterleave(x), with "
    "b = gemmsmith.interleave(gate, up), or gemmsmith.interleave(*b.chunk(2, -1)) of a single weight"
)

UNSUPPORTED_HINTS: dict[str, str] = {
    **dict.fromkeys(("argmax", "argmin", "sort", "argsort", "topk", "cumsum", "cumprod", "median", "unique"),
                    _NEEDS_OTHER_ELEMENTS),
    **dict.fromkeys(("softmax", "log_softmax"), "use gemmsmith's top_k_softmax(x, k), or return x and x.logsumexp(-1)"),
    **dict.fromkeys(("norm", "vector_norm"), "return x.square().sum(dim), and take its square root afterwards"),
    **dict.fromkeys(("var", "std"), "return x.mean(dim) and x.square().mean(dim), and combine them afterwards"),
    **dict.fromkeys(("all", "any"), "return condition.sum(dim), and compare it afterwards"),
    **dict.fromkeys(("layer_norm", "rms_norm", "batch_norm", "group_norm", "normalize", "prod"), _NEEDS_OTHER_ELEMENTS),
    **dict.fromkeys(("matmul", "mm", "bmm", "dot", "einsum", "linear", "addmm", "tensordot"), _SECOND_GEMM),
    **dict.fromkeys(("reshape", "view", "transpose", "permute", "squeeze", "unsqueeze", "flatten", "swapaxes",
                     "expand", "broadcast_to", "expand_dims", "stack", "cat", "concatenate", "roll", "flip"),
                    _CHANGES_SHAPE),
    **dict.fromkeys(("chunk", "split", "tensor_split", "hsplit", "array_split", "narrow", "glu"), _NOT_IN_ONE_TILE),
    **dict.fromkeys(("item", "tolist", "numpy", "cpu", "cuda"),
                    "a traced value has no number yet; " + _APPLY_AFTERWARDS),
    **dict.fromkeys(("floor_divide", "fmod", "remainder", "mod"), "use floor(x / y), or x - floor(x / y) * y"),
    **dict.fromkeys(("fmax", "fmin"), "use maximum or minimum, which pass a NaN on"),
    **dict.fromkeys(("double", "int", "long", "bool"), "use float(), half() or bfloat16(), or a comparison"),
    "size": "use .shape",
    "equal": "use ==, which compares element by element",
}  # fmt: skip
"""What to use instead of functions and methods that are not in the table, for error messages."""
DEFAULT_HINT = "use arithmetic, comparisons, where, and the elementwise functions and reductions"
"""What to use instead of any other function that is not in the table."""
