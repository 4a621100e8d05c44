"""Execution of an epilogue graph in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gemmsmith.backends.reference.matmul import Array, rounded
from gemmsmith.core.dtypes import DType
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.graph.operations import GraphArrays, reduced_axes
from gemmsmith.graph.reductions import REDUCTIONS


def execute(
    graph: EpilogueGraph, accumulator: Array, operands: Mapping[str, Any], group_index: Any = None,
    reduce: Callable[[Array, str, str], Array] | None = None,
) -> dict[str, Array]:  # fmt: skip
    """Return the results by name, in float64; quantized results hold the values that are stored.

    Only casts and quantization round. `accumulator`: (m, n) or (batch, m, n), float64. `operands`: numbers, or arrays
    that broadcast against it, columns as (m, 1); after a GLU gate, which halves n, against (m, n / 2). `group_index`:
    that of each row's group, an array that broadcasts likewise. `reduce`: called instead of `reduced`.
    """
    with np.errstate(all="ignore"):
        values = _NumpyArrays(graph, accumulator, operands, group_index, reduce or reduced).compute()
    results = {}
    for r in graph.results:
        node, value = graph.nodes[r.node], values[r.node]
        if graph.is_reduction(r):
            axis = node.attribute[1]
            rank = np.ndim(value) + len(axis) if reduce else accumulator.ndim
            results[r.name] = np.expand_dims(value, reduced_axes(axis, rank)) if r.keepdim else value
        else:
            width = np.shape(value)[-1] if np.ndim(value) else 1
            results[r.name] = np.broadcast_to(value, (*accumulator.shape[:-1], width))
    return results


def reduced(x: Array, kind: str, axis: str) -> Array:
    """Return a reduction of x, (m, n) or (batch, m, n).

    `kind`: a name in REDUCTIONS, such as "sum". `axis`: the dimensions reduced, such as "n" (one result per row) or
    "all".
    """
    return np.asarray(REDUCTIONS[kind].reference(x, reduced_axes(axis, x.ndim)))


class _NumpyArrays(GraphArrays):
    """Values of a graph's nodes as numpy arrays in float64; `reduce`: as in `execute`."""

    library = np

    def __init__(
        self, graph: EpilogueGraph, accumulator: Array, operands: Mapping[str, Any], group_index: Any,
        reduce: Callable[[Array, str, str], Array],
    ) -> None:  # fmt: skip
        super().__init__(graph, accumulator, operands, group_index)
        self._reduce = reduce

    def as_value(self, x: Any) -> Array:
        return np.asarray(x, np.float64)

    def implementation(self, operation: Any) -> Callable[..., Array]:
        return operation.reference  # type: ignore[no-any-return]

    def rounded(self, x: Array, dtype: DType) -> Array:
        return rounded(x, dtype)

    def reduce(self, x: Array, kind: str, axis: str) -> Array:
        return self._reduce(x, kind, axis)
