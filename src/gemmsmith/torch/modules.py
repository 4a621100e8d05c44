"""Modules with fused epilogues that have the parameters of the modules that they replace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from gemmsmith.core.bools import as_bools
from gemmsmith.core.errors import ArgumentError
from gemmsmith.graph.frontend.fingerprint import register_constant
from gemmsmith.graph.frontend.fusions import ACTIVATIONS, GATED, resolve_activation
from gemmsmith.torch.api import gemm, gemm_then_linear
from gemmsmith.torch.gated_mlp import gated_mlp, multiplies_both_at_once
from gemmsmith.torch.loss import as_batched_input, cross_entropy

Activation = str | Callable[[Any], Any] | None


class FusedLinear(nn.Module):
    """Linear layer with a fused activation: `activation(x @ weight.T + bias)` in one kernel.

    The parameters are those of nn.Linear. It does not subclass nn.Linear: code that replaces nn.Linear modules would
    drop the activation.

    Shapes: input (..., in_features) -> output (..., out_features).

    Args:
        in_features: size of the input's last dimension.
        out_features: size of the output's last dimension.
        bias: whether there is a bias (out_features,).
        activation: a function, None, or a name: relu, gelu, gelu_tanh, silu, sigmoid, tanh, leaky_relu, elu, hardswish,
            mish, softplus.
        device: device of the parameters.
        dtype: dtype of the parameters: bf16, fp16, fp32, or float64 on the CPU.

    Raises:
        ArgumentError: the activation is unknown.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, activation: Activation = None,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        (bias,) = as_bools(bias=bias)
        self.in_features, self.out_features = in_features, out_features
        linear = nn.Linear(in_features, out_features, bias, device, dtype)
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.activation = _check_activation(activation)

    reset_parameters = nn.Linear.reset_parameters

    def forward(self, input: Any) -> Any:
        """Return activation(input @ weight.T + bias), of shape (..., out_features)."""
        weight, bias = self.weight, self.bias
        x = as_batched_input(input, weight)
        operands = {} if bias is None else {"bias": bias}
        y = gemm(x, weight.mT, epilogue=_linear_epilogue(self.activation), **operands)
        return y.squeeze(0) if input.dim() == 1 else y

    def extra_repr(self) -> str:
        """Return the arguments for repr()."""
        return f"{nn.Linear.extra_repr(self)}, activation={self.activation!r}"


class FusedMLP(nn.Module):
    """Gated MLP `down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))` with an activation without a gate.

    The parameters are those of three nn.Linear, or two: gate.weight and up.weight (hidden, dim), down.weight (dim,
    hidden), and biases. The backward pass computes the activation's derivative and the gradients of biases in the
    epilogue of the GEMM with down.weight.

    `gate`, `up` and `down` hold parameters only; their forward is not called. Only up's forward-pre-hooks and down's
    forward hooks run, which suffices for ColwiseParallel of gate and up and RowwiseParallel of down.

    Shapes: input (..., dim) -> output (..., dim).

    Args:
        dim: size of the input's and output's last dimension.
        hidden: size of the hidden dimension.
        activation: with a gate swiglu, geglu, geglu_tanh, reglu; or an activation of `FusedLinear` without one.
        bias: whether the linear layers have biases.
        device: device of the parameters.
        dtype: dtype of the parameters: bf16, fp16, fp32, or float64 on the CPU.

    Raises:
        ArgumentError: the activation is unknown; in forward, a layer has a forward of its own, or a hook that computes
            one of its parameters, as weight_norm and prune add.
    """

    def __init__(
        self, dim: int, hidden: int, activation: Activation = "swiglu", bias: bool = False, device: Any = None,
        dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        (bias,) = as_bools(bias=bias)
        gated = isinstance(activation, str) and activation in GATED
        self.activation = activation if gated else _check_activation(activation, GATED)
        if gated:
            self.gate = nn.Linear(dim, hidden, bias, device, dtype)
        self.up = nn.Linear(dim, hidden, bias, device, dtype)
        self.down = nn.Linear(hidden, dim, bias, device, dtype)

    def forward(self, input: Any) -> Any:
        """Return the MLP's output, of shape (..., dim)."""
        for name in ("gate", "up", "down"):
            layer = getattr(self, name, None)
            if layer is not None and type(layer).forward is not nn.Linear.forward:  # would not be called
                raise ArgumentError(f"{name}: got {type(layer).__name__}, which has its own forward; use nn.Linear")
            if layer is not None and layer._forward_pre_hooks_with_kwargs:  # would not run: the weight stays sharded
                raise ArgumentError(f"{name}: got a hook with kwargs, as of fully_shard; use fully_shard(FusedMLP)")
            if name != "up" and layer is not None and (computed := _hook_computed_parameter(layer)):
                raise ArgumentError(
                    f"{name}: got a {computed} that a hook computes, as of weight_norm or prune, and the layer is not "
                    "called; use torch.nn.utils.parametrizations"
                )
        x, operands = _run_forward_pre_hooks(self.up, as_batched_input(input, self.up.weight)), {}
        gated = self.activation if isinstance(self.activation, str) else ""
        if gated in GATED and self._has_no_bias() and multiplies_both_at_once(x, self.gate.weight, self.up.weight):
            y = gated_mlp(x, self.gate.weight, self.up.weight, self.down.weight, GATED[gated])
            y = _run_forward_hooks(self.down, y)
            return y.squeeze(0) if input.dim() == 1 else y
        epilogue = _linear_epilogue(self.activation)
        if isinstance(self.activation, str) and self.activation in GATED:
            epilogue = partial(_gate, GATED[self.activation])
            operands["gate"] = gemm(x, self.gate.weight.mT)
            if self.gate.bias is not None:  # added here, so that the same kernel sums its gradient
                operands["gate_bias"] = self.gate.bias
        if self.up.bias is not None:
            operands["bias"] = self.up.bias
        up, down = self.up.weight.mT, self.down.weight.mT
        y = _run_forward_hooks(
            self.down, gemm_then_linear(x, up, down, epilogue=epilogue, operands=operands, bias=self.down.bias)
        )
        return y.squeeze(0) if input.dim() == 1 else y

    def _has_no_bias(self) -> bool:
        return self.gate.bias is None and self.up.bias is None and self.down.bias is None

    def extra_repr(self) -> str:
        """Return the arguments for repr()."""
        return f"activation={self.activation!r}"


class FusedLinearCrossEntropy(nn.Module):
    """Cross-entropy of `x @ weight.T` whose logits are not stored.

    Targets equal to ignore_index are excluded from the mean. Any other out-of-range target makes the loss NaN. The
    gradient of the logits is computed in the forward pass, chunk by chunk, in the memory of the chunk's logits; with
    several chunks the gradient of the weight is a sum in fp32. With bf16 or fp16, logits are stored in fp16, less that
    of the label: if one exceeds it by 1.6e7, the gradients are not finite. With reduction="none" backward
    recomputes the GEMM.

    Shapes: input (..., dim), target (...) of integers -> a scalar, or (...) with reduction="none"; fp32, or float64 if
    the input is.

    Args:
        dim: size of the input's last dimension.
        classes: number of classes; weight is (classes, dim).
        ignore_index: the target of rows to ignore.
        reduction: "mean", "sum" or "none".
        chunks: the number of chunks of rows. None: chunks of at least 4096 rows, and only one if the sum in fp32 would
            take more memory than the logits of all rows; with low_memory four of at least 512 rows, at most 4096.
        low_memory: add up the weight's gradient in its dtype, rounded once per chunk: beside the gradients, one chunk's
            logits are allocated.
        device: device of the weight.
        dtype: dtype of the weight: bf16, fp16, fp32, or float64 on the CPU.

    Raises:
        ArgumentError: reduction, ignore_index, chunks or low_memory is not valid.
    """

    def __init__(
        self, dim: int, classes: int, ignore_index: int = -100, reduction: Literal["mean", "sum", "none"] = "mean",
        chunks: int | None = None, low_memory: bool = False, device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ArgumentError(f"reduction: got {reduction!r}; use 'mean', 'sum' or 'none'")
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
            raise ArgumentError(f"ignore_index: got {ignore_index!r}; use an integer, -1 to ignore no label")
        if chunks is not None and (isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1):
            raise ArgumentError(f"chunks: got {chunks!r}; use an integer from 1 on, or None")
        if not isinstance(low_memory, bool):  # the device, from a caller that passes it by position
            raise ArgumentError(f"low_memory: got {low_memory!r}; use True or False")
        self.ignore_index, self.reduction, self.chunks, self.low_memory = ignore_index, reduction, chunks, low_memory
        self.weight = nn.Linear(dim, classes, False, device, dtype).weight

    def forward(self, input: Any, target: Any) -> Any:
        """Return the loss of input @ weight.T against target."""
        return cross_entropy(
            input, self.weight, target, self.ignore_index, self.reduction, self.chunks, self.low_memory
        )

    def extra_repr(self) -> str:
        """Return the arguments for repr()."""
        classes, dim = self.weight.shape
        return f"dim={dim}, classes={classes}, ignore_index={self.ignore_index}, reduction={self.reduction!r}"


def _hook_computed_parameter(layer: nn.Module) -> str:
    """Return the name of a parameter that a hook assigns before each call of the layer, or ""."""
    for name in ("bias", "weight") if layer._forward_pre_hooks else ():
        if name not in layer._parameters and not is_parametrized(layer, name):
            return name
    return ""


def _run_forward_pre_hooks(layer: nn.Module, x: Any) -> Any:
    """Return a layer's input after its forward-pre-hooks."""
    for hook in layer._forward_pre_hooks.values():
        returned = hook(layer, (x,))
        if returned is not None:
            x = returned[0] if isinstance(returned, tuple) else returned
    return x


def _run_forward_hooks(layer: nn.Module, y: Any) -> Any:
    """Return a layer's output after its forward hooks."""
    for key, hook in layer._forward_hooks.items():
        returned = hook(layer, (), {}, y) if key in layer._forward_hooks_with_kwargs else hook(layer, (), y)
        y = y if returned is None else returned
    return y


def _check_activation(activation: Activation, gated_names: Iterable[str] = ()) -> Activation:
    """Return an activation that is a function or a known name. Raises ArgumentError for others."""
    if isinstance(activation, type):
        raise ArgumentError(f"activation: got the class {activation.__name__}; use an instance of it")
    if callable(activation) or (activation or "identity") in ACTIVATIONS:
        return activation
    names = ", ".join([*ACTIVATIONS, *gated_names])
    raise ArgumentError(f"activation: got {activation!r}; use a function or one of {names}")


def _add_bias_and_activate(activation: Activation, acc: Any, bias: Any = None) -> Any:
    return resolve_activation(activation)(acc if bias is None else acc + bias)


_LINEAR_EPILOGUES = {
    name: register_constant(partial(_add_bias_and_activate, name)) for name in (None, *ACTIVATIONS)
}  # fmt: skip


def _linear_epilogue(activation: Activation) -> Callable[..., Any]:
    """Return the epilogue that adds a bias, if there is one, and applies an activation."""
    known = _LINEAR_EPILOGUES.get(activation) if activation is None or isinstance(activation, str) else None
    return known or partial(_add_bias_and_activate, activation)


def _gate(activation: Activation, acc: Any, gate: Any, bias: Any = None, gate_bias: Any = None) -> Any:
    g = gate if gate_bias is None else gate + gate_bias
    return resolve_activation(activation)(g) * (acc if bias is None else acc + bias)
