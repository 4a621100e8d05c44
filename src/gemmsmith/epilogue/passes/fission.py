"""Operator fission: an operation is taken apart where another then shares its work, or where it saves
special-function operations, of which the chip does one for eight multiply-adds."""

from __future__ import annotations

import math
from collections import Counter

from gemmsmith.core.graph import Graph, Node
from gemmsmith.epilogue.passes.rewrite import Editor, rewritten, use_counts

SPECIAL_FUNCTION_OPERATIONS = {
    "exp": 1, "exp2": 1, "log": 1, "log2": 1, "rsqrt": 1, "sqrt": 1, "reciprocal": 1, "div": 1, "sin": 1, "cos": 1,
    "sigmoid": 2, "silu": 2, "softplus": 2, "tanh": 1, "gelu_tanh": 1, "mish": 2, "pow": 2,
    "hypot": 1, "logaddexp": 2,
}  # fmt: skip
"""An element's, by function (epilogue/functions.py); those not listed have none."""


def fission(graph: Graph) -> Graph:
    """See the module. No case raises the number of special-function operations."""
    sigmoids = {n.inputs[0] for n in graph.nodes if n.op == "sigmoid"}
    divisors = Counter(n.inputs[1] for n in graph.nodes if n.op == "div" and graph.nodes[n.inputs[1]].op != "constant")
    uses = use_counts(graph)
    old: list[Node] = list(graph.nodes)

    def rule(e: Editor, node: Node) -> int | None:
        before = old[e.index]
        if node.op == "silu" and before.inputs[0] in sigmoids:
            return e.add("mul", node.inputs[0], e.add("sigmoid", node.inputs[0]))  # the sigmoid is there anyway
        if node.op == "div" and divisors[before.inputs[1]] > 1:
            return e.add("mul", node.inputs[0], e.add("reciprocal", node.inputs[1]))  # one for all
        if node.op == "log":
            return _log(e, node, before)
        return None

    def _log(e: Editor, node: Node, before: Node) -> int | None:
        """log(sigmoid(x)) = -softplus(-x), and log is monotonic: it may go under a clamp."""
        inner = e.nodes[node.inputs[0]]
        if inner.op == "sigmoid" and uses[before.inputs[0]] == 1:
            return _log_sigmoid(e, inner)
        bounds: list[tuple[str, float]] = []
        inner_index = before.inputs[0]
        while inner.op in ("maximum", "minimum") and uses[inner_index] == 1:
            number = next((i for i in inner.inputs if e.number(i) is not None), None)
            bound = e.number(number) if number is not None else None
            if number is None or bound is None or bound <= 0:
                return None
            bounds.append((inner.op, bound))
            other = old[inner_index].inputs
            inner_index = next(i for i in other if old[i].op != "constant")
            inner = e.nodes[next(i for i in inner.inputs if i != number)]
        if not bounds or inner.op != "sigmoid" or uses[inner_index] != 1:
            return None
        made = _log_sigmoid(e, inner)
        for op, bound in reversed(bounds):
            made = e.add(op, made, e.constant(math.log(bound)))
        return made

    return rewritten(graph, rule)


def _log_sigmoid(e: Editor, sigmoid: Node) -> int:
    return e.add("neg", e.add("softplus", e.add("neg", sigmoid.inputs[0])))
