"""Rewriting a graph: its nodes are visited in order, each replaced by what a rule makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from gemmsmith.core.graph import Graph, Node

Rule = Callable[["Editor", Node], int | None]
"""(editor, node with inputs of the new graph) -> the new node that stands for it; None keeps it."""


class Editor:
    """The new graph while it grows."""

    def __init__(self, old: Graph) -> None:
        self.old = old
        self.nodes: list[Node] = []
        self.index = 0
        """The old node being visited."""

    def add(self, op: str, *inputs: int, value: object = None, where: str = "") -> int:
        self.nodes.append(Node(op, inputs, value, where or self.old.nodes[self.index].where))
        return len(self.nodes) - 1

    def constant(self, x: float) -> int:
        return self.add("constant", value=x)

    def number(self, index: int) -> float | None:
        """A constant's value."""
        node = self.nodes[index]
        return node.value if node.op == "constant" else None


def rewritten(graph: Graph, rule: Rule) -> Graph:
    """The graph with each node replaced by what the rule gives; nodes that no result needs are dropped."""
    editor, new = Editor(graph), list[int]()
    for i, node in enumerate(graph.nodes):
        editor.index = i
        moved = replace(node, inputs=tuple(new[j] for j in node.inputs))
        made = rule(editor, moved)
        if made is None:
            editor.nodes.append(moved)
            made = len(editor.nodes) - 1
        new.append(made)
    results = tuple(replace(r, node=new[r.node]) for r in graph.results)
    return pruned(replace(graph, nodes=tuple(editor.nodes), results=results))


def pruned(graph: Graph) -> Graph:
    """The graph without the nodes and operands that no result needs."""
    needed = sorted(graph.reachable())
    renumbered = {old: i for i, old in enumerate(needed)}
    kept = (graph.nodes[old] for old in needed)
    nodes = tuple(replace(node, inputs=tuple(renumbered[j] for j in node.inputs)) for node in kept)
    read = {n.value for n in nodes if n.op == "operand"}
    return replace(
        graph, nodes=nodes, operands=tuple(o for o in graph.operands if o.name in read),
        results=tuple(replace(r, node=renumbered[r.node]) for r in graph.results),
    )  # fmt: skip


def use_counts(graph: Graph) -> Counter[int]:
    """How often each node is used, by nodes and as a result."""
    counts = Counter(source for source, _ in graph.users())
    counts.update(r.node for r in graph.results)
    return counts
