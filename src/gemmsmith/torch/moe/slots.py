"""PyTorch's operators for a router: which experts a token has, slots sorted by experts, and the sum of a token's slots.

A slot, token * top_k + i, is a token's i-th expert. A row is a slot at its place in the order of experts.

    sort_by_expert(Tensor experts, Tensor weights, int count) -> (Tensor, Tensor, Tensor, Tensor, Tensor)
    route(Tensor logits, Tensor? bias, int top_k, str scores, bool normalize, float scale, int groups,
          int top_k_groups) -> (Tensor experts, Tensor weights, Tensor, Tensor, Tensor, Tensor, Tensor)
    sum_rows(Tensor rows, Tensor row_of_slot, SymInt tokens) -> Tensor

The results of the first, and the last of the second, are those of `SortedSlots`. experts (tokens, top_k) are int32,
weights (tokens, top_k) fp32. On a Hopper GPU one or two kernels compute all of it, if there are not too many slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gemmsmith.core.dtypes import as_dtype
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.problem import TMA_ALIGNMENT_BYTES
from gemmsmith.kernels.register_tile import QUANTIZATION_BLOCK, VECTOR_ELEMENTS
from gemmsmith.moe.launch import route, slot_sum, sort_by_expert
from gemmsmith.moe.route import MAX_GROUPS, MAX_TOP_K, SIGMOID_EPSILON, RouteSpec, check_counts
from gemmsmith.moe.slot_sum import MAX_ROWS
from gemmsmith.moe.sort_by_expert import MAX_EXPERTS, MAX_SLOTS
from gemmsmith.torch import fallback
from gemmsmith.torch.define_op import below_autograd, define_op, record_gradients
from gemmsmith.torch.plain_tensors import sees_operators


class SortedSlots(NamedTuple):
    """Slots in the order of their experts, called rows. There are tokens * top_k of both.

    Slots whose index of an expert is not valid are behind the last expert's rows.

    Attributes:
        offsets: (experts,), int32: the end of each expert's rows.
        slot_of_row: (rows,), int32: the slot at each row.
        token_of_row: (rows,), int32: the slot's token.
        row_of_slot: (rows,), int32: the row at which each slot is; the inverse of slot_of_row.
        row_weights: (rows,): the router's weight of each row's slot, in fp32, or float64 if the weights are.
    """

    offsets: Any
    slot_of_row: Any
    token_of_row: Any
    row_of_slot: Any
    row_weights: Any


def sort_slots(experts: Any, weights: Any, count: int) -> SortedSlots:
    """Sort slots, stable, by their experts. No gradients.

    `experts`: (tokens, top_k), integers; `weights`: (tokens, top_k), floats; `count`: the number of experts.
    """
    return SortedSlots(*_SORT(experts, weights.detach(), count))


def with_gradients(order: SortedSlots, weights: Any) -> SortedSlots:
    """Return the sorted slots with row_weights whose gradients are those of the weights (tokens, top_k)."""
    return order._replace(row_weights=_at_least_fp32(weights).flatten().index_select(0, order.slot_of_row))


def sort_by_torch(experts: Any, weights: Any, count: int) -> SortedSlots:
    """Sort slots by torch's operations. The arguments are those of `sort_slots`."""
    flat = experts.flatten()
    sorted_experts, order = torch.where((flat >= 0) & (flat < count), flat, count).sort(stable=True)
    all_experts = torch.arange(count, device=flat.device, dtype=sorted_experts.dtype)
    offsets = torch.searchsorted(sorted_experts, all_experts, right=True, out_int32=True)
    slot_of_row = order.int()
    rows = torch.arange(order.shape[0], device=flat.device, dtype=torch.int32)
    row_of_slot = slot_of_row.scatter(0, order, rows)
    token_of_row = slot_of_row // max(experts.shape[1], 1)
    return SortedSlots(offsets, slot_of_row, token_of_row, row_of_slot, _at_least_fp32(weights).flatten()[order])


def sort_on_gpu(experts: Any, weights: Any, count: int) -> SortedSlots:
    """Sort slots on a GPU: by a kernel, or by torch if the kernel does not support the sizes or the GPU."""
    is_supported = 0 < experts.numel() <= MAX_SLOTS and 0 < count <= MAX_EXPERTS and weights.dtype != torch.float64
    if not is_supported or fallback.kernels_unsupported(experts.get_device()):
        return sort_by_torch(experts, weights, count)
    if experts.dtype not in (torch.int32, torch.int64):
        experts = experts.long()
    results = sort_by_expert(experts.contiguous(), _at_least_fp32(weights).contiguous(), count, "cuda")
    return SortedSlots._make(results[name] for name in SortedSlots._fields)


def _at_least_fp32(weights: Any) -> Any:
    return weights if weights.dtype == torch.float64 else weights.float()


def fake_sort(experts: Any, weights: Any, count: int) -> SortedSlots:
    """Return empty tensors of the shapes and dtypes of `sort_slots`' results."""
    lengths = count, *[experts.numel()] * 3
    row_weights = weights.new_empty(weights.numel(), dtype=_at_least_fp32(weights).dtype)
    return SortedSlots._make([*(experts.new_empty(x, dtype=torch.int32) for x in lengths), row_weights])


_SORT = define_op(
    "sort_by_expert(Tensor experts, Tensor weights, int count) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake_sort, sort_by_torch, sort_on_gpu, by_torch=sort_by_torch,
)  # fmt: skip


def checked_shape(x: Any, experts: Any, weights: Any, gate_up: Any, down: Any, width: int = 2) -> tuple[Any, Any]:
    """Return (count, hidden), the number of experts and their hidden size. Raises ArgumentError if shapes do not match.

    `width`: how many products a gate reads: 2 for gate and up, or 1. The others are those of `gated_experts`.
    """
    count, dim, hidden = down.shape
    is_valid = x.shape == (experts.shape[0], dim) and weights.shape == experts.shape
    if not is_valid or gate_up.shape != (count, width * hidden, dim):
        raise ArgumentError(
            f"x, experts, weights, gate_up, down: got shapes {tuple(x.shape)}, {tuple(experts.shape)}, "
            f"{tuple(weights.shape)}, {tuple(gate_up.shape)} and {tuple(down.shape)}; use (tokens, dim), "
            f"(tokens, top_k), (tokens, top_k), (count, {width} * hidden, dim) and (count, dim, hidden)"
        )
    return count, hidden


def check_hidden(hidden: int, multiple: int = QUANTIZATION_BLOCK) -> None:
    """Raise ArgumentError if the hidden size of MLPs in FP8 is no multiple of `multiple`.

    It must be one of 128 if one array holds gate and up with scales of 128 x 128, of which none may cover both.
    """
    if hidden % multiple:
        raise ArgumentError(f"hidden: got {hidden} with experts in fp8; use a multiple of {multiple}")


def select_experts(
    logits: Any, bias: Any, top_k: int, scores: str, normalize: bool, scale: float, groups: int, top_k_groups: int
) -> tuple[Any, Any]:  # fmt: skip
    """Return each token's experts (tokens, top_k), and their weights, in fp32, or float64 if the logits are.

    Of equal scores the first is selected, as by the kernel; on a GPU one that torch.topk selects. NaN is the greatest.

    Args:
        logits: (tokens, experts), the router's.
        bias: (experts,), added to sigmoid scores for the selection; None with softmax.
        top_k: experts of a token.
        scores: "softmax" or "sigmoid".
        normalize: whether a token's weights are divided by their sum.
        scale: factor of the weights.
        groups: groups of experts; a token's experts are within its best ones.
        top_k_groups: how many these are.

    Raises:
        ArgumentError: see `check_counts`.
    """
    check_counts(logits.shape[-1], top_k, groups, top_k_groups)
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if scores == "softmax":
        values = choice = logits.softmax(-1, dtype=exact)
    else:
        values = logits.to(exact).sigmoid()
        choice = values + bias
    if groups == 1:
        experts = _greatest(choice, top_k)
    else:
        candidates = _experts_of_best_groups(choice, groups, top_k_groups)
        experts = candidates.gather(-1, _greatest(choice.gather(-1, candidates), top_k))
    weights = values.gather(-1, experts)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + (SIGMOID_EPSILON if scores == "sigmoid" else 0))
    return experts, weights * scale


def _greatest(x: Any, count: int) -> Any:
    """Return the indices of the `count` greatest values of each row, the greatest first."""
    if x.is_cuda:
        return x.topk(count, -1).indices
    return x.sort(stable=True, dim=-1, descending=True).indices[..., :count]  # topk takes any of equal ones


def _experts_of_best_groups(choice: Any, groups: int, top_k_groups: int) -> Any:
    """Return the experts, ascending, of each token's best groups: those with the largest sum of two scores.

    As in DeepSeek-V3. `choice`: (tokens, experts), scores with biases; `top_k_groups`: how many groups.
    """
    grouped = choice.unflatten(-1, (groups, -1))
    best = _greatest(grouped.topk(2, -1).values.sum(-1), top_k_groups).sort(-1).values
    in_group = torch.ones_like(grouped[..., :1, :], dtype=torch.long).cumsum(-1) - 1  # not arange: of DTensors, too
    return (best.unsqueeze(-1) * grouped.shape[-1] + in_group).flatten(-2)


def _route_by_torch(logits: Any, bias: Any, top_k: int, *options: Any) -> tuple[Any, ...]:
    """Return the results of the operator route by torch's operations; `options`: its arguments after top_k."""
    experts, weights = select_experts(logits, bias, top_k, *options)
    experts, weights = experts.int(), weights.float()
    return experts, weights, *sort_by_torch(experts, weights, logits.shape[1])


def _route_on_gpu(
    logits: Any, bias: Any, top_k: int, scores: Any, normalize: bool, scale: float, groups: int, top_k_groups: int
) -> tuple[Any, ...]:  # fmt: skip
    """Return the results of the operator route on a GPU: by kernels, or by torch if they do not support the sizes."""
    (tokens, count), options = logits.shape, (scores, normalize, scale, groups, top_k_groups)
    is_supported = (
        tokens > 0 and top_k <= MAX_TOP_K and count <= MAX_EXPERTS and groups <= MAX_GROUPS
        and logits.dtype in (torch.bfloat16, torch.float16, torch.float32)
    )  # fmt: skip
    if not is_supported or fallback.kernels_unsupported(logits.get_device()):
        return _route_by_torch(logits, bias, top_k, *options)
    dtype = as_dtype(logits.dtype, "logits")
    spec = RouteSpec(count, top_k, scores, normalize, groups, top_k_groups, dtype)
    bias = None if scores == "softmax" else bias.float().contiguous()
    results = route(logits.contiguous(), bias, spec, scale, "cuda")
    experts, weights = results["experts"], results["weights"]
    if "offsets" not in results:
        return experts, weights, *sort_on_gpu(experts, weights, count)
    return experts, weights, *(results[name] for name in SortedSlots._fields)


def _fake_route(logits: Any, bias: Any, top_k: int, *_: Any) -> tuple[Any, ...]:
    experts, weights = (logits.new_empty((logits.shape[0], top_k), dtype=x) for x in (torch.int32, torch.float32))
    return experts, weights, *fake_sort(experts, weights, logits.shape[1])


ROUTE = define_op(
    "route(Tensor logits, Tensor? bias, int top_k, str scores, bool normalize, float scale, int groups, "
    "int top_k_groups) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_route, _route_by_torch, _route_on_gpu, by_torch=_route_by_torch,
)  # fmt: skip
"""The operator route."""


MAX_ELEMENTS = 1 << 33
"""Elements of the slots at most: half of those with which the kernel's indices of vectors overflow."""


def sum_slots(slots: Any, tokens: int, addend: Any = None, row_of_slot: Any = None) -> Any:
    """Return the sum of each token's slots, (tokens, n), added in the order of slots, in slots' dtype.

    A kernel computes it on a Hopper GPU in bf16 or fp16, if the sizes allow; otherwise torch.

    Args:
        slots: (tokens * top_k, n), the values of the slots, in the order of slots or of rows.
        tokens: the number of tokens.
        addend: (tokens, n), what is added to the sums, or None.
        row_of_slot: (tokens * top_k,), int32, the index in `slots` of each slot's values; None: they are in order.
    """
    top_k = slots.shape[0] // max(tokens, 1)
    arrays = [slots] if addend is None else [slots, addend]
    is_supported = (
        slots.is_cuda and 0 < top_k <= MAX_ROWS and slots.dtype in (torch.bfloat16, torch.float16)
        and not sees_operators() and 0 < slots.numel() < MAX_ELEMENTS and slots.shape[1] % VECTOR_ELEMENTS == 0
        and all(x.dtype == slots.dtype and x.is_contiguous() for x in arrays)
        and not any(x.data_ptr() % TMA_ALIGNMENT_BYTES for x in arrays)
    )  # fmt: skip
    if is_supported and not fallback.kernels_unsupported(slots.get_device()):
        return slot_sum(slots, top_k, addend, "cuda", row_of_slot)
    if row_of_slot is not None:
        slots = slots.index_select(0, row_of_slot)
    total = slots.view(tokens, -1 if tokens else 0, slots.shape[1]).sum(1)
    return total if addend is None else (total + addend).to(slots.dtype)


def _sum_rows(rows: Any, row_of_slot: Any, tokens: int) -> Any:
    return sum_slots(rows, tokens, row_of_slot=row_of_slot)


SUM_ROWS = define_op(
    "sum_rows(Tensor rows, Tensor row_of_slot, SymInt tokens) -> Tensor",
    lambda rows, row_of_slot, tokens: rows.new_empty(tokens, rows.shape[1]), _sum_rows, by_torch=_sum_rows,
)  # fmt: skip
"""The operator sum_rows: the sum of each token's rows, added in the order of its slots."""


class _SumRows(torch.autograd.Function):
    """SUM_ROWS with gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Any, row_of_slot: Any, tokens: int) -> Any:
        ctx.save_for_backward(row_of_slot)
        return below_autograd(SUM_ROWS, rows, row_of_slot, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        """Return the gradient of the rows: each row gets the gradient of its token's sum."""
        (row_of_slot,) = ctx.saved_tensors
        top_k = row_of_slot.shape[0] // max(gradient.shape[0], 1)
        of_slots = gradient.unsqueeze(1).expand(-1, top_k, -1).flatten(0, 1)
        return torch.zeros_like(of_slots).index_copy(0, row_of_slot.long(), of_slots), None, None


record_gradients(SUM_ROWS, _SumRows.apply)
