"""Sharing of exponentials between functions of the same value, as of a loss and its gradient."""

from __future__ import annotations

from collections.abc import Sequence

from gemmsmith.core.graph import EpilogueGraph, Node
from gemmsmith.graph.passes.rewrite import Editor, rewrite


def share(graph: EpilogueGraph) -> EpilogueGraph:
    """Compute softplus of x, -x, |x| or -|x| from the sigmoid of one of these, if that is computed anyway.

    The softplus then needs no exponential of its own. The sigmoid is added once more; the pass `cse` merges both.
    """
    signs_of_sigmoid: dict[int, list[str]] = {}
    for node in graph.nodes:
        if node.op == "sigmoid":
            x, signs = _split(graph.nodes, node.inputs[0])
            signs_of_sigmoid.setdefault(x, signs)

    def rule(editor: Editor, node: Node) -> int | None:
        if node.op != "softplus":
            return None
        x, _ = _split(graph.nodes, graph.nodes[editor.index].inputs[0])
        if x not in signs_of_sigmoid:
            return None
        argument = editor.new[x]
        for op in signs_of_sigmoid[x]:
            argument = editor.add(op, argument)
        return editor.add("softplus_of_sigmoid", node.inputs[0], editor.add("sigmoid", argument))

    return rewrite(graph, rule)


def _split(nodes: Sequence[Node], index: int) -> tuple[int, list[str]]:
    """Return a node as (x, ops): the node x to which the ops "neg" and "abs" are applied, in order."""
    ops: list[str] = []
    while nodes[index].op in ("neg", "abs"):
        ops.insert(0, nodes[index].op)
        index = nodes[index].inputs[0]
    return index, ops
