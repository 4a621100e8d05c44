"""The nodes after a matmul that its epilogue can compute, and the choice of those that save the most bytes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gemmsmith.core.errors import EpilogueError
from gemmsmith.torch.compiler.fx_epilogue import FxEpilogueTracer, is_min_or_max, is_widening, strip_views_and_widening
from gemmsmith.torch.compiler.matmuls import Matmul
from gemmsmith.torch.compiler.nodes import Node, dtype, fake_tensor, is_row_major, node_kind, op_name, size_bytes
from gemmsmith.torch.compiler.traffic import InductorTraffic, total_bytes
from gemmsmith.torch.ops import MAX_OPERANDS, MAX_RESULTS

MIN_SAVED_FRACTION = 1 / 8
"""Bytes that a fusion has to save, as a fraction of the size of the matmul's results. Chosen; not measured."""

MAX_REGION_NODES = 100
"""Nodes of a region, at most: choosing among them takes time quadratic in their number. Chosen; not measured."""


@dataclass(frozen=True)
class FusionCandidate:
    """A set of nodes that may be fused into a matmul. Nodes are in the graph's order.

    Attributes:
        nodes: the nodes that the epilogue computes, the matmul's own included.
        outputs: those of them that the fused operator stores.
        recomputed: those of them that stay in the graph, and are recomputed from outputs.
        bytes_saved: the bytes that the whole graph moves less.
        extra_bytes: the bytes that the fused kernel moves in addition to the matmul's.
        kernels_saved: the number of Inductor's kernels that are no longer launched.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[Node, ...]
    recomputed: frozenset[Node]
    bytes_saved: int
    extra_bytes: int
    kernels_saved: int


class Region:
    """The nodes that can be in a matmul's epilogue.

    Attributes:
        matmul: the matmul, or a pair of them.
        epilogue: the epilogue of all these nodes.
        roots: the matmul's own nodes: its results.
        nodes: all nodes, in the graph's order, the roots first.
        rejected: nodes that read one of these, but cannot be fused, with the reasons.
        depends_memo: whether a node depends on the matmul, as far as it is known.
    """

    def __init__(self, matmul: Matmul, traffic: InductorTraffic) -> None:
        """Find all nodes after the matmul that its epilogue can compute."""
        self.matmul, self.traffic = matmul, traffic
        self.epilogue = FxEpilogueTracer(matmul, traffic)
        roots = (*matmul.nodes, *matmul.results.values())
        self.roots = [x for x in dict.fromkeys(roots) if x in self.epilogue.fused]
        self.nodes = list(self.roots)
        self.rejected: dict[Node, str] = {}
        self.depends_memo = dict.fromkeys([*matmul.nodes, *self.roots], True)
        self._grow()

    def _grow(self) -> None:
        """Fuse users of fused nodes, in the graph's order, up to the next node that changes a tensor in place.

        A node is fused if each of its inputs is, or does not depend on the matmul. It comes after all its inputs.
        """
        end = next((x for x in self.traffic.mutations if self.matmul.node < x), None)
        waiting, seen = list[Node](), set(self.epilogue.fused)

        def add_users(node: Node) -> None:
            """Add the users of a fused node to the waiting ones, except those that were added before."""
            for user in node.users:
                if user not in seen:
                    seen.add(user)
                    heapq.heappush(waiting, user)

        for root in self.roots:
            add_users(root)
        while waiting and len(self.nodes) < MAX_REGION_NODES and (end is None or waiting[0] < end):
            node = heapq.heappop(waiting)
            # an epilogue can read what does not depend on the matmul
            is_known = all(x in self.epilogue.fused or not self._depends_on_matmul(x) for x in node.all_input_nodes)
            if node.op == "output" or not is_known:
                continue
            try:
                self.epilogue.fuse(node)
            except EpilogueError as error:
                self.rejected[node] = str(error).rpartition("\n")[2].strip()
            else:
                self.nodes.append(node)
                add_users(node)

    def _depends_on_matmul(self, node: Node) -> bool:
        """Return whether a node depends on the matmul, and note it in `depends_memo` for all nodes between both.

        Nodes compare by their places in the graph: x < y if x is before y, and so does not depend on it.
        """
        matmul, undecided, waiting = self.matmul.node, set[Node](), [node]
        while waiting:
            x = waiting.pop()
            if matmul < x and x not in self.depends_memo and x not in undecided:
                undecided.add(x)
                waiting += x.all_input_nodes
        for x in sorted(undecided):
            self.depends_memo[x] = any(self.depends_memo.get(y, False) for y in x.all_input_nodes)
        return self.depends_memo.get(node, False)

    def reads_both(self, nodes: Sequence[Node]) -> bool:
        """Return whether one of these nodes is computed from both matmuls of a pair."""
        sources: dict[Node, frozenset[Node]] = {x: frozenset([x]) for x in self.matmul.nodes}
        for node in nodes:
            if node not in sources:
                sources[node] = frozenset().union(*(sources.get(x, frozenset()) for x in node.all_input_nodes))
        return any(len(x) == 2 for x in sources.values())

    @property
    def plain_candidate(self) -> FusionCandidate:
        """The candidate that replaces the matmul and fuses nothing that follows it."""
        outputs = [x for x in self.roots if fake_tensor(x) is not None]
        return FusionCandidate(tuple(self.roots), tuple(outputs), frozenset(), 0, 0, 0)

    # -- choosing what to fuse -------------------------------------------------------------------------------------

    def best_candidate(self) -> FusionCandidate | None:
        """Return the candidate that saves the most bytes, or None if none saves enough.

        Tries all prefixes of `nodes`. Then drops nodes that no other node of the best one reads, one after the other,
        as long as that does not save less.
        """
        prefixes = [self._candidate(self.nodes[:count]) for count in range(len(self.roots) + 1, len(self.nodes) + 1)]
        best = max(filter(None, prefixes), key=lambda x: x.bytes_saved, default=None)
        while best:
            final = [x for x in best.nodes if x not in self.roots and set(x.users).isdisjoint(best.nodes)]
            smaller = [self._candidate([x for x in best.nodes if x is not dropped]) for dropped in final]
            better = max(filter(None, smaller), key=lambda x: x.bytes_saved, default=None)
            if better is None or better.bytes_saved < best.bytes_saved:
                break
            best = better
        return best

    def _candidate(self, nodes: Sequence[Node]) -> FusionCandidate | None:
        """Return the fusion of these nodes; None if it is impossible or does not save enough bytes."""
        outputs, recomputed = self._outputs(nodes)
        inputs = {x for node in nodes for x in self.epilogue.inputs_read[node]}
        min_max_nodes = (x for x in nodes if x not in self.roots and is_min_or_max(x))
        if any(strip_views_and_widening(x.args[0]) not in outputs for x in min_max_nodes):
            return None  # its gradient compares elements with it: recomputed ones might differ in a bit
        computed = (x for x in nodes if x not in self.roots and not is_transparent(x))
        if may_have_backward() and any(is_compared_in_backward(x) for x in computed):
            return None
        if not all(map(is_row_major, outputs)):
            return None  # other nodes may depend on the strides
        if len(outputs) > MAX_RESULTS or len(inputs) > MAX_OPERANDS:
            return None
        bytes_saved = self._bytes_unfused(nodes, outputs) - self._bytes_fused(nodes, outputs, recomputed, inputs)
        matmul_bytes = total_bytes(self.roots)
        if bytes_saved <= matmul_bytes * MIN_SAVED_FRACTION:
            return None
        without_epilogue = matmul_bytes + total_bytes(self.epilogue.inputs_read[self.matmul.node])
        extra_bytes = total_bytes(inputs) + total_bytes(outputs) - without_epilogue
        kernels_saved = self.traffic.kernels_saved(set(nodes) - recomputed, inputs)
        return FusionCandidate(
            tuple(nodes), tuple(outputs), frozenset(recomputed), bytes_saved, extra_bytes, kernels_saved
        )

    def _outputs(self, nodes: Sequence[Node]) -> tuple[list[Node], set[Node]]:
        """Return which of these nodes the fused operator stores, and which are recomputed from stored ones.

        Those are the nodes that nodes outside read. Views, conditions (bools), and casts that need not be in memory are
        recomputed in the kernels that read them.
        """
        inside, needed = set(nodes), set()
        outputs: list[Node] = []
        recomputed: set[Node] = set()
        for node in reversed(nodes):
            if fake_tensor(node) is None or not (node in needed or any(user not in inside for user in node.users)):
                continue
            is_free = node_kind(node) == "view" or (is_widening(node) and node not in self.traffic.materialized)
            is_condition = not dtype(node).is_floating_point
            if node not in self.roots and (is_free or is_condition):
                recomputed.add(node)
                needed.update(inside.intersection(node.all_input_nodes))
            else:
                outputs.insert(0, node)
        casts = {x for x in outputs if op_name(x) == "convert_element_type" and x.args[0] in outputs}
        casts -= self.traffic.materialized
        return [node for node in outputs if node not in casts], recomputed | casts

    def _bytes_unfused(self, nodes: Sequence[Node], outputs: Sequence[Node]) -> int:
        """Return the bytes that are moved without fusing.

        These are the bytes of the matmul's results, written once and read by each kernel, of the nodes' other inputs,
        and of the `outputs` that Inductor stores.
        """
        total = sum(size_bytes(x) * (1 + len(self.traffic.reader_kernels[x])) for x in self.roots)  # 1: it is written
        kernels_by_input: dict[Node, set[object]] = {}
        for node in nodes:
            for input_ in self.epilogue.inputs_read[node]:
                kernels = ["matmul"] if node in self.roots else self.traffic.kernels_computing(node)
                kernels_by_input.setdefault(input_, set()).update(kernels)
        total += sum(size_bytes(input_) * len(kernels) for input_, kernels in kernels_by_input.items())
        for x in outputs:
            if x not in self.roots and (x in self.traffic.materialized or node_kind(x) == "reduction"):
                depth = self.traffic.opaque_depths[x]
                total += size_bytes(x) * (1 + sum(later > depth for _, later in self.traffic.reader_kernels[x]))
        return total

    def _bytes_fused(
        self, nodes: Sequence[Node], outputs: Sequence[Node], recomputed: set[Node], inputs: set[Node]
    ) -> int:
        """Return the bytes that are moved with fusing: by the fused operator, and by kernels that read its outputs.

        One of the `inputs` that Inductor would not have stored has to be written first.
        """
        inside = set(nodes)

        def outside_kernels(node: Node) -> set[object]:
            """Return the kernels of the rest of the graph that read a stored node, also by way of recomputed ones."""
            kernels: set[object] = set()
            for user in node.users:
                kernels |= outside_kernels(user) if user in recomputed else set()
                kernels |= set(self.traffic.kernels_of_users([user])) if user not in inside else set()
            return kernels

        total = sum(size_bytes(x) * (1 if self.traffic.is_materialized(x) else 2) for x in inputs)
        return total + sum(size_bytes(x) * (1 + len(outside_kernels(x))) for x in outputs)


def may_have_backward() -> bool:
    """Return whether the graph that is compiled now may be a forward graph with a backward graph.

    A backward graph recomputes some nodes of the forward graph.
    """
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context else None
    return metadata is None or any(x.requires_grad for x in metadata.input_info)


def is_compared_in_backward(node: Node) -> bool:
    """Return whether the graph computes a maximum or minimum of a node's elements, and returns it.

    The gradient of a maximum compares the elements with it. In backward Inductor may recompute the elements, and they
    may differ from an epilogue's in a bit: then none would be equal to the maximum, and the gradient would be lost.
    """
    if is_min_or_max(node):
        return False
    return any(
        is_returned(user) if is_min_or_max(user) else is_transparent(user) and is_compared_in_backward(user)
        for user in node.users
    )


def is_returned(node: Node) -> bool:
    """Return whether the graph returns a node, or a view or wider cast of it."""
    return any(user.op == "output" or (is_transparent(user) and is_returned(user)) for user in node.users)


def is_transparent(node: Node) -> bool:
    """Return whether a node has the same numbers as its input: it is a view, or a cast to a wider dtype."""
    return node_kind(node) == "view" or is_widening(node)
