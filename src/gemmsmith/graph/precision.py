"""The precision in which each function of an epilogue is computed."""

from __future__ import annotations

from typing import Literal

from gemmsmith.core.dtypes import FP16, FP32
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.graph.functions import FUNCTIONS, Function, Lowering

Precision = Literal["default", "approx", "exact"]


def select_precisions(graph: EpilogueGraph, fast_math: bool) -> dict[int, Precision]:
    """Select each elementwise node's precision.

    Without `fast_math`: exact. With it: approximate if all results that depend on the node are stored in bf16 or fp8.
    A function that has no lowering of its own in that precision is computed in the default one.
    """
    full_precision: set[int] = set()
    for result in graph.results:
        if graph.is_reduction(result) or result.dtype in (FP32, FP16):
            full_precision.add(result.node)
    for i in range(len(graph.nodes) - 1, -1, -1):
        if i in full_precision:
            full_precision.update(graph.nodes[i].inputs)
    precisions: dict[int, Precision] = {}
    for i, node in enumerate(graph.nodes):
        if f := FUNCTIONS.get(node.op):
            preferred: Precision = "exact" if not fast_math else "default" if i in full_precision else "approx"
            precisions[i] = preferred if lowering(f, preferred) is not f.lower else "default"
    return precisions


def lowering(function: Function, precision: Precision) -> Lowering:
    """Return the function's lowering in a precision, or else the default one."""
    return {"default": None, "approx": function.approx, "exact": function.exact}[precision] or function.lower
