"""Operator fission: decompose an operation if that exposes common subexpressions or saves special-function operations.

The special-function unit has an eighth of the throughput of multiply-adds.
"""

from __future__ import annotations

import math
from collections import Counter

from gemmsmith.core.graph import EpilogueGraph, Node
from gemmsmith.graph.passes.rewrite import Editor, rewrite, use_counts


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
