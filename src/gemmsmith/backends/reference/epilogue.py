"""Executes an epilogue graph in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gemmsmith.backends.reference.product import Array, rounded
from gemmsmith.core.dtypes import LARGEST, LEAST_SCALE, DType
from gemmsmith.core.graph import Graph, Node, over
from gemmsmith.epilogue.functions import FUNCTIONS


def execute(graph: Graph, product: Array, operands: Mapping[str, Any]) -> dict[str, Array]:
    """The results by name, in float64; quantized ones hold the values that are stored.

    product: (m, n) or (batch, m, n), float64. operands: numbers, or arrays that broadcast against it, columns as
    (m, 1); those of gated values against (m, n / 2). Only casts and quantization round.
    """
    values: list[Any] = []
    scales: dict[int, Array] = {}
    for index, node in enumerate(graph.nodes):
        inputs = [values[i] for i in node.inputs]
        with np.errstate(all="ignore"):
            values.append(_node(node, index, inputs, product, operands, scales))
    shape = product.shape[:-1]
    results = {}
    for r in graph.results:
        node, value = graph.nodes[r.node], values[r.node]
        if node.op == "reduce":
            results[r.name] = np.expand_dims(value, _along(node.value[1], product.ndim)) if r.keepdim else value
        else:
            results[r.name] = np.broadcast_to(value, (*shape, np.shape(value)[-1] if np.ndim(value) else 1))
    return results


def _node(
    node: Node, index: int, inputs: list[Any], product: Array, operands: Mapping[str, Any], scales: dict[int, Array]
) -> Any:
    match node.op:
        case "accumulator":
            return product
        case "constant":
            return np.float64(node.value)
        case "operand":
            return np.asarray(operands[node.value], np.float64)
        case "chunk":
            return _half(_spread(inputs[0], product), node.value[0])
        case "interleave":
            return _interleaved(*(_spread(x, product, 2) for x in inputs))
        case "one_hot":
            return np.arange(product.shape[-1]) == inputs[0]
        case "cast":
            return rounded(np.asarray(inputs[0], np.float64), node.value).astype(np.float64)
        case "reduce":
            return _reduced(_spread(inputs[0], product), *node.value)
        case "quantize":
            q, scales[index] = _quantized(_spread(inputs[0], product), *node.value)
            return q
        case "scale":
            return scales[node.inputs[0]]
        case "top_k_softmax":
            return _top_k_softmax(_spread(inputs[0], product), node.value)
    return FUNCTIONS[node.op].meaning(*inputs)


def _spread(x: Any, product: Array, halves: int = 1) -> Array:
    """x at every element: over all rows and batches, and all columns of the product or of its halves."""
    width = np.shape(x)[-1] if np.ndim(x) else 1
    columns = width if width > 1 else product.shape[-1] // halves
    return np.broadcast_to(x, (*product.shape[:-1], columns))


def _half(x: Array, which: int) -> Array:
    """The even (0) or odd (1) groups of 8 columns."""
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // 16, 2, 8)[..., which, :]
    return groups.reshape(*x.shape[:-1], x.shape[-1] // 2)


def _interleaved(x: Array, y: Array) -> Array:
    """Groups of 8 columns of both, alternately."""
    groups = np.stack([z.reshape(*z.shape[:-1], z.shape[-1] // 8, 8) for z in (x, y)], axis=-2)
    return groups.reshape(*x.shape[:-1], 2 * x.shape[-1])


def _reduced(x: Array, kind: str, axis: str) -> Array:
    along = _along(axis, x.ndim)
    if kind == "logsumexp":
        largest = x.max(axis=along, keepdims=True, initial=-np.inf)
        offset = np.where(np.isfinite(largest), largest, 0)
        return np.asarray(np.log(np.exp(x - offset).sum(axis=along)) + offset.squeeze(axis=along))
    if kind in ("max", "min"):  # the initial value is for what has no rows and no batch either
        return np.asarray(getattr(x, kind)(axis=along, initial=-np.inf if kind == "max" else np.inf))
    return np.asarray(getattr(x, kind)(axis=along))


def _along(axis: str, rank: int) -> tuple[int, ...]:
    """The indices that a reduction of an array of that rank sums."""
    return tuple(i for i, index in enumerate("bmn"[3 - rank :]) if index in over(axis))


def _quantized(x: Array, dtype: DType, block: int) -> tuple[Array, Array]:
    """(x over its scale, rounded; the scale of every row and `block` columns)."""
    limit = LARGEST[dtype]
    q, scales = np.empty_like(x), [x[..., :0]]
    for first in range(0, x.shape[-1], block):
        part = x[..., first : first + block]
        amax = np.abs(part).max(axis=-1, keepdims=True)
        scale = np.where(amax == 0, 1.0, np.maximum(amax / limit, LEAST_SCALE))
        q[..., first : first + block] = rounded(part / scale, dtype).astype(np.float64)
        scales.append(scale)
    return q, np.concatenate(scales, axis=-1)


def _top_k_softmax(x: Array, k: int) -> Array:
    """The softmax over the k largest elements of each row; of equal elements the first columns count. NaN in all of a
    row with NaN or +Inf, or with nothing but -Inf."""
    chosen = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    weights = np.exp(np.take_along_axis(x, chosen, axis=-1) - x.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1, keepdims=True)
    result = np.zeros_like(x)
    np.put_along_axis(result, chosen, weights / total, axis=-1)
    return np.where(np.isnan(total), np.nan, result)
