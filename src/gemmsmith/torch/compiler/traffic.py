"""Which kernels Inductor would make of a graph, so that the bytes that they move can be counted.

A model: between products and other opaque nodes, the pointwise nodes and the reductions of rows that follow one another
are one kernel, which reads each tensor once; reductions of columns are another, and so are those of everything. A
pointwise value is computed again wherever it is read, unless an opaque node reads it, or kernels of several levels do
and it takes more tensors than MOST_READS.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

import torch

from gemmsmith.torch.compiler.nodes import Node, kind, mutates, shape, size

T = TypeVar("T")
Kernel = tuple[str, int]
"""What it does ("rows", "columns", "all"), and its level: how many opaque nodes come before it, one after the other."""
MOST_READS = 4
"""As torch._inductor.config.realize_reads_threshold."""


COMPUTED = ("pointwise", "view", "move")
"""Kinds of nodes that are computed again where they are read."""
WORK = ("pointwise", "reduction", "lookup")
"""Kinds of nodes that kernels compute."""


class Traffic:
    """Of a graph. `update` keeps it right when the graph is changed."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.levels: dict[Node, int] = {}
        self.sources: dict[Node, frozenset[Node]] = {}
        """What lies in memory and a node is computed of, up to one more than MOST_READS."""
        self.readers: dict[Node, frozenset[Kernel]] = {}
        """The kernels that read a node."""
        self.needed: dict[Node, bool] = {}
        """Whether a node is opaque, or an opaque node reads it or a view of it."""
        self.written: set[Node] = set()
        """The nodes that lie in memory."""
        self.work: dict[Kernel, set[Node]] = defaultdict(set)
        """The nodes that kernels store or reduce."""
        self.mutations = [node for node in graph.nodes if mutates(node)]
        self.update(graph.nodes)

    def update(self, nodes: Iterable[Node]) -> None:
        """After some nodes have been made, or have other users."""
        found = {*nodes}
        found |= _settle(sorted(found, reverse=True), self._need, lambda node: node.all_input_nodes)
        found |= _settle(sorted(found), self._source, lambda node: node.users)
        _settle(sorted(found, reverse=True), self._read, lambda node: node.all_input_nodes)

    # Each of these three computes something about a node, and returns whether it has changed.

    def _need(self, node: Node) -> bool:
        views = (user for user in node.users if kind(user) in ("view", "move"))
        opaque = kind(node) == "opaque" or any(kind(user) == "opaque" for user in node.users)
        return _put(self.needed, node, opaque or any(self.needed[user] for user in views))

    def _source(self, node: Node) -> bool:
        """A level stays what it was at first: a product with an epilogue runs where the last of its nodes did."""
        before = max((self.levels[x] for x in node.all_input_nodes), default=0)
        self.levels.setdefault(node, before + (kind(node) == "opaque"))
        found = {node}
        if kind(node) in COMPUTED and not self.needed[node]:
            found = {leaf for x in node.all_input_nodes for leaf in self.sources[x]}
        return _put(self.sources, node, frozenset(list(found)[: MOST_READS + 1]))

    def _read(self, node: Node) -> bool:
        readers = self.kernels(node, node.users)
        later = any(level > self.levels[node] for _, level in readers)
        written = self.needed[node] or (later and len(self.sources[node]) > MOST_READS)
        changed = written != (node in self.written)
        (self.written.add if written else self.written.discard)(node)
        if kind(node) in WORK:
            works = written or kind(node) == "reduction"
            (self.work[self.kernel(node)].add if works else self.work[self.kernel(node)].discard)(node)
        return _put(self.readers, node, readers) or changed

    def kernel(self, node: Node) -> Kernel:
        """The kernel that stores a pointwise node, or reduces."""
        return reduces(node) if kind(node) == "reduction" else "rows", self.levels[node]

    def spared(self, nodes: Collection[Node], stored: Iterable[Node]) -> int:
        """How many kernels fewer there are where nothing computes some nodes, and others have to be stored."""

        def needed(kernel: Kernel) -> bool:
            return any(x.users and x not in nodes for x in self.work[kernel])

        known = {self.kernel(x) for x in nodes if kind(x) in WORK and x in self.work[self.kernel(x)]}
        more = {self.kernel(x) for x in stored if kind(x) in WORK and x not in self.written}
        return sum(not needed(kernel) for kernel in known) - sum(not needed(kernel) for kernel in more)

    def kernels(self, node: Node, users: Collection[Node]) -> frozenset[Kernel]:
        """The kernels that read a node for some of its users."""
        found: set[Kernel] = set()
        for user in users:
            match kind(user):
                case "view" | "move":
                    found |= self.readers[user]
                case "reduction":
                    found.add((reduces(user), self.levels[user]))
                case "pointwise":
                    found |= self.computing(user)
        return frozenset(found)

    def computing(self, node: Node) -> frozenset[Kernel]:
        """The kernels that compute a pointwise node: those that read it, or, if it is written, those of its level."""
        if node not in self.written:
            return self.readers[node]
        found = {kernel for kernel in self.readers[node] if kernel[1] == self.levels[node]}
        return frozenset(found | {("rows", self.levels[node])})

    def lies(self, node: Node) -> bool:
        """Whether a node, or that of which it is a view, is in memory."""
        while kind(node) in ("view", "move") and node not in self.written:
            node = node.args[0]
        return node in self.written


def _settle(starts: list[Node], rule: Callable[[Node], bool], onward: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Applies a rule to nodes, and onward from those where it says that something has changed, which are returned."""
    waiting, changed = deque(starts), set[Node]()
    pending = set(starts)
    while waiting:
        node = waiting.popleft()
        pending.remove(node)
        if rule(node):
            changed.add(node)
            more = [x for x in onward(node) if x not in pending]
            waiting.extend(more)
            pending.update(more)
    return changed


def _put(known: dict[Node, T], node: Node, found: T) -> bool:
    """Whether what is found of a node is new; it is known then."""
    if node in known and known[node] == found:
        return False
    known[node] = found
    return True


def reduces(node: Node) -> str:
    """What a reduction's kernel does."""
    rank = len(shape(node.args[0]))
    dims = node.args[1] if len(node.args) > 1 else None
    dims = range(rank) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    reduced = {d % rank for d in dims} if rank else set()
    return "all" if len(reduced) == rank else "rows" if reduced == {rank - 1} else "columns"


def moved(nodes: Iterable[Node]) -> int:
    """The bytes of some nodes together."""
    return sum(size(node) for node in nodes)
