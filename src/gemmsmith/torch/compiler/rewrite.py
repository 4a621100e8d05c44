"""Putting an operator of gemmsmith's in place of a product and what is fused with it."""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from gemmsmith.epilogue.lines import refused
from gemmsmith.torch import text
from gemmsmith.torch.compiler.nodes import Emitter, Node, same, shape
from gemmsmith.torch.compiler.region import Choice, Region
from gemmsmith.torch.operator import OPERATORS

aten = torch.ops.aten


def replace(region: Region, choice: Choice) -> Node:
    """The operator's node, which computes what a choice of a region's nodes did; its graph is in order.

    EpilogueError where a shape cannot be written down, before anything is changed.
    """
    product, epilogue = region.product, region.epilogue
    fused = epilogue.graph(choice.stored)
    nodes = {operand.name: x for x, operand in epilogue.operands.items()}
    tensors = [(nodes[o.name], o.extent) for o in fused.operands if o.dtype is not None]
    numbers = [epilogue.numbers[o.name] for o in fused.operands if o.dtype is None]
    shapes = [_written(shape(x), product.node.graph) for x in choice.stored]
    given = [epilogue.given(extent) for _, extent in tensors]
    graph = product.node.graph
    with graph.inserting_before(product.node):
        emit = Emitter(graph)
        operands = [
            x if same(shape(x), want) else emit(aten.reshape.default, x, _written(want, graph))
            for (x, _), want in zip(tensors, given, strict=True)
        ]
        op = OPERATORS[len(operands), len(fused.results)]
        written = text.write(fused)
        node = emit(op, product.a, product.b, text.key(written), written, numbers, *operands)
        node.meta["stack_trace"] = product.node.meta.get("stack_trace")
        results = [node] if len(shapes) == 1 else [emit(operator.getitem, node, i) for i in range(len(shapes))]
        inside = set(choice.members) - choice.kept
        for old, result, wanted in zip(choice.stored, results, shapes, strict=True):
            new = result if same(shape(result), shape(old)) else emit(aten.reshape.default, result, wanted)
            old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)
    for member in reversed(choice.members):
        if not member.users and member not in choice.kept:
            graph.erase_node(member)
    sort(graph)
    return node


def _written(wanted: Sequence[Any], graph: torch.fx.Graph) -> list[Any]:
    """A shape as an argument: of its symbols one may be -1, the others are found in the graph."""
    symbols = [x for x in wanted if not isinstance(x, int)]
    if len(symbols) <= 1:
        return [x if isinstance(x, int) else -1 for x in wanted]
    known = {str(x.meta["val"]): x for x in graph.nodes if isinstance(x.meta.get("val"), torch.SymInt)}
    if missing := [x for x in symbols if str(x) not in known]:
        raise refused(f"the extent {missing[0]} is nowhere in the graph")
    return [x if isinstance(x, int) else known[str(x)] for x in wanted]


def sort(graph: torch.fx.Graph) -> None:
    """Puts nodes behind their inputs, otherwise in the order that they have. RuntimeError if there is a cycle."""
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    if all(position[x] < i for i, node in enumerate(nodes) for x in node.all_input_nodes):
        return
    missing = {node: len(node.all_input_nodes) for node in nodes}
    ready = [position[node] for node in nodes if not missing[node]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        ordered.append(node)
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, position[user])
    if len(ordered) < len(nodes):
        raise RuntimeError(f"a cycle through {next(x for x in nodes if missing[x])} after fusing; please report this")
    for before, node in itertools.pairwise(ordered):
        before.append(node)
