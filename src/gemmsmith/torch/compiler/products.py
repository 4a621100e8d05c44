"""The products of a graph: torch's, and those that are gemmsmith's already, which are extended."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gemmsmith.core.graph import Graph
from gemmsmith.torch import text
from gemmsmith.torch.compiler.nodes import Node, dtype, name, same, shape, value
from gemmsmith.torch.operator import OPERATORS, named, product_shape

PLAIN = frozenset({"mm", "bmm"})
WITH_A_TERM = frozenset({"addmm", "baddbmm"})
"""beta * term + alpha * (a @ b)."""
DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})


@dataclass(frozen=True, eq=False)
class Product:
    """A product in a graph: `shape` is (m, n) or (batch, m, n). Of gemmsmith's own, `epilogue` is its graph, `operands`
    its tensors and numbers by their names, `results` the nodes of its results by theirs."""

    node: Node
    a: Node
    b: Node
    shape: tuple[Any, ...]
    epilogue: Graph | None = None
    operands: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, Node] = field(default_factory=dict)

    @property
    def term(self) -> tuple[Node, float, float] | None:
        """What is added to it, beta and alpha."""
        if name(self.node) not in WITH_A_TERM:
            return None
        factors = self.node.kwargs
        return self.node.args[0], factors.get("beta", 1), factors.get("alpha", 1)


def product(node: Node) -> Product | None:
    """The product that a node computes, if it is one."""
    if name(node) in PLAIN or name(node) in WITH_A_TERM:
        a, b = node.args[:2] if name(node) in PLAIN else node.args[1:3]
        return Product(node, a, b, product_shape(shape(a), shape(b)))
    return _own(node) if node.target in OPERATORS.values() else None


def _own(node: Node) -> Product:
    a, b, _, epilogue, numbers, *tensors = node.args
    graph = text.read(epilogue)
    results = {graph.results[0].name: node}
    if len(graph.results) > 1:
        taken = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        results = {r.name: taken[i] for i, r in enumerate(graph.results) if i in taken}
    of_product = product_shape(shape(a), shape(b))
    return Product(node, a, b, of_product, graph, named(graph, numbers, tensors), results)


def refusal(found: Product) -> str:
    """Why a product is left as it is, whatever follows it; "" if it need not be."""
    if dtype(found.a) not in DTYPES or dtype(found.a) != dtype(found.b):
        return f"its operands are {dtype(found.a)} and {dtype(found.b)}".replace("torch.", "")
    if any(same(extent, 1) for extent in (*found.shape[-2:], shape(found.a)[-1])):
        return "it is a product with a vector"
    device = value(found.a).device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        return "it runs on a GPU that is not a Hopper"
    return ""
