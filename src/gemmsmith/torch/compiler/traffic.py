"""A model of the kernels that Inductor would make of a graph, and of the bytes that they move.

Approximates Inductor's scheduler: between matmuls and other opaque nodes, chains of pointwise ops and row reductions
form one kernel, which reads each of its inputs once. Column reductions form another kernel, and full reductions a
third. A pointwise value is recomputed by each kernel that reads it, unless an opaque node reads it, or kernels of
several opaque depths read it and computing it takes more than MAX_READS tensors.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

import torch

from gemmsmith.torch.compiler.nodes import Node, is_mutating, node_kind, reduced_dims, shape, size_bytes

T = TypeVar("T")
KernelKey = tuple[str, int]
"""A kernel, identified by what it reduces over ("rows", also for pointwise kernels, "columns" or "all"), and its opaque
depth: the maximum number of opaque nodes, such as matmuls, on a path from an input of the graph to it."""
MAX_READS = 4
"""Maximum tensors from which a value that kernels of several opaque depths read may be recomputed. Source: Inductor's
default of torch._inductor.config.realize_reads_threshold."""


RECOMPUTED_KINDS = ("pointwise", "view", "strided_view")
"""Kinds of nodes that are recomputed where they are read, unless they are materialized."""
KERNEL_KINDS = ("pointwise", "reduction", "gather")
"""Kinds of nodes that take a kernel to compute."""


class InductorTraffic:
    """The kernels that Inductor would make of an FX graph. Call `update` after the graph has changed.

    A node is materialized if a kernel stores it in memory; others are recomputed by each kernel that reads them.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.opaque_depths: dict[Node, int] = {}
        """Nodes to the maximum number of opaque nodes on a path from an input of the graph to them."""
        self.materialized_sources: dict[Node, frozenset[Node]] = {}
        """Nodes to the materialized nodes that they are computed from, at most MAX_READS + 1."""
        self.reader_kernels: dict[Node, frozenset[KernelKey]] = {}
        """Nodes to the kernels that read them."""
        self.must_materialize: dict[Node, bool] = {}
        """Nodes to whether they are opaque, or an opaque node reads them or a view of them."""
        self.materialized: set[Node] = set()
        """The nodes that are stored in memory (Inductor: realized)."""
        self.work: dict[KernelKey, set[Node]] = defaultdict(set)
        """Kernels to the nodes that they store or reduce."""
        self.mutations = [node for node in graph.nodes if is_mutating(node)]
        self.update(graph.nodes)

    def update(self, nodes: Iterable[Node]) -> None:
        """Update the model after `nodes` have been inserted into the graph, or the sets of their users have changed."""
        changed = {*nodes}
        changed |= _run_to_fixpoint(
            sorted(changed, reverse=True), self._update_must_materialize, lambda node: node.all_input_nodes
        )
        changed |= _run_to_fixpoint(sorted(changed), self._update_materialized_sources, lambda node: node.users)
        _run_to_fixpoint(sorted(changed, reverse=True), self._update_readers, lambda node: node.all_input_nodes)

    # The next three recompute a property of a node and return whether it has changed.

    def _update_must_materialize(self, node: Node) -> bool:
        """Find whether a node has to be in memory: it is opaque, or an opaque node reads it or a view of it."""
        views = (user for user in node.users if node_kind(user) in ("view", "strided_view"))
        opaque = node_kind(node) == "opaque" or any(node_kind(user) == "opaque" for user in node.users)
        return _update(self.must_materialize, node, opaque or any(self.must_materialize[user] for user in views))

    def _update_materialized_sources(self, node: Node) -> bool:
        # The opaque depth is set once: a fused matmul runs where the last of its nodes did.
        """Find from which stored nodes a node is computed, and set its opaque depth."""
        depth = max((self.opaque_depths[x] for x in node.all_input_nodes), default=0)
        self.opaque_depths.setdefault(node, depth + (node_kind(node) == "opaque"))
        materialized_sources = {node}
        if node_kind(node) in RECOMPUTED_KINDS and not self.must_materialize[node]:
            materialized_sources = {leaf for x in node.all_input_nodes for leaf in self.materialized_sources[x]}
        return _update(self.materialized_sources, node, frozenset(list(materialized_sources)[: MAX_READS + 1]))

    def _update_readers(self, node: Node) -> bool:
        """Find which kernels read a node, and whether it is materialized.

        It is if it must be, or if a kernel of a greater opaque depth reads it and it would be recomputed from more than
        MAX_READS tensors.
        """
        readers = self.kernels_of_users(node.users)
        read_later = any(depth > self.opaque_depths[node] for _, depth in readers)
        is_expensive = len(self.materialized_sources[node]) > MAX_READS
        is_materialized = self.must_materialize[node] or (read_later and is_expensive)
        changed = is_materialized != (node in self.materialized)
        (self.materialized.add if is_materialized else self.materialized.discard)(node)
        if node_kind(node) in KERNEL_KINDS:
            stores_or_reduces = is_materialized or node_kind(node) == "reduction"
            (self.work[self.kernel(node)].add if stores_or_reduces else self.work[self.kernel(node)].discard)(node)
        return _update(self.reader_kernels, node, readers) or changed

    def kernel(self, node: Node) -> KernelKey:
        """Return the kernel that stores a pointwise node, or computes a reduction."""
        return reduction_kind(node) if node_kind(node) == "reduction" else "rows", self.opaque_depths[node]

    def kernels_saved(self, nodes: Collection[Node], materialized: Iterable[Node]) -> int:
        """Return how many kernels fewer run if `nodes` need not be computed, but `materialized` must be in memory.

        A kernel runs as long as any other node that it stores or reduces is needed.
        """

        def is_needed(kernel: KernelKey) -> bool:
            return any(x.users and x not in nodes for x in self.work[kernel])

        current = {self.kernel(x) for x in nodes if node_kind(x) in KERNEL_KINDS and x in self.work[self.kernel(x)]}
        added = {self.kernel(x) for x in materialized if node_kind(x) in KERNEL_KINDS and x not in self.materialized}
        return sum(not is_needed(kernel) for kernel in current) - sum(not is_needed(kernel) for kernel in added)

    def kernels_of_users(self, users: Collection[Node]) -> frozenset[KernelKey]:
        """Return the kernels that read a node whose users are `users`: those that compute these or their views.

        Opaque nodes and gathers do not count.
        """
        kernels: set[KernelKey] = set()
        for user in users:
            match node_kind(user):
                case "view" | "strided_view":
                    kernels |= self.reader_kernels[user]
                case "reduction" | "pointwise":
                    kernels |= self.kernels_computing(user)
        return frozenset(kernels)

    def kernels_computing(self, node: Node) -> frozenset[KernelKey]:
        """Return the kernels that compute a pointwise node or a reduction.

        A pointwise node is computed by each kernel that reads it. If it is materialized, the kernels of its own opaque
        depth compute it, one of which stores it.
        """
        if node_kind(node) == "reduction":
            return frozenset([self.kernel(node)])
        if node not in self.materialized:
            return self.reader_kernels[node]
        kernels = {kernel for kernel in self.reader_kernels[node] if kernel[1] == self.opaque_depths[node]}
        return frozenset(kernels | {self.kernel(node)})

    def is_materialized(self, node: Node) -> bool:
        """Return whether a node, or the node it is a view of, is materialized."""
        while node_kind(node) in ("view", "strided_view") and node not in self.materialized:
            node = node.args[0]
        return node in self.materialized


def _run_to_fixpoint(
    nodes: list[Node], rule: Callable[[Node], bool], successors: Callable[[Node], Iterable[Node]]
) -> set[Node]:
    """Apply `rule` to nodes, and to the `successors` of those for which it returns True, until nothing changes.

    `rule`: recomputes a property of a node, and returns whether it has changed. Returns the nodes that have changed.
    """
    waiting, changed = deque(nodes), set[Node]()
    pending = set(nodes)
    while waiting:
        node = waiting.popleft()
        pending.remove(node)
        if rule(node):
            changed.add(node)
            added = [x for x in successors(node) if x not in pending]
            waiting.extend(added)
            pending.update(added)
    return changed


def _update(values: dict[Node, T], node: Node, value: T) -> bool:
    """Store a node's value in `values`, and return whether it was not there or differs from the former one."""
    if node in values and values[node] == value:
        return False
    values[node] = value
    return True


def reduction_kind(node: Node) -> str:
    """Return what a reduction node reduces over: "rows" (the last dimension), "all" or "columns"."""
    reduced, rank = reduced_dims(node), len(shape(node.args[0]))
    return "all" if len(reduced) == rank else "rows" if reduced == {rank - 1} else "columns"


def total_bytes(nodes: Iterable[Node]) -> int:
    """Return the sum of the sizes of nodes' tensors in bytes."""
    return sum(size_bytes(node) for node in nodes)
