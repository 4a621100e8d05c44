"""Reduction elimination: reductions whose value is known, a simpler reduction of the same value, and the same
reduction asked for twice.

A reduction of a constant is not computed: the second step writes its value (launches.py). Equal reductions of equal
values become one node by `share`; results that reduce the same value over the same axis by the same rule (sum and mean)
share one set of partials (epilogue/device/reductions.py).
"""

from __future__ import annotations

from gemmsmith.core.graph import Graph, Node
from gemmsmith.epilogue.passes.rewrite import Editor, rewritten

_NEVER_NEGATIVE = frozenset({"abs", "relu", "exp", "exp2", "sqrt", "sigmoid", "softplus"})


def reductions(graph: Graph) -> Graph:
    """Removes an operation before a reduction that the reduction repeats."""
    return rewritten(graph, _rule)


def _rule(e: Editor, node: Node) -> int | None:
    if node.op != "reduce":
        return None
    kind, _ = node.value
    inner = e.nodes[node.inputs[0]]
    if inner.op == "abs" and e.nodes[inner.inputs[0]].op in _NEVER_NEGATIVE:
        return e.add("reduce", inner.inputs[0], value=node.value)
    if kind in ("max", "min") and inner.op in ("maximum", "minimum") and inner.inputs[0] == inner.inputs[1]:
        return e.add("reduce", inner.inputs[0], value=node.value)
    return None
