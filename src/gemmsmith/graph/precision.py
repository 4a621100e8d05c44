"""The precision in which each function of an epilogue is computed, and what the epilogue costs."""

from __future__ import annotations

from gemmsmith.core.dtypes import FP16, FP32
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.graph.function_costs import Cost, Precision
from gemmsmith.graph.functions import Function
from gemmsmith.graph.reductions import REDUCTIONS


def select_precisions(graph: EpilogueGraph, fast_math: bool) -> dict[int, Precision]:
    """Select the precision of each elementwise node, by index; see graph/functions.py for the three precisions.

    Without `fast_math` it is "exact". With it, it is "approx" if all results that depend on the node are stored in bf16
    or fp8, else "default". A function without a lowering in that precision is computed in the default one.
    """
    precise_results = (r.node for r in graph.results if graph.is_reduction(r) or r.dtype in (FP32, FP16))
    full_precision = graph.nodes_needed_by(precise_results)
    precisions: dict[int, Precision] = {}
    for i, node in enumerate(graph.nodes):
        if isinstance(f := node.operation, Function):
            preferred: Precision = "exact" if not fast_math else "default" if i in full_precision else "approx"
            precisions[i] = preferred if preferred in f.lowerings else "default"
    return precisions


def reduction_cost(graph: EpilogueGraph) -> Cost:
    """Return the cost of an epilogue's reductions per element of the accumulator, without those between threads."""
    kinds = [graph.nodes[r.node].attribute[0] for r in graph.results if graph.is_reduction(r)]
    return Cost(*map(sum, zip(Cost(), *(REDUCTIONS[kind].cost for kind in kinds), strict=True)))


def epilogue_cost(graph: EpilogueGraph, fast_math: bool, vector_share: float = 0.0) -> Cost:
    """Return the cost of an epilogue's functions per element of the accumulator.

    Functions of scalars and of columns (one value per row) count nothing. Those of rows, (N,), count the fraction
    `vector_share` of a matrix's, since a thread computes each once for several rows.
    """
    dims, precisions = graph.broadcast_dims, select_precisions(graph, fast_math)
    total = Cost()
    for i, node in enumerate(graph.nodes):
        cost = node.operation.cost_per_element(precisions.get(i, "default"))
        if dims[i].varies_along_n:
            share = (1 if dims[i].is_matrix else vector_share) / (dims[i].row_divisor * dims[i].column_divisor)
            total = Cost(*(x + share * y for x, y in zip(total, cost, strict=True)))
    return total


def uses_special_functions(graph: EpilogueGraph, node: int) -> bool:
    """Return whether a node is computed with the special-function unit."""
    return any(graph.nodes[i].operation.style == "special" for i in graph.nodes_needed_by([node]))
