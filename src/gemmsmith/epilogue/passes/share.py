"""Common subexpressions: equal nodes become one, and equal graphs equal.

Inputs of commutative functions are put in order, and nodes are numbered as a walk from the results meets them, so
that a function and a hand-built tree of the same meaning give the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

from gemmsmith.core.graph import Graph, Node
from gemmsmith.epilogue.passes.rewrite import Editor, rewritten

COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum", "eq", "ne", "and", "or"})


def _sorted_inputs(node: Node, key: Callable[[int], Any]) -> list[int]:
    """A node's inputs, those that may change places in the order of a key."""
    count = len(node.inputs) if node.op in COMMUTATIVE else 2 if node.op == "fma" else 0
    return [*sorted(node.inputs[:count], key=key), *node.inputs[count:]]


def share(graph: Graph) -> Graph:
    """Each value computed once; nodes in a canonical order."""
    return _ordered(_merged(graph))


def _merged(graph: Graph) -> Graph:
    known: dict[Node, int] = {}

    def rule(e: Editor, node: Node) -> int:
        node = replace(node, inputs=tuple(_sorted_inputs(node, int)))
        if node not in known:
            e.nodes.append(node)
            known[node] = len(e.nodes) - 1
        return known[node]

    return rewritten(graph, rule)


def _ordered(graph: Graph) -> Graph:
    """Numbered in post-order from the results, commutative inputs by what they are, then by number."""
    looks = _looks(graph)
    order: list[int] = []
    renumbered: dict[int, int] = {}

    def inputs(node: Node) -> list[int]:
        return _sorted_inputs(node, looks.__getitem__)

    for r in graph.results:
        stack = [(r.node, False)]
        while stack:
            i, done = stack.pop()
            if i in renumbered:
                continue
            if done:
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


def _looks(graph: Graph) -> list[str]:
    """A digest of what each node computes, the same however nodes are numbered."""
    looks: list[str] = []
    for node in graph.nodes:
        parts = [looks[i] for i in _sorted_inputs(node, looks.__getitem__)]
        looks.append(sha256(f"{node.op}|{node.value!r}|{'|'.join(parts)}".encode()).hexdigest())
    return looks
