"""A gated MLP whose gate and up are one product, with gradients."""

from __future__ import annotations

from typing import Any

import torch

from gemmsmith.arrays import INTERLEAVE_COLUMNS
from gemmsmith.torch.api import autocast, is_autocast, is_dtensor
from gemmsmith.torch.autograd import PLAIN_GEMM, is_column_major, transposed, weight_gradient
from gemmsmith.torch.autograd_state import (
    check_once_differentiable,
    in_functorch_transform,
    needs_grad,
    operators_record_gradients,
)
from gemmsmith.torch.mlp.gated_epilogues import epilogue_of
from gemmsmith.torch.ops import call_op


def multiplies_both_at_once(x: Any, gate: Any, up: Any) -> bool:
    """Return whether `gated_mlp` computes it: in 16 bits, of tensors, without transforms of functions."""
    is_16bit = x.dtype in (torch.bfloat16, torch.float16) or is_autocast(x)
    is_plain = not (any(map(is_dtensor, (x, gate, up))) or in_functorch_transform() or operators_record_gradients())
    return is_16bit and is_plain and gate.shape == up.shape and not gate.shape[0] % INTERLEAVE_COLUMNS


def gated_mlp(x: Any, gate: Any, up: Any, down: Any, activation: str, recompute: bool = False) -> Any:
    """Return down (activation(gate x) * up x), with gradients. No second derivatives.

    Args:
        x: (..., dim), in 16 bits or under autocast to them.
        gate: (hidden, dim).
        up: (hidden, dim).
        down: (dim, hidden).
        activation: silu, gelu, gelu_tanh or relu.
        recompute: save no products; backward multiplies by gate and up again.
    """
    (x, gate), (_, up), (_, down) = autocast(x, gate), autocast(x, up), autocast(x, down)
    rows = x.flatten(0, -2)
    if needs_grad(x, gate, up, down):
        y = _GatedMLP.apply(rows, gate, up, down, activation, recompute)[0]
    else:
        y = _multiply(rows, gate, up, down, activation)
    return y.view(*x.shape[:-1], down.shape[0])


def _multiply(rows: Any, gate: Any, up: Any, down: Any, activation: str) -> Any:
    """Return the MLP's result without what backward reads."""
    h = call_op(epilogue_of("gated", activation, str(rows.dtype)), rows, (transposed(gate), transposed(up)), [], [])
    return call_op(PLAIN_GEMM, h, transposed(down), [], [])


def _multiply_gate_and_up(rows: Any, gate: Any, up: Any, activation: str) -> tuple[Any, Any, Any]:
    """Return activation(gate x) * up x and both products."""
    epilogue = epilogue_of("gate_and_halves", activation, str(rows.dtype))
    return call_op(epilogue, rows, (transposed(gate), transposed(up)), [], [])  # type: ignore[no-any-return]


class _GatedMLP(torch.autograd.Function):
    """The result, then what backward reads of the products, which it computes again with `recompute`."""

    @staticmethod
    def forward(rows: Any, gate: Any, up: Any, down: Any, activation: str, recompute: bool) -> tuple[Any, ...]:
        if recompute:
            return (_multiply(rows, gate, up, down, activation),)
        h, g, u = _multiply_gate_and_up(rows, gate, up, activation)
        return call_op(PLAIN_GEMM, h, down.mT, [], []), h, g, u

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        *arrays, ctx.activation, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arrays, *output[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        check_once_differentiable()
        if gradients[0] is None:
            return (None,) * 6
        gradient, (rows, gate, up, down, *products) = gradients[0], ctx.saved_tensors
        h, g, u = products or _multiply_gate_and_up(rows, gate, up, ctx.activation)
        epilogue = epilogue_of("backward", ctx.activation, str(h.dtype))
        grad_g, grad_u = call_op(epilogue, gradient, down, [], [g, u])
        grad_rows = grad_gate = grad_up = grad_down = None
        if ctx.needs_input_grad[0]:
            of_gate = call_op(PLAIN_GEMM, grad_g, gate, [], [])
            grad_rows = call_op(epilogue_of("added", ctx.activation, str(h.dtype)), grad_u, up, [], [of_gate])
        if ctx.needs_input_grad[1]:
            grad_gate = weight_gradient(rows, grad_g, is_column_major(transposed(gate))).mT
        if ctx.needs_input_grad[2]:
            grad_up = weight_gradient(rows, grad_u, is_column_major(transposed(up))).mT
        if ctx.needs_input_grad[3]:
            grad_down = weight_gradient(h, gradient, is_column_major(transposed(down))).mT
        return grad_rows, grad_gate, grad_up, grad_down, None, None
