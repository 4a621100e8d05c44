"""Moving a loss's gradient, a scalar, through products, before torch divides a training step into two graphs.

The gradient of a loss with respect to what a product gave, dZ, is t times something that does not depend on t, the
gradient of the loss itself. So that is computed where Z is, with the loss, in the product's epilogue, and kept in place
of Z; going backward, dA = dZ B^T and dB = A^T dZ are multiplied by t in their epilogues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.utils.checkpoint import CheckpointPolicy

from gemmsmith.core.graph import Extent, Graph, Operand, Result
from gemmsmith.core.graph import Node as Step
from gemmsmith.torch import text
from gemmsmith.torch.compiler.epilogue import held
from gemmsmith.torch.compiler.nodes import Emitter, Node, constant, dtype, kind, name, shape, value
from gemmsmith.torch.compiler.products import PLAIN, product, refusal
from gemmsmith.torch.operator import OPERATORS

aten = torch.ops.aten


def move(graph: torch.fx.Graph) -> None:
    """Changes a graph of a forward and its backward, in place."""
    scalars = [x for x in graph.nodes if x.op == "placeholder" and "tangents" in x.name and _is_scalar(x)]
    for scalar in scalars:
        factor = _Factor(graph, scalar)
        for node in list(graph.nodes):
            if name(node) in PLAIN:
                for i in range(2):
                    factor.take(_matrix(node.args[i]))
    stable_topological_sort(graph)
    graph.eliminate_dead_code()


def _is_scalar(node: Node) -> bool:
    return (
        value(node) is not None and shape(node) == () and dtype(node) in (torch.bfloat16, torch.float32, torch.float64)
    )


def _matrix(node: Node) -> Node:
    """What an operand is a view of."""
    while kind(node) in ("view", "move") and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


class _Factor:
    """A scalar, and what depends on it."""

    def __init__(self, graph: torch.fx.Graph, scalar: Node) -> None:
        self.graph, self.scalar = graph, scalar
        self.dependent = _below(graph, [scalar])
        self.later = _below(graph, [x for x in graph.nodes if "tangents" in x.name and x.op == "placeholder"])
        self.after = _below(graph, [x for x in graph.nodes if product(x)])
        self.known: dict[Node, Node | None] = {}
        self.taken: set[Node] = set()

    def take(self, matrix: Node) -> None:
        """Takes the scalar out of a matrix, if it is a factor of it and all else is computed of a product."""
        if matrix not in self.dependent or matrix in self.taken or kind(matrix) != "pointwise":
            return
        self.taken.add(matrix)
        found = self._divided(matrix) if dtype(matrix) != torch.float16 else None  # it may be what keeps it in range
        if found is None or not self._follows_a_product(found):
            return
        found.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        self._users(matrix, found)

    def _follows_a_product(self, node: Node) -> bool:
        """Whether a value is computed of what a product gives, and element by element."""
        waiting, seen, found = [node], {node}, False
        while waiting:
            x = waiting.pop()
            if x in self.after and kind(x) in ("reduction", "lookup"):
                return False
            found = found or product(x) is not None
            inputs = x.all_input_nodes if kind(x) in ("pointwise", "view", "move") else []
            waiting += [y for y in inputs if y not in seen]
            seen.update(inputs)
        return found

    def _users(self, old: Node, new: Node) -> None:
        """Has those that read a node read another, and multiplies what they make of it."""
        for user in list(old.users):
            with self.graph.inserting_after(user):
                if kind(user) in ("view", "move") and len(user.all_input_nodes) == 1:
                    self._users(user, self._copy(user, {old: new}))
                elif self._multiplies(user, old):
                    operands = (new if x is old else x for x in user.args)
                    written = text.write(_scaled(self.scalar, user))
                    op = OPERATORS[1, 1]
                    made = Emitter(self.graph)(op, *operands, text.key(written), written, [], self.scalar)
                    made.meta["stack_trace"] = user.meta.get("stack_trace")
                    self._replace(user, made)
                elif name(user) == "sum":
                    self._replace(user, self._times(self._copy(user, {old: new})))
                else:
                    user.replace_input_with(old, self._times(new))

    def _replace(self, old: Node, new: Node) -> None:
        """Has everyone read a new node, which depends on the scalar as the old one did."""
        old.replace_all_uses_with(new)
        self.dependent.add(new)
        self.later.add(new)

    def _multiplies(self, node: Node, matrix: Node) -> bool:
        """Whether a node is a product of a matrix and another, which an operator can compute."""
        if name(node) not in PLAIN or list(node.args).count(matrix) != 1:
            return False
        found = product(node)
        return found is not None and not refusal(found)

    def _times(self, node: Node) -> Node:
        """A node times the scalar, in the node's dtype."""
        emit = Emitter(self.graph)
        made = emit(aten.mul.Tensor, node, self.scalar)
        if dtype(made) != dtype(node):
            made = emit(torch.ops.prims.convert_element_type.default, made, dtype(node))
        self.dependent.add(made)
        self.later.add(made)
        return made

    def _copy(self, node: Node, changed: Mapping[Node, Node]) -> Node:
        return self.graph.node_copy(node, lambda x: changed.get(x, x))

    def _divided(self, node: Node) -> Node | None:
        """A new node for a node without the scalar, which is a factor of it; None if it is not."""
        if node not in self.known:
            self.known[node] = self._divide(node)
        return self.known[node]

    def _divide(self, node: Node) -> Node | None:
        if node is self.scalar:
            with self.graph.inserting_after(node):
                one = Emitter(self.graph)
                return one(aten.full.default, [], 1.0, dtype=dtype(node), device=value(node).device)
        inputs = node.all_input_nodes
        dependent = [x for x in inputs if x in self.dependent]
        if not dependent or any(x in self.later and x not in dependent for x in inputs):
            return None
        if not self._is_linear(node, dependent):
            return None
        changed = {x: self._divided(x) for x in dependent}
        if any(x is None for x in changed.values()):
            return None
        with self.graph.inserting_after(node):
            return self._copy(node, {x: y for x, y in changed.items() if y is not None})

    def _is_linear(self, node: Node, dependent: list[Node]) -> bool:
        """Whether a node is so many times as large as some of its inputs are."""
        match name(node):
            case "neg" | "convert_element_type":
                return bool(dtype(node).is_floating_point)
            case "mul":
                return len(dependent) == 1 and node.args[0] is not node.args[1]
            case "div":
                return dependent == [node.args[0]]
            case "add" | "sub":
                return all(x in dependent for x in node.args)
            case "where":
                branches = node.args[1:]
                zero = [x for x in branches if x == 0 or (isinstance(x, torch.fx.Node) and constant(x) == 0)]
                return node.args[0] not in dependent and all(x in dependent or x in zero for x in branches)
        return kind(node) in ("view", "move") and len(node.all_input_nodes) == 1


def _scaled(scalar: Node, node: Node) -> Graph:
    """The epilogue of a product that is multiplied by a scalar."""
    operand = Operand("x0", Extent(), held(dtype(scalar)))
    steps = (Step("accumulator"), Step("operand", (), "x0"), Step("mul", (0, 1)))
    return Graph(steps, (operand,), (Result("out", 2, held(dtype(node))),))


def _below(graph: torch.fx.Graph, roots: Iterable[Node]) -> set[Node]:
    """The nodes that depend on some, and these."""
    found = set(roots)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
