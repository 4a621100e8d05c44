"""What experts with FP8 weights compute, in float64, and how far a result may be from it, element by element."""

from __future__ import annotations

from typing import Any

import torch

ROUNDING = 2.0**-4
"""Of e4m3, relative."""
SMALLEST = 2.0**-10 / 448
"""Rounding error of e4m3's subnormal numbers, relative to the largest element that shares the scale."""
SUMS = 2.0**-11
"""Of the tensor cores' sums, relative to the sum of magnitudes."""
SLOPE = 1.13
"""The largest slope of an activation."""


def dequantized(weight: Any, scale: Any) -> Any:
    """(..., n, k) in float64; a scale for each 128 x 128."""
    wide = scale.double().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return weight.double() * wide[..., : weight.shape[-2], : weight.shape[-1]]


def quantization_error(x: Any) -> Any:
    return x * ROUNDING + x.amax(-1, keepdim=True) * SMALLEST


def fp8_experts_and_bound(
    x: Any, experts: Any, weights: Any, gate_up: Any, down: Any, activation: Any = torch.nn.functional.silu
) -> tuple[Any, Any]:  # fmt: skip
    """The sum of each token's experts, and its bound. All in float64, gate_up and down as `dequantized`."""
    epsilon = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}[x.dtype]
    x, weights = x.double(), weights.double()
    y, bound = torch.zeros_like(x), torch.zeros_like(x)
    for e in range(len(gate_up)):
        token, slot = torch.where(experts == e)
        if not len(token):
            continue
        rows, weight = x[token], weights[token, slot, None]
        both = rows @ gate_up[e].T
        x_error = quantization_error(rows.abs())
        both_error = (x_error + SUMS * (rows.abs() + x_error)) @ gate_up[e].abs().T
        (gate, up), (gate_error, up_error) = both.chunk(2, -1), both_error.chunk(2, -1)
        gate_error = gate_error + epsilon * (gate.abs() + gate_error)
        activated, h_error = activation(gate), SLOPE * gate_error
        h_error = activated.abs() * up_error + up.abs() * h_error + h_error * up_error
        h = activated * up
        h_error = h_error + quantization_error(h.abs() + h_error)
        slot_error = (h_error + SUMS * (h.abs() + h_error)) @ down[e].abs().T
        result = h @ down[e].T
        y = y.index_add(0, token, result * weight)
        slot_error = slot_error + epsilon * (result.abs() + slot_error)
        bound = bound.index_add(0, token, slot_error * weight.abs())
    return y, 1.01 * bound + epsilon * (y.abs() + bound) + 1e-6


def fp8_mlp_and_bound(x: Any, gate: Any, up: Any, down: Any) -> tuple[Any, Any]:
    """The same of an MLP: one expert of all tokens."""
    weights = x.new_ones((len(x), 1))
    gate_up = torch.cat([gate, up])[None]
    return fp8_experts_and_bound(x, torch.zeros_like(weights, dtype=torch.int64), weights, gate_up, down[None])
