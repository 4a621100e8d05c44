"""Layers whose epilogues are fused, with the parameters of the layers that they replace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.switches import switches
from gemmsmith.epilogue.frontend.fusions import ACTIVATIONS, GATED, function_of
from gemmsmith.torch.api import chain, gemm
from gemmsmith.torch.loss import cross_entropy, rows

Activation = str | Callable[[Any], Any] | None


class FusedLinear(nn.Module):
    """activation(x @ weight.T + bias) in one kernel; parameters as of nn.Linear, which it is not: what replaces those
    would lose the activation.

    x (..., in_features) -> (..., out_features). activation: a function, None, or a name: relu, gelu, gelu_tanh, silu,
    sigmoid, tanh, leaky_relu, elu, hardswish, mish, softplus. ArgumentError for another name.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, activation: Activation = None,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        (bias,) = switches(bias=bias)
        self.in_features, self.out_features = in_features, out_features
        plain = nn.Linear(in_features, out_features, bias, device, dtype)
        self.weight = plain.weight
        self.register_parameter("bias", plain.bias)
        self.activation = _known(activation)

    reset_parameters = nn.Linear.reset_parameters

    def forward(self, input: Any) -> Any:
        x = rows(input, self.weight)
        operands = {} if self.bias is None else {"bias": self.bias}
        y = gemm(x, self.weight.mT, epilogue=partial(_biased, self.activation), operands=operands)
        return y.squeeze(0) if input.dim() == 1 else y

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, activation={self.activation!r}"


class FusedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), or, with an activation that has no gate, down(activation(up(x))).

    x (..., dim) -> (..., dim). activation: swiglu, geglu, geglu_tanh, reglu; or one without a gate, as in FusedLinear.
    The parameters are those of three nn.Linear, or two: gate.weight and up.weight (hidden, dim), down.weight
    (dim, hidden), and biases if there are any. The backward pass computes the activation's derivative and the gradients
    of biases where it multiplies by down.weight. ArgumentError for another name.

    The layers themselves are not called; of their hooks those before up and after down run, which is all that
    ColwiseParallel of gate and up and RowwiseParallel of down need. ArgumentError where a hook of gate or down
    computes a parameter, as weight_norm and prune do.
    """

    def __init__(
        self, dim: int, hidden: int, activation: Activation = "swiglu", bias: bool = False, device: Any = None,
        dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        (bias,) = switches(bias=bias)
        gated = isinstance(activation, str) and activation in GATED
        self.activation = activation if gated else _known(activation, GATED)
        if gated:
            self.gate = nn.Linear(dim, hidden, bias, device, dtype)
        self.up = nn.Linear(dim, hidden, bias, device, dtype)
        self.down = nn.Linear(hidden, dim, bias, device, dtype)

    def forward(self, input: Any) -> Any:
        for name in ("gate", "up", "down"):
            layer = getattr(self, name, None)
            if layer is not None and type(layer).forward is not nn.Linear.forward:  # which is not called
                raise ArgumentError(f"{name}: got {type(layer).__name__}, which has its own forward; use nn.Linear")
            if layer is not None and layer._forward_pre_hooks_with_kwargs:  # nothing would gather its weight
                raise ArgumentError(f"{name}: got a hook with kwargs, as of fully_shard; use fully_shard(FusedMLP)")
            if name != "up" and layer is not None and (computed := _computed_by_hook(layer)):
                raise ArgumentError(
                    f"{name}: got a {computed} that a hook computes, as of weight_norm or prune, and the layer is not "
                    "called; use torch.nn.utils.parametrizations"
                )
        x, operands = _before(self.up, rows(input, self.up.weight)), {}
        epilogue = partial(_biased, self.activation)
        if isinstance(self.activation, str) and self.activation in GATED:
            epilogue = partial(_gated, GATED[self.activation])
            operands["gate"] = gemm(x, self.gate.weight.mT)
            if self.gate.bias is not None:  # here its gradient is a sum of the same kernel
                operands["gate_bias"] = self.gate.bias
        if self.up.bias is not None:
            operands["bias"] = self.up.bias
        up, down = self.up.weight.mT, self.down.weight.mT
        y = _after(self.down, chain(x, up, down, epilogue=epilogue, operands=operands, bias=self.down.bias))
        return y.squeeze(0) if input.dim() == 1 else y

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class FusedLinearCrossEntropy(nn.Module):
    """The cross-entropy of x @ weight.T, whose logits are not stored.

    x (..., dim), target (...) of integers -> a scalar, or, with reduction="none", (...); fp32, of float64 that. Rows
    whose target is ignore_index count for nothing; the mean is over the others. Another target that is no class makes
    the loss NaN. weight (classes, dim). The gradients are computed in the forward pass, in `chunks` parts of the rows:
    besides them it takes the memory of one part's logits in fp32 and their gradient in x's dtype, and, where there are
    several parts, of two gradients of the weight in fp32. With reduction="none" the backward pass multiplies again.
    """

    def __init__(
        self, dim: int, classes: int, ignore_index: int = -100, reduction: Literal["mean", "sum", "none"] = "mean",
        chunks: int = 8, device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ArgumentError(f"reduction: got {reduction!r}; use 'mean', 'sum' or 'none'")
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
            raise ArgumentError(f"ignore_index: got {ignore_index!r}; use an integer, -1 to ignore no label")
        if not isinstance(chunks, int) or chunks < 1:
            raise ArgumentError(f"chunks: got {chunks!r}; use an integer from 1 on")
        self.ignore_index, self.reduction, self.chunks = ignore_index, reduction, chunks
        self.weight = nn.Linear(dim, classes, False, device, dtype).weight

    def forward(self, input: Any, target: Any) -> Any:
        return cross_entropy(input, self.weight, target, self.ignore_index, self.reduction, self.chunks)

    def extra_repr(self) -> str:
        classes, dim = self.weight.shape
        return f"dim={dim}, classes={classes}, ignore_index={self.ignore_index}, reduction={self.reduction!r}"


def _computed_by_hook(layer: nn.Module) -> str:
    """The name of a parameter that a hook assigns before each call of the layer; "" if there is none."""
    for name in ("bias", "weight") if layer._forward_pre_hooks else ():
        if name not in layer._parameters and not is_parametrized(layer, name):
            return name
    return ""


def _before(layer: nn.Module, x: Any) -> Any:
    """A layer's input as its hooks make it."""
    for hook in layer._forward_pre_hooks.values():
        made = hook(layer, (x,))
        if made is not None:
            x = made[0] if isinstance(made, tuple) else made
    return x


def _after(layer: nn.Module, y: Any) -> Any:
    """A layer's output as its hooks make it."""
    for key, hook in layer._forward_hooks.items():
        made = hook(layer, (), {}, y) if key in layer._forward_hooks_with_kwargs else hook(layer, (), y)
        y = y if made is None else made
    return y


def _known(activation: Activation, others: Iterable[str] = ()) -> Activation:
    """A function, or a name that is in the table."""
    if isinstance(activation, type):
        raise ArgumentError(f"activation: got the class {activation.__name__}; use an instance of it")
    if callable(activation) or (activation or "identity") in ACTIVATIONS:
        return activation
    listed = ", ".join([*ACTIVATIONS, *others])
    raise ArgumentError(f"activation: got {activation!r}; use a function or one of {listed}")


def _biased(activation: Activation, acc: Any, bias: Any = None) -> Any:
    return function_of(activation)(acc if bias is None else acc + bias)


def _gated(activation: Activation, acc: Any, gate: Any, bias: Any = None, gate_bias: Any = None) -> Any:
    g = gate if gate_bias is None else gate + gate_bias
    return function_of(activation)(g) * (acc if bias is None else acc + bias)
