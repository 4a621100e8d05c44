"""The graphs of an epilogue: as the user wrote it, and after the passes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from gemmsmith.arrays import ArrayInfo
from gemmsmith.binding import scaling
from gemmsmith.binding.groups import classify_in_groups, with_reductions_of_groups
from gemmsmith.core.dicts import BoundedCache
from gemmsmith.core.dtypes import BF16, FP16, FP32, DType
from gemmsmith.core.errors import ArgumentError, EpilogueError, did_you_mean
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph, Operand
from gemmsmith.core.grouping import Grouping
from gemmsmith.epilogue.epilogue_plan import check_quantize_blocks
from gemmsmith.graph.frontend.classify import classify, describe
from gemmsmith.graph.frontend.fingerprint import fingerprint, restore
from gemmsmith.graph.frontend.tracer import trace_with_shape_dependence
from gemmsmith.graph.passes import optimize
from gemmsmith.graph.source_location import epilogue_error

_GRAPH_CACHE: dict[Hashable, tuple[EpilogueGraph, EpilogueGraph]] = BoundedCache(1024)
"""Graphs of epilogues that do not depend on the number of rows."""


def build_graphs(
    epilogue: Any, source: Hashable, shape: tuple[int, ...], operands: Mapping[str, ArrayInfo | float],
    factors: Mapping[str, ArrayInfo | float], out_dtype: DType, grouping: Grouping | None, groups: int,
    scaled_shape: tuple[int, ...],
) -> tuple[EpilogueGraph, EpilogueGraph, bool]:  # fmt: skip
    """Return the epilogue's graph as the user wrote it, the graph after the passes, and whether M may decide them.

    In both graphs scales are applied.

    `epilogue`: a function, a graph, or a visitor tree. `source`: its fingerprint; None: it is computed here. `factors`:
    scales by which the accumulator is multiplied first. `out_dtype`: of matrix results for which the epilogue names
    none. `scaled_shape`: the product's `shape`, but with the rows of the array a, of which a grouped GEMM may gather
    some: the scales have these rows.
    """
    classify_operand = partial(classify_in_groups, groups=groups) if groups else classify
    kinds = {
        name: (broadcast_dims(name, x.shape, of), x.dtype) if isinstance(x, ArrayInfo) else (BroadcastDims(), None)
        for broadcast_dims, of, infos in (
            (classify_operand, shape, operands), (scaling.scale_broadcast_dims, scaled_shape, factors)
        )
        for name, x in infos.items()
    }  # fmt: skip
    key = len(shape), shape[-1], tuple(kinds.items()), out_dtype, grouping
    source = source or fingerprint(epilogue)
    if cached := _GRAPH_CACHE.get((source, key)):
        return *cached, False
    operand_kinds = {name: kinds[name] for name in operands}
    source_graph, depends_on_rows = build_source_graph(epilogue, source, shape, operand_kinds, groups > 0)
    source_graph = with_reductions_of_groups(source_graph, grouping) if grouping else source_graph
    source_graph = scaling.multiply_by_scales(source_graph, [Operand(name, *kinds[name]) for name in factors])
    graph = with_result_dtypes(optimize(source_graph), out_dtype)
    check_quantize_blocks(graph)
    if source is not None and not depends_on_rows:
        _GRAPH_CACHE[source, key] = source_graph, graph
    return source_graph, graph, depends_on_rows


def build_source_graph(
    epilogue: Any, source: Hashable, shape: tuple[int, ...], kinds: Mapping[str, tuple[BroadcastDims, DType | None]],
    has_groups: bool = False,
) -> tuple[EpilogueGraph, bool]:  # fmt: skip
    """Return the epilogue's graph as the user wrote it, and whether it may depend on the number of rows.

    `source`: the fingerprint, from which the function that is traced is restored, so that another thread cannot change
    what it reads meanwhile; None if it has none. `kinds`: by name of an operand, the dimensions along which it varies,
    and its dtype or None for a number. `has_groups`: the epilogue may read a group's index. Raises EpilogueError if the
    function cannot be traced, or the graph cannot be computed.
    """
    epilogue = epilogue if source is None else restore(source)
    if isinstance(epilogue, EpilogueGraph):
        if any(node.op in ("chunk", "interleave") and node.attribute[-1] != "n" for node in epilogue.nodes):
            raise EpilogueError("epilogue: got a chunk of rows; use one of columns, (0, 'n') and (1, 'n')")
        if not has_groups and any(node.op == "group_index" for node in epilogue.nodes):
            raise EpilogueError("epilogue: got the index of a group; use grouped_gemm, or a grouping")
        return epilogue, False
    if isinstance(epilogue, type):
        raise EpilogueError(f"epilogue: got the class {epilogue.__name__}; use an instance of it")
    if callable(graph := getattr(epilogue, "graph", None)):
        return bind_operands(graph(), kinds, shape), True
    if callable(epilogue):
        return trace_with_shape_dependence(epilogue, shape, kinds, has_groups)
    raise ArgumentError(f"epilogue: got {type(epilogue).__name__}; use a function, a visitor tree, or None")


def with_result_dtypes(graph: EpilogueGraph, out_dtype: DType) -> EpilogueGraph:
    """Give every result without a dtype one: `out_dtype` to matrices, fp32 to reductions and scales."""
    results = []
    for r in graph.results:
        node = graph.nodes[r.node]
        is_reduction_or_scale = node.op in ("reduce", "scale")
        if is_reduction_or_scale and r.dtype not in (None, FP32, FP16, BF16):
            kind = "a reduction's result" if node.op == "reduce" else "scales"
            raise epilogue_error(f"{r.name}: got dtype {r.dtype} for {kind}; use fp32, fp16 or bf16", node.location)
        results.append(replace(r, dtype=r.dtype or (FP32 if is_reduction_or_scale else out_dtype)))
    return replace(graph, results=tuple(results))


def bind_operands(
    graph: EpilogueGraph, operands: Mapping[str, tuple[BroadcastDims, DType | None]], acc_shape: tuple[int, ...] = ()
) -> EpilogueGraph:
    """Return a visitor tree's graph with the batches and dtypes of actual operands.

    `operands`: (broadcast dims, dtype) by name; the dtype of a Python number is None. `acc_shape`: (..., M, N), which
    resolves ambiguous dims: if M is 1, a row is a matrix. Raises EpilogueError for a missing or unexpected operand, and
    for one of another kind than its node reads.
    """
    expected = {o.name: o for o in graph.operands}
    for name in expected.keys() - operands.keys():
        raise epilogue_error(f"{name}: not given; pass {describe(expected[name].broadcast_dims)} of that name")
    for name in operands.keys() - expected.keys():
        reads = ", ".join(expected) or "no operand"
        raise epilogue_error(f"{name}: given, but the epilogue reads {reads}; leave it out{did_you_mean(name)}")
    one_row, one_column = acc_shape[-2:-1] == (1,), acc_shape[-1:] == (1,)
    bound = []
    for name, operand in expected.items():
        expected_dims, (dims, dtype) = operand.broadcast_dims, operands[name]
        if (dims.rows_per_value != expected_dims.rows_per_value and not one_row) or (
            dims.columns_per_value != expected_dims.columns_per_value and not one_column
        ):
            raise epilogue_error(f"{name}: got {describe(dims)}; use {describe(expected_dims)}")
        bound.append(replace(operand, broadcast_dims=expected_dims._replace(batch=dims.batch), dtype=dtype))
    return replace(graph, operands=tuple(bound))
