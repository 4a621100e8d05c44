"""Registers that an epilogue needs in addition to the accumulator."""

from __future__ import annotations

from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.core.mma import THREADS_PER_WARPGROUP, WGMMA_M
from gemmsmith.graph.row_functions import RowFunction


def row_function_inputs(graph: EpilogueGraph) -> dict[int, int]:
    """Map each row function's node to its input, whose elements are kept in registers."""
    return {i: node.inputs[0] for i, node in enumerate(graph.nodes) if isinstance(node.operation, RowFunction)}


def accumulator_consumers(graph: EpilogueGraph) -> set[int]:
    """Return the nodes that kernels compute directly from the accumulator: inputs of row functions, else results.

    A row function's input is kept in registers, so what is computed from it does not read the accumulator. If such an
    input is the only one of these nodes, it can be kept in the accumulator's registers, which nothing reads afterwards.
    """
    materialized = set(row_function_inputs(graph).values())
    consumers: set[int] = set()
    seen: set[tuple[int, int]] = set()
    stack = [(r.node, r.node) for r in graph.results]
    while stack:
        i, root = stack.pop()
        root = i if i in materialized else root
        if graph.nodes[i].op == "accumulator":
            consumers.add(root)
        elif (i, root) not in seen:
            seen.add((i, root))
            stack += [(j, root) for j in graph.nodes[i].inputs]
    return consumers


def extra_registers(graph: EpilogueGraph, columns: int) -> int:
    """Return the registers per thread, besides the accumulator's, for row functions' inputs in a subtile.

    An input that can be kept in the accumulator's registers needs none.
    """
    dims, consumers = graph.broadcast_dims, accumulator_consumers(graph)
    extra = {i for i in row_function_inputs(graph).values() if consumers != {i}}
    return sum(WGMMA_M * columns // dims[i].column_divisor // THREADS_PER_WARPGROUP for i in extra)
