"""Properties of FX nodes after Inductor's decompositions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch._guards import detect_fake_mode
from torch.fx.experimental.symbolic_shapes import statically_known_true

Node = Any
"""torch.fx.Node, untyped because gemmsmith is type-checked without torch."""

CONTIGUOUS_VIEWS = frozenset({"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "alias", "detach", "clone"})
"""Operations whose result has its input's elements in the same order."""
NON_CONTIGUOUS_VIEWS = frozenset(
    {"permute", "transpose", "t", "expand", "slice", "select", "split", "split_with_sizes", "unbind"}
)
"""Other operations that Inductor inlines into the kernels that read them."""
GATHER_OPS = frozenset({"gather", "index", "embedding"})
"""Operations that read only some of their input's elements."""
REDUCTION_OPS = frozenset({
    "sum", "mean", "amax", "amin", "max", "min", "prod", "any", "all", "var", "var_mean", "std", "argmax", "argmin",
    "logsumexp",
})  # fmt: skip
"""Reductions. Their second argument is the reduced dimensions."""
NAMESPACES = frozenset({"aten", "prims", "gemmsmith"})
"""Namespaces of operators that are known by their names."""
UNKNOWN_EXTENT_HINT = 8192
"""Length assumed for a symbolic extent without a hint. Chosen; not measured."""

NodeKind = Literal["view", "strided_view", "gather", "pointwise", "reduction", "opaque"]


def op_name(node: Node) -> str:
    """Return the name of a node's operator without namespace and overload, or "" if it calls none of NAMESPACES."""
    return _target_info(node)[1]


def node_kind(node: Node) -> NodeKind:
    """Return how Inductor computes a node.

    "view": the same elements in the same order. "strided_view": other views, which Inductor inlines into the kernels
    that read them. "gather": reads some elements of its input. "pointwise", "reduction": as the names say. "opaque":
    all others, such as matmuls and graph outputs, which read whole tensors from memory.
    """
    return _target_info(node)[2]


_TARGET_INFO: dict[int, tuple[Any, str, NodeKind]] = {}
"""Target, operator name and kind by the id of a node's target: hashing an OpOverload takes torch ten times as long. The
target is stored to keep it alive, so that its id stays unique."""


def _target_info(node: Node) -> tuple[Any, str, NodeKind]:
    """Return what a node calls, the operator's name and its kind; computed once for each target."""
    target = node.target if node.op == "call_function" else None
    info = _TARGET_INFO.get(id(target))
    if info is None:
        name = target._schema.name if isinstance(target, torch._ops.OpOverload) else ""
        namespace, _, op = name.rpartition("::")
        if namespace not in NAMESPACES or target is torch.ops.aten.view.dtype:  # which copies bits
            op = ""
        info = _TARGET_INFO[id(target)] = target, op, _classify(target, op)
    return info


def _classify(target: Any, op: str) -> NodeKind:
    """Return how Inductor computes calls of a target, see `node_kind`. `op`: the operator's name, "" if it is none."""
    if op in CONTIGUOUS_VIEWS:
        return "view"
    if op in NON_CONTIGUOUS_VIEWS or target is operator.getitem:
        return "strided_view"
    if op in GATHER_OPS:
        return "gather"
    tags = target.tags if op else ()
    if torch.Tag.pointwise in tags or op == "cat":
        return "pointwise"
    return "reduction" if op in REDUCTION_OPS else "opaque"


def strip_views(node: Node, kinds: Collection[str] = ("view",)) -> Node:
    """Return the node of which a node is a view, through a chain of views of these kinds; the node itself if none."""
    while isinstance(node, torch.fx.Node) and node_kind(node) in kinds and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def later_sources(nodes: Iterable[Node], than: Node) -> set[Node]:
    """Return those of `nodes`, and of the nodes that they are computed from, that follow another node in the graph."""
    later, waiting = set[Node](), list(nodes)
    while waiting:
        x = waiting.pop()
        if than < x and x not in later:
            later.add(x)
            waiting += x.all_input_nodes
    return later


def belongs_to_training(node: Node) -> bool:
    """Return whether a node's graph is a backward pass, or a forward pass that a backward pass follows.

    AOTAutograd names the inputs of these primals_1 and tangents_1, those of others arg0_1.
    """
    inputs = node.graph.find_nodes(op="placeholder")
    return any(x.name.startswith(("primals_", "tangents_")) for x in inputs)


def is_mutating(node: Node) -> bool:
    """Return whether a node changes a tensor in place."""
    return bool(op_name(node)) and node.target._schema.is_mutable


def fake_tensor(node: Node) -> Any:
    """Return the FakeTensor in a node's meta["val"], or None if its value is not one tensor."""
    fake = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return fake if isinstance(fake, torch.Tensor) else None


def shape(node: Node) -> tuple[Any, ...]:
    """Return the shape of a node whose value is a tensor."""
    return tuple(fake_tensor(node).shape)


def dtype(node: Node) -> torch.dtype:
    """Return the dtype of a node whose value is a tensor."""
    result: torch.dtype = fake_tensor(node).dtype
    return result


def reduced_dims(node: Node) -> set[int]:
    """Return the dimensions that a reduction node reduces, as indices >= 0."""
    rank = len(shape(node.args[0]))
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or range(rank)
    return {d % rank for d in dims} if rank else set()


def is_row_major(node: Node) -> bool:
    """Return whether a tensor is contiguous, as the results of gemmsmith's operators are."""
    fake, contiguous_stride = fake_tensor(node), 1
    for extent, stride in reversed(list(zip(fake.shape, fake.stride(), strict=True))):
        if not statically_equal(extent, 1) and not statically_equal(stride, contiguous_stride):
            return False
        contiguous_stride = contiguous_stride * extent
    return True


def size_bytes(node: Node) -> int:
    """Return the size of a node's tensor in bytes, with symbolic extents replaced by their hints."""
    fake = fake_tensor(node)
    if fake is None:
        return 0
    return int(math.prod(size_hints(fake.shape)) * fake.element_size())


def size_hints(extents: Iterable[Any]) -> tuple[int, ...]:
    """Return extents as integers: for symbolic ones the hint, the value for which the graph was traced.

    UNKNOWN_EXTENT_HINT if there is none.
    """
    return tuple(x if isinstance(x, int) else int(x.node.hint or UNKNOWN_EXTENT_HINT) for x in extents)


def have_hints(extents: Iterable[Any]) -> bool:
    """Return whether all extents are numbers, or symbols with a hint."""
    return all(isinstance(x, int) or x.node.has_hint() for x in extents)


def statically_equal(a: Any, b: Any) -> bool:
    """Return whether two extents, or two shapes, are equal for all values of their symbols."""
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(statically_equal, a, b))
    return bool(statically_known_true(a == b))


def fill_value(node: Node) -> float | bool | None:
    """Return the number that all elements of a node's tensor are, if it is aten.full or scalar_tensor, else None."""
    position = {"full": 1, "scalar_tensor": 0}.get(op_name(node))
    value = None if position is None else node.args[position]
    if not isinstance(value, (bool, int, float)):
        return None
    of = dtype(node)
    return bool(value) if of == torch.bool else value if of.is_floating_point else math.trunc(value)


class Emitter:
    """Inserts nodes into a graph and computes their fake tensors. `nodes` lists those inserted so far."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Insert a call of `target` and return its node."""
        node = self.graph.call_function(target, args, kwargs)
        fake_args = torch.fx.map_arg(args, lambda x: x.meta["val"])
        with torch.no_grad(), detect_fake_mode(fake_args) or nullcontext():
            node.meta["val"] = target(*fake_args, **kwargs)
        self.nodes.append(node)
        return node
