"""The sum over the slots of each token."""

from __future__ import annotations

from typing import Any

import torch

from gemmsmith.core.problem import TMA_ALIGNMENT_BYTES
from gemmsmith.kernels.register_tile import VECTOR_ELEMENTS
from gemmsmith.moe.launch_slot_sum import slot_sum
from gemmsmith.moe.slot_sum import MAX_ROWS
from gemmsmith.torch import fallback
from gemmsmith.torch.autograd_state import records_now
from gemmsmith.torch.ops import LIBRARY, define_op

MAX_ELEMENTS = 1 << 33
"""Elements of the slots at most: half of those with which the kernel's indices of vectors overflow."""


def sum_slots(slots: Any, tokens: int, addend: Any = None, row_of_slot: Any = None) -> Any:
    """Return the sums (tokens, n) of slots (tokens * top_k, n) in their order, plus `addend`, in slots' dtype.

    `row_of_slot`: (tokens * top_k,), int32: which row each slot's is; None: they are in order.
    """
    top_k = slots.shape[0] // max(tokens, 1)
    arrays = [slots] if addend is None else [slots, addend]
    is_supported = (
        slots.is_cuda and 0 < top_k <= MAX_ROWS and slots.dtype in (torch.bfloat16, torch.float16)
        and 0 < slots.numel() < MAX_ELEMENTS and slots.shape[1] % VECTOR_ELEMENTS == 0
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
    "sum_rows", "(Tensor rows, Tensor row_of_slot, SymInt tokens) -> Tensor",
    lambda rows, row_of_slot, tokens: rows.new_empty(tokens, rows.shape[1]), lambda *_, **__: 0,
    CPU=_sum_rows, CUDA=_sum_rows,
)  # fmt: skip
"""The operator: the sums of each token's rows, in the order of its slots."""


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Any, row_of_slot: Any, tokens: int) -> Any:
        ctx.save_for_backward(row_of_slot)
        with torch._C._AutoDispatchBelowAutograd():
            return SUM_ROWS(rows, row_of_slot, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        (row_of_slot,) = ctx.saved_tensors
        top_k = row_of_slot.shape[0] // max(gradient.shape[0], 1)
        of_slots = gradient.unsqueeze(1).expand(-1, top_k, -1).flatten(0, 1)
        return torch.zeros_like(of_slots).index_copy(0, row_of_slot.long(), of_slots), None, None


def _autograd_kernel(rows: Any, row_of_slot: Any, tokens: int) -> Any:
    """Record gradients, which exported programs need."""
    if records_now(rows):
        return _SumRows.apply(rows, row_of_slot, tokens)
    with torch._C._AutoDispatchBelowAutograd():
        return SUM_ROWS(rows, row_of_slot, tokens)


LIBRARY.impl("sum_rows", _autograd_kernel, "Autograd")
