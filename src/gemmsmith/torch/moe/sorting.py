"""PyTorch's operator that sorts a router's slots by their experts.

    sort_by_expert(Tensor experts, Tensor weights, int count) -> (Tensor, Tensor, Tensor, Tensor, Tensor)

The results are those of `SortedSlots`. On a Hopper GPU one kernel computes them, if there are not too many slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gemmsmith.core.errors import ArgumentError
from gemmsmith.moe.launch_sort import sort_by_expert
from gemmsmith.moe.sort_by_expert import MAX_EXPERTS, MAX_SLOTS
from gemmsmith.torch import fallback
from gemmsmith.torch.ops import define_op


class SortedSlots(NamedTuple):
    """Slots token * top_k + i in the order of their experts. Those of no expert are behind the last end.

    Attributes:
        offsets: (experts,), int32, the end of each expert's rows.
        slot_of_row: (rows,), int32.
        token_of_row: (rows,), int32.
        row_of_slot: (rows,), int32.
        row_weights: (rows,), fp32, or float64 for a float64.
    """

    offsets: Any
    slot_of_row: Any
    token_of_row: Any
    row_of_slot: Any
    row_weights: Any


def sort_slots(experts: Any, weights: Any, count: int) -> SortedSlots:
    """Sort slots, stable, by their experts: (tokens, top_k) integers, with weights of a float dtype. No gradients."""
    return SortedSlots(*_SORT(experts, weights.detach(), count))


def with_gradients(order: SortedSlots, weights: Any) -> SortedSlots:
    """Return the sorted slots with row_weights whose gradients are those of the weights (tokens, top_k)."""
    return order._replace(row_weights=_exact(weights).flatten().index_select(0, order.slot_of_row))


def sort_by_torch(experts: Any, weights: Any, count: int) -> SortedSlots:
    """Sort slots by torch's operations."""
    flat = experts.flatten()
    sorted_experts, order = torch.where((flat >= 0) & (flat < count), flat, count).sort(stable=True)
    all_experts = torch.arange(count, device=flat.device, dtype=sorted_experts.dtype)
    offsets = torch.searchsorted(sorted_experts, all_experts, right=True, out_int32=True)
    slot_of_row = order.int()
    rows = torch.arange(order.shape[0], device=flat.device, dtype=torch.int32)
    row_of_slot = torch.empty_like(slot_of_row).scatter_(0, order, rows)
    token_of_row = slot_of_row // max(experts.shape[1], 1)
    return SortedSlots(offsets, slot_of_row, token_of_row, row_of_slot, _exact(weights).flatten()[order])


def sort_on_gpu(experts: Any, weights: Any, count: int) -> SortedSlots:
    """Sort slots on a GPU, without autograd."""
    is_supported = 0 < experts.numel() <= MAX_SLOTS and 0 < count <= MAX_EXPERTS and weights.dtype != torch.float64
    if not is_supported or fallback.kernels_unsupported(experts.get_device()):
        return sort_by_torch(experts, weights, count)
    if experts.dtype not in (torch.int32, torch.int64):
        experts = experts.long()
    results = sort_by_expert(experts.contiguous(), _exact(weights).contiguous(), count, "cuda")
    return SortedSlots._make(results[name] for name in SortedSlots._fields)


def _exact(weights: Any) -> Any:
    return weights if weights.dtype == torch.float64 else weights.float()


def fake_sort(experts: Any, weights: Any, count: int) -> SortedSlots:
    """Return tensors of the results' shapes and dtypes."""
    lengths = count, *[experts.numel()] * 3
    row_weights = weights.new_empty(weights.numel(), dtype=_exact(weights).dtype)
    return SortedSlots._make([*(experts.new_empty(x, dtype=torch.int32) for x in lengths), row_weights])


_SORT = define_op(
    "sort_by_expert", "(Tensor experts, Tensor weights, int count) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake_sort, lambda *_, **__: 0, CPU=sort_by_torch, CUDA=sort_on_gpu,
)  # fmt: skip


def checked_shape(x: Any, experts: Any, weights: Any, gate_up: Any, down: Any, width: int = 2) -> tuple[Any, Any]:
    """Return (count, hidden) of experts whose gates read `width` halves. Raises ArgumentError for other shapes."""
    count, dim, hidden = down.shape
    is_valid = x.shape == (experts.shape[0], dim) and weights.shape == experts.shape
    if not is_valid or gate_up.shape != (count, width * hidden, dim):
        raise ArgumentError(
            f"x, experts, weights, gate_up, down: got shapes {tuple(x.shape)}, {tuple(experts.shape)}, "
            f"{tuple(weights.shape)}, {tuple(gate_up.shape)} and {tuple(down.shape)}; use (tokens, dim), "
            f"(tokens, top_k), (tokens, top_k), (count, {width} * hidden, dim) and (count, dim, hidden)"
        )
    return count, hidden
