"""Rewriting of a graph: its nodes are visited in order, and replaced by the results of rules, or of patterns.

A pattern is a variable ("x", which matches any value), a number (which matches constants), or (op, pattern, ...).
Commutative functions match in either order. A replacement is a pattern, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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


Pattern = Any
Bindings = dict[str, int]
"""The nodes for which the variables of a pattern stand."""
PatternTable = dict[str, list[tuple[Pattern, Pattern]]]
"""(pattern, replacement) by the operation of the pattern's root."""


def pattern_table(rows: Sequence[tuple[Pattern, Pattern]]) -> PatternTable:
    """Return the table of (pattern, replacement) rows. The first pattern that matches a node is used."""
    table: PatternTable = {}
    for pattern, replacement in rows:
        table.setdefault(pattern[0], []).append((pattern, replacement))
    return table


def replace_by_pattern(
    table: PatternTable, editor: Editor, node: Node, uses: Counter[int] | None = None, rel_tol: float = 0.0
) -> int | None:
    """Add the replacement of a node and return its index; None if no pattern of the table matches.

    `uses`: how often each node of `editor` is used. With it a pattern's inner nodes must have a single use, or they
    would be computed twice. `rel_tol`: the relative difference that constants may have from a pattern's numbers.
    """
    matcher = _Matcher(editor.nodes, uses, rel_tol)
    for pattern, replacement in table.get(node.op, ()):
        for bindings in matcher.matches(pattern, node, {}):
            return _instantiate(editor, replacement, bindings)
    return None


class _Matcher(NamedTuple):
    """Matches patterns to `nodes`; `uses` and `rel_tol` as in `replace_by_pattern`."""

    nodes: Sequence[Node]
    uses: Counter[int] | None
    rel_tol: float

    def matches(self, pattern: Pattern, node: Node, known: Bindings) -> list[Bindings]:
        """Return the bindings with which a node matches a pattern (op, pattern, ...), each an extension of `known`.

        There are several if a commutative operation matches in either order, and none if it does not match.
        """
        op, *operands = pattern
        if node.op != op:
            return []
        matches: list[Bindings] = []
        first, *others = node.inputs
        for inputs in (node.inputs, (others[0], first, *others[1:])) if op in COMMUTATIVE else (node.inputs,):
            ways = [known]
            for operand, index in zip(operands, inputs, strict=True):
                ways = [x for bindings in ways for x in self._input_matches(operand, index, bindings)]
            matches += ways
        return matches

    def _input_matches(self, pattern: Pattern, index: int, known: Bindings) -> list[Bindings]:
        """Return the bindings with which the node `index`, an input of a matched node, matches a pattern."""
        node = self.nodes[index]
        if isinstance(pattern, str):
            return [{**known, pattern: index}] if known.get(pattern, index) == index else []
        if isinstance(pattern, (int, float)):
            is_equal = node.op == "constant" and math.isclose(node.attribute, pattern, rel_tol=self.rel_tol)
            return [known] if is_equal else []
        return [] if self.uses and self.uses[index] > 1 else self.matches(pattern, node, known)


def _instantiate(editor: Editor, pattern: Pattern, bindings: Bindings) -> int:
    """Add the nodes of a replacement, with `bindings` for its variables, and return the index of its value."""
    if isinstance(pattern, str):
        return bindings[pattern]
    if isinstance(pattern, (int, float)):
        return editor.constant(pattern)
    op, *operands = pattern
    return editor.add(op, *(_instantiate(editor, operand, bindings) for operand in operands))
