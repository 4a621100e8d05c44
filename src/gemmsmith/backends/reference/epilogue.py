"""Execution of an epilogue graph in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gemmsmith.backends.reference.matmul import Array, rounded
from gemmsmith.core.dtypes import MAX_FINITE, MIN_SCALE, DType
from gemmsmith.core.graph import EpilogueGraph, Node, reduced_dims
from gemmsmith.graph.functions import FUNCTIONS


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
    values: list[Array] = []
    scales: dict[int, Array] = {}
    for index, node in enumerate(graph.nodes):
        inputs = [values[i] for i in node.inputs]
        with np.errstate(all="ignore"):
            if node.op == "group_index":
                value = group_index
            elif node.op == "reduce":
                value = (reduce or reduced)(_broadcast_to_accumulator(inputs[0], accumulator), *node.attribute)
            else:
                value = _evaluate_node(node, index, inputs, accumulator, operands, scales)
        values.append(np.asarray(value, np.float64))  # a predicate is 0 or 1, as in the kernels
    shape = accumulator.shape[:-1]
    results = {}
    for r in graph.results:
        node, value = graph.nodes[r.node], values[r.node]
        if node.op == "reduce":
            axis = node.attribute[1]
            rank = np.ndim(value) + len(axis) if reduce else accumulator.ndim
            results[r.name] = np.expand_dims(value, _reduced_axes(axis, rank)) if r.keepdim else value
        else:
            results[r.name] = np.broadcast_to(value, (*shape, np.shape(value)[-1] if np.ndim(value) else 1))
    return results


def _evaluate_node(
    node: Node, index: int, inputs: list[Array], accumulator: Array, operands: Mapping[str, Any],
    scales: dict[int, Array],
) -> Any:  # fmt: skip
    match node.op:
        case "accumulator":
            return accumulator
        case "constant":
            return np.float64(node.attribute)
        case "operand":
            return np.asarray(operands[node.attribute], np.float64)
        case "chunk":
            return _half(_broadcast_to_accumulator(inputs[0], accumulator), node.attribute[0])
        case "interleave":
            return _interleave(*(_broadcast_to_accumulator(x, accumulator, 2) for x in inputs))
        case "one_hot":
            return np.arange(accumulator.shape[-1]) == inputs[0]
        case "cast":
            return rounded(inputs[0], node.attribute)
        case "quantize":
            q, scales[index] = _quantize(_broadcast_to_accumulator(inputs[0], accumulator), *node.attribute)
            return q
        case "scale":
            return scales[node.inputs[0]]
        case "top_k_softmax":
            return _top_k_softmax(_broadcast_to_accumulator(inputs[0], accumulator), node.attribute)
    return FUNCTIONS[node.op].reference(*inputs)


def _broadcast_to_accumulator(x: Any, accumulator: Array, halves: int = 1) -> Array:
    """Broadcast x to the accumulator's shape, or to 1 / `halves` of its columns."""
    width = np.shape(x)[-1] if np.ndim(x) else 1
    columns = width if width > 1 else accumulator.shape[-1] // halves
    return np.broadcast_to(x, (*accumulator.shape[:-1], columns))


def _half(x: Array, which: int) -> Array:
    """Return the even (0) or odd (1) groups of 8 columns."""
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // 16, 2, 8)[..., which, :]
    return groups.reshape(*x.shape[:-1], x.shape[-1] // 2)


def _interleave(x: Array, y: Array) -> Array:
    """Interleave groups of 8 columns of x and y."""
    groups = np.stack([z.reshape(*z.shape[:-1], z.shape[-1] // 8, 8) for z in (x, y)], axis=-2)
    return groups.reshape(*x.shape[:-1], 2 * x.shape[-1])


def reduced(x: Array, kind: str, axis: str) -> Array:
    """Return a reduction of x, (m, n) or (batch, m, n)."""
    axes = _reduced_axes(axis, x.ndim)
    if kind == "logsumexp":
        largest = x.max(axis=axes, keepdims=True, initial=-np.inf)
        offset = np.where(np.isfinite(largest), largest, 0)
        return np.asarray(np.log(np.exp(x - offset).sum(axis=axes)) + offset.squeeze(axis=axes))
    if kind in ("max", "min"):  # the initial value is for empty arrays
        return np.asarray(getattr(x, kind)(axis=axes, initial=-np.inf if kind == "max" else np.inf))
    return np.asarray(getattr(x, kind)(axis=axes))


def _reduced_axes(axis: str, rank: int) -> tuple[int, ...]:
    """Return the dimensions of an array of that rank that a reduction along `axis` reduces."""
    return tuple(i for i, index in enumerate("bmn"[3 - rank :]) if index in reduced_dims(axis))


def _quantize(x: Array, dtype: DType, block: int) -> tuple[Array, Array]:
    """Return (x divided by its scale and rounded, the scale per row and `block` columns)."""
    limit = MAX_FINITE[dtype]
    q, scales = np.empty_like(x), [x[..., :0]]
    for first in range(0, x.shape[-1], block):
        columns = x[..., first : first + block]
        amax = np.abs(columns).max(axis=-1, keepdims=True)
        scale = np.where(amax == 0, 1.0, np.maximum(amax / limit, MIN_SCALE))
        q[..., first : first + block] = rounded(columns / scale, dtype).astype(np.float64)
        scales.append(scale)
    return q, np.concatenate(scales, axis=-1)


def _top_k_softmax(x: Array, k: int) -> Array:
    """Return the softmax over the k largest elements of each row; of equal elements the first columns are selected.

    A row is all NaN if it has NaN or +Inf, or nothing but -Inf.
    """
    selected = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    weights = np.exp(np.take_along_axis(x, selected, axis=-1) - x.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1, keepdims=True)
    result = np.zeros_like(x)
    np.put_along_axis(result, selected, weights / total, axis=-1)
    return np.where(np.isnan(total), np.nan, result)
