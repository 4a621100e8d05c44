"""Operator fission: decompose an operation if that exposes common subexpressions or saves special-function operations.

The special-function unit has an eighth of the throughput of multiply-adds.
"""

from __future__ import annotations

import math
from collections import Counter

from gemmsmith.core.graph import EpilogueGraph, Node
from gemmsmith.graph.passes.rewrite import Editor, rewrite, use_counts


def fission(graph: EpilogueGraph) -> EpilogueGraph:
    """Decompose silu, div and log where that saves work; never increases the number of special-function operations."""
    sigmoids = {n.inputs[0] for n in graph.nodes if n.op == "sigmoid"}
    division_counts = Counter(
        n.inputs[1] for n in graph.nodes if n.op == "div" and graph.nodes[n.inputs[1]].op != "constant"
    )
    uses = use_counts(graph)
    old: list[Node] = list(graph.nodes)

    def rewrite_node(editor: Editor, node: Node) -> int | None:
        old_node = old[editor.index]
        if node.op == "silu" and old_node.inputs[0] in sigmoids:
            sigmoid = editor.add("sigmoid", node.inputs[0])  # which is computed anyway
            return editor.add("mul", node.inputs[0], sigmoid)
        if node.op == "div" and division_counts[old_node.inputs[1]] > 1:
            reciprocal = editor.add("reciprocal", node.inputs[1])  # one for all divisions
            return editor.add("mul", node.inputs[0], reciprocal)
        if node.op == "log":
            return _log(editor, node, old_node)
        return None

    def _log(editor: Editor, node: Node, old_node: Node) -> int | None:
        """Replace log(sigmoid(x)) by -softplus(-x). Log is monotonic, so it may be moved inside a clamp."""
        inner = editor.nodes[node.inputs[0]]
        if inner.op == "sigmoid" and uses[old_node.inputs[0]] == 1:
            return _log_sigmoid(editor, inner)
        bounds: list[tuple[str, float]] = []
        inner_index = old_node.inputs[0]
        while inner.op in ("maximum", "minimum") and uses[inner_index] == 1:
            constant = next((i for i in inner.inputs if editor.constant_value(i) is not None), None)
            bound = editor.constant_value(constant) if constant is not None else None
            if constant is None or bound is None or bound <= 0:
                return None
            bounds.append((inner.op, bound))
            other = old[inner_index].inputs
            inner_index = next(i for i in other if old[i].op != "constant")
            inner = editor.nodes[next(i for i in inner.inputs if i != constant)]
        if not bounds or inner.op != "sigmoid" or uses[inner_index] != 1:
            return None
        result = _log_sigmoid(editor, inner)
        for op, bound in reversed(bounds):
            result = editor.add(op, result, editor.constant(math.log(bound)))
        return result

    return rewrite(graph, rewrite_node)


def _log_sigmoid(editor: Editor, sigmoid: Node) -> int:
    return editor.add("neg", editor.add("softplus", editor.add("neg", sigmoid.inputs[0])))
