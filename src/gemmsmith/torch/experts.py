"""The experts of a mixture-of-experts layer: gated MLPs, each on the tokens that the router sends to it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gemmsmith.api import grouped_gemm as launch
from gemmsmith.arrays import INTERLEAVE_COLUMNS
from gemmsmith.torch import fallback
from gemmsmith.torch.api import autocast
from gemmsmith.torch.autograd import PLAIN_GEMM
from gemmsmith.torch.autograd_state import check_once_differentiable, needs_grad, operators_record_gradients
from gemmsmith.torch.expert_sort import SortedSlots, checked_shape, sort_slots, with_gradients
from gemmsmith.torch.gated_epilogues import ACTIVATIONS, check_activation, epilogue_of, gate_and_up
from gemmsmith.torch.graph_serialization import deserialize
from gemmsmith.torch.grouped_ops import multiply_slices, rows_by_groups
from gemmsmith.torch.ops import LIBRARY, by_rows, call_op, define_op, fp32_precision, read_together
from gemmsmith.torch.sharded_experts import is_dtensor, sharded_experts
from gemmsmith.torch.slots import SUM_ROWS, sum_slots

MIN_COPIED_ROWS = 128
"""Rows of an expert in the mean from which on they are copied. On an H100 the first product of Mixtral-8x7B, 4096
tokens, takes 3322 us with gathered rows, 2603 without, and the copy 80."""
MIN_HIDDEN_WITH_COPIES = 1024
"""Hidden size from which on rows are copied: with 704, 590 us with gathered rows, 509 without, and the copy 119."""


def gated_experts(
    x: Any, experts: Any, weights: Any, gate_up: Any, down: Any, activation: str = "silu",
    all_present: bool = False, order: SortedSlots | None = None, addend: Any = None,
) -> Any:  # fmt: skip
    """Return the sum over a token's experts e of weight * down[e] (activation(gate[e] x) * up[e] x), with gradients.

    Nothing is read on the host. Experts of a token are added in a fixed order. No second derivatives. If gate_up and
    down are DTensors, sharded by experts, the others are DTensors, too, and each rank computes its experts.

    Args:
        x: (tokens, dim), bf16, fp16, fp32, or float64 on the CPU.
        experts: (tokens, top_k) of integers. Those outside 0 ... count - 1, such as other ranks', count for nothing.
        weights: (tokens, top_k), a float dtype.
        gate_up: (count, 2 * hidden, dim), in x's dtype: the rows of gate, then those of up.
        down: (count, dim, hidden), in x's dtype.
        activation: silu, gelu, gelu_tanh or relu.
        all_present: no expert is outside of 0 ... count - 1.
        order: the slots in the order of their experts, if they are sorted already; not of DTensors.
        addend: (tokens, dim), what is added to the result; not to DTensors.

    Returns:
        (tokens, dim), in x's dtype, or autocast's; of DTensors a DTensor of partial sums.

    Raises:
        ArgumentError: shapes or placements do not match, or the activation is unknown.
    """
    check_activation(activation)
    if is_dtensor(gate_up):
        function = partial(gated_experts, activation=activation)
        return sharded_experts(function, x, experts, weights, gate_up, down, order, addend)
    (x, gate_up), (_, down) = autocast(x, gate_up), autocast(x, down)
    count, hidden = checked_shape(x, experts, weights, gate_up, down)
    if order is None:
        order = sort_slots(experts, weights, count)
    if needs_grad(x, weights, gate_up, down) or not _gathers(x, hidden):
        if operators_record_gradients():  # the program's operators record gradients when it runs
            y = _GatedExperts.forward(x, weights, gate_up, down, *with_gradients(order, weights), activation)[0]
        else:
            y = _GatedExperts.apply(x, weights, gate_up, down, *order, activation)[0]
        return y if addend is None else y + addend
    is_added = addend is not None and not needs_grad(addend)
    y = torch.ops.gemmsmith.gated_experts(
        x.contiguous(), order.offsets, order.slot_of_row, order.token_of_row, order.row_weights.float(), gate_up, down,
        addend if is_added else None, activation, all_present,
    )  # fmt: skip
    return y if is_added or addend is None else y + addend


def _run_inference(
    x: Any, offsets: Any, slot_of_row: Any, token_of_row: Any, row_weights: Any, gate_up: Any, down: Any, addend: Any,
    activation: str, all_present: bool,
) -> Any:  # fmt: skip
    """Return the experts' sum without what backward needs: kernels gather x's rows, and scatter results to slots.

    Where a product is bound by the tensor cores, copying its rows first takes less time than gathering them costs it.
    """
    rows, tokens = len(slot_of_row), len(x)
    row_weights, dtypes = row_weights.unsqueeze(1), (str(x.dtype), "torch.float32")
    gather = token_of_row
    if rows >= MIN_COPIED_ROWS * len(gate_up) and down.shape[2] >= MIN_HIDDEN_WITH_COPIES:
        x, gather = x.index_select(0, token_of_row), None
    h = launch(
        x, read_together(*gate_and_up(gate_up)), offsets=offsets, gather=gather,
        epilogue=deserialize(epilogue_of("gated", activation, *dtypes)),
    )  # fmt: skip
    slots = (x.new_empty if all_present else x.new_zeros)((rows, down.shape[1]))
    launch(
        h, down.mT, offsets=offsets, scatter=slot_of_row, out=slots,
        epilogue=deserialize(epilogue_of("weight", activation, *dtypes)), operands={"weight": by_rows(row_weights)},
    )  # fmt: skip
    return sum_slots(slots, tokens, addend)


def _inference_fake(x: Any, *_: Any) -> Any:
    return x.new_empty(x.shape)


LIBRARY.define(
    "gated_experts(Tensor x, Tensor offsets, Tensor slot_of_row, Tensor token_of_row, Tensor row_weights, "
    "Tensor gate_up, Tensor down, Tensor? addend, str activation, bool all_present) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
LIBRARY.impl("gated_experts", _run_inference, "CUDA")
torch.library.register_fake("gemmsmith::gated_experts", _inference_fake, lib=LIBRARY)


def _gathers(x: Any, hidden: int) -> bool:
    """Return whether kernels can gather and scatter rows of x, and of results of `hidden` columns."""
    is_16bit = x.dtype in (torch.bfloat16, torch.float16)
    return is_16bit and x.is_cuda and not fallback.kernels_unsupported(x.get_device()) and not (x.shape[1] | hidden) % 8


def sort_by_expert(experts: Any, count: int) -> tuple[Any, Any]:
    """Return the slots (token * top_k + i) in the order of their experts, and the ends of each expert's, int32.

    Slots whose expert is outside 0 ... count - 1 are behind the last end.
    """
    order = sort_slots(experts, torch.empty_like(experts, dtype=torch.float32), count)
    return order.slot_of_row.long(), order.offsets


class _GatedExperts(torch.autograd.Function):
    """The experts' products. Rows are slots (token * top_k + i) in the order of their experts.

    h is weighted before down multiplies it. Backward does not need the result of down: the gradient of a weight is the
    sum of h times h's gradient (sonic-moe).
    """

    @staticmethod
    def forward(
        x: Any, weights: Any, gate_up: Any, down: Any, offsets: Any, slot_of_row: Any, token_of_row: Any,
        row_of_slot: Any, row_weights: Any, activation: str,
    ) -> tuple[Any, ...]:  # fmt: skip
        hidden = down.shape[2]
        rows, row_weights = x.index_select(0, token_of_row), row_weights.unsqueeze(1)
        dtypes = str(x.dtype), str(row_weights.dtype)
        if hidden % INTERLEAVE_COLUMNS:
            gate, up = (call_op(PLAIN_GEMM, rows, b, [], [], offsets) for b in gate_and_up(gate_up))
            h = (ACTIVATIONS[activation](gate)[0] * up * row_weights).to(x.dtype)
        else:
            epilogue = epilogue_of("weighted gate and up", activation, *dtypes)
            h, gate, up = call_op(epilogue, rows, gate_and_up(gate_up), [], [row_weights], offsets)
        y = call_op(PLAIN_GEMM, h, down.mT, [], [], offsets)
        return SUM_ROWS(y, row_of_slot, len(x)), rows, gate, up, h

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        _, weights, gate_up, down, offsets, _, token_of_row, row_of_slot, row_weights, ctx.activation = inputs
        ctx.top_k, ctx.dtype = weights.shape[1], weights.dtype
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gate_up, down, offsets, token_of_row, row_of_slot, row_weights, *output[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        check_once_differentiable()
        if gradients[0] is None:
            return (None,) * 10
        gate_up, down, offsets, token_of_row, row_of_slot, row_weights, rows, gate, up, h = ctx.saved_tensors
        gradient = gradients[0].index_select(0, token_of_row)
        grad_both, grad_row_weights = torch.ops.gemmsmith.gated_experts_backward(
            gradient, down, gate, up, row_weights, offsets, ctx.activation
        )
        grad_x = grad_weights = grad_gate_up = grad_down = None
        if ctx.needs_input_grad[0]:
            grad_rows = call_op(PLAIN_GEMM, grad_both, gate_up, [], [], offsets)
            grad_x = SUM_ROWS(grad_rows, row_of_slot, len(gradients[0]))
        if ctx.needs_input_grad[1]:
            grad_weights = grad_row_weights.index_select(0, row_of_slot).view(-1, ctx.top_k).to(ctx.dtype)
        if ctx.needs_input_grad[2]:
            grad_gate_up = multiply_slices(grad_both.mT, rows, offsets)
        if ctx.needs_input_grad[3]:
            grad_down = multiply_slices(gradient.mT, h, offsets)
        return grad_x, grad_weights, grad_gate_up, grad_down, *[None] * 6


def _backward_epilogue(activation: str, gate: Any, row_weights: Any) -> str:
    return epilogue_of("weighted backward", activation, str(gate.dtype), str(row_weights.dtype))


def _backward_on_gpu(
    gradient: Any, down: Any, gate: Any, up: Any, row_weights: Any, offsets: Any, activation: str
) -> tuple[Any, Any]:
    """Return the gradients of gate and of up, side by side, and those of the rows' weights."""
    if fallback.kernels_unsupported(gate.get_device()):
        return _backward_by_groups(gradient, down, gate, up, row_weights, offsets, activation)
    hidden = gate.shape[1]
    grad_both, grad_weights = _backward_fake(gradient, down, gate, up, row_weights, offsets, activation)
    operands = {"gate": gate, "up": up, "weight": row_weights.unsqueeze(1)}
    launch(
        gradient, down, offsets=offsets, precision=fp32_precision(gate),
        epilogue=deserialize(_backward_epilogue(activation, gate, row_weights)),
        operands={name: by_rows(x) for name, x in operands.items()},
        out={"out": grad_both[:, :hidden], "out1": grad_both[:, hidden:], "out2": grad_weights},
    )  # fmt: skip
    return grad_both, grad_weights


def _backward_by_groups(
    gradient: Any, down: Any, gate: Any, up: Any, row_weights: Any, offsets: Any, activation: str
) -> tuple[Any, Any]:
    operands = gate, up, row_weights.unsqueeze(1)
    epilogue = _backward_epilogue(activation, gate, row_weights)
    *both, grad_weights = rows_by_groups(gradient, down, offsets, 0, epilogue, [], *operands)
    return torch.cat(both, 1), grad_weights


def _backward_fake(
    gradient: Any, down: Any, gate: Any, up: Any, row_weights: Any, offsets: Any, activation: str
) -> tuple[Any, Any]:
    return gate.new_empty(gate.shape[0], 2 * gate.shape[1]), torch.empty_like(row_weights)


define_op(
    "gated_experts_backward", "(Tensor gradient, Tensor down, Tensor gate, Tensor up, Tensor row_weights, "
    "Tensor offsets, str activation) -> (Tensor, Tensor)", _backward_fake,
    lambda gradient, down, *_, **__: 2 * gradient[0] * gradient[1] * down[2],
    CPU=_backward_by_groups, CUDA=_backward_on_gpu,
)  # fmt: skip
