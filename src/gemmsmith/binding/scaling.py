"""Scales of a GEMM's operands: the granularity that their shapes define, and those that the epilogue applies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from gemmsmith.arrays import ArrayInfo, describe
from gemmsmith.binding import checks
from gemmsmith.core.dtypes import FP32, UE8M0, validate_fp32_scalar
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph, Node, Operand
from gemmsmith.core.problem import SCALE_BLOCK, SCALE_NAMES
from gemmsmith.core.product import Role
from gemmsmith.core.scalars import ceil_div, is_number


def describe_scale(x: Any, role: Role, a: ArrayInfo) -> ArrayInfo | float:
    """Return the caller's scale_a or scale_b as a number or an ArrayInfo.

    Raises ArgumentError for another dtype than fp32 or ue8m0, or another device than that of `a`.
    """
    argument = f"scale_{role}"
    if is_number(x):
        return validate_fp32_scalar(argument, x)
    info = describe(x, argument)
    if info.dtype not in (FP32, UE8M0):
        raise ArgumentError(f"{argument}: got dtype {info.dtype}; use fp32, or ue8m0 (float8_e8m0fnu or uint8)")
    checks.check_alignment_and_device(argument, info, a)
    return info


def scale_granularity(
    x: ArrayInfo | float, role: Role, operand: ArrayInfo, batch: tuple[int, ...], planned_granularity: int | None = None
) -> int | None:
    """Return the rows of a (columns of b) per block scale, 1 or 128; None for tensor, row or column scales.

    `batch`: the sizes that a leading dimension of x may have, besides 1. `planned_granularity`: that if several fit the
    shape; None: the first in the order None, 1, 128. Raises ArgumentError if the shape fits none. Two arrays of scales
    fit two arrays b, with scales of 128 x 128 only.
    """
    if not isinstance(x, ArrayInfo) or x.shape in ((), (1,)):
        return None
    is_transposed = role == "b"
    if x.interleave_stride:
        return _granularity_of_two(x, role, operand, batch)
    rows, k = operand.shape[-2:][::-1] if is_transposed else operand.shape[-2:]
    blocks = ceil_div(k, SCALE_BLOCK)
    shapes = [
        ((1, 1), None), ((rows, 1), None), ((rows, blocks), 1), ((ceil_div(rows, SCALE_BLOCK), blocks), SCALE_BLOCK),
    ]  # fmt: skip
    if len(x.shape) == 2 or (len(x.shape) == 3 and batch and x.shape[0] in (1, *batch)):
        last_dims = tuple(x.shape[-2:][::-1] if is_transposed else x.shape[-2:])
        matches = [granularity for shape, granularity in shapes if last_dims == shape]
        if matches:
            return planned_granularity if planned_granularity in matches else matches[0]
    alternatives = ", ".join(dict.fromkeys(str(shape[::-1] if is_transposed else shape) for shape, _ in shapes))
    raise ArgumentError(
        f"scale_{role}: got shape {tuple(x.shape)}; for {role} of shape {tuple(operand.shape)} use one of "
        f"(), {alternatives}"
        + "".join(f", with or without a batch dimension of {count} or 1 in front" for count in batch)
    )


def _granularity_of_two(x: ArrayInfo, role: Role, operand: ArrayInfo, batch: tuple[int, ...]) -> int:
    """Return the columns per scale, 128, of a tuple of two arrays of scales, for a tuple of two arrays b.

    Raises ArgumentError if they are not scales of 128 x 128 blocks.
    """
    part, of = x.parts[0].shape, operand.parts[0].shape
    if not operand.interleave_stride:
        raise ArgumentError(f"scale_{role}: got a tuple with one array {role}; use one array")
    expected = tuple(ceil_div(extent, SCALE_BLOCK) for extent in of[-2:])
    if part[-2:] != expected or (len(part) != 2 and (len(part), part[0]) not in [(3, n) for n in (1, *batch)]):
        raise ArgumentError(
            f"scale_{role}: got two arrays of shape {part}; for two arrays {role} of shape {of} use "
            f"{expected} each, for blocks of 128 x 128, and multiply by any other scale in the epilogue"
        )
    return SCALE_BLOCK


def scale_broadcast_dims(name: str, shape: tuple[int, ...], gemm_shape: tuple[int, ...]) -> BroadcastDims:
    """Return along which dimensions a scale varies that the epilogue applies.

    scale_a varies along the rows if it has one value per row, also for M = 1, and scale_b along the columns likewise;
    other shapes are scalars.
    """
    if len(shape) < 2:
        return BroadcastDims()
    batch = len(shape) == 3 and shape[0] == gemm_shape[0]
    if name == SCALE_NAMES["a"]:
        return BroadcastDims(batch, rows_per_value=1 if shape[-2] == gemm_shape[-2] else 0)
    return BroadcastDims(batch, columns_per_value=1 if shape[-1] == gemm_shape[-1] else 0)


def describe_granularity(role: Role, graph: EpilogueGraph, scale_granularity: Mapping[Role, int]) -> str:
    """Return the kind of the scales of a or b in words, such as "a tensor scale", for comparisons and messages."""
    if role in scale_granularity:
        return f"scales of {scale_granularity[role]}x{SCALE_BLOCK} blocks"
    operand = next((o for o in graph.operands if o.name == SCALE_NAMES[role]), None)
    if operand is None:
        return "none"
    if operand.broadcast_dims != BroadcastDims():  # it varies along a dimension
        return "row or column scales"
    return "a tensor scale" if operand.dtype else "a number"


def multiply_by_scales(graph: EpilogueGraph, factors: Iterable[Operand]) -> EpilogueGraph:
    """Return the graph with the accumulator multiplied by these operands before anything else reads it."""
    nodes: list[Node] = []
    new_index: list[int] = []
    for node in graph.nodes:
        nodes.append(replace(node, inputs=tuple(new_index[i] for i in node.inputs)))
        for factor in factors if node.op == "accumulator" else ():
            nodes.append(Node("operand", (), factor.name))
            nodes.append(Node("mul", (len(nodes) - 2, len(nodes) - 1)))
        new_index.append(len(nodes) - 1)
    results = tuple(replace(r, node=new_index[r.node]) for r in graph.results)
    return EpilogueGraph(tuple(nodes), (*graph.operands, *factors), results)
