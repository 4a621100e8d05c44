"""Common subexpression elimination, a canonical form of graphs, and sharing of exponentials.

Inputs of commutative functions are sorted and nodes are numbered in post-order from the results, so that a function
and an equivalent hand-built visitor tree result in the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from gemmsmith.core.graph import EpilogueGraph, Node
from gemmsmith.graph.passes.rewrite import COMMUTATIVE, Editor, rewrite


def _sorted_inputs(node: Node, key: Callable[[int], Any]) -> list[int]:
    """Return a node's inputs, with the two that are interchangeable, if any, sorted by `key`."""
    count = 2 if node.op in COMMUTATIVE else 0
    return [*sorted(node.inputs[:count], key=key), *node.inputs[count:]]


def cse(graph: EpilogueGraph) -> EpilogueGraph:
    """Merge equal nodes and sort nodes into a canonical order."""
    return _renumber(_merge_equal_nodes(graph))


def _merge_equal_nodes(graph: EpilogueGraph) -> EpilogueGraph:
    canonical: dict[Node, int] = {}

    def rule(editor: Editor, node: Node) -> int:
        node = replace(node, inputs=tuple(_sorted_inputs(node, int)))
        if node not in canonical:
            canonical[node] = editor.keep(node)
        return canonical[node]

    return rewrite(graph, rule)


def _renumber(graph: EpilogueGraph) -> EpilogueGraph:
    """Renumber nodes in post-order from the results, with commutative inputs sorted by digest.

    The order then depends on the expressions alone, not on how the graph was built. The stack is explicit, since graphs
    may be deeper than Python's recursion limit.
    """
    digests = _digests(graph)
    order: list[int] = []
    renumbered: dict[int, int] = {}

    def inputs(node: Node) -> list[int]:
        return _sorted_inputs(node, digests.__getitem__)

    for r in graph.results:
        stack = [(r.node, False)]
        while stack:
            i, done = stack.pop()
            if i in renumbered:
                continue
            if done:  # its inputs have been numbered
                renumbered[i] = len(order)
                order.append(i)
                continue
            stack.append((i, True))
            stack += [(j, False) for j in reversed(inputs(graph.nodes[i]))]
    nodes = tuple(replace(graph.nodes[i], inputs=tuple(renumbered[j] for j in inputs(graph.nodes[i]))) for i in order)
    return replace(
        graph, nodes=nodes, operands=tuple(sorted(graph.operands, key=lambda o: o.name)),
        results=tuple(replace(r, node=renumbered[r.node]) for r in graph.results),
    )  # fmt: skip


def _digests(graph: EpilogueGraph) -> list[str]:
    """Return a digest of each node's expression, which does not depend on the numbering."""
    digests: list[str] = []
    for node in graph.nodes:
        input_digests = [digests[i] for i in _sorted_inputs(node, digests.__getitem__)]
        digests.append(sha256(f"{node.op}|{node.attribute!r}|{'|'.join(input_digests)}".encode()).hexdigest())
    return digests


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
