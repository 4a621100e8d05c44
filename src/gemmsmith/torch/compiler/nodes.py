"""What the nodes of torch's graphs are, after Inductor's decompositions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch._guards import detect_fake_mode
from torch.fx.experimental.symbolic_shapes import statically_known_true

Node = Any
"""A torch.fx.Node."""

VIEWS = frozenset({"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "alias", "detach", "clone"})
"""Operations whose result has its input's elements in the same order."""
MOVES = frozenset({"permute", "transpose", "t", "expand", "slice", "select", "split", "split_with_sizes", "unbind"})
"""Others that Inductor computes where their result is read."""
LOOKUPS = frozenset({"gather", "index", "embedding"})
"""Operations that read few of their input's elements."""
REDUCED = frozenset({
    "sum", "mean", "amax", "amin", "max", "min", "prod", "any", "all", "var", "var_mean", "std", "argmax", "argmin",
    "logsumexp",
})  # fmt: skip
"""Reductions, whose second argument is the indices."""
UNKNOWN_EXTENT = 8192
"""The length that an extent is taken for where nothing is known of it."""

Kind = Literal["view", "move", "lookup", "pointwise", "reduction", "opaque"]


def name(node: Node) -> str:
    """An operator's name without namespace and overload, "" of anything else."""
    return _known(node)[1]


def kind(node: Node) -> Kind:
    """How Inductor computes a node: "opaque" is what reads whole tensors from memory, as products and outputs do."""
    return _known(node)[2]


_KNOWN: dict[int, tuple[Any, str, Kind]] = {}
"""Names by the id of a node's target, which is kept: to hash an operator takes torch ten times as long."""


def _known(node: Node) -> tuple[Any, str, Kind]:
    target = node.target if node.op == "call_function" else None
    found = _KNOWN.get(id(target))
    if found is None:
        op = target._schema.name.rpartition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""
        found = _KNOWN[id(target)] = target, op, _kind(target, op)
    return found


def _kind(target: Any, op: str) -> Kind:
    if op in VIEWS:
        return "view"
    if op in MOVES or target is operator.getitem:
        return "move"
    if op in LOOKUPS:
        return "lookup"
    tags = target.tags if op else ()
    if torch.Tag.pointwise in tags or op == "cat":
        return "pointwise"
    return "reduction" if op in REDUCED else "opaque"


def mutates(node: Node) -> bool:
    """Whether it changes a tensor in place."""
    return bool(name(node)) and node.target._schema.is_mutable


def value(node: Node) -> Any:
    """The fake tensor that a node gives; None where it gives none."""
    found = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def shape(node: Node) -> tuple[Any, ...]:
    """Of a node that gives a tensor."""
    return tuple(value(node).shape)


def dtype(node: Node) -> torch.dtype:
    """Of a node that gives a tensor."""
    found: torch.dtype = value(node).dtype
    return found


def row_major(node: Node) -> bool:
    """Whether a tensor lies in memory as an operator's results do."""
    found, length = value(node), 1
    for extent, stride in reversed(list(zip(found.shape, found.stride(), strict=True))):
        if not same(extent, 1) and not same(stride, length):
            return False
        length = length * extent
    return True


def size(node: Node) -> int:
    """The bytes of a tensor, with symbolic extents as they were when the graph was made."""
    found = value(node)
    if found is None:
        return 0
    return int(math.prod(hints(found.shape)) * found.element_size())


def hints(extents: Iterable[Any]) -> tuple[int, ...]:
    """Extents as numbers: of symbols what they were when the graph was made."""
    return tuple(x if isinstance(x, int) else int(x.node.hint or UNKNOWN_EXTENT) for x in extents)


def same(a: Any, b: Any) -> bool:
    """Whether two extents, or shapes, are equal whatever symbols in them stand for."""
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(statically_known_true(a == b))


def constant(node: Node) -> float | bool | None:
    """The number with which a node fills its tensor; None if it does not."""
    if name(node) == "full":
        found = node.args[1]
    elif name(node) == "scalar_tensor":
        found = node.args[0]
    else:
        return None
    return found if isinstance(found, (bool, int, float)) else None


class Emitter:
    """Makes nodes with their fake tensors. `made`: those so far."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        self.made: list[Node] = []

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        given = torch.fx.map_arg(args, lambda x: x.meta["val"])
        with torch.no_grad(), detect_fake_mode(given) or nullcontext():
            node.meta["val"] = target(*given, **kwargs)
        self.made.append(node)
        return node
