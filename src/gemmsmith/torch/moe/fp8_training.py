"""Gated experts whose products are computed in e4m3, in training: weights and gradients stay in 16 or 32 bits.

Each operand is quantized where it is multiplied (DeepSeek-V3's recipe, arXiv:2412.19437, section 3.3): activations and
their gradients with a scale for each row and 128 columns, weights with one for each 128 x 128, and what is multiplied
along the tokens, for the gradients of weights, with one for each 128 rows and column.

    gemmsmith::fp8_experts_forward(Tensor x, Tensor[] table, Tensor row_weights, Tensor gate_up, Tensor down,
        str activation) -> (Tensor y, Tensor gate, Tensor up)
    gemmsmith::fp8_experts_backward(Tensor gradient, Tensor x, Tensor gate, Tensor up, ..., bool[] needs)
        -> (Tensor of x, Tensor of row_weights, Tensor of gate_up, Tensor of down)

`table`: offsets, token_of_row and row_of_slot of `SortedSlots`. `needs`: whether the last two gradients are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from gemmsmith.api import grouped_gemm
from gemmsmith.arrays import INTERLEAVE_COLUMNS
from gemmsmith.backends import Backend
from gemmsmith.core.errors import ArgumentError
from gemmsmith.graph.frontend.values import quantize as quantize_traced
from gemmsmith.host.quantization import quantize
from gemmsmith.torch.api import autocast, is_dtensor
from gemmsmith.torch.autograd_state import check_once_differentiable, operators_record_gradients
from gemmsmith.torch.mlp.gated_epilogues import check_activation, weighted_backward, weighted_gate_and_halves
from gemmsmith.torch.moe.experts import sharded_experts
from gemmsmith.torch.moe.fp8_experts import check_hidden
from gemmsmith.torch.moe.slots import SUM_ROWS, SortedSlots, checked_shape, sort_slots, with_gradients
from gemmsmith.torch.ops import by_rows, define_op, record_gradients

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of x and of the weights."""


def gated_experts_in_fp8(
    x: Any, experts: Any, weights: Any, gate_up: Any, down: Any, activation: str = "silu",
    order: SortedSlots | None = None, addend: Any = None,
) -> Any:  # fmt: skip
    """Return what `gated_experts` does, by products of operands that are quantized to e4m3, with gradients.

    Args:
        x: (tokens, dim), bf16, fp16 or fp32.
        experts: (tokens, top_k) of integers. Those outside 0 ... count - 1, such as other ranks', count for nothing.
        weights: (tokens, top_k), a float dtype.
        gate_up: (count, 2 * hidden, dim), bf16, fp16 or fp32: the rows of gate, then those of up; hidden is a multiple
            of 8.
        down: (count, dim, hidden), bf16, fp16 or fp32.
        activation: silu, gelu, gelu_tanh or relu.
        order: the slots in the order of their experts, if they are sorted already; not of DTensors.
        addend: (tokens, dim), what is added to the result; not to DTensors.

    Returns:
        (tokens, dim), in x's dtype, or autocast's; of DTensors a DTensor of partial sums.

    Raises:
        ArgumentError: shapes, dtypes or placements do not match, or the activation is unknown.
    """
    check_activation(activation)
    if is_dtensor(gate_up):
        function = partial(gated_experts_in_fp8, activation=activation)
        return sharded_experts(function, x, experts, weights, gate_up, down, order, addend)
    (x,) = autocast(x)
    for name, array in (("x", x), ("gate_up", gate_up), ("down", down)):
        if array.dtype not in DTYPES:
            raise ArgumentError(f"{name}: got {array.dtype}; use one of {', '.join(map(str, DTYPES))}")
    count, hidden = checked_shape(x, experts, weights, gate_up, down)
    check_hidden(hidden, INTERLEAVE_COLUMNS)
    if order is None:
        order = sort_slots(experts, weights, count)
    exporting = operators_record_gradients()
    order = with_gradients(order, weights) if exporting else order
    table, row_weights = [order.offsets, order.token_of_row, order.row_of_slot], order.row_weights.float()
    if exporting:  # the program's operator records gradients when it runs
        y = FORWARD(x.contiguous(), table, row_weights, gate_up, down, activation)[0]
    else:
        y = _Experts.apply(x.contiguous(), weights, row_weights, gate_up, down, activation, *table)[0]
    return y if addend is None else y + addend


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Any, weights: Any, row_weights: Any, gate_up: Any, down: Any, activation: str, offsets: Any,
        token_of_row: Any, row_of_slot: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        table = [offsets, token_of_row, row_of_slot]
        return FORWARD(x, table, row_weights, gate_up, down, activation)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        x, weights, row_weights, gate_up, down, ctx.activation, *table = inputs
        ctx.top_k, ctx.dtype = weights.shape[1], weights.dtype
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *output[1:], row_weights, gate_up, down, *table)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        check_once_differentiable()
        if gradients[0] is None:
            return (None,) * 9
        x, gate, up, row_weights, gate_up, down, *table = ctx.saved_tensors
        _, needs_weights, needs_row_weights, *needs = ctx.needs_input_grad[:5]
        grad_x, of_rows, *of_weights = BACKWARD(
            gradients[0].contiguous(), x, gate, up, table, row_weights, gate_up, down, ctx.activation, needs
        )
        grad_weights = None
        if needs_weights:
            grad_weights = of_rows.index_select(0, table[2]).view(-1, ctx.top_k).to(ctx.dtype)
        of_weights = [g if is_needed else None for g, is_needed in zip(of_weights, needs, strict=True)]
        return grad_x, grad_weights, of_rows if needs_row_weights else None, *of_weights, *[None] * 4


def _forward(
    x: Any, table: Sequence[Any], row_weights: Any, gate_up: Any, down: Any, activation: str, backend: Backend = "auto"
) -> tuple[Any, Any, Any]:
    """Return the experts' sum, and each row's gate and up (rows, hidden), which backward reads."""
    offsets, token_of_row, row_of_slot = table
    multiply = partial(grouped_gemm, offsets=offsets, backend=backend)
    values, scales = quantize(x, "1x128", backend=backend)
    h, h_scales, gate, up = multiply(
        values, scale_a=scales, **_gate_and_up(gate_up, backend), gather=token_of_row,
        epilogue=_weighted_gated(activation), weight=by_rows(row_weights.unsqueeze(1)), out_dtype=x.dtype,
    )  # fmt: skip
    y = multiply(h, scale_a=h_scales, **_transposed(down, backend), out_dtype=x.dtype)
    return SUM_ROWS(y, row_of_slot, x.shape[0]), gate, up


def _backward(
    gradient: Any, x: Any, gate: Any, up: Any, table: Sequence[Any], row_weights: Any, gate_up: Any, down: Any,
    activation: str, needs: Sequence[bool], backend: Backend = "auto",
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Return the gradients of x, of the rows' weights (rows,), of gate_up and of down; the last two, if needed."""
    (rows, hidden), dtype, (offsets, token_of_row, row_of_slot) = gate.shape, x.dtype, table
    multiply = partial(grouped_gemm, offsets=offsets, backend=backend)
    values, scales = quantize(gradient, "1x128", backend=backend)
    grad_both, grad_weights, h = x.new_empty((rows, 2 * hidden)), torch.empty_like(row_weights), torch.empty_like(gate)
    multiply(
        values, scale_a=scales, **_transposed(down.mT, backend), gather=token_of_row,
        epilogue=_weighted_gradients(activation), gate=by_rows(gate), up=by_rows(up),
        weight=by_rows(row_weights.unsqueeze(1)), out_dtype=dtype,
        out={"out": grad_both[:, :hidden], "out1": grad_both[:, hidden:], "out2": grad_weights, "out3": h},
    )  # fmt: skip
    values, scales = quantize(grad_both, "1x128", backend=backend)
    grad_rows = multiply(values, scale_a=scales, **_transposed(gate_up.mT, backend), out_dtype=dtype)
    grad_x = SUM_ROWS(grad_rows, row_of_slot, x.shape[0])
    along_rows = partial(_multiply_along_rows, offsets=offsets, backend=backend)
    of_weights = [x.new_empty(0), x.new_empty(0)]
    if needs[0]:
        of_weights[0] = along_rows(grad_both, x.index_select(0, token_of_row), dtype=gate_up.dtype)
    if needs[1]:
        of_weights[1] = along_rows(gradient.index_select(0, token_of_row), h, dtype=down.dtype)
    return grad_x, grad_weights, *of_weights


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


@lru_cache(maxsize=16)
def _weighted_gradients(activation: str) -> Callable[..., Any]:
    """Return the epilogue of the gradient of h: those of gate, of up and of the row's weight; and h, weighted."""
    return partial(weighted_backward, activation)


def _fake_forward(
    x: Any, table: Sequence[Any], row_weights: Any, gate_up: Any, down: Any, activation: str
) -> tuple[Any, Any, Any]:
    return x.new_empty(x.shape), *(x.new_empty(row_weights.shape[0], down.shape[2]) for _ in range(2))


def _fake_backward(
    gradient: Any, x: Any, gate: Any, up: Any, table: Sequence[Any], row_weights: Any, gate_up: Any, down: Any,
    activation: str, needs: Sequence[bool],
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    of_weights = zip((gate_up, down), needs, strict=True)
    return x.new_empty(x.shape), torch.empty_like(row_weights), *(
        w.new_empty(w.shape) if needed else x.new_empty(0) for w, needed in of_weights
    )  # fmt: skip


_ARRAYS = "Tensor[] table, Tensor row_weights, Tensor gate_up, Tensor down, str activation"


def _count_flops(rows: Any, gate_up: Any, *, products: int) -> int:
    return products * 3 * int(rows[0]) * int(gate_up[1]) * int(gate_up[2])


FORWARD = define_op(
    f"fp8_experts_forward(Tensor x, {_ARRAYS}) -> (Tensor, Tensor, Tensor)", _fake_forward, _forward,
    count_flops=lambda x, table, rows, gate_up, *_, **__: _count_flops(rows, gate_up, products=1),
)  # fmt: skip
BACKWARD = define_op(
    f"fp8_experts_backward(Tensor gradient, Tensor x, Tensor gate, Tensor up, {_ARRAYS}, bool[] needs) -> "
    "(Tensor, Tensor, Tensor, Tensor)", _fake_backward, _backward,
    count_flops=lambda gradient, x, gate, up, table, rows, gate_up, *_, **__: _count_flops(rows, gate_up, products=2),
)  # fmt: skip


def _record(x: Any, table: Sequence[Any], row_weights: Any, gate_up: Any, down: Any, activation: str) -> Any:
    """Return what the operator does, with gradients."""
    return _Experts.apply(x, row_weights.detach().unsqueeze(1), row_weights, gate_up, down, activation, *table)


record_gradients(FORWARD, _record)
