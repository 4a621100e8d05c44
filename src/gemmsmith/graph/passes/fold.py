"""Constant folding and algebraic simplification, exact in IEEE arithmetic except for the sign of zeros.

Not done, because of Inf and NaN: x * 0 -> 0, x - x -> 0, x / x -> 1, exp(log(x)) -> x.
"""

from __future__ import annotations

import math

import numpy as np

from gemmsmith.core.dtypes import DType, overflow_as_fp32
from gemmsmith.core.graph import EpilogueGraph, Node
from gemmsmith.graph.functions import Function
from gemmsmith.graph.passes.rewrite import Editor, pattern_table, replace_by_pattern, rewrite

_IDEMPOTENT = {"abs", "relu", "floor", "round", "sign"}
"""Functions with f(f(x)) = f(x)."""
_NEVER_NEGATIVE = {"abs", "relu", "exp", "exp2", "sqrt", "sigmoid", "softplus", "ndtr"}
_PATTERNS = pattern_table(
    [
        (("neg", ("neg", "x")), "x"),
        (("not", ("not", "x")), "x"),
        (("abs", ("neg", "x")), ("abs", "x")),
        (("add", "x", 0), "x"),
        (("sub", "x", 0), "x"),
        (("sub", 0, "x"), ("neg", "x")),
        (("mul", "x", 1), "x"),
        (("mul", "x", -1), ("neg", "x")),
        (("div", "x", 1), "x"),
        (("maximum", "x", "x"), "x"),
        (("minimum", "x", "x"), "x"),
        (("gt", ("relu", "x"), 0), ("gt", "x", 0)),
        (("le", ("relu", "x"), 0), ("le", "x", 0)),
        (("pow", "x", 0), 1),
        (("pow", "x", 1), "x"),
        (("pow", "x", 2), ("mul", "x", "x")),
        (("pow", "x", 3), ("mul", ("mul", "x", "x"), "x")),
        (("pow", "x", -1), ("reciprocal", "x")),  # pow(x, 0.5) is not sqrt(x): pow(-Inf, 0.5) is Inf
        (("where", "condition", "x", "x"), "x"),
        (("fma", "x", 1, "y"), ("add", "x", "y")),
    ]
)


def fold(graph: EpilogueGraph) -> EpilogueGraph:
    """Evaluate functions of constants and remove operations that change nothing."""
    return rewrite(graph, _rule)


def _rule(editor: Editor, node: Node) -> int | None:
    """Return the node's replacement, folded until no rule applies: -x * -1 becomes -(-x), then x. None to keep it."""
    replacement = _fold_once(editor, node)
    while replacement is not None and (further := _fold_once(editor, editor.nodes[replacement])) is not None:
        replacement = further
    return replacement


def _fold_once(editor: Editor, node: Node) -> int | None:
    """Return the node that replaces a node by the first rule that applies, or None."""
    function = node.operation
    if not isinstance(function, Function):
        is_exact = node.op == "cast" and _is_exact_in(editor, node.attribute, node.inputs[0])
        return node.inputs[0] if is_exact else None
    constants = [editor.constant_value(i) for i in node.inputs]
    if all(x is not None for x in constants):
        with np.errstate(all="ignore"):
            return editor.constant(float(function.reference(*(np.float64(x) for x in constants if x is not None))))
    folded = _fold_of_input(editor, node, constants)
    return replace_by_pattern(_PATTERNS, editor, node) if folded is None else folded


def _fold_of_input(editor: Editor, node: Node, constants: list[float | None]) -> int | None:
    """Fold by rules that are no patterns, and return the replacement or None. `constants`: values of constant inputs.

    They are f(f(x)) = f(x), f(x) = x for x >= 0, division by a power of two, comparison of a predicate with 0, and
    where() with a constant condition.
    """
    x, inner, b = node.inputs[0], editor.nodes[node.inputs[0]], constants[-1]
    if (node.op == inner.op and node.op in _IDEMPOTENT) or (node.op in ("abs", "relu") and inner.op in _NEVER_NEGATIVE):
        return x
    if node.op == "div" and b and abs(math.frexp(b)[0]) == 0.5 and overflow_as_fp32(1 / b) == 1 / b != 1:
        return editor.add("mul", x, editor.constant(1 / b))  # a power of two: exact
    if node.op in ("ne", "eq") and b == 0 and inner.operation.is_predicate:
        return x if node.op == "ne" else editor.add("not", x)
    if node.op == "where" and constants[0] is not None:
        return node.inputs[1 if constants[0] else 2]
    return None


def _is_exact_in(editor: Editor, dtype: DType, x: int) -> bool:
    """Return whether the node `x` is known to have only values that `dtype` represents, so that a cast changes none."""
    node = editor.nodes[x]
    if node.operation.commutes_with_rounding:
        return _is_exact_in(editor, dtype, node.inputs[0])
    if node.op == "operand":
        return editor.old.operand(node.attribute).dtype == dtype
    return node.op == "cast" and bool(node.attribute == dtype)
