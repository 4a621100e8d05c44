"""The scales of a product's operands: what their shapes mean, and those that the epilogue multiplies by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from numbers import Real
from typing import Any, Literal

from gemmsmith import checks
from gemmsmith.arrays import ArrayInfo, describe
from gemmsmith.core.dtypes import FP32, UE8M0, number_operand
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import Extent, Graph, Node, Operand
from gemmsmith.core.problem import SCALE_BLOCK, SCALE_NAMES

ARGUMENTS = dict(zip(SCALE_NAMES, ("scale_a", "scale_b"), strict=True))
"""What scales are called as arguments."""


def argument_name(operand: str) -> str:
    """What an epilogue's operand is called as an argument."""
    return ARGUMENTS.get(operand, operand)


def with_scales(operands: Mapping[str, Any], scale_a: Any, scale_b: Any) -> Mapping[str, Any]:
    """The operands of an epilogue, and the scales that are given."""
    if scale_a is None and scale_b is None:
        return operands
    given = zip(SCALE_NAMES, (scale_a, scale_b), strict=True)
    return {**operands, **{name: x for name, x in given if x is not None}}


def described(x: Any, name: str, a: ArrayInfo) -> ArrayInfo | float:
    """A scale as it is given: a number, or an array, which is on a's device."""
    argument = argument_name(name)
    if isinstance(x, Real):
        return number_operand(argument, x)
    info = describe(x, argument)
    if info.dtype not in (FP32, UE8M0):
        raise ArgumentError(f"{argument}: got dtype {info.dtype}; use fp32, or ue8m0 (float8_e8m0fnu or uint8)")
    checks.beside(argument, info, a)
    return info


def block_rows(
    x: ArrayInfo | float, name: str, operand: ArrayInfo, batch: tuple[int, ...], planned: int | None = None
) -> int | None:
    """Of how many of a's rows, or b's columns, one of these block scales is, 1 or 128; None for scales of a whole
    tensor, or of its rows or columns. Where a shape can be several of these, which then are the same: as `planned`, or
    the simplest. ArgumentError for a shape that is none of these, or another batch."""
    if not isinstance(x, ArrayInfo) or x.shape in ((), (1,)):
        return None
    turned = name == SCALE_NAMES[1]
    rows, k = operand.shape[-2:][::-1] if turned else operand.shape[-2:]
    blocks = -(-k // SCALE_BLOCK)
    shapes = [((1, 1), None), ((rows, 1), None), ((rows, blocks), 1), ((-(-rows // SCALE_BLOCK), blocks), SCALE_BLOCK)]
    if len(x.shape) == 2 or (len(x.shape) == 3 and batch and x.shape[0] in (1, *batch)):
        own = tuple(x.shape[-2:][::-1] if turned else x.shape[-2:])
        found = [meaning for shape, meaning in shapes if own == shape]
        if found:
            return planned if planned in found else found[0]
    listed = ", ".join(str(shape[::-1] if turned else shape) for shape, _ in shapes)
    raise ArgumentError(
        f"{argument_name(name)}: got shape {tuple(x.shape)}; for {name[-1]} of shape {tuple(operand.shape)} use one of "
        f"(), {listed}" + "".join(f", with {count} or 1 in front or without" for count in batch)
    )


def extent(name: str, shape: tuple[int, ...], product: tuple[int, ...]) -> Extent:
    """Along which indices of the product a scale varies that the epilogue multiplies by: of a along its rows, of b
    along its columns, also where there is one; never a matrix."""
    if len(shape) < 2:
        return Extent()
    of_a = name == SCALE_NAMES[0]
    varies: Literal[0, 1] = 1 if (shape[-2] == product[-2] if of_a else shape[-1] == product[-1]) else 0
    batch = len(shape) == 3 and shape[0] == product[0]
    return Extent(batch, varies, 0) if of_a else Extent(batch, 0, varies)


def kind(name: str, graph: Graph, block_rows: Mapping[str, int]) -> str:
    """What a product's scale of that name is for, in words."""
    if name in block_rows:
        return f"scales of {block_rows[name]}x{SCALE_BLOCK} blocks"
    operand = next((o for o in graph.operands if o.name == name), None)
    if operand is None:
        return "none"
    if operand.extent != Extent():
        return "scales of rows or columns"
    return "a scale of the whole" if operand.dtype else "a number"


def scaled(graph: Graph, factors: Iterable[Operand]) -> Graph:
    """The graph of a product that is multiplied by these operands first."""
    nodes: list[Node] = []
    place: list[int] = []
    for node in graph.nodes:
        nodes.append(replace(node, inputs=tuple(place[i] for i in node.inputs)))
        for factor in factors if node.op == "accumulator" else ():
            nodes.append(Node("operand", (), factor.name))
            nodes.append(Node("mul", (len(nodes) - 2, len(nodes) - 1)))
        place.append(len(nodes) - 1)
    results = tuple(replace(r, node=place[r.node]) for r in graph.results)
    return Graph(tuple(nodes), (*graph.operands, *factors), results)
