"""What follows one product and may be computed in its epilogue, and how much of that saves the most bytes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from gemmsmith.core.errors import EpilogueError
from gemmsmith.torch.compiler.epilogue import Epilogue, as_stored, is_extreme, is_widening
from gemmsmith.torch.compiler.nodes import Node, dtype, kind, name, row_major, size, value
from gemmsmith.torch.compiler.products import Product
from gemmsmith.torch.compiler.traffic import Traffic, moved, reduces
from gemmsmith.torch.operator import MOST_OPERANDS, MOST_RESULTS

WORTH = 8
"""A fusion is worth it where it saves one byte in so many of those that the product moves."""

MOST_MEMBERS = 100
"""Nodes that a region has: choosing among them takes time that grows with their square."""


@dataclass(frozen=True)
class Choice:
    """Nodes that become an epilogue: `members`, in the graph's order, of which those `stored` are results; those `kept`
    stay in the graph, and are computed of results. `saved`: bytes; `beside`: bytes that the operator's own kernel moves
    and the product's does not; `spared`: Inductor's kernels."""

    members: tuple[Node, ...]
    stored: tuple[Node, ...]
    kept: frozenset[Node]
    saved: int
    beside: int
    spared: int


class Region:
    """The nodes that can be in a product's epilogue, `members`, in the graph's order. `refused`: of those that use one
    of these and are none why not."""

    def __init__(self, product: Product, traffic: Traffic) -> None:
        self.product, self.traffic = product, traffic
        self.epilogue = Epilogue(product, traffic)
        own = (product.node, *product.results.values())
        self.own = [x for x in dict.fromkeys(own) if x in self.epilogue.joined]
        self.members = list(self.own)
        self.refused: dict[Node, str] = {}
        self.below = dict.fromkeys([product.node, *self.own], True)
        self._grow()

    def _grow(self) -> None:
        end = next((x for x in self.traffic.mutations if self.product.node < x), None)
        waiting, seen = [user for x in self.own for user in x.users], set[Node]()
        heapq.heapify(waiting)
        while waiting and len(self.members) < MOST_MEMBERS and (end is None or waiting[0] < end):
            node = heapq.heappop(waiting)
            if node in self.epilogue.joined or node in seen or node.op == "output":
                continue
            seen.add(node)
            try:
                if all(x in self.epilogue.joined or not self._depends(x) for x in node.all_input_nodes):
                    self.epilogue.join(node)
                    self.members.append(node)
                    for user in node.users:
                        heapq.heappush(waiting, user)
            except EpilogueError as error:
                self.refused[node] = str(error).rpartition("\n")[2].strip()

    def _depends(self, node: Node) -> bool:
        """Whether a node is computed of what the product gives."""
        first, found, waiting = self.product.node, set[Node](), [node]
        while waiting:
            x = waiting.pop()
            if first < x and x not in self.below and x not in found:
                found.add(x)
                waiting += x.all_input_nodes
        for x in sorted(found):
            self.below[x] = any(self.below.get(y, False) for y in x.all_input_nodes)
        return self.below.get(node, False)

    # -- what is stored, and what that saves -----------------------------------------------------------------------

    def choice(self) -> Choice | None:
        """The nodes that save the most bytes: those up to some node, without some that nothing else needs. None where
        nothing is saved."""
        tried = [self._choose(self.members[:count]) for count in range(len(self.own) + 1, len(self.members) + 1)]
        best = max(filter(None, tried), key=lambda x: x.saved, default=None)
        while best:
            last = [x for x in best.members if x not in self.own and set(x.users).isdisjoint(best.members)]
            fewer = [self._choose([x for x in best.members if x is not end]) for end in last]
            better = max(filter(None, fewer), key=lambda x: x.saved, default=None)
            if better is None or better.saved < best.saved:
                break
            best = better
        return best

    def _choose(self, members: Sequence[Node]) -> Choice | None:
        stored, kept = self._results(members)
        reads = {x for node in members for x in self.epilogue.reads[node]}
        extremes = (x for x in members if x not in self.own and is_extreme(x))
        if any(as_stored(x.args[0]) not in stored for x in extremes):
            return None  # what is compared with it might be computed again, and differ in a bit
        if not all(map(row_major, stored)):
            return None  # others may depend on its strides
        if len(stored) > MOST_RESULTS or len(reads) > MOST_OPERANDS:
            return None
        saved = self._before(members, stored) - self._after(members, stored, kept, reads)
        whole = moved(self.own)
        if saved * WORTH <= whole:
            return None
        beside = moved(reads) + moved(stored) - whole - moved(self.epilogue.reads[self.product.node])
        spared = self.traffic.spared(set(members) - kept, reads)
        return Choice(tuple(members), tuple(stored), frozenset(kept), saved, beside, spared)

    def _results(self, members: Sequence[Node]) -> tuple[list[Node], set[Node]]:
        """The members that others need and that are stored, and those that are computed of these again: views and
        conditions; and casts, unless they have to lie in memory, too."""
        inside, needed = set(members), set()
        stored: list[Node] = []
        kept: set[Node] = set()
        for node in reversed(members):
            if value(node) is None or not (node in needed or any(user not in inside for user in node.users)):
                continue
            if node not in self.own and (is_cheap(node) or (is_widening(node) and node not in self.traffic.written)):
                kept.add(node)
                needed.update(inside.intersection(node.all_input_nodes))
            else:
                stored.insert(0, node)
        casts = {x for x in stored if is_cast(x) and x.args[0] in stored and x not in self.traffic.written}
        return [node for node in stored if node not in casts], kept | casts

    def _before(self, members: Sequence[Node], stored: Sequence[Node]) -> int:
        """The bytes that the product's results and what Inductor makes of the rest move."""
        count = sum(size(x) * (1 + len(self.traffic.readers[x])) for x in self.own)
        readers: dict[Node, set[object]] = {}
        for node in members:
            for leaf in self.epilogue.reads[node]:
                readers.setdefault(leaf, set()).update(self._computing(node))
        count += sum(size(leaf) * len(kernels) for leaf, kernels in readers.items())
        for x in stored:
            if x not in self.own and (x in self.traffic.written or kind(x) == "reduction"):
                later = [level for _, level in self.traffic.readers[x] if level > self.traffic.levels[x]]
                count += size(x) * (1 + len(later))
        return count

    def _computing(self, node: Node) -> frozenset[object]:
        if node in self.own:
            return frozenset({"product"})
        if kind(node) == "reduction":
            return frozenset({(reduces(node), self.traffic.levels[node])})
        return frozenset(self.traffic.computing(node))

    def _after(self, members: Sequence[Node], stored: Sequence[Node], kept: set[Node], reads: set[Node]) -> int:
        inside = set(members)

        def outside(node: Node) -> set[object]:
            found: set[object] = set()
            for user in node.users:
                found |= outside(user) if user in kept else set()
                found |= set(self.traffic.kernels(node, [user])) if user not in inside else set()
            return found

        count = sum(size(x) * (1 if self.traffic.lies(x) else 2) for x in reads)
        return count + sum(size(x) * (1 + len(outside(x))) for x in stored)


def is_cheap(node: Node) -> bool:
    """Whether a value is no result of an operator: a view, or a condition."""
    return kind(node) == "view" or not dtype(node).is_floating_point


def is_cast(node: Node) -> bool:
    """Whether it changes the dtype of a value alone."""
    return name(node) == "convert_element_type"
