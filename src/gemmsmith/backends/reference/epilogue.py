"""Execution of an epilogue graph in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gemmsmith.backends.reference.matmul import Array, rounded
from gemmsmith.core.graph import EpilogueGraph, reduced_dims
from gemmsmith.graph.reductions import REDUCTIONS


def execute(
    graph: EpilogueGraph, accumulator: Array, operands: Mapping[str, Any], group_index: Any = None,
    reduce: Callable[[Array, str, str], Array] | None = None,
) -> dict[str, Array]:  # fmt: skip
    """Return the results by name, in float64; quantized results hold the values that are stored.

    Only casts and quantization round.

    Args:
        graph: The epilogue.
        accumulator: A @ B, (m, n) or (batch, m, n), float64.
        operands: Numbers, or arrays that broadcast against the accumulator, columns as (m, 1); after a GLU gate, which
            halves n, against (m, n / 2).
        group_index: The index of each row's group, an array that broadcasts likewise.
        reduce: Computes reductions, as `reduced` does.
    """
    arrays = _NumpyArrays(graph, accumulator, operands, group_index, reduce or reduced)
    for node in graph.nodes:
        with np.errstate(all="ignore"):
            value = node.operation.compute(arrays, node, *(arrays.values[i] for i in node.inputs))
        arrays.values.append(np.asarray(value, np.float64))  # a predicate is 0 or 1, as in the kernels
    shape = accumulator.shape[:-1]
    results = {}
    for r in graph.results:
        node, value = graph.nodes[r.node], arrays.values[r.node]
        if graph.is_reduction(r):
            axis = node.attribute[1]
            rank = np.ndim(value) + len(axis) if reduce else accumulator.ndim
            results[r.name] = np.expand_dims(value, _reduced_axes(axis, rank)) if r.keepdim else value
        else:
            results[r.name] = np.broadcast_to(value, (*shape, np.shape(value)[-1] if np.ndim(value) else 1))
    return results


class _NumpyArrays:
    """A `GraphArrays` in float64."""

    library = np

    def __init__(
        self, graph: EpilogueGraph, accumulator: Array, operands: Mapping[str, Any], group_index: Any,
        reduce: Callable[[Array, str, str], Array],
    ) -> None:  # fmt: skip
        self.graph, self.accumulator, self.operands, self.group_index = graph, accumulator, operands, group_index
        self.reduce = reduce
        self.values: list[Array] = []
        self.constant, self.rounded = np.float64, rounded

    def implementation(self, operation: Any) -> Callable[..., Array]:
        return operation.reference  # type: ignore[no-any-return]

    def operand(self, name: str) -> Array:
        return np.asarray(self.operands[name], np.float64)

    def columns(self) -> Array:
        return np.arange(self.accumulator.shape[-1])

    def full(self, x: Array, divisor: int = 1) -> Array:
        width = np.shape(x)[-1] if np.ndim(x) else 1
        columns = width if width > 1 else self.accumulator.shape[-1] // divisor
        return np.broadcast_to(x, (*self.accumulator.shape[:-1], columns))


def reduced(x: Array, kind: str, axis: str) -> Array:
    """Return a reduction of x, (m, n) or (batch, m, n)."""
    return np.asarray(REDUCTIONS[kind].reference(x, _reduced_axes(axis, x.ndim)))


def _reduced_axes(axis: str, rank: int) -> tuple[int, ...]:
    """Return the dimensions of an array of that rank that a reduction along `axis` reduces."""
    return tuple(i for i, index in enumerate("bmn"[3 - rank :]) if index in reduced_dims(axis))
