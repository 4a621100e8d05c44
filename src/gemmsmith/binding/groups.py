"""Epilogue operands of a grouped GEMM, some of which have one value, or row, for each group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gemmsmith.arrays import ArrayInfo, describe
from gemmsmith.core.dtypes import BF16, FP16, FP32
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph, reduced_dims
from gemmsmith.core.grouping import GATHER, SCATTER, TABLES, Grouping, Table
from gemmsmith.core.problem import SCALE_BLOCK
from gemmsmith.core.product import Role
from gemmsmith.graph.frontend.classify import classify


def make_grouping(
    arrays: Mapping[str, Any], along: Any = "m", zero_fill: Any = True
) -> tuple[Grouping, dict[str, Any]]:
    """Return the Grouping that the arguments of `grouped_gemm` describe, and those of the arrays that are not None.

    `arrays`: by name, the tables "offsets", "sizes" and "counts", and the row indices "gather" and "scatter". Raises
    ArgumentError unless exactly one table is given.
    """
    given = {name: x for name, x in arrays.items() if x is not None}
    tables: list[Table] = [name for name in TABLES if name in given]
    if len(tables) != 1:
        raise ArgumentError(f"offsets, sizes, counts: got {', '.join(tables) or 'none'}; use exactly one of them")
    grouping = Grouping(tables[0], along, zero_fill=zero_fill, gathers=GATHER in given, scatters=SCATTER in given)
    return grouping, given


def with_arrays(operands: Mapping[str, Any], arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the operands with the table and row indices (`arrays`) added.

    Raises ArgumentError if an operand has the name of one of these.
    """
    for name in arrays:
        if name in operands:
            raise ArgumentError(f"operands: got the name {name}, which is that of an argument; use another name")
    return {**operands, **arrays}


def with_group_dimension(name: str, x: ArrayInfo, shape: tuple[int, ...], groups: int) -> ArrayInfo:
    """Return an epilogue's operand; with shape (G, 1, 1) or (G, 1, N) if it has one value, or one row, for each group.

    The caller may also write (G,) and (G, N) for these, if G is neither N nor M. (1, M, N) becomes (M, N). `shape`: the
    result's, (M, N) or (G, M, N). Raises ArgumentError if the operand's shape has two meanings.
    """
    *batch, m, n = shape
    rank = len(x.shape)
    if rank == 3 and not batch and x.shape[0] == 1:
        return x._replace(shape=x.shape[1:], strides=x.strides[1:])
    if rank not in (1, 2) or groups == 1 or x.shape[0] != groups:
        return x
    other = n if rank == 1 else m
    if other == groups or (rank == 1 and 2 * groups == n):
        by_group = f"({groups}, 1, {x.shape[-1] if rank == 2 else 1})"
        by_row = f"(1, {n})" if rank == 1 else f"(1, {m}, {n})"
        raise ArgumentError(
            f"{name}: got shape {x.shape}, whose {groups} may be groups or {'columns' if rank == 1 else 'rows'}; "
            f"use {by_group} for one of each group, or {by_row}"
        )
    columns = x.shape[1:] or (1,)
    return x._replace(shape=(groups, 1, *columns), strides=(x.strides[0], 0, *(x.strides[1:] or (0,))))


def classify_in_groups(name: str, operand_shape: tuple[int, ...], shape: tuple[int, ...], groups: int) -> BroadcastDims:
    """Return the dimensions along which an operand of a grouped GEMM varies, as `classify` does.

    With a product (M, N), an operand (G, 1, N) or (G, 1, 1) varies along the groups, which take the batch's place.
    """
    if len(shape) == 2 and len(operand_shape) == 3 and operand_shape[:2] == (groups, 1):
        row = (operand_shape[2],) if operand_shape[2] > 1 or shape[1] == 1 else ()
        return classify(name, row, shape)._replace(batch=True)
    return classify(name, operand_shape, shape)


def with_reductions_of_groups(graph: EpilogueGraph, grouping: Grouping) -> EpilogueGraph:
    """Return the graph with reductions over rows changed so that each group's rows are reduced by themselves.

    Their axis then is without "b", the batch, in whose place the groups are. Raises ArgumentError for reductions that a
    grouped GEMM cannot compute.
    """
    if not grouping.clips_rows:
        return graph
    nodes = list(graph.nodes)
    for r in graph.results:
        node = nodes[r.node]
        if node.op != "reduce":
            continue
        kind, axis = node.attribute
        if axis == "b" or (grouping.is_masked and "b" in reduced_dims(axis)):
            raise ArgumentError(f"{r.name}: got a reduction over the groups; use one over rows (-2), columns or both")
        if grouping.scatters:
            raise ArgumentError(f"{r.name}: got a reduction with scatter; return the matrix, or leave scatter out")
        if graph.constant_operand_of(r) is not None:
            raise ArgumentError(f"{r.name}: got the reduction of a constant; compute it from the sizes of groups")
        nodes[r.node] = replace(node, attribute=(kind, reduced_dims(axis).removeprefix("b")))
    return replace(graph, nodes=tuple(nodes))


def scattered_shape(shape: tuple[int, ...], results: Mapping[str, Any], graph: EpilogueGraph) -> tuple[int, ...]:
    """Return the shape of the results, to whose rows those of a product of `shape` are scattered.

    The number of rows is that of the first array in `results`, the caller's by name. Raises ArgumentError if an array
    is not given.
    """
    for r in graph.results:
        if r.name not in results:
            raise ArgumentError(
                f"{r.name}: got none with scatter; use an array, to whose rows the result's are scattered"
            )
    first = graph.results[0].name
    rows, *_ = (*describe(results[first], first).shape, 0)
    return rows, *shape[1:]


def check_added_rows(graph: EpilogueGraph) -> None:
    """Raise ArgumentError for results of dtypes that cannot be added atomically to the rows of `scatter`."""
    for r in graph.results:
        if r.dtype not in (FP32, BF16, FP16):
            raise ArgumentError(
                f"{r.name}: got {r.dtype} with scatter and deterministic=False, which adds rows of fp32, bf16 or fp16; "
                "use one of these, or deterministic=True, which stores rows"
            )


def check_scales_of_groups(grouping: Grouping, granularity: Mapping[Role, int]) -> None:
    """Raise ArgumentError for block scales of a whose blocks may hold rows of two groups."""
    if grouping.along == "m" and not grouping.is_masked and granularity.get("a") == SCALE_BLOCK:
        raise ArgumentError(
            f"scale_a: got a scale for {SCALE_BLOCK} rows, which may be two groups'; use one for each row and "
            f"{SCALE_BLOCK} of k, of shape (m, k/{SCALE_BLOCK})"
        )
