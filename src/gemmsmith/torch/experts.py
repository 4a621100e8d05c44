"""The experts of a mixture-of-experts layer: gated MLPs, each on the tokens that the router sends to it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gemmsmith.core.errors import ArgumentError
from gemmsmith.graph.frontend.fusions import resolve_activation
from gemmsmith.torch.grouped import grouped_gemm, grouped_gemm_then_linear


def gated_experts(
    x: Any, experts: Any, weights: Any, gate_up: Any, down: Any, activation: Any = "silu"
) -> Any:  # fmt: skip
    """Return the sum over a token's experts e of weight * down[e] (activation(gate[e] x) * up[e] x), with gradients.

    Nothing is read on the host. Experts of a token are added in a fixed order. No second derivatives.

    Args:
        x: (tokens, dim), bf16, fp16, fp32, or float64 on the CPU.
        experts: (tokens, top_k) of integers. Those outside 0 ... count - 1, such as other ranks', count for nothing.
        weights: (tokens, top_k), a float dtype.
        gate_up: (count, 2 * hidden, dim), in x's dtype: the rows of gate, then those of up.
        down: (count, dim, hidden), in x's dtype.
        activation: a name, as of FusedLinear, or a function.

    Returns:
        (tokens, dim), in x's dtype.

    Raises:
        ArgumentError: shapes do not match.
    """
    (count, twice_hidden, dim), (tokens, top_k) = gate_up.shape, experts.shape
    hidden = twice_hidden // 2
    if x.shape != (tokens, dim) or weights.shape != experts.shape or down.shape != (count, dim, hidden):
        raise ArgumentError(
            f"x, experts, weights, gate_up, down: got shapes {tuple(x.shape)}, {tuple(experts.shape)}, "
            f"{tuple(weights.shape)}, {tuple(gate_up.shape)} and {tuple(down.shape)}; use (tokens, dim), "
            "(tokens, top_k), (tokens, top_k), (count, 2 * hidden, dim) and (count, dim, hidden)"
        )
    order, offsets = sort_by_expert(experts, count)
    row_of_slot = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    rows = _TokensOfRows.apply(x, order, row_of_slot, top_k)
    gate = grouped_gemm(rows, gate_up[:, :hidden].mT, offsets=offsets)
    results = grouped_gemm_then_linear(
        rows, gate_up[:, hidden:].mT, down.mT, offsets=offsets, epilogue=partial(_gate, activation),
        operands={"gate": gate},
    )  # fmt: skip
    slots = _Permuted.apply(results, row_of_slot, order).view(tokens, top_k, dim)
    return (slots * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def sort_by_expert(experts: Any, count: int) -> tuple[Any, Any]:
    """Return the slots (token * top_k + i) in the order of their experts, and the ends of each expert's, int32.

    Slots whose expert is outside 0 ... count - 1 are behind the last end.
    """
    flat = experts.flatten()
    sorted_experts, order = torch.where((flat >= 0) & (flat < count), flat, count).sort(stable=True)
    ends = torch.searchsorted(sorted_experts, torch.arange(count, device=flat.device, dtype=flat.dtype), right=True)
    return order, ends.to(torch.int32)


def _gate(activation: Any, acc: Any, gate: Any) -> Any:
    return resolve_activation(activation)(gate) * acc


class _Permuted(torch.autograd.Function):
    """x[index] for a permutation, whose gradient is a permutation too."""

    @staticmethod
    def forward(ctx: Any, x: Any, index: Any, inverse: Any) -> Any:
        ctx.save_for_backward(inverse)
        return x[index]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        return gradient[ctx.saved_tensors[0]], None, None


class _TokensOfRows(torch.autograd.Function):
    """The token of each row, whose gradients are summed over a token's slots in order."""

    @staticmethod
    def forward(ctx: Any, x: Any, order: Any, row_of_slot: Any, top_k: int) -> Any:
        ctx.save_for_backward(row_of_slot)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        slots = gradient[ctx.saved_tensors[0]]
        return slots.view(-1, ctx.top_k, slots.shape[-1]).sum(1), None, None, None
