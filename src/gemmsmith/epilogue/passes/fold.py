"""Constant folding and algebraic simplification, exact in IEEE arithmetic but for the sign of a zero.

Not done, because of Inf and NaN: x * 0 -> 0, x - x -> 0, x / x -> 1, exp(log(x)) -> x.
"""

from __future__ import annotations

import math

import numpy as np

from gemmsmith.core.dtypes import DType, in_fp32
from gemmsmith.core.graph import Graph, Node
from gemmsmith.epilogue.functions import FUNCTIONS, PREDICATES
from gemmsmith.epilogue.passes.rewrite import Editor, rewritten

_IDEMPOTENT = {"abs", "relu", "floor", "round", "sign"}
"""f(f(x)) = f(x)."""
_NEVER_NEGATIVE = {"abs", "relu", "exp", "exp2", "sqrt", "sigmoid", "softplus"}


def fold(graph: Graph) -> Graph:
    """Functions of constants become constants; operations that change nothing vanish."""
    return rewritten(graph, _rule)


def _rule(e: Editor, node: Node) -> int | None:
    """What replaces a node, folded again: -x * -1 becomes -(-x), which becomes x."""
    found = _once(e, node)
    while found is not None and (further := _once(e, e.nodes[found])) is not None:
        found = further
    return found


def _once(e: Editor, node: Node) -> int | None:
    function = FUNCTIONS.get(node.op)
    if function is None:
        return _cast(e, node) if node.op == "cast" else None
    numbers = [e.number(i) for i in node.inputs]
    if all(x is not None for x in numbers):
        with np.errstate(all="ignore"):
            return e.constant(float(function.meaning(*(np.float64(x) for x in numbers if x is not None))))
    return _unary(e, node) if len(node.inputs) == 1 else _binary(e, node, numbers)


def _cast(e: Editor, node: Node) -> int | None:
    """Rounding changes nothing that the dtype holds."""
    return node.inputs[0] if _holds(e, node.value, node.inputs[0]) else None


def _holds(e: Editor, dtype: DType, x: int) -> bool:
    """Whether a value is known to be exact in a dtype."""
    node = e.nodes[x]
    if node.op in ("neg", "abs", "relu"):
        return _holds(e, dtype, node.inputs[0])
    if node.op == "operand":
        return e.old.operand(node.value).dtype == dtype
    return node.op == "cast" and bool(node.value == dtype)


def _unary(e: Editor, node: Node) -> int | None:
    x = node.inputs[0]
    inner = e.nodes[x]
    if node.op == inner.op == "neg" or (node.op == inner.op == "not"):
        return inner.inputs[0]
    if node.op == inner.op and node.op in _IDEMPOTENT:
        return x
    if node.op == "abs" and inner.op == "neg":
        return e.add("abs", inner.inputs[0])
    if node.op in ("abs", "relu") and inner.op in _NEVER_NEGATIVE:
        return x
    return None


def _binary(e: Editor, node: Node, numbers: list[float | None]) -> int | None:
    x, y = node.inputs[0], node.inputs[1]
    a, b = numbers[0], numbers[1]
    match node.op:
        case "add":
            return x if b == 0 else y if a == 0 else None
        case "sub":
            return x if b == 0 else e.add("neg", y) if a == 0 else None
        case "mul":
            one, other = (x, b) if b is not None else (y, a)
            return one if other == 1 else e.add("neg", one) if other == -1 else None
        case "div":
            if b is not None and b != 0 and math.frexp(b)[0] in (0.5, -0.5) and in_fp32(1 / b) == 1 / b:
                return x if b == 1 else e.add("mul", x, e.constant(1 / b))  # a power of two: exact
            return None
        case "maximum" | "minimum":
            return x if x == y else None
        case "gt" | "le":
            return e.add(node.op, e.nodes[x].inputs[0], y) if b == 0 and e.nodes[x].op == "relu" else None
        case "ne" | "eq":
            if b == 0 and e.nodes[x].op in PREDICATES:
                return x if node.op == "ne" else e.add("not", x)
            return None
        case "pow":
            return _power(e, x, b)
        case "where":
            condition = e.number(x)
            if condition is not None:
                return y if condition else node.inputs[2]
            return y if y == node.inputs[2] else None
        case "fma":
            return e.add("add", x, node.inputs[2]) if b == 1 else None
    return None


def _power(e: Editor, x: int, exponent: float | None) -> int | None:
    if exponent == 0:
        return e.constant(1.0)
    if exponent == 1:
        return x
    if exponent == 2:
        return e.add("mul", x, x)
    if exponent == 3:
        return e.add("mul", e.add("mul", x, x), x)
    if exponent == -1:
        return e.add("reciprocal", x)
    return None  # not sqrt for 0.5: pow(-Inf, 0.5) is Inf
