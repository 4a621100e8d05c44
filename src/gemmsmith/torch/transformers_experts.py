"""The experts of transformers' models by grouped GEMMs: `experts_implementation="gemmsmith"`."""

from __future__ import annotations

from typing import Any

from gemmsmith.core.errors import ArgumentError
from gemmsmith.torch.experts import gated_experts

NAME = "gemmsmith"
_NAMES = {
    "SiLUActivation": "silu", "SiLU": "silu", "GELUActivation": "gelu", "GELU": "gelu", "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh", "ReLU": "relu",
}  # fmt: skip
"""Our names of the activations of transformers."""


def register_experts() -> None:
    """Let models of transformers (from 5.0 on) compute their experts by `experts_implementation="gemmsmith"`.

    Afterwards `AutoModelForCausalLM.from_pretrained(..., experts_implementation="gemmsmith")` or
    `model.set_experts_implementation("gemmsmith")` selects it.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_forward)


def _experts_forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """Compute what an experts module of transformers does, which has gate_up_proj and down_proj."""
    if not self.has_gate or self.has_bias or self.has_post_expert_norm or not self.is_concatenated:
        raise ArgumentError(f"experts_implementation: {type(self).__name__} is no gated MLP without biases; use eager")
    gate_up, down = self.gate_up_proj, self.down_proj
    if self.is_transposed:
        gate_up, down = gate_up.mT, down.mT
    activation = _NAMES.get(type(self.act_fn).__name__)
    if activation is None:
        raise ArgumentError(f"experts_implementation: got the activation {type(self.act_fn).__name__}; use eager")
    return gated_experts(hidden_states, top_k_index, top_k_weights, gate_up, down, activation)
