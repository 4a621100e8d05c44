"""Operator fusion: replace several operations by one that takes fewer instructions.

A pattern is a variable ("x", which matches any value), a number (which matches constants, to six digits), or (op,
pattern, ...). Commutative functions match in either order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gemmsmith.core.graph import EpilogueGraph, Node
from gemmsmith.graph.approximations import GELU_A, GELU_B
from gemmsmith.graph.passes.cse import COMMUTATIVE
from gemmsmith.graph.passes.rewrite import Editor, eliminate_dead_code, rewrite, use_counts

Pattern = Any


class Matcher:
    """Matches patterns against nodes. Inner nodes must have a single use, or they would be computed twice."""

    def __init__(self, nodes: Sequence[Node], uses: Counter[int]) -> None:
        self.nodes, self.uses = nodes, uses

    def match(self, pattern: Pattern, node: Node) -> dict[str, int] | None:
        """Return the variables' nodes if `node` matches, else None."""
        return self._match_node(pattern, node, {})

    def _match_node(self, pattern: Pattern, node: Node, bindings: dict[str, int]) -> dict[str, int] | None:
        op, *operands = pattern
        if node.op != op or len(node.inputs) != len(operands):
            return None
        orders = [node.inputs, node.inputs[::-1]] if op in COMMUTATIVE else [node.inputs]
        if op == "fma":
            a, b, c = node.inputs
            orders = [(a, b, c), (b, a, c)]
        for inputs in orders:
            extended: dict[str, int] | None = dict(bindings)
            for operand, index in zip(operands, inputs, strict=True):
                extended = self._match_input(operand, index, extended) if extended is not None else None
            if extended is not None:
                return extended
        return None

    def _match_input(self, pattern: Pattern, index: int, bindings: dict[str, int]) -> dict[str, int] | None:
        node = self.nodes[index]
        if isinstance(pattern, str):
            if bindings.setdefault(pattern, index) != index:
                return None
            return bindings
        if isinstance(pattern, (int, float)):
            is_equal = node.op == "constant" and math.isclose(node.attribute, pattern, rel_tol=1e-6)
            return bindings if is_equal else None
        if self.uses[index] > 1:
            return None
        return self._match_node(pattern, node, bindings)


_SQUARES: list[Pattern] = [("mul", GELU_B, ("mul", "x", "x")), ("mul", ("mul", GELU_B, "x"), "x")]
_CUBES: list[Pattern] = [
    ("mul", GELU_B, ("mul", ("mul", "x", "x"), "x")),
    ("mul", GELU_B, ("pow", "x", 3)),
    *(("mul", square, "x") for square in _SQUARES),
]
_TANH_ARGUMENTS: list[Pattern] = [
    *(("mul", GELU_A, ("add", "x", cube)) for cube in _CUBES),
    *(("mul", GELU_A, ("mul", "x", ("add", 1, square))) for square in _SQUARES),
    *(("mul", ("mul", GELU_A, "x"), ("add", 1, square)) for square in _SQUARES),
]
"""Patterns of sqrt(2 / pi) (x + 0.044715 x^3)."""

_ERFS: list[Pattern] = [("erf", ("mul", math.sqrt(0.5), "x")), ("erf", ("div", "x", math.sqrt(2)))]
"""Patterns of erf(x / sqrt(2))."""


def _halves(inner: Pattern) -> list[Pattern]:
    """Return the patterns of 0.5 x (1 + inner)."""
    one = ("add", 1, inner)
    return [("mul", ("mul", 0.5, "x"), one), ("mul", 0.5, ("mul", "x", one)), ("mul", "x", ("mul", 0.5, one))]


FUSION_PATTERNS: list[tuple[Pattern, Pattern]] = [
    (("detach", "x"), "x"),
    (("reciprocal", ("add", 1, ("exp", ("neg", "x")))), ("sigmoid", "x")),
    (("div", 1, ("add", 1, ("exp", ("neg", "x")))), ("sigmoid", "x")),
    (("mul", 0.5, ("add", 1, ("tanh", ("mul", 0.5, "x")))), ("sigmoid", "x")),
    (("div", "x", ("add", 1, ("exp", ("neg", "x")))), ("silu", "x")),
    (("mul", "x", ("sigmoid", "x")), ("silu", "x")),
    (("mul", "x", ("tanh", ("softplus", "x"))), ("mish", "x")),
    *((half, ("gelu", "x")) for erf in _ERFS for half in _halves(erf)),
    *((half, ("gelu_tanh", "x")) for t in _TANH_ARGUMENTS for half in _halves(("tanh", t))),
    *((("add", 0.5, ("mul", 0.5, erf)), ("ndtr", "x")) for erf in _ERFS),
    *((("mul", 0.5, ("add", 1, erf)), ("ndtr", "x")) for erf in _ERFS),
    (("mul", "x", ("ndtr", "x")), ("gelu", "x")),
    (("log", ("add", 1, ("exp", "x"))), ("softplus", "x")),
    (("log1p", ("exp", "x")), ("softplus", "x")),
    (("add", ("relu", "x"), ("softplus", ("neg", ("abs", "x")))), ("softplus", "x")),
    (("sub", ("minimum", "x", 0), ("softplus", ("neg", ("abs", "x")))), ("neg", ("softplus", ("neg", "x")))),
    (("log", ("add", 1, "x")), ("log1p", "x")),
    (("sub", ("exp", "x"), 1), ("expm1", "x")),
    (("div", 1, ("sqrt", "x")), ("rsqrt", "x")),
    (("reciprocal", ("sqrt", "x")), ("rsqrt", "x")),
    (("div", 1, "x"), ("reciprocal", "x")),
    (("maximum", "x", 0), ("relu", "x")),
]
"""(pattern, replacement); the first pattern that matches is used."""
FMA_PATTERNS: list[tuple[Pattern, Pattern]] = [
    (("add", ("mul", "x", "y"), "z"), ("fma", "x", "y", "z")),
    (("sub", ("mul", "x", "y"), "z"), ("fma", "x", "y", ("neg", "z"))),
    (("sub", "z", ("mul", "x", "y")), ("fma", ("neg", "x"), "y", "z")),
]
"""(pattern, replacement) of fused multiply-adds, in which a negation is free. Used last, so that no other pattern loses
its multiplication."""


def fuse(graph: EpilogueGraph) -> EpilogueGraph:
    """Replace known functions that are written out."""
    return _apply(graph, FUSION_PATTERNS)


def multiply_add(graph: EpilogueGraph) -> EpilogueGraph:
    """Replace multiplications whose only use is an addition by fused multiply-adds."""
    return _apply(graph, FMA_PATTERNS)


def _apply(graph: EpilogueGraph, table: list[tuple[Pattern, Pattern]]) -> EpilogueGraph:
    """Replace each node by the first pattern of the table that matches it."""
    graph = eliminate_dead_code(graph)  # nodes that no result needs do not count as users
    old_uses = use_counts(graph)
    uses: Counter[int] = Counter()  # of the new nodes: as many as of the old nodes that they replace

    def replacement_of(editor: Editor, node: Node) -> int:
        matcher = Matcher(editor.nodes, uses)
        matches = ((replacement, matcher.match(pattern, node)) for pattern, replacement in table)
        replacement, bindings = next((x for x in matches if x[1] is not None), (None, None))
        if bindings is None:
            editor.nodes.append(node)
            new = len(editor.nodes) - 1
        else:
            new = _instantiate(editor, replacement, bindings)
        uses[new] = old_uses[editor.index]
        return new

    return rewrite(graph, replacement_of)


def _instantiate(editor: Editor, pattern: Pattern, bindings: dict[str, int]) -> int:
    """Add a pattern's nodes, with the nodes that its variables stand for, and return the index of its value."""
    if isinstance(pattern, str):
        return bindings[pattern]
    op, *operands = pattern
    return editor.add(op, *(_instantiate(editor, operand, bindings) for operand in operands))
