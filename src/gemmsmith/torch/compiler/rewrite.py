"""Putting an operator of gemmsmith's in place of a product and what is fused with it."""

from __future__ import annotations

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
    product, epilogue, traffic = region.product, region.epilogue, region.traffic
    fused = epilogue.graph(choice.stored)
    nodes = {operand.name: x for x, operand in epilogue.operands.items()}
    tensors = [(nodes[o.name], o.extent) for o in fused.operands if o.dtype is not None]
    numbers = [epilogue.numbers[o.name] for o in fused.operands if o.dtype is None]
    shapes = [_written(shape(x), product.node) for x in choice.stored]
    given = [epilogue.given(extent) for _, extent in tensors]
    graph = product.node.graph
    hoist([x for x, _ in tensors], product.node)
    with graph.inserting_before(product.node):
        emit = Emitter(graph)
        operands = [
            x if same(shape(x), want) else emit(aten.reshape.default, x, _written(want, product.node))
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
    changed = {*emit.made, *choice.members, *(x for member in choice.members for x in member.all_input_nodes)}
    traffic.levels[node] = max(traffic.levels[x] for x in choice.members)
    for member in reversed(choice.members):
        if not member.users and member not in choice.kept:
            graph.erase_node(member)
            changed.remove(member)
    traffic.update(changed)
    return node


def hoist(nodes: Sequence[Node], before: Node) -> None:
    """Puts what some nodes are computed of, and these, in front of another. RuntimeError if that is a cycle."""
    late, waiting = set[Node](), list(nodes)
    while waiting:
        x = waiting.pop()
        if x is before:
            raise RuntimeError(f"a cycle through {before} after fusing; please report this")
        if before < x and x not in late:
            late.add(x)
            waiting += x.all_input_nodes
    for x in sorted(late):
        before.prepend(x)


def _written(wanted: Sequence[Any], before: Node) -> list[Any]:
    """A shape as an argument: of its symbols one may be -1, the others are found in the graph in front of a node."""
    symbols = [x for x in wanted if not isinstance(x, int)]
    if len(symbols) <= 1:
        return [x if isinstance(x, int) else -1 for x in wanted]
    extents = (x for x in before.graph.nodes if isinstance(x.meta.get("val"), torch.SymInt) and x < before)
    known = {str(x.meta["val"]): x for x in extents}
    if missing := [x for x in symbols if str(x) not in known]:
        raise refused(f"the extent {missing[0]} is nowhere in the graph")
    return [x if isinstance(x, int) else known[str(x)] for x in wanted]
