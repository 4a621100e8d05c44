"""A mixture-of-experts layer: router, gated experts and shared experts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from gemmsmith.arrays import INTERLEAVE_COLUMNS
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.scalars import as_bools, as_integers
from gemmsmith.graph.frontend.fusions import GATED
from gemmsmith.moe.route import check_counts
from gemmsmith.torch.api import as_batched_input, expect_tensor, is_dtensor
from gemmsmith.torch.autograd_state import needs_grad, refuse_transforms
from gemmsmith.torch.fallback import FLOAT_DTYPES
from gemmsmith.torch.graph_serialization import PLAIN_GEMM
from gemmsmith.torch.mlp.gated_epilogues import Gate
from gemmsmith.torch.mlp.layers import FusedMLP, has_hooks
from gemmsmith.torch.moe.experts import gated_experts
from gemmsmith.torch.moe.fp8_experts import (
    SCALE_SUFFIX,
    Fp8Experts,
    Fp8MLP,
    convert_weights,
    dequantize_for,
)
from gemmsmith.torch.moe.slots import ROUTE, SortedSlots, check_hidden, select_experts
from gemmsmith.torch.ops import call_op

FP32_GEMM = f"{PLAIN_GEMM} fp32"
"""The serialized epilogue that returns the accumulator in fp32."""


class Router(nn.Module):
    """Selects `top_k` experts for each token, and their weights.

    Parameters: weight (experts, dim); with scores "sigmoid" also the buffer e_score_correction_bias (experts,), which
    is added to the scores when experts are selected, but not in their weights (DeepSeek-V3). It stays in fp32, whatever
    dtype the module is cast to, since rounding makes biases equal.
    """

    def __init__(
        self, dim: int, experts: int, top_k: int, scores: Literal["softmax", "sigmoid"], normalize: bool, scale: float,
        groups: int, top_k_groups: int, device: Any, dtype: Any,
    ) -> None:  # fmt: skip
        """Check the arguments, which `FusedMoE` documents, and make the parameters."""
        super().__init__()
        if scores not in ("softmax", "sigmoid"):
            raise ArgumentError(f'scores: got {scores!r}; use "softmax" or "sigmoid"')
        top_k, groups, top_k_groups = as_integers(1, top_k=top_k, groups=groups, top_k_groups=top_k_groups)
        check_counts(experts, top_k, groups, top_k_groups)
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise ArgumentError(f"scale: got {scale!r}; use a number")
        self.top_k, self.scores, self.normalize, self.scale = top_k, scores, normalize, float(scale)
        self.groups, self.top_k_groups = groups, top_k_groups
        self.weight = nn.Parameter(torch.empty(experts, dim, device=device, dtype=dtype))
        if scores == "sigmoid":
            bias = torch.empty(experts, device=device, dtype=torch.float32)
            self.register_buffer("e_score_correction_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from a normal distribution of standard deviation dim ** -0.5, and set the bias to 0."""
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        if self.scores == "sigmoid":
            nn.init.zeros_(self.e_score_correction_bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move and cast parameters as nn.Module does (in to(), half() and such), and move the bias without a cast."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, x in before.items():
            if x is not None and (moved := self._buffers[name]).dtype != x.dtype:
                self._buffers[name] = x.to(moved.device)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        bias = state_dict.get(name := f"{prefix}e_score_correction_bias")
        if bias is not None:  # load_state_dict(assign=True) would take it as it is, in any dtype
            state_dict[name] = bias.float()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: Any) -> tuple[Any, Any]:
        """Return the experts (tokens, top_k) of x (tokens, dim), and their weights, in fp32 (float64 for a float64)."""
        return select_experts(self._logits(x), *self._options)

    def route(self, x: Any) -> tuple[Any, Any, SortedSlots]:
        """Return the experts and their weights, as forward does, and the slots in the order of their experts.

        Records no gradients.
        """
        is_16bit = x.dtype == self.weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
        if self.scores == "sigmoid" and is_16bit:  # products are exact in fp32, so x and weight need no copies in fp32
            logits = call_op(FP32_GEMM, as_batched_input(x, self.weight), self.weight.mT)
        else:
            logits = self._logits(x)
        experts, weights, *order = ROUTE(logits, *self._options)
        return experts, weights, SortedSlots(*order)

    def _logits(self, x: Any) -> Any:
        """Return the logits (tokens, experts), in fp32 (or float64) with scores "sigmoid", also under autocast."""
        if self.scores == "softmax":
            return nn.functional.linear(as_batched_input(x, self.weight), self.weight)
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        x, weight = x.to(exact), self.weight.to(exact)
        with contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            return nn.functional.linear(as_batched_input(x, weight), weight)

    @property
    def _options(self) -> tuple[Any, ...]:
        """How experts are selected: the arguments of `select_experts` after the logits."""
        bias = self.e_score_correction_bias if self.scores == "sigmoid" else None
        return bias, self.top_k, self.scores, self.normalize, self.scale, self.groups, self.top_k_groups


class Experts(nn.Module):
    """The weights of gated MLPs: gate_up_proj (experts, 2 * hidden, dim), gate's rows first, and down_proj."""

    def __init__(
        self, dim: int, hidden: int, experts: int, activation: str, multiply_in_fp8: bool, device: Any, dtype: Any
    ) -> None:  # fmt: skip
        """Make the parameters; `FusedMoE` documents the arguments."""
        super().__init__()
        if multiply_in_fp8:
            check_hidden(hidden, INTERLEAVE_COLUMNS)
        self.activation, self.multiply_in_fp8 = activation, multiply_in_fp8
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * hidden, dim, device=device, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(experts, dim, hidden, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from normal distributions of standard deviation k ** -0.5, where k is the last dimension."""
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x: Any, experts: Any, weights: Any, order: Any = None, addend: Any = None) -> Any:
        """Return the weighted sum of each token's experts, (tokens, dim). See `gated_experts`."""
        x = x if self.multiply_in_fp8 else as_batched_input(x, self.gate_up_proj)
        return gated_experts(
            x, experts, weights, self.gate_up_proj, self.down_proj, Gate(self.activation), True, order, addend,
            in_fp8=self.multiply_in_fp8,
        )  # fmt: skip


class FusedMoE(nn.Module):
    """Mixture of experts: each token's sum of `top_k` gated MLPs, weighted by a router, and of a shared MLP.

    The experts are computed by grouped GEMMs, without padding, and without the host waiting for the router. With equal
    scores, in inference and on the CPU the first experts are selected, in training on a GPU those of torch.topk. There
    are no second derivatives, and so no torch.func.grad, no forward mode, and no torch.func.vmap. State dicts
    of the blocks of Mixtral, Qwen3-MoE and DeepSeek-V3 in transformers can be loaded, of version 5 (one tensor for all
    experts) and of checkpoints (a tensor for each), in fp8 with scales of 128 x 128 or without. Weights are quantized,
    or dequantized, if the layer's are so.

    Shapes: input (..., dim) -> output (..., dim).

    Args:
        dim: size of the input's and output's last dimension.
        hidden: size of an expert's hidden dimension.
        experts: number of experts.
        top_k: experts of a token.
        scores: "softmax" over all experts (Mixtral, Qwen3-MoE), or "sigmoid" of each (DeepSeek-V3).
        normalize: whether a token's weights are divided by their sum.
        scale: factor of the weights (DeepSeek-V3: routed_scaling_factor).
        groups: groups of at least two experts; a token's experts are within the best `top_k_groups` of them, by the sum
            of a group's two largest scores (DeepSeek-V3: n_group). The best groups have `top_k` experts or more.
        top_k_groups: see `groups` (DeepSeek-V3: topk_group).
        shared_hidden: size of the hidden dimension of an MLP that all tokens have; 0: none.
        activation: of the gate: silu, gelu, gelu_tanh or relu.
        device: device of the parameters.
        dtype: dtype of the parameters: bf16, fp16, fp32, or float64 on the CPU.
        experts_dtype: torch.float8_e4m3fn: weights of the experts and of the shared MLP in fp8, with a scale for each
            128 x 128, for inference: under torch.no_grad(), or with frozen parameters. `hidden` is a multiple of 128
            then. Default: dtype.
        multiply_in_fp8: in training, too, multiply operands of the experts that are quantized to e4m3, weights with a
            scale for each 128 x 128, activations and their gradients with one for each token and 128 columns. `hidden`
            is a multiple of 8 then.

    Raises:
        ArgumentError: an argument is not valid; in forward, the input's shape or dtype does not match the weights, or
            a transform of torch.func is active.
    """

    def __init__(
        self, dim: int, hidden: int, experts: int, top_k: int, *, scores: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True, scale: float = 1.0, groups: int = 1, top_k_groups: int = 1, shared_hidden: int = 0,
        activation: str = "silu", device: Any = None, dtype: Any = None, experts_dtype: Any = None,
        multiply_in_fp8: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        dim, hidden, experts = as_integers(1, dim=dim, hidden=hidden, experts=experts)
        (shared_hidden,) = as_integers(0, shared_hidden=shared_hidden)
        normalize, multiply_in_fp8 = as_bools(normalize=normalize, multiply_in_fp8=multiply_in_fp8)
        if dtype not in (None, *FLOAT_DTYPES):
            raise ArgumentError(f"dtype: got {dtype}; use one of {', '.join(map(str, FLOAT_DTYPES))}")
        if experts_dtype not in (None, dtype, torch.float8_e4m3fn):
            raise ArgumentError(
                f"experts_dtype: got {experts_dtype}; use torch.float8_e4m3fn, or None for that of dtype"
            )
        if multiply_in_fp8 and experts_dtype == torch.float8_e4m3fn:
            raise ArgumentError("experts_dtype, multiply_in_fp8: got both; use one")
        self.gate = Router(dim, experts, top_k, scores, normalize, scale, groups, top_k_groups, device, dtype)
        is_fp8 = experts_dtype == torch.float8_e4m3fn
        self.experts: nn.Module = (
            Fp8Experts(dim, hidden, experts, activation, device) if is_fp8
            else Experts(dim, hidden, experts, activation, multiply_in_fp8, device, dtype)
        )  # fmt: skip
        gated = next((name for name, act in GATED.items() if act == activation), "")
        if not gated:
            raise ArgumentError(f"activation: got {activation!r}; use one of {', '.join(GATED.values())}")
        self.shared_experts: nn.Module | None = None
        if shared_hidden:
            self.shared_experts = (
                Fp8MLP(dim, shared_hidden, activation, device) if is_fp8
                else FusedMLP(dim, shared_hidden, gated, False, device, dtype)
            )  # fmt: skip
        self.register_load_state_dict_pre_hook(_rename_transformers_parameters)

    def reset_parameters(self) -> None:
        """Initialize all parameters as the constructor does: in the same order, and those in fp8 with 0."""
        for module in self.modules():
            if module._parameters:
                module.reset_parameters()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, of shape (..., dim)."""
        expect_tensor("input", input)
        refuse_transforms("input")
        x = input.flatten(0, -2) if input.dim() > 1 else input.reshape(1, -1)
        shared = self.shared_experts
        if self._is_routed_by_kernel(x):
            y = self.experts(x, *self.gate.route(x), None if shared is None else shared(x))
        else:
            y = self.experts(x, *self.gate(x))
            if y.shape[0] != x.shape[0]:
                raise ArgumentError(
                    f"experts: got {y.shape[0]} results of {x.shape[0]} tokens; use ExpertParallel with output_layouts "
                    "equal to input_layouts"
                )
            if shared is not None:
                y = y + shared(x)
        return y.reshape(input.shape)

    def _is_routed_by_kernel(self, x: Any) -> bool:
        """Return whether a kernel selects and sorts the experts: for inference, if no hook looks at the router."""
        gate, experts = self.gate, self.experts
        is_plain = type(gate) is Router and type(experts) in (Experts, Fp8Experts)
        if not (is_plain and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)):
            return False
        arrays = (x, gate.weight, experts.gate_up_proj, experts.down_proj)
        return not (needs_grad(*arrays) or has_hooks(gate) or any(map(is_dtensor, arrays)))


_OF_ONE_EXPERT = re.compile(r"experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight(|_scale_inv)")
_OF_SHARED = re.compile(r"(shared_experts\.(?:gate|up|down))_proj(\.weight(?:|_scale_inv))")
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def _rename_transformers_parameters(
    module: nn.Module, state: dict[str, Any], prefix: str, *_: Any, **__: Any
) -> None:  # fmt: skip
    """Change a state dict of a block of transformers in place to one of a `FusedMoE`, before it is loaded.

    Parameters are renamed, weights of single experts are stacked, and weights are converted to the module's dtypes.
    `prefix`: the part of the state dict's names before the module's own names.
    """
    single: dict[str, dict[str, dict[int, Any]]] = {"": {}, SCALE_SUFFIX: {}}
    for name in [name for name in state if name.startswith(prefix)]:
        own_name = name.removeprefix(prefix)
        if match := _OF_ONE_EXPERT.fullmatch(own_name):
            kind = _MIXTRAL.get(match[2], match[2])
            single[match[3]].setdefault(kind, {})[int(match[1])] = state.pop(name)
        elif match := _OF_SHARED.fullmatch(own_name):
            state[prefix + match[1] + match[2]] = state.pop(name)
    kinds, parameter = ("gate_proj", "up_proj", "down_proj"), module.experts.gate_up_proj
    stacked = {suffix: [_stacked(x.get(kind, {})) for kind in kinds] for suffix, x in single.items() if x}
    # Dequantize before gate and up are joined: each ends with blocks of scales of its own, maybe of less than 128 rows
    if len(stacked) == 2 and parameter.dtype != torch.float8_e4m3fn:
        stacked = {"": [dequantize_for(parameter, *pair) for pair in zip(*stacked.values(), strict=True)]}
    for suffix, (gate, up, down) in stacked.items():
        state[f"{prefix}experts.gate_up_proj{suffix}"] = torch.cat([gate, up], 1)
        state[f"{prefix}experts.down_proj{suffix}"] = down
    convert_weights(module, state, prefix)


def _stacked(weights: Mapping[int, Any]) -> Any:
    """Return weights by an expert's index as one tensor, in the order of experts. Raises ArgumentError if one lacks."""
    if not weights or sorted(weights) != list(range(len(weights))):
        raise ArgumentError(f"state_dict: got experts {sorted(weights)} of a layer; use 0, 1, ... of each projection")
    return torch.stack([weights[i] for i in range(len(weights))])
