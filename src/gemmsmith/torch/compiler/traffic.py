"""Which kernels Inductor would make of a graph, so that the bytes that they move can be counted.

A model: between products and other opaque nodes, the pointwise nodes and the reductions of rows that follow one another
are one kernel, which reads each tensor once; reductions of columns are another, and so are those of everything. A
pointwise value is computed again wherever it is read, unless an opaque node reads it, or kernels of several levels do
and it takes more tensors than MOST_READS.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gemmsmith.torch.compiler.nodes import Node, kind, shape, size

Kernel = tuple[str, int]
"""What it does ("rows", "columns", "all"), and its level: how many opaque nodes come before it, one after the other."""
MOST_READS = 4
"""As torch._inductor.config.realize_reads_threshold."""


COMPUTED = ("pointwise", "view", "move")
"""Kinds of nodes that are computed again where they are read."""


class Traffic:
    """Of a graph, as it is when this is made."""

    def __init__(self, graph: Iterable[Node]) -> None:
        self.levels: dict[Node, int] = {}
        self.sources: dict[Node, frozenset[Node]] = {}
        """What lies in memory and a node is computed of."""
        self.readers: dict[Node, frozenset[Kernel]] = {}
        """The kernels that read a node."""
        self.written: set[Node] = set()
        """The nodes that lie in memory."""
        nodes = list(graph)
        for node in reversed(nodes):
            self._place_for_others(node)
        for node in nodes:
            before = max((self.levels[x] for x in node.all_input_nodes), default=0)
            self.levels[node] = before + (kind(node) == "opaque")
            inner = (self.sources[x] for x in node.all_input_nodes)
            again = kind(node) in COMPUTED and node not in self.written
            self.sources[node] = frozenset[Node]().union(*inner) if again else frozenset({node})
        for node in reversed(nodes):
            self.readers[node] = self.kernels(node, node.users)
            later = any(level > self.levels[node] for _, level in self.readers[node])
            if later and len(self.sources[node]) > MOST_READS:
                self.written.add(node)

    def _place_for_others(self, node: Node) -> None:
        """Notes whether a node is opaque, or an opaque node reads it or a view of it."""
        kinds = [(kind(user), user in self.written) for user in node.users]
        read = any(k == "opaque" or (k in ("view", "move") and written) for k, written in kinds)
        if read or kind(node) == "opaque":
            self.written.add(node)

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
