"""Operator fusion: replace several operations by one that takes fewer instructions."""

from __future__ import annotations

import math
from collections import Counter

from gemmsmith.core.graph import EpilogueGraph, Node
from gemmsmith.graph.approximations import GELU_A, GELU_B
from gemmsmith.graph.passes.patterns import Pattern, PatternTable, pattern_table, replace_by_pattern
from gemmsmith.graph.passes.rewrite import Editor, eliminate_dead_code, rewrite, use_counts

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


FUSION_PATTERNS = pattern_table(
    [
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
)
FMA_PATTERNS = pattern_table(
    [
        (("add", ("mul", "x", "y"), "z"), ("fma", "x", "y", "z")),
        (("sub", ("mul", "x", "y"), "z"), ("fma", "x", "y", ("neg", "z"))),
        (("sub", "z", ("mul", "x", "y")), ("fma", ("neg", "x"), "y", "z")),
    ]
)
"""Fused multiply-adds, in which a negation is free. Used last, so that no other pattern loses its multiplication."""


def fuse(graph: EpilogueGraph) -> EpilogueGraph:
    """Replace expressions that are known functions written out, such as x * sigmoid(x), by these functions."""
    return _apply(graph, FUSION_PATTERNS)


def multiply_add(graph: EpilogueGraph) -> EpilogueGraph:
    """Replace multiplications whose only use is an addition by fused multiply-adds."""
    return _apply(graph, FMA_PATTERNS)


def _apply(graph: EpilogueGraph, table: PatternTable) -> EpilogueGraph:
    """Replace nodes by patterns. A constant matches a pattern's number to six digits, as users write them."""
    graph = eliminate_dead_code(graph)  # nodes that no result needs do not count as users
    old_uses = use_counts(graph)
    uses: Counter[int] = Counter()  # of the new nodes: as many as of the old nodes that they replace

    def rule(editor: Editor, node: Node) -> int:
        # with `uses`, a pattern does not match if another node needs one of its inner nodes
        new = replace_by_pattern(table, editor, node, uses, rel_tol=1e-6)
        new = editor.keep(node) if new is None else new
        uses[new] = old_uses[editor.index]
        return new

    return rewrite(graph, rule)
