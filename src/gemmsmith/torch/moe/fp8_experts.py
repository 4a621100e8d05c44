"""Gated MLPs with weights in e4m3 and scales of 128 x 128 blocks, as DeepSeek-V3's checkpoints have them; inference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from gemmsmith.api import gemm, grouped_gemm
from gemmsmith.arrays import INTERLEAVE_COLUMNS
from gemmsmith.backends import Backend
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.problem import TMA_ALIGNMENT_BYTES
from gemmsmith.core.scalars import round_up
from gemmsmith.graph.frontend.values import quantize as quantize_traced
from gemmsmith.host.quantization import dequantize, quantize
from gemmsmith.kernels.register_tile import QUANTIZATION_BLOCK as BLOCK
from gemmsmith.torch.autograd_state import needs_grad
from gemmsmith.torch.define_op import define_op
from gemmsmith.torch.mlp.gated_epilogues import check_activation, gate_and_up, gated, width
from gemmsmith.torch.moe.experts import sum_down
from gemmsmith.torch.moe.slots import SortedSlots, check_hidden, checked_shape, sort_slots
from gemmsmith.torch.ops import can_read_together

SCALE_SUFFIX = "_scale_inv"
"""The name of a weight's scales is the weight's followed by this, in transformers and in DeepSeek-V3's checkpoints."""


class Fp8Weights(nn.Module):
    """Weights in e4m3 and their scales."""

    def reset_parameters(self) -> None:
        for x in self.parameters(recurse=False):
            nn.init.zeros_(x)


class Fp8Weight(Fp8Weights):
    """A module of one weight and its scales. A call returns both, so that hooks, as of accelerate, can load them."""

    def forward(self) -> Any:
        return self.weight, self.weight_scale_inv


class Fp8Experts(Fp8Weights):
    """The weights of gated MLPs in e4m3: gate_up_proj (experts, 2 * hidden, dim), gate's rows first, and down_proj.

    gate_up_proj_scale_inv and down_proj_scale_inv, fp32, have a scale for each 128 x 128 of a weight. All are zero
    until they are loaded; weights without scales are quantized then.
    """

    def __init__(self, dim: int, hidden: int, experts: int, activation: str, device: Any) -> None:
        """Make the parameters; `FusedMoE` documents the arguments."""
        super().__init__()
        check_hidden(hidden)
        self.activation = activation
        _add_weight(self, "gate_up_proj", (experts, 2 * hidden, dim), device)
        _add_weight(self, "down_proj", (experts, dim, hidden), device)

    def forward(self, x: Any, experts: Any, weights: Any, order: Any = None, addend: Any = None) -> Any:
        return fp8_gated_experts(
            x, experts, weights, self.gate_up_proj, self.gate_up_proj_scale_inv, self.down_proj,
            self.down_proj_scale_inv, self.activation, all_present=True, order=order, addend=addend,
        )  # fmt: skip


class Fp8MLP(nn.Module):
    """A gated MLP of all tokens: gate.weight and up.weight (hidden, dim), and down.weight, as those of `Fp8Experts`."""

    def __init__(self, dim: int, hidden: int, activation: str, device: Any) -> None:
        """Make the parameters; `hidden` is `shared_hidden` of `FusedMoE`, which documents the arguments."""
        super().__init__()
        check_hidden(hidden, INTERLEAVE_COLUMNS)
        self.activation = activation
        self.gate, self.up, self.down = Fp8Weight(), Fp8Weight(), Fp8Weight()
        for layer, shape in ((self.gate, (hidden, dim)), (self.up, (hidden, dim)), (self.down, (dim, hidden))):
            _add_weight(layer, "weight", shape, device)

    def forward(self, x: Any) -> Any:
        layers = [self.gate(), self.up(), self.down()]
        _check([x], {name: w for name, (w, _) in zip(("gate", "up", "down"), layers, strict=True)})
        return torch.ops.gemmsmith.fp8_mlp(x, *[t for layer in layers for t in layer], self.activation)


def _add_weight(module: nn.Module, name: str, shape: tuple[int, ...], device: Any) -> None:
    """Add a weight (..., n, k) of zeros in e4m3 to a module, and its scales, one for each 128 x 128, in fp32.

    `name`: the parameter's; that of the scales has SCALE_SUFFIX appended.
    """
    blocks = (*shape[:-2], *[-(-extent // BLOCK) for extent in shape[-2:]])
    for suffix, extents, dtype in (("", shape, torch.float8_e4m3fn), (SCALE_SUFFIX, blocks, torch.float32)):
        values = torch.zeros(extents, device=device, dtype=dtype)
        module.register_parameter(name + suffix, nn.Parameter(values, requires_grad=False))


def _check(inputs: Iterable[Any], weights: Mapping[str, Any]) -> None:
    """Raise ArgumentError if an input requires a gradient, or a weight, given by name, is not e4m3."""
    if needs_grad(*inputs):
        raise ArgumentError("x, weights: got a tensor that requires a gradient; FP8 experts have none, use no_grad()")
    for name, w in weights.items():
        if w.dtype != torch.float8_e4m3fn:
            raise ArgumentError(f"{name}: got {w.dtype}; use torch.float8_e4m3fn, which .to(dtype) of a module changes")


def fp8_gated_experts(
    x: Any, experts: Any, weights: Any, gate_up: Any, gate_up_scale: Any, down: Any, down_scale: Any,
    activation: str = "silu", all_present: bool = False, order: SortedSlots | None = None, addend: Any = None,
) -> Any:  # fmt: skip
    """Return each token's weighted sum of its experts, as `gated_experts` does, multiplied in FP8, without gradients.

    x and the hidden activations are quantized with a scale for each token and 128 columns. On the CPU the products are
    the reference's.

    Args:
        x: (tokens, dim), bf16, fp16 or fp32.
        experts: (tokens, top_k) of integers. Those outside 0 ... count - 1, such as other ranks', count for nothing.
        weights: (tokens, top_k), a float dtype.
        gate_up: (count, 2 * hidden, dim), e4m3: the rows of gate, then those of up; hidden is a multiple of 128. Or
            (count, hidden, dim) if `activation` reads one half.
        gate_up_scale: (count, 2 * hidden / 128, dim / 128), fp32: dequantization factors.
        down: (count, dim, hidden), e4m3.
        down_scale: (count, dim / 128, hidden / 128), fp32.
        activation: silu, gelu, gelu_tanh or relu; or the serialized graph of a gate (gated_epilogues.py).
        all_present: no expert is outside of 0 ... count - 1.
        order: the slots in the order of their experts, if they are sorted already.
        addend: (tokens, dim), what is added to the result.

    Returns:
        (tokens, dim), in x's dtype.

    Raises:
        ArgumentError: a gradient is required, a weight is not e4m3, shapes do not match, or the activation is unknown.
    """
    check_activation(activation)
    _check((x, weights, *[addend] * (addend is not None)), {"gate_up": gate_up, "down": down})
    count, hidden = checked_shape(x, experts, weights, gate_up, down, width(activation))
    check_hidden(hidden)
    if order is None:
        order = sort_slots(experts, weights.float(), count)
    return torch.ops.gemmsmith.fp8_experts(
        x.contiguous(), list(order), gate_up, gate_up_scale, down, down_scale, addend, activation, all_present,
    )  # fmt: skip


def _run_experts(
    x: Any, order: Sequence[Any], gate_up: Any, gate_up_scale: Any, down: Any, down_scale: Any, addend: Any,
    activation: str, all_present: bool, backend: Backend = "auto",
) -> Any:  # fmt: skip
    """Return each token's weighted sum of its experts: the kernel of the operator fp8_experts.

    `order`: the fields of `SortedSlots`. `backend`: as in `gemm`. The others are those of `fp8_gated_experts`.
    """
    offsets, _, token_of_row, *_ = order
    values, scales = quantize(x, "1x128", backend=backend)
    weights = _first_operands(gate_up, gate_up_scale, width(activation))
    h, h_scales = grouped_gemm(
        values, scale_a=scales, **weights, offsets=offsets, gather=token_of_row, epilogue=_gated(activation),
        backend=backend,
    )  # fmt: skip
    scales = {"scale_a": h_scales, "scale_b": down_scale.mT, "out_dtype": x.dtype}
    return sum_down(h, down, x, order, addend, activation, all_present, backend, **scales)


def _run_mlp(
    x: Any, gate: Any, gate_scale: Any, up: Any, up_scale: Any, down: Any, down_scale: Any, activation: str,
    backend: Backend = "auto",
) -> Any:  # fmt: skip
    values, scales = quantize(x, "1x128", backend=backend)
    if not can_read_together(gate.T, up.T):
        gate, up = _with_aligned_rows(torch.stack([gate, up]))
    h, h_scales = gemm(
        values, (gate.T, up.T), scale_a=scales, scale_b=(gate_scale.T, up_scale.T), epilogue=_gated(activation),
        backend=backend,
    )  # fmt: skip
    return gemm(h, down.T, scale_a=h_scales, scale_b=down_scale.T, out_dtype=x.dtype, backend=backend)


def _first_operands(weight: Any, scale: Any, width: int) -> dict[str, Any]:
    """Return the arguments b and scale_b of the first grouped GEMM.

    `weight`: (count, width * hidden, dim), and its scales. `width`: how many halves the gate reads. With two, b is a
    tuple of gate's and up's weights, (count, dim, hidden) each, which are copied if TMA cannot read both.
    """
    if width == 1:
        return {"b": weight.mT, "scale_b": scale.mT}
    b = gate_and_up(weight)
    if not can_read_together(*b):
        b = gate_and_up(_with_aligned_rows(weight))
    return {"b": b, "scale_b": gate_and_up(scale)}


def _with_aligned_rows(weight: Any) -> Any:
    """Return a copy of a weight (..., n, k) whose rows begin at multiples of 16 bytes, as TMA needs."""
    *rows, k = weight.shape
    copy = weight.new_empty((*rows, round_up(k, TMA_ALIGNMENT_BYTES)))[..., :k]
    copy.copy_(weight)
    return copy


@lru_cache(maxsize=16)
def _gated(activation: str) -> Any:
    """Return the epilogue of the first GEMM: the gate h, which down multiplies, quantized."""
    return lambda acc: quantize_traced(gated(activation, acc))


define_op(
    "fp8_experts(Tensor x, Tensor[] order, Tensor gate_up, Tensor gate_up_scale, Tensor down, Tensor down_scale, "
    "Tensor? addend, str activation, bool all_present) -> Tensor", lambda x, *_: x.new_empty(x.shape), _run_experts,
)  # fmt: skip
define_op(
    "fp8_mlp(Tensor x, Tensor gate, Tensor gate_scale, Tensor up, Tensor up_scale, Tensor down, Tensor down_scale, "
    "str activation) -> Tensor", lambda x, *_: x.new_empty(x.shape), _run_mlp,
)  # fmt: skip


def convert_weights(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Convert a state dict's weights in place to the dtypes of a module's parameters.

    For parameters in fp8 weights without scales are quantized; for others weights with scales are dequantized.
    `prefix`: the part of the state dict's names before the parameters' names.
    """
    for name, parameter in module.named_parameters():
        weight, scale = state.get(prefix + name), prefix + name + SCALE_SUFFIX
        if weight is None or name.endswith(SCALE_SUFFIX):
            continue
        if parameter.dtype == torch.float8_e4m3fn and scale not in state and weight.dtype != parameter.dtype:
            state[prefix + name], state[scale] = quantize(weight.detach(), "128x128")
        elif parameter.dtype != torch.float8_e4m3fn and scale in state:
            state[prefix + name] = dequantize_for(parameter, weight, state.pop(scale))


def dequantize_for(parameter: Any, weight: Any, scale: Any) -> Any:
    """Return an fp8 weight (..., n, k) with scales of 128 x 128, dequantized to a parameter's dtype (float64: fp32)."""
    dtype = torch.float32 if parameter.dtype == torch.float64 else parameter.dtype
    return dequantize(weight.detach(), scale.detach(), dtype)
