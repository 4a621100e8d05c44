"""Experts of other kinds than gated MLPs without biases, and what they compute, one expert at a time."""

from __future__ import annotations

from typing import Any

import torch

from gemmsmith.torch.graph_serialization import serialize
from gemmsmith.torch.mlp.gated_epilogues import HALVES, Gate, trace_gate, width
from gemmsmith.torch.moe.experts import gated_experts

OAI = serialize(
    trace_gate(lambda gate, up: (up.clamp(-2, 2) + 1) * gate.clamp(max=2) * (gate.clamp(max=2) * 1.7).sigmoid(), HALVES)
)
"""The gate of GPT-OSS."""
RELU2 = serialize(trace_gate(lambda gate: gate.relu().square(), HALVES[:1]))
"""That of Nemotron-H, which reads one half."""
KINDS = {
    "GPT-OSS": (OAI, True, True, False), "biases": (OAI, False, True, False), "no gate": (RELU2, False, True, False),
    "a norm": ("silu", False, False, True), "biases and a norm": ("silu", False, True, True),
}  # fmt: skip
"""The first arguments of `KindOfExperts`."""


class KindOfExperts(torch.nn.Module):
    """Experts with this gate, whose columns of gate and up may alternate; with biases, or a norm of down's results."""

    def __init__(
        self, gate: str, interleaved: bool, biased: bool, post: bool, dim: int, hidden: int, experts: int
    ) -> None:  # fmt: skip
        super().__init__()
        self.gate, self.interleaved, columns = gate, interleaved, width(gate) * hidden
        shapes = (experts, columns, dim), (experts, dim, hidden), (experts, columns), (experts, dim)
        self.arrays = torch.nn.ParameterList(
            torch.randn(x) * (x[-1] ** -0.5 if len(x) == 3 else 1) for x in shapes[: 4 if biased else 2]
        )
        self.post = torch.nn.Sequential(torch.nn.RMSNorm(dim, 0.1), torch.nn.Tanh()) if post else None

    def forward(self, x: Any, experts: Any, weights: Any) -> Any:
        gate_up, down, *biases = self.arrays
        return gated_experts(
            x, experts, weights, gate_up, down, Gate(self.gate, self.interleaved), biases=tuple(biases) or (None, None),
            post=self.post,
        )  # fmt: skip

    def one_at_a_time(self, x: Any, experts: Any, weights: Any, saved: torch.dtype = torch.float64) -> Any:
        """`saved`: the dtype to which gate and up are rounded, since a clamp's gradient jumps where they are."""
        gate_up, down, *biases = self.arrays
        y = torch.zeros_like(x)
        for e in range(len(down)):
            token, slot = torch.where(experts == e)
            both = x[token] @ gate_up[e].T + (biases[0][e] if biases else 0)
            both = both + (both.detach().to(saved).to(both.dtype) - both.detach())
            gate, up = (both[:, ::2], both[:, 1::2]) if self.interleaved else both.chunk(2, 1)
            if self.gate == OAI:
                h = (up.clamp(-2, 2) + 1) * gate.clamp(max=2) * (gate.clamp(max=2) * 1.7).sigmoid()
            else:
                h = both.relu().square() if self.gate == RELU2 else torch.nn.functional.silu(gate) * up
            rows = h @ down[e].T + (biases[1][e] if biases else 0)
            y = y.index_add(0, token, (self.post(rows) if self.post else rows) * weights[token, slot, None])
        return y
