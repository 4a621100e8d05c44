"""Hoist the scalar upstream gradient out of matmuls, before AOTAutograd partitions a training step.

The gradient of a loss with respect to a matmul's result Z is dZ = t * G, where t is the gradient of the loss itself and
G does not depend on it. So G can be computed in the forward matmul's epilogue and be saved in place of Z. In the
backward pass dA = G B^T and dB = A^T G are multiplied by t in their epilogues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.utils.checkpoint import CheckpointPolicy

from gemmsmith.core.graph import BroadcastDims, EpilogueGraph, Operand, Result
from gemmsmith.core.graph import Node as EpilogueNode
from gemmsmith.torch.compiler.matmuls import MM_OPS, match_matmul, op_call, unsupported_reason
from gemmsmith.torch.compiler.nodes import (
    Emitter,
    Node,
    dtype,
    fake_tensor,
    fill_value,
    node_kind,
    op_name,
    strip_views,
)
from gemmsmith.torch.graph_serialization import graph_dtype

aten = torch.ops.aten


def hoist_scalar_grad(graph: torch.fx.Graph) -> None:
    """Hoist the scalar gradients out of the matmuls of a joint forward and backward graph, in place.

    AOTAutograd names the inputs that are gradients of results "tangents_1" and so on.
    """
    scalars = [x for x in graph.nodes if x.op == "placeholder" and "tangents" in x.name and _is_float_scalar(x)]
    for scalar in scalars:
        hoister = _ScalarHoister(graph, scalar)
        for node in list(graph.nodes):
            if op_name(node) in MM_OPS:
                for i in range(2):
                    hoister.try_hoist(strip_views(node.args[i], ("view", "strided_view")))
    stable_topological_sort(graph)
    graph.eliminate_dead_code()


def _is_float_scalar(node: Node) -> bool:
    """Return whether a node is a 0-dimensional tensor of bf16, fp32 or fp64."""
    fake = fake_tensor(node)
    return fake is not None and fake.ndim == 0 and fake.dtype in (torch.bfloat16, torch.float32, torch.float64)


class _ScalarHoister:
    """Hoists one scalar, an upstream gradient (an input of the graph), out of matmuls."""

    def __init__(self, graph: torch.fx.Graph, scalar: Node) -> None:
        """Find the nodes that depend on the scalar, on any upstream gradient, and on matmuls."""
        self.graph, self.scalar = graph, scalar
        self.dependent = _dependents(graph, [scalar])
        self.depends_on_grads = _dependents(
            graph, [x for x in graph.nodes if "tangents" in x.name and x.op == "placeholder"]
        )
        self.depends_on_matmul = _dependents(graph, [x for x in graph.nodes if match_matmul(x)])
        self._unscaled: dict[Node, Node | None] = {}
        self._visited: set[Node] = set()

    def try_hoist(self, matrix: Node) -> None:
        """Hoist the scalar out of an operand of a matmul, if it is a factor of that.

        Only if the other factor is computed elementwise from a matmul's result: that matmul's epilogue can then compute
        it in the forward pass, where it is saved.
        """
        if matrix not in self.dependent or matrix in self._visited or node_kind(matrix) != "pointwise":
            return
        self._visited.add(matrix)
        # fp16 may need the scalar, a loss scale, to stay in range.
        try:
            unscaled = self._without_scalar(matrix) if dtype(matrix) != torch.float16 else None
        except RecursionError:  # hundreds of linear nodes
            return
        if unscaled is None or not self._is_elementwise_of_matmul(unscaled):
            return
        unscaled.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        self._rewire_users(matrix, unscaled)

    def _is_elementwise_of_matmul(self, node: Node) -> bool:
        """Return whether a node is computed elementwise from a matmul's result, without reductions or gathers of it."""
        waiting, seen, reads_matmul = [node], {node}, False
        while waiting:
            x = waiting.pop()
            if x in self.depends_on_matmul and node_kind(x) in ("reduction", "gather"):
                return False
            reads_matmul = reads_matmul or match_matmul(x) is not None
            inputs = x.all_input_nodes if node_kind(x) in ("pointwise", "view", "strided_view") else []
            waiting += [y for y in inputs if y not in seen]
            seen.update(inputs)
        return reads_matmul

    def _rewire_users(self, old: Node, new: Node) -> None:
        """Let the users of `old` read `new`, which is `old` without the factor `scalar`; their values stay the same.

        A matmul is multiplied by the scalar in its epilogue, a sum after it; other users read `new` times the scalar.
        """
        for user in list(old.users):
            with self.graph.inserting_after(user):
                if node_kind(user) in ("view", "strided_view") and len(user.all_input_nodes) == 1:
                    self._rewire_users(user, self._copy(user, {old: new}))
                elif self._can_scale_matmul(user, old):
                    arrays = [new if x is old else x for x in user.args]
                    epilogue = _scale_epilogue(self.scalar, user)
                    scaled = Emitter(self.graph)(*op_call(epilogue, arrays, [], [self.scalar]))
                    scaled.meta["stack_trace"] = user.meta.get("stack_trace")
                    self._replace(user, scaled)
                elif op_name(user) == "sum":
                    self._replace(user, self._times_scalar(self._copy(user, {old: new})))
                else:
                    user.replace_input_with(old, self._times_scalar(new))

    def _replace(self, old: Node, new: Node) -> None:
        """Replace all uses of a node by a new node, which depends on the scalar as the old one did."""
        old.replace_all_uses_with(new)
        self.dependent.add(new)
        self.depends_on_grads.add(new)

    def _can_scale_matmul(self, node: Node, matrix: Node) -> bool:
        """Return whether a node is a matmul of `matrix` with another operand, and gemmsmith has an operator for it."""
        if op_name(node) not in MM_OPS or list(node.args).count(matrix) != 1:
            return False
        matmul = match_matmul(node)
        return matmul is not None and not unsupported_reason(matmul)

    def _times_scalar(self, node: Node) -> Node:
        """Return a new node for a node times the scalar, in the node's dtype."""
        emit = Emitter(self.graph)
        scaled = emit(aten.mul.Tensor, node, self.scalar)
        if dtype(scaled) != dtype(node):
            scaled = emit(torch.ops.prims.convert_element_type.default, scaled, dtype(node))
        self.dependent.add(scaled)
        self.depends_on_grads.add(scaled)
        return scaled

    def _copy(self, node: Node, replacements: Mapping[Node, Node]) -> Node:
        return self.graph.node_copy(node, lambda x: replacements.get(x, x))

    def _without_scalar(self, node: Node) -> Node | None:
        """Return a new node, equal to a node without the factor `scalar`; None if the scalar is not a factor of it."""
        if node not in self._unscaled:
            self._unscaled[node] = self._remove_scalar(node)
        return self._unscaled[node]

    def _remove_scalar(self, node: Node) -> Node | None:
        """Compute `_without_scalar`: copy the nodes between the scalar and this one, with 1 in place of the scalar.

        All nodes between must be linear in the scalar, so that the copy is G where the node is scalar * G.
        """
        if node is self.scalar:
            with self.graph.inserting_after(node):
                emit = Emitter(self.graph)
                return emit(aten.full.default, [], 1.0, dtype=dtype(node), device=fake_tensor(node).device)
        inputs = node.all_input_nodes
        dependent = [x for x in inputs if x in self.dependent]
        if not dependent or any(x in self.depends_on_grads and x not in dependent for x in inputs):
            return None
        if not self._is_linear(node, dependent):
            return None
        replacements = {x: self._without_scalar(x) for x in dependent}
        if any(x is None for x in replacements.values()):
            return None
        with self.graph.inserting_after(node):
            return self._copy(node, {x: y for x, y in replacements.items() if y is not None})

    def _is_linear(self, node: Node, dependent: list[Node]) -> bool:
        """Return whether a node is linear in the inputs `dependent` together: their common factor is a factor of it."""
        match op_name(node):
            case "neg" | "convert_element_type":
                return bool(dtype(node).is_floating_point)
            case "mul":
                return len(dependent) == 1 and node.args[0] is not node.args[1]
            case "div":
                return dependent == [node.args[0]] and not node.kwargs  # rounding_mode
            case "add" | "sub":
                return all(x in dependent for x in node.args)
            case "where":
                branches = node.args[1:]
                zero = [x for x in branches if x == 0 or (isinstance(x, torch.fx.Node) and fill_value(x) == 0)]
                return node.args[0] not in dependent and all(x in dependent or x in zero for x in branches)
        return node_kind(node) in ("view", "strided_view") and len(node.all_input_nodes) == 1


def _scale_epilogue(scalar: Node, node: Node) -> EpilogueGraph:
    """Return the epilogue that multiplies a matmul's result by a scalar, in the dtype of the matmul's node."""
    operand = Operand("x0", BroadcastDims(), graph_dtype(dtype(scalar)))
    nodes = (EpilogueNode("accumulator"), EpilogueNode("operand", (), "x0"), EpilogueNode("mul", (0, 1)))
    return EpilogueGraph(nodes, (operand,), (Result("out", 2, graph_dtype(dtype(node))),))


def _dependents(graph: torch.fx.Graph, roots: Iterable[Node]) -> set[Node]:
    """Return the nodes that depend on `roots`, and the roots."""
    dependents = set(roots)
    for node in graph.nodes:
        if not dependents.isdisjoint(node.all_input_nodes):
            dependents.add(node)
    return dependents
