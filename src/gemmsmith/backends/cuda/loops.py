"""The loops of a piece of code, given by the instructions that may follow each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Loop:
    """A natural loop. `body`: the numbers of its instructions. `each`: those that are executed in every iteration."""

    body: frozenset[int]
    each: frozenset[int]

    @property
    def some(self) -> frozenset[int]:
        """The instructions that are not executed in every iteration."""
        return self.body - self.each


def loops(successors: Sequence[Sequence[int]]) -> list[Loop]:
    """All loops that can be reached from instruction 0, in the order of their first instructions."""
    order = _postorder(successors)
    rank = {node: i for i, node in enumerate(order)}
    before: dict[int, list[int]] = {node: [] for node in order}
    for node in order:
        for after in successors[node]:
            before[after].append(node)
    dominator = _dominators(order, rank, before)
    latches: dict[int, list[int]] = {}
    for node in order:
        for after in successors[node]:
            if after in _chain(dominator, node):
                latches.setdefault(after, []).append(node)
    found = []
    for header, ends in sorted(latches.items()):
        body, todo = {header}, list(ends)
        while todo:
            if (node := todo.pop()) not in body:
                body.add(node)
                todo += before[node]
        each = set.intersection(*(set(_chain(dominator, end)) for end in ends)) & body
        found.append(Loop(frozenset(body), frozenset(each)))
    return found


def _postorder(successors: Sequence[Sequence[int]]) -> list[int]:
    """What can be reached from instruction 0, in postorder of a depth-first search."""
    order, seen, stack = [], {0}, [(0, iter(successors[0]))]
    while stack:
        node, rest = stack[-1]
        after = next((x for x in rest if x not in seen), None)
        if after is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(after)
            stack.append((after, iter(successors[after])))
    return order


def _dominators(order: list[int], rank: dict[int, int], before: dict[int, list[int]]) -> dict[int, int]:
    """The immediate dominator of each instruction: the last one before it that every path to it goes through (Cooper,
    Harvey, Kennedy, "A Simple, Fast Dominance Algorithm")."""
    dominator, changed = {0: 0}, True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            first, *others = (x for x in before[node] if x in dominator)
            for other in others:
                while first != other:
                    if rank[first] < rank[other]:
                        first = dominator[first]
                    else:
                        other = dominator[other]
            if dominator.get(node) != first:
                dominator[node], changed = first, True
    return dominator


def _chain(dominator: dict[int, int], node: int) -> list[int]:
    """An instruction and those that dominate it."""
    found = [node]
    while node:
        node = dominator[node]
        found.append(node)
    return found
