"""The experts of transformers' models by grouped GEMMs: `experts_implementation="gemmsmith"`."""

from __future__ import annotations

from typing import Any

from gemmsmith.core.errors import ArgumentError
from gemmsmith.torch.experts import gated_experts
from gemmsmith.torch.fp8_experts import fp8_gated_experts

NAME = "gemmsmith"
_NAMES = {
    "SiLUActivation": "silu", "SiLU": "silu", "GELUActivation": "gelu", "GELU": "gelu", "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh", "ReLU": "relu",
}  # fmt: skip
"""Our names of the activations of transformers."""


def register_experts() -> None:
    """Let models of transformers (from 5.0 on) compute their experts by `experts_implementation="gemmsmith"`.

    Afterwards `AutoModelForCausalLM.from_pretrained(..., experts_implementation="gemmsmith")` or
    `model.set_experts_implementation("gemmsmith")` selects it, also for experts in FP8 with scales of 128 x 128, if
    transformers has an interface for these.
    """
    from transformers.integrations import finegrained_fp8
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_forward)
    if interface := getattr(finegrained_fp8, "ALL_FP8_EXPERTS_FUNCTIONS", None):
        interface.register(NAME, _fp8_experts_forward)


def _experts_forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """Compute what an experts module of transformers does, which has gate_up_proj and down_proj."""
    if not self.has_gate or self.has_bias or self.has_post_expert_norm or not self.is_concatenated:
        raise ArgumentError(f"experts_implementation: {type(self).__name__} is no gated MLP without biases; use eager")
    gate_up, down = self.gate_up_proj, self.down_proj
    if self.is_transposed:
        gate_up, down = gate_up.mT, down.mT
    return gated_experts(hidden_states, top_k_index, top_k_weights, gate_up, down, _activation(self))


def _fp8_experts_forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """Compute what an experts module in FP8 of transformers does."""
    modified = [name for name in _GATE_MODIFIERS if getattr(self, name, None) is not None]
    if not self.has_gate or self.has_bias or modified or self.activation_scheme != "dynamic":
        modifiers = ", ".join([*modified, f"activation_scheme={self.activation_scheme}"])
        raise ArgumentError(
            f"experts_implementation: {type(self).__name__} with {modifiers} is no plain gated MLP; use eager"
        )
    if tuple(self.block_size or ()) != (128, 128):
        raise ArgumentError(f"experts_implementation: got scales of blocks {self.block_size}; use 128 x 128, or eager")
    return fp8_gated_experts(
        hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.gate_up_proj_scale_inv, self.down_proj,
        self.down_proj_scale_inv, _activation(self),
    )  # fmt: skip


_GATE_MODIFIERS = ("swiglu_alpha", "swiglu_limit", "gate_softcap", "up_softcap")
"""Attributes of an experts module that change the gate, if they are not None."""


def _activation(module: Any) -> str:
    """Return our name of a module's activation."""
    name = type(module.act_fn).__name__
    if name not in _NAMES:
        raise ArgumentError(f"experts_implementation: got the activation {name}; use eager")
    return _NAMES[name]
