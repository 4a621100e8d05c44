"""Binding of a visitor tree's graph to operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import did_you_mean
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph
from gemmsmith.graph.frontend.classify import describe
from gemmsmith.graph.source_location import epilogue_error


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
