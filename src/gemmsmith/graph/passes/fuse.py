"""Operator fusion and fission: replace operations by others that take fewer instructions, or that share some.

The special-function unit has an eighth of the throughput of multiply-adds.
"""

from __future__ import annotations

import math
from collections import Counter

from gemmsmith.core.graph import EpilogueGraph, Node
from gemmsmith.graph.approximations import GELU_A, GELU_B
from gemmsmith.graph.passes.rewrite import (
    Editor,
    Pattern,
    PatternTable,
    eliminate_dead_code,
    pattern_table,
    replace_by_pattern,
    rewrite,
    use_counts,
)

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


def fission(graph: EpilogueGraph) -> EpilogueGraph:
    """Decompose silu, div and log where that saves work; never increases the number of special-function operations.

    silu(x) becomes x sigmoid(x) if the sigmoid is computed anyway; x / y becomes x (1 / y) if y divides several values;
    log(sigmoid(x)) becomes -softplus(-x).
    """
    sigmoids = {n.inputs[0] for n in graph.nodes if n.op == "sigmoid"}
    division_counts = Counter(
        n.inputs[1] for n in graph.nodes if n.op == "div" and graph.nodes[n.inputs[1]].op != "constant"
    )
    uses = use_counts(graph)

    def rule(editor: Editor, node: Node) -> int | None:
        old_inputs = graph.nodes[editor.index].inputs
        if node.op == "silu" and old_inputs[0] in sigmoids:
            sigmoid = editor.add("sigmoid", node.inputs[0])  # which is computed anyway
            return editor.add("mul", node.inputs[0], sigmoid)
        if node.op == "div" and division_counts[old_inputs[1]] > 1:
            reciprocal = editor.add("reciprocal", node.inputs[1])  # one for all divisions
            return editor.add("mul", node.inputs[0], reciprocal)
        return log_of(editor, old_inputs[0]) if node.op == "log" else None

    def log_of(editor: Editor, x: int) -> int | None:
        """Add the logarithm of the old node `x` if it is sigmoid(y), as -softplus(-y), or a clamp of that; else None.

        The logarithm is monotonic, so that log(min(x, c)) is min(log(x), log(c)). If x has other users, it is computed
        anyway, and nothing is saved.
        """
        node = graph.nodes[x]
        if uses[x] > 1:
            return None
        if node.op == "sigmoid":
            return editor.add("neg", editor.add("softplus", editor.add("neg", editor.new[node.inputs[0]])))
        if node.op in ("maximum", "minimum"):
            for clamped, bound in (node.inputs, node.inputs[::-1]):
                limit = graph.nodes[bound]
                if limit.op == "constant" and limit.attribute > 0 and (log := log_of(editor, clamped)) is not None:
                    return editor.add(node.op, log, editor.constant(math.log(limit.attribute)))
        return None

    return rewrite(graph, rule)
