"""Gated experts whose products are computed in e4m3, in training: weights and gradients stay in 16 or 32 bits.

Each operand is quantized where it is multiplied (DeepSeek-V3's recipe, arXiv:2412.19437, section 3.3): activations and
their gradients with a scale for each row and 128 columns, weights with one for each 128 x 128, and what is multiplied
along the tokens, for the gradients of weights, with one for each 128 rows and column.

`table`: offsets, token_of_row and row_of_slot of `SortedSlots`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from gemmsmith.api import grouped_gemm
from gemmsmith.backends import Backend
from gemmsmith.graph.frontend.values import quantize as quantize_traced
from gemmsmith.host.quantization import quantize
from gemmsmith.torch.graph_serialization import deserialize
from gemmsmith.torch.mlp.gated_epilogues import epilogue_of, weighted_gate_and_halves
from gemmsmith.torch.moe.slots import sum_slots
from gemmsmith.torch.ops import by_rows


def forward_in_fp8(
    x: Any, table: Sequence[Any], row_weights: Any, gate_up: Any, down: Any, activation: str, backend: Backend = "auto"
) -> tuple[Any, Any, Any]:
    """Return down's results (rows, dim), and each row's gate and up (rows, hidden), which backward reads."""
    offsets, token_of_row, _ = table
    multiply = partial(grouped_gemm, offsets=offsets, backend=backend)
    values, scales = quantize(x, "1x128", backend=backend)
    h, h_scales, gate, up = multiply(
        values, scale_a=scales, **_gate_and_up(gate_up, backend), gather=token_of_row,
        epilogue=_weighted_gated(activation), weight=by_rows(row_weights.unsqueeze(1)), out_dtype=x.dtype,
    )  # fmt: skip
    return multiply(h, scale_a=h_scales, **_transposed(down, backend), out_dtype=x.dtype), gate, up


def backward_in_fp8(
    gradient: Any, x: Any, halves: Sequence[Any], table: Sequence[Any], row_weights: Any, gate_up: Any, down: Any,
    activation: str, needs: Sequence[bool], backend: Backend = "auto",
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Return the gradients of x, of the rows' weights (rows,), of gate_up and of down.

    `halves`: gate and up. `needs`: whether those of x, gate_up and down are needed; others are empty.
    """
    (gate, up), dtype, (offsets, token_of_row, row_of_slot) = halves, x.dtype, table
    rows, hidden = gate.shape
    multiply = partial(grouped_gemm, offsets=offsets, backend=backend)
    values, scales = quantize(gradient, "1x128", backend=backend)
    grad_both, grad_weights, h = x.new_empty((rows, 2 * hidden)), torch.empty_like(row_weights), torch.empty_like(gate)
    epilogue = deserialize(epilogue_of("weighted_backward", activation, str(dtype)))
    multiply(
        values, scale_a=scales, **_transposed(down.mT, backend), gather=token_of_row, epilogue=epilogue,
        gate=by_rows(gate), up=by_rows(up), weight=by_rows(row_weights.unsqueeze(1)), out_dtype=dtype,
        out={"out": grad_both[:, :hidden], "out1": grad_both[:, hidden:], "out2": grad_weights, "out3": h},
    )  # fmt: skip
    grad_x, grad_gate_up, grad_down = (x.new_empty(0) for _ in range(3))
    if needs[0]:
        values, scales = quantize(grad_both, "1x128", backend=backend)
        grad_rows = multiply(values, scale_a=scales, **_transposed(gate_up.mT, backend), out_dtype=dtype)
        grad_x = sum_slots(grad_rows, x.shape[0], row_of_slot=row_of_slot)
    along_rows = partial(_multiply_along_rows, offsets=offsets, backend=backend)
    if needs[1]:
        grad_gate_up = along_rows(grad_both, x.index_select(0, token_of_row), dtype=gate_up.dtype)
    if needs[2]:
        grad_down = along_rows(gradient.index_select(0, token_of_row), h, dtype=down.dtype)
    return grad_x, grad_weights, grad_gate_up, grad_down


def _gate_and_up(gate_up: Any, backend: Backend) -> dict[str, Any]:
    """Return the operands b (count, dim, hidden) each, and their scales."""
    matrices = gate_up.unflatten(1, (2, -1)).flatten(0, 1)
    b, scale_b = (x.unflatten(0, (-1, 2)).mT.unbind(1) for x in quantize(matrices, "128x128", backend=backend))
    return {"b": tuple(b), "scale_b": tuple(scale_b)}


def _transposed(weight: Any, backend: Backend) -> dict[str, Any]:
    """Return the operand b (count, k, n), and its scales, that is the transpose of a weight (count, n, k)."""
    values, scales = quantize(weight, "128x128", backend=backend)
    return {"b": values.mT, "scale_b": scales.mT}


def _multiply_along_rows(x: Any, y: Any, offsets: Any, dtype: Any, backend: Backend) -> Any:
    """Return (count, m, n), x.T @ y of each group's rows of x (rows, m) and y (rows, n)."""
    a, scale_a, filled = quantize(x, "128x1", offsets=offsets, backend=backend)
    b, scale_b, _ = quantize(y, "128x1", offsets=offsets, backend=backend)
    return grouped_gemm(
        a.T, b, scale_a=scale_a.T, scale_b=scale_b, offsets=filled, along="k", out_dtype=dtype, backend=backend
    )


@lru_cache(maxsize=16)
def _weighted_gated(activation: str) -> Callable[..., Any]:
    """Return the epilogue of gate and up: what down multiplies, times a row's weight; and both."""

    def epilogue(acc: Any, weight: Any) -> Any:
        h, *halves = weighted_gate_and_halves(activation, acc, weight)
        return *quantize_traced(h), *halves

    return epilogue
