"""Matmuls of a graph: aten's, and gemmsmith's own operators, whose epilogues can be extended."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gemmsmith.arrays import INTERLEAVE_COLUMNS
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.torch import graph_serialization
from gemmsmith.torch.compiler.nodes import Node, dtype, fake_tensor, later_sources, op_name, shape, statically_equal
from gemmsmith.torch.ops import OPERATORS, matmul_shape, operands_by_name

MM_OPS = frozenset({"mm", "bmm"})
"""aten's operators that compute a @ b."""
ADDMM_OPS = frozenset({"addmm", "baddbmm"})
"""aten's operators that compute beta * bias + alpha * (a @ b)."""
MATMUL_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
"""Dtypes of a and b for which a matmul can be replaced."""


@dataclass(frozen=True, eq=False)
class Matmul:
    """A matmul in an FX graph.

    Attributes:
        shape: (m, n) or (batch, m, n).
        epilogue: for gemmsmith's own operators, the graph of the epilogue; None for aten's.
        operands: nodes and numbers by the names of that epilogue's operands.
        results: nodes by the names of that epilogue's results; those without a node are not read.
        second: another matmul of the same a and shape that the same kernel computes, or None.
    """

    node: Node
    a: Node
    b: Node
    shape: tuple[Any, ...]
    epilogue: EpilogueGraph | None = None
    operands: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, Node] = field(default_factory=dict)
    second: Matmul | None = None

    @property
    def nodes(self) -> list[Node]:
        """The matmul's node, and the second one's."""
        return [self.node, *([self.second.node] if self.second else [])]

    @property
    def arrays(self) -> list[Node]:
        """a, b, and the second one's b."""
        return [self.a, *(x.b for x in (self, self.second) if x)]

    @property
    def is_on_gpu(self) -> bool:
        """Whether a CUDA kernel computes it."""
        return bool(fake_tensor(self.a).is_cuda)

    @property
    def bias_term(self) -> tuple[Node, float, float] | None:
        """The tensor that addmm or baddbmm adds, beta and alpha; None for other operators."""
        if op_name(self.node) not in ADDMM_OPS:
            return None
        kwargs = self.node.kwargs
        return self.node.args[0], kwargs.get("beta", 1), kwargs.get("alpha", 1)


def match_matmul(node: Node) -> Matmul | None:
    """Return the matmul that a node computes, by one of aten's operators or of gemmsmith's; None if it computes none.

    gemmsmith's operators with two arrays b, or with groups, do not count.
    """
    if op_name(node) in MM_OPS or op_name(node) in ADDMM_OPS:
        a, b = node.args[:2] if op_name(node) in MM_OPS else node.args[1:3]
        return Matmul(node, a, b, matmul_shape(shape(a), shape(b)))
    is_ours = node.target in OPERATORS.values() and node.args[2:4] == (None, None)
    return _match_gemmsmith_op(node) if is_ours else None


def match_pairs(matmul: Matmul) -> list[Matmul]:
    """Return pairs: the matmul together with each later one of the same a that the same kernel may compute.

    An example is the gate and the up projection of an MLP. Both weights must be in 16 bits with k contiguous, as those
    of nn.Linear are, and have the same shape and strides.
    """
    if op_name(matmul.node) != "mm" or not _is_linear_weight(matmul.b):
        return []
    others = (match_matmul(x) for x in matmul.a.users if matmul.node < x and op_name(x) == "mm")
    strides = fake_tensor(matmul.b).stride()
    return [
        replace(matmul, second=x)
        for x in others
        if x and x.a is matmul.a and x.b is not matmul.b and x.b is not matmul.node
        and all(matmul.node not in y.all_input_nodes for y in later_sources([x.b], matmul.node))
        and shape(x.b) == shape(matmul.b)
        and dtype(x.b) == dtype(matmul.b) and fake_tensor(x.b).stride() == strides
    ]  # fmt: skip


def _is_linear_weight(b: Node) -> bool:
    """Return whether a kernel can read b together with another such array, as if their columns alternated.

    It can in 16 bits, with k contiguous, as in the transpose of an nn.Linear's weight, and n and k's length in memory
    multiples of 8.
    """
    fake = fake_tensor(b)
    extents = (*fake.shape, *fake.stride())
    is_static = all(isinstance(x, int) for x in extents) and fake.dtype.itemsize == 2
    return is_static and fake.stride(0) == 1 and not (fake.stride(1) | fake.shape[1]) % INTERLEAVE_COLUMNS


def _match_gemmsmith_op(node: Node) -> Matmul:
    """Return the matmul that a call of one of gemmsmith's operators computes, with its epilogue."""
    a, b, _, _, _, epilogue, numbers, tensors = node.args
    graph = graph_serialization.deserialize(epilogue)
    results = {graph.results[0].name: node}
    if len(graph.results) > 1:
        getitems = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        results = {r.name: getitems[i] for i, r in enumerate(graph.results) if i in getitems}
    shape_ = matmul_shape(shape(a), shape(b))
    return Matmul(node, a, b, shape_, graph, operands_by_name(graph, numbers, tensors), results)


def op_call(
    graph: EpilogueGraph, arrays: Sequence[Any], numbers: Sequence[float], operands: Sequence[Any]
) -> tuple[Any, ...]:  # fmt: skip
    """Return the operator that computes an epilogue, followed by its arguments.

    `arrays`: a, b, and the second b of a pair.
    """
    text = graph_serialization.serialize(graph)
    a, b, b2 = (*arrays, None)[:3]
    return OPERATORS[len(graph.results)], a, b, b2, None, graph_serialization.digest(text), text, numbers, operands


def unsupported_reason(matmul: Matmul) -> str:
    """Return why a matmul is left as it is, whatever follows it; "" if it may be replaced."""
    if dtype(matmul.a) not in MATMUL_DTYPES or dtype(matmul.a) != dtype(matmul.b):
        return f"unsupported operand dtypes {dtype(matmul.a)} and {dtype(matmul.b)}".replace("torch.", "")
    if any(statically_equal(extent, 1) for extent in (*matmul.shape[-2:], shape(matmul.a)[-1])):
        return "matrix-vector product"
    device = fake_tensor(matmul.a).device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        return "the GPU's compute capability is not 9.0"
    return ""
