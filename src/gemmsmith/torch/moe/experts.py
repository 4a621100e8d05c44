"""The experts of a mixture-of-experts layer: MLPs, mostly gated, each on the tokens that the router sends to it.

A slot, token * top_k + i, is a token's i-th expert. Rows are slots in the order of their experts (`SortedSlots`), so
that a grouped GEMM multiplies each expert's rows.
"""

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
from gemmsmith.torch.autograd_state import needs_grad, operators_record_gradients
from gemmsmith.torch.define_op import define_op
from gemmsmith.torch.dynamo import assume_constant_result
from gemmsmith.torch.graph_serialization import deserialize
from gemmsmith.torch.mlp.gated_epilogues import BIASES, Gate, check_activation, epilogue_of, gate_and_up, width
from gemmsmith.torch.moe.slots import (
    SUM_ROWS,
    SortedSlots,
    check_hidden,
    checked_shape,
    sort_slots,
    sum_slots,
    with_gradients,
)
from gemmsmith.torch.moe.training import FORWARD, ExpertsFunction, rows_of_experts
from gemmsmith.torch.ops import by_rows, read_together

DTYPES_IN_FP8 = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of x and of weights that are quantized before they are multiplied in FP8."""
MIN_COPIED_ROWS = 128
"""Mean number of an expert's rows from which on a copy of x in the order of rows is made, instead of a kernel that
gathers rows. On an H100 the first product of Mixtral-8x7B, 4096 tokens, takes 3322 us with gathered rows, 2603 without,
and the copy 80."""
MIN_HIDDEN_WITH_COPIES = 1024
"""Hidden size from which on that copy is made: with 704, 590 us with gathered rows, 509 without, and the copy 119."""


def gated_experts(
    x: Any, experts: Any, weights: Any, gate_up: Any, down: Any, gate: Gate = Gate(),  # noqa: B008 - it is constant
    all_present: bool = False, order: SortedSlots | None = None, addend: Any = None,
    biases: tuple[Any, Any] = (None, None), post: Callable[[Any], Any] | None = None, in_fp8: bool = False,
) -> Any:  # fmt: skip
    """Return the sum over a token's experts e of weight * down[e] (activation(gate[e] x) * up[e] x), with gradients.

    Nothing is read on the host. Experts of a token are added in a fixed order. No second derivatives. If gate_up and
    down are DTensors, sharded by experts, the others are DTensors, too, and each rank computes its experts.

    Args:
        x: (tokens, dim), bf16, fp16, fp32, or float64 on the CPU.
        experts: (tokens, top_k) of integers. Those outside 0 ... count - 1, such as other ranks', count for nothing.
        weights: (tokens, top_k), a float dtype.
        gate_up: (count, 2 * hidden, dim), in x's dtype: the rows of gate, then those of up; (count, hidden, dim) if
            `gate` reads one half; or rows of gate and of up alternate, as `gate` says.
        down: (count, dim, hidden), in x's dtype.
        gate: silu, gelu, gelu_tanh or relu; or a serialized graph (gated_epilogues.py).
        all_present: no expert is outside of 0 ... count - 1.
        order: the slots (tokens' experts) in the order of their experts, if they are sorted already; not of DTensors.
        addend: (tokens, dim), what is added to the result; not to DTensors.
        biases: that of gate_up, (count, 2 * hidden), in the order of its rows, or None; that of down, (count, dim),
            or None.
        post: a function of the rows (tokens * top_k, dim) of down's results, with gradients of its own, such as a norm;
            their weights are those of its results.
        in_fp8: multiply operands that are quantized to e4m3 (training.py). x, gate_up and down are bf16, fp16 or
            fp32, `hidden` a multiple of 8; without biases, interleaved rows and `post`.

    Returns:
        (tokens, dim), in x's dtype, or autocast's; of DTensors a DTensor of partial sums.

    Raises:
        ArgumentError: shapes, dtypes or placements do not match, the activation is unknown, or DTensors have biases or
            a post.
    """
    check_activation(gate.activation)
    gate_up_bias, down_bias = biases
    if is_dtensor(gate_up):
        if gate_up_bias is not None or down_bias is not None or post:
            raise ArgumentError("biases, post: got one with weights that are DTensors; use None")
        function = partial(gated_experts, gate=gate, in_fp8=in_fp8)
        return sharded_experts(function, x, experts, weights, gate_up, down, order, addend)
    if in_fp8:
        (x,) = autocast(x)
        for name, array in (("x", x), ("gate_up", gate_up), ("down", down)):
            if array.dtype not in DTYPES_IN_FP8:
                raise ArgumentError(f"{name}: got {array.dtype}; use one of {', '.join(map(str, DTYPES_IN_FP8))}")
        check_hidden(down.shape[2], INTERLEAVE_COLUMNS)
    else:
        x, gate_up, down = autocast(x, gate_up, down)
    count, hidden = checked_shape(x, experts, weights, gate_up, down, width(gate.activation))
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
    read = [array for array in (x, weights, gate_up, down, gate_up_bias) if array is not None]
    if in_fp8 or post or gate.interleaved or needs_grad(*read) or not _can_gather(x, hidden):
        biases = gate_up_bias, down_bias
        y = _run_with_gradients(x, weights, gate_up, down, biases, order, gate, in_fp8, post)
        return y if addend is None else y + addend
    is_added = addend is not None and not needs_grad(addend)
    y = torch.ops.gemmsmith.gated_experts(
        x.contiguous(), [*order[:-1], order.row_weights.float()], gate_up, down, gate_up_bias,
        addend if is_added else None, gate.activation, all_present,
    )  # fmt: skip
    return y if is_added or addend is None else y + addend


def _dense_weights(experts: Any, weights: Any, count: int) -> Any:
    """Return each token's weights of all experts, (tokens, count): 0 for experts that it does not have."""
    present = torch.where((experts >= 0) & (experts < count), experts, count).long()
    return weights.new_zeros(experts.shape[0], count + 1).scatter_add(1, present, weights)[:, :count]


def _run_with_gradients(
    x: Any, weights: Any, gate_up: Any, down: Any, biases: tuple[Any, Any], order: SortedSlots, gate: Gate,
    in_fp8: bool, post: Any,
) -> Any:  # fmt: skip
    """Return each token's weighted sum of its experts, (tokens, dim), by the operators of training.py.

    Gradients are recorded if they are needed. The arguments are those of `gated_experts`, but `order` is given, and
    `biases` are gate_up's, in x's dtype, and down's. down's bias is added here only before a `post`; otherwise
    `gated_experts` adds it.
    """
    is_recorded_later = operators_record_gradients()  # by the operator, when an exported program runs
    differentiable = with_gradients(order, weights) if post or is_recorded_later else order
    # post's results are weighted below instead of h
    row_weights = torch.ones_like(order.row_weights) if post else differentiable.row_weights
    row_weights = row_weights.float() if in_fp8 else row_weights
    x, table = x.contiguous(), [order.offsets, order.token_of_row, order.row_of_slot]
    arrays, options = (row_weights, gate_up, down, biases[0]), (*gate, post is None, in_fp8)
    if is_recorded_later:
        y = FORWARD(x, table, *arrays, *options)[0]
    else:
        y = ExpertsFunction.apply(x, weights.detach() if post else weights, *arrays, *table, options)[0]
    if post is None:
        return y
    if biases[1] is not None:
        y = y + rows_of_experts(biases[1], order.offsets, y)
    rows = torch.arange(y.shape[0], device=y.device).unsqueeze(1)
    y = post(y) * differentiable.row_weights.unsqueeze(1)
    y = torch.where(rows < order.offsets[-1], y, 0).to(x.dtype)  # nothing in rows of no expert
    return SUM_ROWS(y, order.row_of_slot, x.shape[0])


def _run_inference(
    x: Any, order: Sequence[Any], gate_up: Any, down: Any, bias: Any, addend: Any, activation: str, all_present: bool,
    backend: Backend = "auto",
) -> Any:  # fmt: skip
    """Return each token's weighted sum of its experts, without gradients: the kernel of the operator gated_experts.

    The first grouped GEMM gathers x's rows, the second one scatters its results to slots. Where the first one is bound
    by the tensor cores, a copy of the rows is made before: it takes less time than gathering would cost the GEMM.

    Args:
        x: (tokens, dim).
        order: the fields of `SortedSlots`.
        gate_up: as in `gated_experts`.
        down: as in `gated_experts`.
        bias: gate_up's bias or None.
        addend: (tokens, dim) or None.
        activation: the gate.
        all_present: whether every slot has an expert.
        backend: as in `gemm`.
    """
    (offsets, _, token_of_row, *_), dtype = order, str(x.dtype)
    a, gather = x, token_of_row
    if len(token_of_row) >= MIN_COPIED_ROWS * gate_up.shape[0] and down.shape[2] >= MIN_HIDDEN_WITH_COPIES:
        a, gather = x.index_select(0, token_of_row), None
    b = read_together(*gate_and_up(gate_up)) if width(activation) == 2 else gate_up.mT
    biases = () if bias is None else bias.unsqueeze(1).chunk(width(activation), 2)
    h = launch(
        a, b, offsets=offsets, gather=gather, operands=dict(zip(BIASES, biases, strict=False)),
        epilogue=deserialize(epilogue_of("gated", activation, dtype, has_bias=bias is not None)), backend=backend,
    )  # fmt: skip
    return sum_down(h, down, x, order, addend, activation, all_present, backend)


def sum_down(
    h: Any, down: Any, x: Any, order: Sequence[Any], addend: Any, activation: str, all_present: bool, backend: Backend,
    **scales: Any,
) -> Any:  # fmt: skip
    """Return each token's weighted sum of down's results, (tokens, dim), plus the addend if it is not None.

    Args:
        h: (rows, hidden), which down multiplies, in the order of rows.
        down: (count, dim, hidden).
        x: (tokens, dim): the result has its dtype and device.
        order: the fields of `SortedSlots`.
        addend: (tokens, dim) or None.
        activation: the gate.
        all_present: whether every slot has an expert; otherwise slots of none are set to zero first.
        backend: as in `gemm`.
        **scales: further arguments of `grouped_gemm`: the scales of h and down in FP8.
    """
    offsets, slot_of_row, _, _, row_weights = order
    slots = (x.new_empty if all_present else x.new_zeros)((slot_of_row.shape[0], down.shape[1]))
    launch(
        h, down.mT, offsets=offsets, scatter=slot_of_row, out=slots, backend=backend,
        epilogue=deserialize(epilogue_of("weighted", activation, str(x.dtype))),
        operands={"weight": by_rows(row_weights.unsqueeze(1))}, **scales,
    )  # fmt: skip
    return sum_slots(slots, x.shape[0], addend)


def _decompose(
    x: Any, order: Sequence[Any], gate_up: Any, down: Any, bias: Any, addend: Any, activation: str, all_present: bool
) -> Any:  # fmt: skip
    """Compute what `_run_inference` does, by the operator of training."""
    offsets, _, token_of_row, row_of_slot, row_weights = order
    table, options = [offsets, token_of_row, row_of_slot], (*Gate(activation), True, False)
    y = FORWARD(x, table, row_weights, gate_up, down, bias, *options)[0]
    return y if addend is None else y + addend


define_op(
    "gated_experts(Tensor x, Tensor[] order, Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? addend, "
    "str activation, bool all_present) -> Tensor", lambda x, *_: x.new_empty(x.shape), _run_inference,
    by_torch=_decompose,
)  # fmt: skip


def _can_gather(x: Any, hidden: int) -> bool:
    """Return whether kernels can gather rows of x, and scatter rows of results: on a Hopper GPU, in 16 bits.

    The columns of x, and `hidden`, those of h, must be multiples of 8, or 16 bytes.
    """
    is_16bit = x.dtype in (torch.bfloat16, torch.float16)
    return is_16bit and x.is_cuda and not (x.shape[1] | hidden) % 8 and _kernels_run(x.get_device())


@assume_constant_result
def _kernels_run(index: int) -> bool:
    return not fallback.kernels_unsupported(index)


# -- weights that are DTensors, sharded by experts: each rank computes its own ones, of all tokens --------------------
def check_count(count: int, mesh: Any) -> None:
    """Raise ArgumentError for a number of experts that is no multiple of the ranks."""
    if count % mesh.size():
        raise ArgumentError(f"gate_up, down: got {count} experts for {mesh.size()} ranks; use a multiple")


def sharded_experts(
    function: Callable[..., Any], x: Any, experts: Any, weights: Any, gate_up: Any, down: Any, order: Any, addend: Any
) -> Any:  # fmt: skip
    """Return function(x, experts, weights, gate_up, down) summed over the ranks, as a DTensor of partial sums.

    Each rank calls it with its experts' weights. All arguments are DTensors on one mesh; gate_up and down are sharded
    by experts; x, experts and weights are gathered if they are sharded. Indices in `experts` become relative to the
    rank's first expert, so that those of other ranks' experts are outside of 0 ... count - 1. Raises ArgumentError for
    other placements, and if there is an `order` or `addend`.
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
