"""Natural loops of a control-flow graph, which is given by the successors of each instruction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Loop:
    """A natural loop.

    `body`: indices of its instructions. `unconditional`: those that execute in every iteration (dominate all latches).
    """

    body: frozenset[int]
    unconditional: frozenset[int]

    @property
    def conditional(self) -> frozenset[int]:
        """Instructions that do not execute in every iteration."""
        return self.body - self.unconditional


def find_loops(successors: Sequence[Sequence[int]]) -> list[Loop]:
    """Return all loops reachable from instruction 0, in the order of their first instructions."""
    order = _postorder(successors)
    postorder_index = {node: i for i, node in enumerate(order)}
    predecessors: dict[int, list[int]] = {node: [] for node in order}
    for node in order:
        for successor in successors[node]:
            predecessors[successor].append(node)
    dominator = _immediate_dominators(order, postorder_index, predecessors)
    latches: dict[int, list[int]] = {}
    for node in order:
        for successor in successors[node]:
            if successor in _dominator_chain(dominator, node):
                latches.setdefault(successor, []).append(node)
    result = []
    for header, header_latches in sorted(latches.items()):
        body, todo = {header}, list(header_latches)
        while todo:
            if (node := todo.pop()) not in body:
                body.add(node)
                todo += predecessors[node]
        unconditional = set.intersection(*(set(_dominator_chain(dominator, x)) for x in header_latches)) & body
        result.append(Loop(frozenset(body), frozenset(unconditional)))
    return result


def _postorder(successors: Sequence[Sequence[int]]) -> list[int]:
    """Return the instructions reachable from 0, in postorder of a depth-first search."""
    order, seen, stack = [], {0}, [(0, iter(successors[0]))]
    while stack:
        node, rest = stack[-1]
        successor = next((x for x in rest if x not in seen), None)
        if successor is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(successor)
            stack.append((successor, iter(successors[successor])))
    return order


def _immediate_dominators(
    order: list[int], postorder_index: dict[int, int], predecessors: dict[int, list[int]]
) -> dict[int, int]:
    """Return the immediate dominator of each instruction.

    Source: Cooper, Harvey, Kennedy, "A Simple, Fast Dominance Algorithm".
    """
    dominator, changed = {0: 0}, True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            first, *others = (x for x in predecessors[node] if x in dominator)
            for other in others:
                while first != other:
                    if postorder_index[first] < postorder_index[other]:
                        first = dominator[first]
                    else:
                        other = dominator[other]
            if dominator.get(node) != first:
                dominator[node], changed = first, True
    return dominator


def _dominator_chain(dominator: dict[int, int], node: int) -> list[int]:
    """Return an instruction and its dominators."""
    chain = [node]
    while node:
        node = dominator[node]
        chain.append(node)
    return chain
