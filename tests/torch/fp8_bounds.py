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


# -- training --------------------------------------------------------------------------------------------------------
OF_ROUNDING = {torch.float32: 0.05, torch.float16: 0.1, torch.bfloat16: 0.15}
"""Bounds of relative errors against the same rounded operands, by what is stored between kernels, whose own rounding
changes what e4m3 rounds to."""
OF_RECIPE = 0.15
"""The same against float64, of 20 tokens or more: a single weight's gradient may be a small sum of large terms."""


def rounded(x: Any, along: int) -> Any:
    """In float64, rounded to e4m3 with a scale for each 128 elements along a dimension."""
    x = x.double().movedim(along, -1)
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))
    scale = padded.abs().amax(-1, keepdim=True) / 448
    scale = torch.where(scale == 0, 1, scale)
    values = (padded / scale).float().to(torch.float8_e4m3fn).double() * scale
    return values.flatten(-2)[..., : x.shape[-1]].movedim(-1, along)


def rounded_blocks(weight: Any) -> Any:
    """In float64, rounded to e4m3 with a scale for each 128 x 128."""
    (n, k), weight = weight.shape, weight.double()
    padded = torch.nn.functional.pad(weight, (0, -k % 128, 0, -n % 128))
    blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    scale = torch.where(scale == 0, 1, scale)
    values = (blocks / scale).float().to(torch.float8_e4m3fn).double() * scale
    return values.reshape(padded.shape)[:n, :k]


def trained_in_float64(
    x: Any, experts: Any, weights: Any, gate_up: Any, down: Any, gradient: Any, activation: str = "silu",
    rounded: Any = None, rounded_blocks: Any = None,
) -> list[Any]:  # fmt: skip
    """The result of experts, and the gradients of x, weights, gate_up and down; operands of products are `rounded`."""
    act = {"gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh")}.get(
        activation, getattr(torch.nn.functional, activation.removesuffix("_tanh"))
    )
    dtype, is_exact = x.dtype, rounded_blocks is None

    def stored(t: Any) -> Any:
        """In memory, between kernels."""
        return t if is_exact else t.to(dtype).double()

    if is_exact:
        rounded, rounded_blocks = (lambda t, _: t), (lambda t: t)
    x, weights, gate_up, down, gradient = (t.double() for t in (x, weights, gate_up, down, gradient))
    results = [torch.zeros_like(t) for t in (x, x, weights, gate_up, down)]
    y, of_x, of_weights, of_gate_up, of_down = results
    for e in range(len(gate_up)):
        token, slot = torch.where(experts == e)
        rows, g, weight = x[token], gradient[token], weights[token, slot, None]
        gate, up = (rounded(rows, 1) @ rounded_blocks(w).T for w in gate_up[e].chunk(2))
        y.index_add_(0, token, rounded(act(gate) * up * weight, 1) @ rounded_blocks(down[e]).T)
        with torch.enable_grad():
            gate, up = (stored(t).requires_grad_() for t in (gate, up))
            scale = weight.clone().requires_grad_()
            h = act(gate) * up * scale
            of_h = rounded(g, 1) @ rounded_blocks(down[e])
            of_gate, of_up, of_weight = torch.autograd.grad(h, (gate, up, scale), of_h)
        h, of_both = stored(h.detach()), stored(torch.cat([of_gate, of_up], 1))
        of_x.index_add_(0, token, rounded(of_both, 1) @ rounded_blocks(gate_up[e]))
        of_weights[token, slot] = of_weight[:, 0]
        of_gate_up[e] = rounded(of_both, 0).T @ rounded(rows, 0)
        of_down[e] = rounded(g, 0).T @ rounded(h, 0)
    return results


def trained_in_fp8(*arguments: Any) -> list[Any]:
    """The same with the operands of products in e4m3."""
    return trained_in_float64(*arguments, rounded=rounded, rounded_blocks=rounded_blocks)


def relative_errors(got: Any, want: Any) -> list[Any]:
    """Of each token's and of each expert's results, in the norm, and of all weights; exact zeros have 0 or infinity."""
    errors = []
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        x, y = (t[None] if i == 2 else t for t in (x, y))
        difference, size = ((t.double()).flatten(1).norm(dim=1) for t in (x.double() - y, y))
        errors.append(torch.where(difference == 0, 0, difference / size))
    return errors
