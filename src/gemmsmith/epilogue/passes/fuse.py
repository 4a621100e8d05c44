"""Operator fusion: several operations become one that the chip computes in fewer instructions."""

from __future__ import annotations

import math
from collections import Counter

from gemmsmith.core.graph import Graph, Node
from gemmsmith.epilogue.functions import GELU_A, GELU_B
from gemmsmith.epilogue.passes.patterns import Matcher, Pattern
from gemmsmith.epilogue.passes.rewrite import Editor, pruned, rewritten, use_counts

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
"""sqrt(2 / pi) (x + 0.044715 x^3), in its ways of writing."""


def _halves(inner: Pattern) -> list[Pattern]:
    """0.5 x (1 + inner), in its ways of writing."""
    one = ("add", 1, inner)
    return [("mul", ("mul", 0.5, "x"), one), ("mul", 0.5, ("mul", "x", one)), ("mul", "x", ("mul", 0.5, one))]


FUSIONS: list[tuple[Pattern, Pattern]] = [
    (("detach", "x"), "x"),
    (("reciprocal", ("add", 1, ("exp", ("neg", "x")))), ("sigmoid", "x")),
    (("div", 1, ("add", 1, ("exp", ("neg", "x")))), ("sigmoid", "x")),
    (("mul", 0.5, ("add", 1, ("tanh", ("mul", 0.5, "x")))), ("sigmoid", "x")),
    (("div", "x", ("add", 1, ("exp", ("neg", "x")))), ("silu", "x")),
    (("mul", "x", ("sigmoid", "x")), ("silu", "x")),
    (("mul", "x", ("tanh", ("softplus", "x"))), ("mish", "x")),
    *((half, ("gelu", "x")) for half in _halves(("erf", ("mul", math.sqrt(0.5), "x")))),
    *((half, ("gelu", "x")) for half in _halves(("erf", ("div", "x", math.sqrt(2))))),
    *((half, ("gelu_tanh", "x")) for t in _TANH_ARGUMENTS for half in _halves(("tanh", t))),
    (("log", ("add", 1, ("exp", "x"))), ("softplus", "x")),
    (("log1p", ("exp", "x")), ("softplus", "x")),
    (("log", ("add", 1, "x")), ("log1p", "x")),
    (("sub", ("exp", "x"), 1), ("expm1", "x")),
    (("div", 1, ("sqrt", "x")), ("rsqrt", "x")),
    (("reciprocal", ("sqrt", "x")), ("rsqrt", "x")),
    (("div", 1, "x"), ("reciprocal", "x")),
    (("maximum", "x", 0), ("relu", "x")),
]
"""(pattern, replacement); the first pattern that matches is used. A variable matches any value."""
MULTIPLY_ADD: list[tuple[Pattern, Pattern]] = [
    (("add", ("mul", "x", "y"), "z"), ("fma", "x", "y", "z")),
    (("sub", ("mul", "x", "y"), "z"), ("fma", "x", "y", ("neg", "z"))),
    (("sub", "z", ("mul", "x", "y")), ("fma", ("neg", "x"), "y", "z")),
]
"""Last, so that no other pattern loses its multiplication; a negation is free in the instruction."""


def fuse(graph: Graph) -> Graph:
    """Known functions written out become that function."""
    return _apply(graph, FUSIONS)


def multiply_add(graph: Graph) -> Graph:
    """A multiplication whose only use is an addition becomes one fused multiply-add."""
    return _apply(graph, MULTIPLY_ADD)


def _apply(graph: Graph, table: list[tuple[Pattern, Pattern]]) -> Graph:
    graph = pruned(graph)  # nodes that no result needs do not count as users
    uses = use_counts(graph)
    old_of: dict[int, int] = {}

    def rule(e: Editor, node: Node) -> int:
        # Uses are counted in the old graph; a node that is kept has its old node's.
        matcher = Matcher(e.nodes, Counter({new: uses[old] for new, old in old_of.items()}))
        for pattern, replacement in table:
            found = matcher.match(pattern, node)
            if found is not None:
                made = _build(e, replacement, found)
                break
        else:
            e.nodes.append(node)
            made = len(e.nodes) - 1
        old_of[made] = e.index
        return made

    return rewritten(graph, rule)


def _build(e: Editor, pattern: Pattern, bound: dict[str, int]) -> int:
    if isinstance(pattern, str):
        return bound[pattern]
    op, *parts = pattern
    return e.add(op, *(_build(e, part, bound) for part in parts))
