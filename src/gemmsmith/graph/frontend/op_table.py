"""Dispatch table of the functions and methods of torch, numpy and math that an epilogue may use.

An entry takes the Tracer and the call's arguments, with torch's names; tracer("exp", x) adds an elementwise node. Other
argument names (axis, keepdims, a_min ...) are replaced by torch's before, and `inplace` and `out` are removed.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

from gemmsmith.core.dicts import Records
from gemmsmith.core.graph import OPERATIONS
from gemmsmith.graph.functions import Function
from gemmsmith.graph.reductions import REDUCTIONS
from gemmsmith.graph.source_location import epilogue_error

OpLowering = Callable[..., Any]
"""(tracer, arguments of the call) -> the traced result."""

ARGUMENT_ALIASES = {"axis": "dim", "keepdims": "keepdim", "a_min": "min", "a_max": "max", "a": "input", "x": "input"}
"""Argument names of numpy -> torch's."""


def _predicate_op(op: str) -> OpLowering:
    """Return the lowering of & | ~ ^, as the function `op` of predicates. Numbers, for which they are bitwise, fail."""

    def lower(tracer: Any, *inputs: Any) -> Any:
        tracer.expect_bools(op, inputs)
        return tracer(op, *inputs)

    return lower


def _scaled(tracer: Any, x: Any, factor: Any) -> Any:
    return x if _is_number(factor, 1) else tracer("mul", x, factor)


def _accumulate(op: str) -> OpLowering:
    return lambda tracer, input, tensor1, tensor2, value=1: tracer(
        "add", input, tracer(op, _scaled(tracer, tensor1, value), tensor2)
    )


def _is_number(x: Any, number: float) -> bool:
    return isinstance(x, numbers.Real) and x == number


def _clamp(tracer: Any, input: Any, min: Any = None, max: Any = None) -> Any:
    """Compute torch.clamp, one of whose bounds may be None."""
    if min is None and max is None:
        raise epilogue_error("clamp: got neither min nor max; pass at least one of them")
    x = input if min is None else tracer("maximum", input, min)
    return x if max is None else tracer("minimum", x, max)


def _reduction(kind: str) -> OpLowering:
    return lambda tracer, input, dim=None, keepdim=False, dtype=None: tracer.reduce(kind, input, dim, keepdim, dtype)


def _extremum(kind: str, pairwise: str) -> OpLowering:
    """Return the lowering of torch.max or torch.min.

    With one value it is the reduction `kind`; with two values, the elementwise function `pairwise`.
    """

    def lower(tracer: Any, input: Any, dim: Any = None, keepdim: Any = False, other: Any = None) -> Any:
        if other is None and not isinstance(dim, (numbers.Integral, tuple, list, type(None))):
            other = dim  # torch.max(a, b)
        return tracer.reduce(kind, input, dim, keepdim) if other is None else tracer(pairwise, input, other)

    return lower


def _gelu(tracer: Any, input: Any, approximate: str = "none") -> Any:
    if approximate not in ("none", "tanh"):
        raise epilogue_error(f"gelu: approximate: got {approximate!r}; use 'none' or 'tanh'")
    return tracer("gelu" if approximate == "none" else "gelu_tanh", input)


def _softplus(tracer: Any, input: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    """Compute log(1 + exp(beta x)) / beta, and x where beta x is above the threshold, as torch does."""
    y = _scaled(tracer, input, beta)
    soft = tracer("softplus", y)
    if not _is_number(beta, 1):
        soft = tracer("div", soft, beta)
    # above 20, softplus(x) is x in fp32
    return soft if _is_number(threshold, 20) else tracer("where", tracer("gt", y, threshold), input, soft)


def _celu(tracer: Any, input: Any, alpha: Any = 1) -> Any:
    below = tracer("mul", alpha, tracer("elu", tracer("div", input, alpha), 1))
    return tracer("where", tracer("gt", input, 0), input, below)


def _div(tracer: Any, input: Any, other: Any, rounding_mode: str | None = None) -> Any:
    """Compute torch.div, rounded down with rounding_mode="floor"."""
    if rounding_mode not in (None, "floor"):
        raise epilogue_error(f"div: rounding_mode: got {rounding_mode!r}; use None or 'floor'")
    quotient = tracer("div", input, other)
    return tracer("floor", quotient) if rounding_mode else quotient


def _round(tracer: Any, input: Any, decimals: int = 0) -> Any:
    if decimals:
        raise epilogue_error(f"round: decimals: got {decimals}; use 0, as in round(x * 100) / 100")
    return tracer("round", input)


def _log(tracer: Any, input: Any, base: Any = None) -> Any:
    """Compute the natural logarithm, or the logarithm to a base, as math.log does."""
    if base is None:
        return tracer("log", input)
    return tracer(
        "div", tracer("log", input), math.log(base) if isinstance(base, numbers.Real) else tracer("log", base)
    )


def _dropout(tracer: Any, input: Any, p: Any = 0.5, training: Any = True) -> Any:
    if training and p:
        raise epilogue_error("dropout: got training=True; pass the mask as an operand and multiply by it")
    return input


def _ceil(tracer: Any, input: Any) -> Any:
    return tracer("neg", tracer("floor", tracer("neg", input)))


def _where(tracer: Any, condition: Any, input: Any = None, other: Any = None) -> Any:
    if input is None or other is None:
        raise epilogue_error("where: got a condition alone; use where(condition, a, b)")
    return tracer("where", condition, input, other)


_SELU_ALPHA = 1.6732632423543772
"""SELU's alpha. Klambauer et al., "Self-Normalizing Neural Networks", 2017."""
_SELU_SCALE = 1.0507009873554805
"""SELU's lambda (same source)."""

OPS: dict[str, OpLowering] = {
    "add": lambda tracer, input, other, alpha=1: tracer("add", input, _scaled(tracer, other, alpha)),
    "sub": lambda tracer, input, other, alpha=1: tracer("sub", input, _scaled(tracer, other, alpha)),
    "rsub": lambda tracer, input, other, alpha=1: tracer("sub", other, _scaled(tracer, input, alpha)),
    "div": _div,
    "pow": lambda tracer, input, exponent: tracer("pow", input, exponent),
    "square": lambda tracer, input: tracer("mul", input, input),
    "addcmul": _accumulate("mul"),
    "addcdiv": _accumulate("div"),
    "lerp": lambda tracer, input, end, weight: tracer("add", input, tracer("mul", weight, tracer("sub", end, input))),
    "tan": lambda tracer, input: tracer("div", tracer("sin", input), tracer("cos", input)),
    "log": _log,
    "log10": lambda tracer, input: tracer("mul", tracer("log2", input), math.log10(2)),
    "round": _round,
    "ceil": _ceil,
    "trunc": lambda tracer, input: tracer(
        "where", tracer("lt", input, 0), _ceil(tracer, input), tracer("floor", input)
    ),
    "isnan": lambda tracer, input: tracer("ne", input, input),
    "isinf": lambda tracer, input: tracer("eq", tracer("abs", input), math.inf),
    "isfinite": lambda tracer, input: tracer("lt", tracer("abs", input), math.inf),
    # activations
    "gelu": _gelu,
    "softplus": _softplus,
    "log_sigmoid": lambda tracer, input: tracer("neg", tracer("softplus", tracer("neg", input))),
    "leaky_relu": lambda tracer, input, negative_slope=0.01: tracer("leaky_relu", input, negative_slope),
    "prelu": lambda tracer, input, weight: tracer("where", tracer("gt", input, 0), input, tracer("mul", input, weight)),
    "elu": lambda tracer, input, alpha=1.0: tracer("elu", input, alpha),
    "celu": _celu,
    "selu": lambda tracer, input: tracer("mul", tracer("elu", input, _SELU_ALPHA), _SELU_SCALE),
    "relu6": lambda tracer, input: tracer("hardtanh", input, 0, 6),
    "hardtanh": lambda tracer, input, min_val=-1.0, max_val=1.0: tracer("hardtanh", input, min_val, max_val),
    "hardsigmoid": lambda tracer, input: tracer("div", tracer("hardtanh", tracer("add", input, 3), 0, 6), 6),
    "softsign": lambda tracer, input: tracer("div", input, tracer("add", tracer("abs", input), 1)),
    "tanhshrink": lambda tracer, input: tracer("sub", input, tracer("tanh", input)),
    "threshold": lambda tracer, input, threshold, value: tracer("where", tracer("le", input, threshold), value, input),
    # choices
    "clamp": _clamp,
    "clamp_min": lambda tracer, input, min: tracer("maximum", input, min),
    "clamp_max": lambda tracer, input, max: tracer("minimum", input, max),
    "where": _where,
    "masked_fill": lambda tracer, input, mask, value: tracer("where", mask, value, input),
    "bitwise_and": _predicate_op("and"),
    "bitwise_or": _predicate_op("or"),
    "bitwise_not": _predicate_op("not"),
    "bitwise_xor": _predicate_op("ne"),
    # reductions
    "max": _extremum("max", "maximum"),
    "min": _extremum("min", "minimum"),
    "count_nonzero": lambda tracer, input, dim=None, keepdim=False: tracer.reduce(
        "sum", tracer("ne", input, 0), dim, keepdim
    ),
    # casts, halves, and what changes nothing
    "to": lambda tracer, input, dtype, **_: tracer.cast(input, dtype),
    "type_as": lambda tracer, input, other: tracer.cast(input, other.dtype),
    "float": lambda tracer, input: tracer.cast(input, "fp32"),
    "half": lambda tracer, input: tracer.cast(input, "fp16"),
    "bfloat16": lambda tracer, input: tracer.cast(input, "bf16"),
    "dropout": _dropout,
    "one_hot": lambda tracer, input, num_classes: tracer.one_hot(input, num_classes),
    "clone": lambda tracer, input, **_: input,
}  # fmt: skip

_OP_ALIASES = {
    "round": "rint around", "trunc": "fix", "log_sigmoid": "logsigmoid", "sub": "subtract",
    "div": "divide true_divide", "pow": "power float_power", "bitwise_not": "invert", "clamp": "clip", "max": "amax",
    "min": "amin", "to": "astype type", "clone": "contiguous copy positive",
}  # fmt: skip
OPS.update({alias: OPS[name] for name, aliases in _OP_ALIASES.items() for alias in aliases.split()})

METHODS: dict[str, OpLowering] = {
    "where": lambda tracer, input, condition, other: tracer("where", condition, input, other)
}
"""Methods whose argument order differs from that of the function of the same name."""

EPILOGUE_FUNCTIONS: Records[Callable[..., Any]] = Records("a function of epilogues")
"""Functions of epilogues that are not torch's or numpy's, by name; see `epilogue_function` in values.py."""


def find_op(name: str) -> OpLowering | None:
    """Return what adds the nodes of the function of torch, numpy or math called `name`; None if there is nothing.

    It is an entry of OPS, a reduction, or an elementwise function that has the name among the `names` of its record.
    """
    if name in OPS:
        return OPS[name]
    if name in REDUCTIONS:
        return _reduction(name)
    functions = (f for f in OPERATIONS.values() if isinstance(f, Function))
    return next((_elementwise(f) for f in functions if name in f.names.split()), None)


def _elementwise(function: Function) -> OpLowering:
    """Return the lowering of a record's function, which takes its arguments by torch's names, too."""
    match function.arity:
        case 1:
            return lambda tracer, input: tracer(function.name, input)
        case 2:
            return lambda tracer, input, other: tracer(function.name, input, other)
    return lambda tracer, *inputs: tracer(function.name, *inputs)


def op_names() -> list[str]:
    """Return all names for which `find_op` has an entry."""
    functions = (f for f in OPERATIONS.values() if isinstance(f, Function))
    return [*OPS, *REDUCTIONS, *(name for f in functions for name in f.names.split())]


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
