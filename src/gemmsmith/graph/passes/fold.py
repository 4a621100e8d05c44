"""Constant folding and algebraic simplification, exact in IEEE arithmetic except for the sign of zeros.

Not done, because of Inf and NaN: x * 0 -> 0, x - x -> 0, x / x -> 1, exp(log(x)) -> x.
"""

from __future__ import annotations

import math

import numpy as np

from gemmsmith.core.dtypes import DType, overflow_as_fp32
from gemmsmith.core.graph import EpilogueGraph, Node
from gemmsmith.graph.functions import Function
from gemmsmith.graph.passes.rewrite import Editor, rewrite

_IDEMPOTENT = {"abs", "relu", "floor", "round", "sign"}
"""Functions with f(f(x)) = f(x)."""
_NEVER_NEGATIVE = {"abs", "relu", "exp", "exp2", "sqrt", "sigmoid", "softplus", "ndtr"}


def fold(graph: EpilogueGraph) -> EpilogueGraph:
    """Evaluate functions of constants and remove operations that change nothing."""
    return rewrite(graph, _rule)


def _rule(editor: Editor, node: Node) -> int | None:
    """Return the node's replacement, folded repeatedly: -x * -1 becomes -(-x), which becomes x."""
    replacement = _fold_once(editor, node)
    while replacement is not None and (further := _fold_once(editor, editor.nodes[replacement])) is not None:
        replacement = further
    return replacement


def _fold_once(editor: Editor, node: Node) -> int | None:
    function = node.operation
    if not isinstance(function, Function):
        return _cast(editor, node) if node.op == "cast" else None
    constants = [editor.constant_value(i) for i in node.inputs]
    if all(x is not None for x in constants):
        with np.errstate(all="ignore"):
            return editor.constant(float(function.reference(*(np.float64(x) for x in constants if x is not None))))
    return _unary(editor, node) if len(node.inputs) == 1 else _binary(editor, node, constants)


def _cast(editor: Editor, node: Node) -> int | None:
    """Remove a cast of values that are exact in its dtype."""
    return node.inputs[0] if _is_exact_in(editor, node.attribute, node.inputs[0]) else None


def _is_exact_in(editor: Editor, dtype: DType, x: int) -> bool:
    """Return whether a value is known to be exact in a dtype."""
    node = editor.nodes[x]
    if node.operation.commutes_with_rounding:
        return _is_exact_in(editor, dtype, node.inputs[0])
    if node.op == "operand":
        return editor.old.operand(node.attribute).dtype == dtype
    return node.op == "cast" and bool(node.attribute == dtype)


def _unary(editor: Editor, node: Node) -> int | None:
    x = node.inputs[0]
    inner = editor.nodes[x]
    if node.op == inner.op == "neg" or (node.op == inner.op == "not"):
        return inner.inputs[0]
    if node.op == inner.op and node.op in _IDEMPOTENT:
        return x
    if node.op == "abs" and inner.op == "neg":
        return editor.add("abs", inner.inputs[0])
    if node.op in ("abs", "relu") and inner.op in _NEVER_NEGATIVE:
        return x
    return None


def _binary(editor: Editor, node: Node, constants: list[float | None]) -> int | None:
    x, y = node.inputs[0], node.inputs[1]
    a, b = constants[0], constants[1]
    match node.op:
        case "add":
            return x if b == 0 else y if a == 0 else None
        case "sub":
            return x if b == 0 else editor.add("neg", y) if a == 0 else None
        case "mul":
            factor, other = (x, b) if b is not None else (y, a)
            return factor if other == 1 else editor.add("neg", factor) if other == -1 else None
        case "div":
            if b is not None and b != 0 and math.frexp(b)[0] in (0.5, -0.5) and overflow_as_fp32(1 / b) == 1 / b:
                return x if b == 1 else editor.add("mul", x, editor.constant(1 / b))  # a power of two: exact
            return None
        case "maximum" | "minimum":
            return x if x == y else None
        case "gt" | "le":
            return (
                editor.add(node.op, editor.nodes[x].inputs[0], y) if b == 0 and editor.nodes[x].op == "relu" else None
            )
        case "ne" | "eq":
            if b == 0 and editor.nodes[x].operation.is_predicate:
                return x if node.op == "ne" else editor.add("not", x)
            return None
        case "pow":
            return _power(editor, x, b)
        case "where":
            condition = editor.constant_value(x)
            if condition is not None:
                return y if condition else node.inputs[2]
            return y if y == node.inputs[2] else None
        case "fma":
            return editor.add("add", x, node.inputs[2]) if b == 1 else None
    return None


def _power(editor: Editor, x: int, exponent: float | None) -> int | None:
    if exponent == 0:
        return editor.constant(1.0)
    if exponent == 1:
        return x
    if exponent == 2:
        return editor.add("mul", x, x)
    if exponent == 3:
        return editor.add("mul", editor.add("mul", x, x), x)
    if exponent == -1:
        return editor.add("reciprocal", x)
    return None  # pow(x, 0.5) is not replaced by sqrt: pow(-Inf, 0.5) is Inf
