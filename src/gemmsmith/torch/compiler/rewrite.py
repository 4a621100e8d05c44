"""Replacement of a matmul and the nodes that are fused with it by one of gemmsmith's operators."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.graph.source_location import epilogue_error
from gemmsmith.torch import graph_serialization
from gemmsmith.torch.compiler.nodes import Emitter, Node, shape, statically_equal
from gemmsmith.torch.compiler.region import FusionCandidate, Region
from gemmsmith.torch.ops import OPERATORS, OPERATORS_OF_TWO

aten = torch.ops.aten


def insert_fused_op(region: Region, candidate: FusionCandidate) -> EpilogueGraph:
    """Insert the operator that computes a candidate's nodes, erase these, and return its epilogue.

    Raises EpilogueError if a shape cannot be expressed in the graph, before anything is changed.
    """
    matmul, epilogue, traffic = region.matmul, region.epilogue, region.traffic
    fused = epilogue.graph(candidate.outputs)
    arguments = epilogue.arguments(fused).values()
    tensors, numbers = (
        [x for x in arguments if isinstance(x, tuple)],
        [x for x in arguments if not isinstance(x, tuple)],
    )
    shapes = [_shape_argument(shape(x), matmul.node) for x in candidate.outputs]
    graph = matmul.node.graph
    move_before([*(x for x, _ in tensors), *matmul.arrays], matmul.node)
    with graph.inserting_before(matmul.node):
        emit = Emitter(graph)
        operands = [
            x
            if statically_equal(shape(x), operand_shape)
            else emit(aten.reshape.default, x, _shape_argument(operand_shape, matmul.node))
            for x, operand_shape in tensors
        ]
        op = (OPERATORS_OF_TWO if matmul.second else OPERATORS)[len(operands), len(fused.results)]
        serialized = graph_serialization.serialize(fused)
        node = emit(op, *matmul.arrays, graph_serialization.digest(serialized), serialized, numbers, *operands)
        node.meta["stack_trace"] = matmul.node.meta.get("stack_trace")
        results = [node] if len(shapes) == 1 else [emit(operator.getitem, node, i) for i in range(len(shapes))]
        fused_nodes = set(candidate.nodes) - candidate.recomputed
        for output, result, shape_ in zip(candidate.outputs, results, shapes, strict=True):
            new = (
                result if statically_equal(shape(result), shape(output)) else emit(aten.reshape.default, result, shape_)
            )
            output.replace_all_uses_with(new, delete_user_cb=lambda user: user not in fused_nodes)
    changed = {*emit.nodes, *candidate.nodes, *(x for member in candidate.nodes for x in member.all_input_nodes)}
    traffic.opaque_depths[node] = max(traffic.opaque_depths[x] for x in candidate.nodes)
    for member in reversed(candidate.nodes):
        if not member.users and member not in candidate.recomputed:
            graph.erase_node(member)
            changed.remove(member)
    traffic.update(changed)
    return fused


def move_before(nodes: Sequence[Node], before: Node) -> None:
    """Move nodes, and what they are computed from, before another node. Raises RuntimeError if that is a cycle."""
    later, waiting = set[Node](), list(nodes)
    while waiting:
        x = waiting.pop()
        if x is before:
            raise RuntimeError(f"a cycle through {before} after fusing; please report this")
        if before < x and x not in later:
            later.add(x)
            waiting += x.all_input_nodes
    for x in sorted(later):
        before.prepend(x)


def _shape_argument(extents: Sequence[Any], before: Node) -> list[Any]:
    """Return a shape as an argument of aten.reshape before a node.

    One symbolic extent becomes -1; several are looked up among the graph's nodes. Raises EpilogueError for one that is
    not there.
    """
    symbols = [x for x in extents if not isinstance(x, int)]
    if len(symbols) <= 1:
        return [x if isinstance(x, int) else -1 for x in extents]
    symint_nodes = (x for x in before.graph.nodes if isinstance(x.meta.get("val"), torch.SymInt) and x < before)
    node_of_symbol = {str(x.meta["val"]): x for x in symint_nodes}
    if missing := [x for x in symbols if str(x) not in node_of_symbol]:
        raise epilogue_error(f"symbolic size {missing[0]} is not available in the graph")
    return [x if isinstance(x, int) else node_of_symbol[str(x)] for x in extents]
