"""The experts of a mixture-of-experts layer: MLPs, mostly gated, each on the tokens that the router sends to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from gemmsmith.api import grouped_gemm as launch
from gemmsmith.arrays import INTERLEAVE_COLUMNS
from gemmsmith.backends import Backend
from gemmsmith.core.errors import ArgumentError
from gemmsmith.torch import fallback
from gemmsmith.torch.api import autocast, is_dtensor
from gemmsmith.torch.autograd import PLAIN_GEMM, is_column_major, transposed, weight_gradient
from gemmsmith.torch.autograd_state import check_once_differentiable, needs_grad, operators_record_gradients
from gemmsmith.torch.graph_serialization import deserialize
from gemmsmith.torch.mlp.gated_epilogues import BIASES, HALVES, check_activation, epilogue_of, gate_and_up, width
from gemmsmith.torch.moe.slots import SUM_ROWS, SortedSlots, checked_shape, sort_slots, sum_slots, with_gradients
from gemmsmith.torch.ops import (
    by_rows,
    call_op,
    define_op,
    fp32_precision,
    multiply_slices,
    read_together,
    run_by_torch,
)
from gemmsmith.torch.plain_tensors import runs_kernels

MIN_COPIED_ROWS = 128
"""Rows of an expert in the mean from which on they are copied. On an H100 the first product of Mixtral-8x7B, 4096
tokens, takes 3322 us with gathered rows, 2603 without, and the copy 80."""
MIN_HIDDEN_WITH_COPIES = 1024
"""Hidden size from which on rows are copied: with 704, 590 us with gathered rows, 509 without, and the copy 119."""


def gated_experts(
    x: Any, experts: Any, weights: Any, gate_up: Any, down: Any, activation: str = "silu",
    all_present: bool = False, order: SortedSlots | None = None, addend: Any = None,
    biases: tuple[Any, Any] = (None, None), interleaved: bool = False, post: Callable[[Any], Any] | None = None,
) -> Any:  # fmt: skip
    """Return the sum over a token's experts e of weight * down[e] (activation(gate[e] x) * up[e] x), with gradients.

    Nothing is read on the host. Experts of a token are added in a fixed order. No second derivatives. If gate_up and
    down are DTensors, sharded by experts, the others are DTensors, too, and each rank computes its experts.

    Args:
        x: (tokens, dim), bf16, fp16, fp32, or float64 on the CPU.
        experts: (tokens, top_k) of integers. Those outside 0 ... count - 1, such as other ranks', count for nothing.
        weights: (tokens, top_k), a float dtype.
        gate_up: (count, 2 * hidden, dim), in x's dtype: the rows of gate, then those of up; (count, hidden, dim) if
            `activation` reads one half.
        down: (count, dim, hidden), in x's dtype.
        activation: silu, gelu, gelu_tanh or relu; or the serialized graph of a gate (gated_epilogues.py).
        all_present: no expert is outside of 0 ... count - 1.
        order: the slots in the order of their experts, if they are sorted already; not of DTensors.
        addend: (tokens, dim), what is added to the result; not to DTensors.
        biases: that of gate_up, (count, 2 * hidden), in the order of its rows, or None; that of down, (count, dim),
            or None.
        interleaved: rows of gate and of up alternate.
        post: a function of the rows (tokens * top_k, dim) of down's results, with gradients of its own, such as a norm;
            their weights are those of its results.

    Returns:
        (tokens, dim), in x's dtype, or autocast's; of DTensors a DTensor of partial sums.

    Raises:
        ArgumentError: shapes or placements do not match, the activation is unknown, or DTensors have biases or a post.
    """
    check_activation(activation)
    gate_up_bias, down_bias = biases
    if is_dtensor(gate_up):
        if gate_up_bias is not None or down_bias is not None or post:
            raise ArgumentError("biases, post: got one with weights that are DTensors; use None")
        function = partial(gated_experts, activation=activation, interleaved=interleaved)
        return sharded_experts(function, x, experts, weights, gate_up, down, order, addend)
    x, gate_up, down = autocast(x, gate_up, down)
    count, hidden = checked_shape(x, experts, weights, gate_up, down, width(activation))
    for name, bias, weight in (("gate_up", gate_up_bias, gate_up), ("down", down_bias, down)):
        if bias is not None and bias.shape != weight.shape[:2]:
            raise ArgumentError(f"biases: got shape {tuple(bias.shape)} for {name}; use {tuple(weight.shape[:2])}")
    if order is None:
        order = sort_slots(experts, weights, count)
    if gate_up_bias is not None:
        gate_up_bias = gate_up_bias.to(x.dtype)
    if down_bias is not None and not post:
        bias = _dense_weights(experts, weights, count).to(x.dtype) @ down_bias.to(x.dtype)
        addend = bias if addend is None else addend + bias
    bias_grad = gate_up_bias is not None and needs_grad(gate_up_bias)
    if post or interleaved or bias_grad or needs_grad(x, weights, gate_up, down) or not _gathers(x, hidden):
        biases = gate_up_bias, down_bias
        y = _run_with_gradients(x, weights, gate_up, down, biases, order, activation, interleaved, post)
        return y if addend is None else y + addend
    is_added = addend is not None and not needs_grad(addend)
    y = torch.ops.gemmsmith.gated_experts(
        x.contiguous(), [*order[:-1], order.row_weights.float()], gate_up, down, gate_up_bias,
        addend if is_added else None, activation, all_present,
    )  # fmt: skip
    return y if is_added or addend is None else y + addend


def _dense_weights(experts: Any, weights: Any, count: int) -> Any:
    """Return each token's weights of all experts, (tokens, count)."""
    present = torch.where((experts >= 0) & (experts < count), experts, count).long()
    return weights.new_zeros(experts.shape[0], count + 1).scatter_add(1, present, weights)[:, :count]


def _run_with_gradients(
    x: Any, weights: Any, gate_up: Any, down: Any, biases: tuple[Any, Any], order: SortedSlots, activation: str,
    interleaved: bool, post: Any,
) -> Any:  # fmt: skip
    """Return the experts' sum, with gradients if they are recorded; with down's bias only if there is a `post`."""
    differentiable = with_gradients(order, weights) if post or operators_record_gradients() else order
    table = differentiable._replace(row_weights=torch.ones_like(order.row_weights)) if post else differentiable
    arguments = x, weights, gate_up, down, biases[0], *table[:1], *table[2:], activation, interleaved, post is None
    # an exported program's operators record gradients when it runs
    y = (_Experts.forward if operators_record_gradients() else _Experts.apply)(*arguments)[0]
    if post is None:
        return y
    if biases[1] is not None:
        y = y + _rows_of_experts(biases[1], order.offsets, y)
    rows = torch.arange(y.shape[0], device=y.device).unsqueeze(1)
    y = post(y) * differentiable.row_weights.unsqueeze(1)
    y = torch.where(rows < order.offsets[-1], y, 0).to(x.dtype)  # nothing in rows of no expert
    return SUM_ROWS(y, order.row_of_slot, x.shape[0])


def _run_inference(
    x: Any, order: Sequence[Any], gate_up: Any, down: Any, bias: Any, addend: Any, activation: str, all_present: bool,
    backend: Backend = "auto",
) -> Any:  # fmt: skip
    """Return the experts' sum without what backward needs: kernels gather x's rows, and scatter results to slots.

    Where a product is bound by the tensor cores, copying its rows first takes less time than gathering them costs it.
    """
    offsets, slot_of_row, token_of_row, _, row_weights = order
    rows, tokens, dtype = slot_of_row.shape[0], x.shape[0], str(x.dtype)
    gather = token_of_row
    if rows >= MIN_COPIED_ROWS * gate_up.shape[0] and down.shape[2] >= MIN_HIDDEN_WITH_COPIES:
        x, gather = x.index_select(0, token_of_row), None
    b = read_together(*gate_and_up(gate_up)) if width(activation) == 2 else gate_up.mT
    biases = () if bias is None else bias.unsqueeze(1).chunk(width(activation), 2)
    h = launch(
        x, b, offsets=offsets, gather=gather, operands=dict(zip(BIASES, biases, strict=False)),
        epilogue=deserialize(epilogue_of("gated", activation, dtype, has_bias=bias is not None)), backend=backend,
    )  # fmt: skip
    slots = (x.new_empty if all_present else x.new_zeros)((rows, down.shape[1]))
    launch(
        h, down.mT, offsets=offsets, scatter=slot_of_row, out=slots,
        epilogue=deserialize(epilogue_of("weighted", activation, dtype)),
        operands={"weight": by_rows(row_weights.unsqueeze(1))}, backend=backend,
    )  # fmt: skip
    return sum_slots(slots, tokens, addend)


define_op(
    "gated_experts(Tensor x, Tensor[] order, Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? addend, "
    "str activation, bool all_present) -> Tensor", lambda x, *_: x.new_empty(x.shape), _run_inference,
)  # fmt: skip


def _gathers(x: Any, hidden: int) -> bool:
    """Return whether kernels can gather and scatter rows of x, and of results of `hidden` columns."""
    is_16bit = x.dtype in (torch.bfloat16, torch.float16)
    return is_16bit and x.is_cuda and not (x.shape[1] | hidden) % 8 and _kernels_run(x.get_device())


@torch.compiler.assume_constant_result
def _kernels_run(index: int) -> bool:
    return not fallback.kernels_unsupported(index)


def sort_by_expert(experts: Any, count: int) -> tuple[Any, Any]:
    """Return the slots (token * top_k + i) in the order of their experts, and the ends of each expert's, int32.

    Slots whose expert is outside 0 ... count - 1 are behind the last end.
    """
    order = sort_slots(experts, torch.empty_like(experts, dtype=torch.float32), count)
    return order.slot_of_row.long(), order.offsets


class _Experts(torch.autograd.Function):
    """The experts' products. Rows are slots (token * top_k + i) in the order of their experts.

    h is weighted before down multiplies it. Backward does not need the result of down: the gradient of a weight is the
    sum of h times h's gradient (sonic-moe). It reads x, gate and up: it gathers rows, and computes h, again.
    """

    @staticmethod
    def forward(
        x: Any, weights: Any, gate_up: Any, down: Any, bias: Any, offsets: Any, token_of_row: Any, row_of_slot: Any,
        row_weights: Any, activation: str, interleaved: bool, sums: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        rows = x.index_select(0, token_of_row)
        h, *halves = _multiply_by_gate_and_up(rows, gate_up, bias, offsets, row_weights, activation, interleaved)
        y = call_op(PLAIN_GEMM, h, down.mT, offsets=offsets)
        return SUM_ROWS(y, row_of_slot, x.shape[0]) if sums else y, *halves

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        x, weights, gate_up, down, _, *table, ctx.activation, ctx.interleaved, ctx.sums = inputs
        ctx.top_k, ctx.dtype = weights.shape[1], weights.dtype
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, gate_up, down, *table, *output[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        check_once_differentiable()
        if gradients[0] is None:
            return (None,) * 12
        x, gate_up, down, offsets, token_of_row, row_of_slot, row_weights, *halves = ctx.saved_tensors
        gradient = gradients[0].index_select(0, token_of_row) if ctx.sums else gradients[0]
        grad_both, grad_row_weights, h = torch.ops.gemmsmith.gated_experts_backward(
            gradient, down, halves, row_weights, offsets, ctx.activation, ctx.interleaved
        )
        grad_x = grad_weights = grad_gate_up = grad_down = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_rows = call_op(PLAIN_GEMM, grad_both, gate_up, offsets=offsets)
            grad_x = SUM_ROWS(grad_rows, row_of_slot, x.shape[0])
        if ctx.needs_input_grad[1] and ctx.sums:
            grad_weights = grad_row_weights.index_select(0, row_of_slot).view(-1, ctx.top_k).to(ctx.dtype)
        if ctx.needs_input_grad[2]:
            swapped = not is_column_major(transposed(gate_up))
            grad_gate_up = GATHERED_SLICES(grad_both, x, token_of_row, offsets, swapped)
            grad_gate_up = grad_gate_up.mT if swapped else grad_gate_up
        if ctx.needs_input_grad[3]:
            grad_down = weight_gradient(h, gradient, is_column_major(transposed(down)), offsets).mT
        if ctx.needs_input_grad[4]:
            ones = grad_both.new_ones(1, grad_both.shape[0])
            grad_bias = multiply_slices(ones, grad_both, offsets).squeeze(1)
        return grad_x, grad_weights, grad_gate_up, grad_down, grad_bias, *[None] * 7


def _multiply_gathered(gradient: Any, x: Any, token_of_row: Any, offsets: Any, swapped: bool) -> Any:
    """Return (count, n, k), gradient.T @ rows of x, of each group's rows; or the transpose of each."""
    rows = x.index_select(0, token_of_row)
    a, b = (rows, gradient) if swapped else (gradient, rows)
    return multiply_slices(a.mT, b, offsets)


def _fake_gathered(gradient: Any, x: Any, token_of_row: Any, offsets: Any, swapped: bool) -> Any:
    shape = (x.shape[1], gradient.shape[1]) if swapped else (gradient.shape[1], x.shape[1])
    return gradient.new_empty((offsets.shape[0], *shape))


GATHERED_SLICES = define_op(
    "gathered_slices(Tensor gradient, Tensor x, Tensor token_of_row, Tensor offsets, bool swapped) -> Tensor",
    _fake_gathered, _multiply_gathered,
    count_flops=lambda gradient, x, *_, **__: 2 * gradient[0] * gradient[1] * x[1],
)  # fmt: skip
"""The operator of gate_up's gradient. It gathers x's rows itself, since compiled code would save those of forward."""


def _multiply_by_gate_and_up(
    rows: Any, gate_up: Any, bias: Any, offsets: Any, row_weights: Any, activation: str, interleaved: bool
) -> tuple[Any, ...]:
    """Return the weighted h (rows, hidden), and gate and up, or one matrix of both with gate_up's order of columns."""
    weight, dtypes, count = row_weights.unsqueeze(1), (str(rows.dtype), str(row_weights.dtype)), width(activation)
    biases = () if bias is None else (_rows_of_experts(bias, offsets, rows),)
    hidden = gate_up.shape[1] // count
    if count == 1 or not (interleaved or hidden % INTERLEAVE_COLUMNS):
        b = gate_and_up(gate_up) if count == 2 else gate_up.mT
        halves = [half for both in biases for half in both.chunk(count, 1)]
        epilogue = epilogue_of("weighted_gate_and_halves", activation, *dtypes, bias is not None)
        return call_op(epilogue, rows, b, [], [weight, *halves], offsets)  # type: ignore[no-any-return]
    epilogue = PLAIN_GEMM if bias is None else epilogue_of("added", activation, dtypes[0])
    both = call_op(epilogue, rows, gate_up.mT, [], biases, offsets)
    a, b = rows.new_empty((rows.shape[0], 0)), rows.new_empty((0, hidden))
    epilogue = epilogue_of("weighted_gate", activation, *dtypes)
    return call_op(epilogue, a, b, [], [weight, *_split(both, interleaved)]), both


def _rows_of_experts(x: Any, offsets: Any, rows: Any) -> Any:
    """Return the row of x (count, n) that is the expert's of each of the rows; the last one's for rows of none."""
    experts = torch.searchsorted(offsets, torch.arange(rows.shape[0], device=rows.device), right=True)
    return x.index_select(0, experts.clamp(max=x.shape[0] - 1))


def _split(both: Any, interleaved: bool) -> tuple[Any, Any]:
    """Return gate and up of a matrix of both."""
    return (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, 1)


def _backward(
    gradient: Any, down: Any, halves: list[Any], row_weights: Any, offsets: Any, activation: str, interleaved: bool,
    backend: Backend = "auto",
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Return the gradients of gate and up, in gate_up's order of columns, those of the rows' weights, and h."""
    parts = halves if len(halves) == width(activation) else _split(halves[0], interleaved)
    epilogue = epilogue_of("weighted_backward", activation, str(halves[0].dtype), str(row_weights.dtype))
    operands = row_weights.unsqueeze(1), *parts
    if backend == "auto" and not runs_kernels(gradient):
        *grads, grad_weights, h = run_by_torch(epilogue, gradient, down, [], operands, offsets)
        return torch.stack(grads, 2).flatten(1) if interleaved else torch.cat(grads, 1), grad_weights, h
    grad_both, grad_weights, h = _backward_fake(gradient, down, halves, row_weights, offsets, activation, interleaved)
    grads = [torch.empty_like(h) for _ in HALVES] if interleaved else grad_both.chunk(width(activation), 1)
    launch(
        gradient, down, offsets=offsets, precision=fp32_precision(gradient), epilogue=deserialize(epilogue),
        operands={name: by_rows(x) for name, x in zip(("weight", *HALVES), operands, strict=False)},
        out={f"out{i or ''}": x for i, x in enumerate((*grads, grad_weights, h))}, backend=backend,
    )  # fmt: skip
    return torch.stack(grads, 2).flatten(1) if interleaved else grad_both, grad_weights, h


def _backward_fake(
    gradient: Any, down: Any, halves: list[Any], row_weights: Any, offsets: Any, activation: str, interleaved: bool
) -> tuple[Any, Any, Any]:
    rows, hidden = gradient.shape[0], down.shape[2]
    shapes = (rows, width(activation) * hidden), (rows, hidden)
    both, h = (gradient.new_empty(shape, dtype=halves[0].dtype) for shape in shapes)
    return both, torch.empty_like(row_weights), h


define_op(
    "gated_experts_backward(Tensor gradient, Tensor down, Tensor[] halves, Tensor row_weights, Tensor offsets, "
    "str activation, bool interleaved) -> (Tensor, Tensor, Tensor)", _backward_fake, _backward,
    count_flops=lambda gradient, down, *_, **__: 2 * gradient[0] * gradient[1] * down[2],
)  # fmt: skip


# -- weights that are DTensors, sharded by experts: each rank computes its own ones, of all tokens --------------------
def check_count(count: int, mesh: Any) -> None:
    """Raise ArgumentError for a number of experts that is no multiple of the ranks."""
    if count % mesh.size():
        raise ArgumentError(f"gate_up, down: got {count} experts for {mesh.size()} ranks; use a multiple")


def sharded_experts(
    function: Callable[..., Any], x: Any, experts: Any, weights: Any, gate_up: Any, down: Any, order: Any, addend: Any
) -> Any:  # fmt: skip
    """Return the sum of `function` on each rank's experts, a DTensor of partial sums.

    All are DTensors on one mesh; x, experts and weights are gathered if they are sharded. Other ranks' experts become
    indices outside of 0 ... count - 1. Raises ArgumentError for an `order` or `addend`, and for other placements.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import local_map

    if order is not None or addend is not None:
        raise ArgumentError("order, addend: got one with weights that are DTensors; use None")
    mesh = gate_up.device_mesh
    for name, array in (("x", x), ("experts", experts), ("weights", weights), ("down", down)):
        if not is_dtensor(array) or array.device_mesh != mesh:
            raise ArgumentError(
                f"{name}: got no DTensor on gate_up's mesh; use gemmsmith.torch.parallel.ExpertParallel"
            )
    replicated, partial, sharded = ([kind] * mesh.ndim for kind in (Replicate(), Partial(), Shard(0)))
    for name, array in (("gate_up", gate_up), ("down", down)):
        if list(array.placements) != sharded:
            raise ArgumentError(f"{name}: got {array.placements}; use Shard(0) in each dimension of the mesh")
    count, first = len(gate_up), 0
    check_count(count, mesh)
    for dim in range(mesh.ndim):
        count //= mesh.size(dim)
        first += mesh.get_local_rank(dim) * count
    return local_map(
        lambda x, experts, *others: function(x, experts - first, *others), out_placements=partial,
        in_placements=(*[replicated] * 3, sharded, sharded), in_grad_placements=(*[partial] * 3, sharded, sharded),
        device_mesh=mesh, redistribute_inputs=True,
    )(x, experts, weights, gate_up, down)  # fmt: skip
