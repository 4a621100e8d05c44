"""Epilogues of gated linear units: activation(gate) * up from one product, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from gemmsmith.arrays import INTERLEAVE_COLUMNS
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import BroadcastDims
from gemmsmith.graph.frontend.interleave import deinterleave
from gemmsmith.graph.frontend.tracer import trace
from gemmsmith.torch.backward_plan import dynamo_constant
from gemmsmith.torch.graph_serialization import serialize
from gemmsmith.torch.tracing import dtype_from_name


def _gate_and_up_results(activation: str, acc: Any) -> tuple[Any, Any, Any]:
    gate, up = deinterleave(acc)
    return ACTIVATIONS[activation](gate)[0] * up, gate, up


def gated(activation: str, acc: Any) -> Any:
    """Return activation(gate) * up."""
    return _gate_and_up_results(activation, acc)[0]


def weighted_gate_and_up(activation: str, acc: Any, weight: Any) -> tuple[Any, Any, Any]:
    """Return activation(gate) * up * weight, gate and up."""
    h, gate, up = _gate_and_up_results(activation, acc)
    return h * weight, gate, up


def _weight(_: str, acc: Any, weight: Any) -> Any:
    return acc * weight


def _backward(activation: str, acc: Any, gate: Any, up: Any) -> tuple[Any, Any]:
    """Return the gradients of gate and up."""
    value, slope = ACTIVATIONS[activation](gate)
    return acc * up * slope, acc * value


def weighted_backward(activation: str, acc: Any, gate: Any, up: Any, weight: Any) -> tuple[Any, Any, Any]:
    """Return the gradients of gate, of up and of the weight, whose factor is activation(gate) * up."""
    h = ACTIVATIONS[activation](gate)[0] * up
    return *_backward(activation, acc * weight, gate, up), (acc * h).sum(-1)


def _silu(x: Any) -> tuple[Any, Any]:
    s = x.sigmoid()
    return x * s, s * (1 + x * (1 - s))


def _gelu(x: Any) -> tuple[Any, Any]:
    distribution = 0.5 * (1 + (x * 0.5**0.5).erf())
    return x * distribution, distribution + x * (x * x * -0.5).exp() * (2 * math.pi) ** -0.5


def _gelu_tanh(x: Any) -> tuple[Any, Any]:
    scale = (2 / math.pi) ** 0.5
    t = (scale * (x + 0.044715 * x * x * x)).tanh()
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * scale * (1 + 3 * 0.044715 * x * x)


def _relu(x: Any) -> tuple[Any, Any]:
    return x.relu(), (x > 0) * 1.0


ACTIVATIONS: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "relu": _relu,
}  # fmt: skip
"""Activations, which return a value and the derivative, by name."""


def check_activation(activation: str) -> None:
    """Raise ArgumentError for an unknown activation."""
    if activation not in ACTIVATIONS:
        raise ArgumentError(f"activation: got {activation!r}; use one of {', '.join(ACTIVATIONS)}")


def gate_and_up(weight: Any) -> tuple[Any, Any]:
    """Return the operands b (count, k, n) of gate and of up, of a weight (count, 2 * n, k): gate's rows, then up's."""
    n = weight.shape[1] // 2
    return weight[:, :n].mT, weight[:, n:].mT


@dynamo_constant
def epilogue_of(name: str, activation: str, dtype: str, weight_dtype: str = "torch.float32") -> str:
    """Return a serialized epilogue, of operands of these dtypes."""
    matrix = BroadcastDims(False, 1, 1), dtype_from_name(dtype)
    weight = BroadcastDims(False, 1, 0), dtype_from_name(weight_dtype)
    epilogues: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "gate and up": (_gate_and_up_results, {}),
        "gated": (gated, {}),
        "weight": (_weight, {"weight": weight}),
        "backward": (_backward, {"gate": matrix, "up": matrix}),
        "weighted gate and up": (weighted_gate_and_up, {"weight": weight}),
        "weighted backward": (weighted_backward, {"gate": matrix, "up": matrix, "weight": weight}),
    }
    function, operands = epilogues[name]
    return serialize(trace(partial(function, activation), (2, 2 * INTERLEAVE_COLUMNS), operands))
