"""Rewriting of a graph: visits its nodes in order and replaces each by the result of a rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from gemmsmith.core.graph import EpilogueGraph, Node

COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum", "eq", "ne", "and", "or", "fma"})
"""Operations whose first two inputs are interchangeable."""
Rule = Callable[["Editor", Node], int | None]
"""(editor, node with inputs in the new graph) -> index of the new node that replaces it, or None to keep it."""


class Editor:
    """The new graph under construction, while a pass visits the nodes of the old one in order."""

    def __init__(self, old: EpilogueGraph) -> None:
        """Begin with no nodes. `old`: the graph that is rewritten."""
        self.old = old
        self.nodes: list[Node] = []
        self.new: list[int] = []
        """Indices of the new nodes that replace the old ones visited so far."""

    @property
    def index(self) -> int:
        return len(self.new)

    def add(self, op: str, *inputs: int, attribute: object = None) -> int:
        """Add a node with the visited node's source location, and return its index."""
        return self.keep(Node(op, inputs, attribute, self.old.nodes[self.index].location))

    def keep(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def constant(self, x: float) -> int:
        return self.add("constant", attribute=x)

    def constant_value(self, index: int) -> float | None:
        """Return the value of a constant node, or None for other nodes."""
        node = self.nodes[index]
        return node.attribute if node.op == "constant" else None


def rewrite(graph: EpilogueGraph, rule: Rule) -> EpilogueGraph:
    """Replace each node, in topological order, by the rule's result, then eliminate dead code."""
    editor = Editor(graph)
    for node in graph.nodes:
        remapped = replace(node, inputs=tuple(editor.new[j] for j in node.inputs))
        replacement = rule(editor, remapped)
        editor.new.append(editor.keep(remapped) if replacement is None else replacement)
    results = tuple(replace(r, node=editor.new[r.node]) for r in graph.results)
    return eliminate_dead_code(replace(graph, nodes=tuple(editor.nodes), results=results))


def eliminate_dead_code(graph: EpilogueGraph) -> EpilogueGraph:
    """Remove the nodes and operands that no result needs."""
    needed = sorted(graph.nodes_needed_by(r.node for r in graph.results))
    renumbered = {old: i for i, old in enumerate(needed)}
    live = (graph.nodes[old] for old in needed)
    nodes = tuple(replace(node, inputs=tuple(renumbered[j] for j in node.inputs)) for node in live)
    read = {n.attribute for n in nodes if n.op == "operand"}
    return replace(
        graph, nodes=nodes, operands=tuple(o for o in graph.operands if o.name in read),
        results=tuple(replace(r, node=renumbered[r.node]) for r in graph.results),
    )  # fmt: skip


def use_counts(graph: EpilogueGraph) -> Counter[int]:
    """Count the uses of each node, by nodes and as a result."""
    counts = Counter(source for source, _ in graph.edges())
    counts.update(r.node for r in graph.results)
    return counts
