"""Modules with fused epilogues that have the parameters of the modules that they replace."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import fusion

from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.scalars import as_bools
from gemmsmith.graph.frontend.fingerprint import register_constant
from gemmsmith.graph.frontend.fusions import ACTIVATIONS, GATED, resolve_activation
from gemmsmith.torch.api import as_batched_input, gemm, is_dtensor
from gemmsmith.torch.dynamo import assume_constant_result
from gemmsmith.torch.mlp.gemm_then_linear import gated_mlp, gemm_then_linear, multiplies_both_at_once

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

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what copies and pickles are made from. Raises ArgumentError if torch is about to fuse a batch norm.

        torch.nn.utils.fusion copies a module with a weight and a bias, and scales them by the batch norm that follows.
        That would be wrong here, where an activation is between both.
        """
        called_by = getattr(sys._getframe(1).f_back, "f_globals", {}).get("__name__")  # the caller of copy.deepcopy
        if called_by == fusion.__name__ and self.activation is not None:
            raise ArgumentError(
                f"linear: got a FusedLinear with the activation {self.activation!r}, behind which the batch norm is; "
                "use one without an activation"
            )
        return super().__reduce_ex__(protocol)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return activation(input @ weight.T + bias), of shape (..., out_features)."""
        weight, bias = self.weight, self.bias
        if _is_wrapper(weight) or _has_hooks(self.activation):
            return resolve_activation(self.activation)(nn.functional.linear(input, weight, bias))
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

    Kernels read the parameters of `gate`, `up` and `down`, which are not called. If one of them, or the activation, has
    a hook, a forward of its own or a quantized weight, or only some are DTensors, they are called, and the activation
    is torch's; the hooks of ColwiseParallel and RowwiseParallel need no calls. Hooks of all modules
    (register_module_forward_hook) do not see the layers.

    Shapes: input (..., dim) -> output (..., dim).

    Args:
        dim: size of the input's and output's last dimension.
        hidden: size of the hidden dimension.
        activation: with a gate swiglu, geglu, geglu_tanh, reglu; or an activation of `FusedLinear` without one.
        bias: whether the linear layers have biases.
        device: device of the parameters.
        dtype: dtype of the parameters: bf16, fp16, fp32, or float64 on the CPU.
        recompute: save only the input for the backward pass, which multiplies by gate and up again. In fp32 or float64,
            or with biases, the product with gate is saved, too.

    Raises:
        ArgumentError: the activation is unknown.
    """

    def __init__(
        self, dim: int, hidden: int, activation: Activation = "swiglu", bias: bool = False, device: Any = None,
        dtype: Any = None, *, recompute: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        bias, self.recompute = as_bools(bias=bias, recompute=recompute)
        gated = isinstance(activation, str) and activation in GATED
        self.activation = activation if gated else _check_activation(activation, GATED)
        if gated:
            self.gate = nn.Linear(dim, hidden, bias, device, dtype)
        self.up = nn.Linear(dim, hidden, bias, device, dtype)
        self.down = nn.Linear(hidden, dim, bias, device, dtype)

    def reset_parameters(self) -> None:
        """Initialize the parameters again, as those of nn.Linear are."""
        for layer in self.children():
            layer.reset_parameters()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output, of shape (..., dim)."""
        gate = GATED.get(self.activation) if isinstance(self.activation, str) else None
        layers = [self.up, self.down] if gate is None else [self.gate, self.up, self.down]
        are_read = all(map(_may_be_read, layers)) and len({is_dtensor(x.weight) for x in layers}) == 1
        if not are_read or _has_hooks(self.activation):
            inner = [layer(input) for layer in layers[:-1]]
            h = resolve_activation(gate or self.activation)(inner[0])
            return self.down(h if gate is None else h * inner[1])
        x = as_batched_input(input, self.up.weight)
        # Only hooks of tensor parallelism are left; up's convert the input for all layers, down's the output
        for hook in self.up._forward_pre_hooks.values():
            x = hook(self.up, (x,))
        y = self._run_fused(x, gate, [layer.bias for layer in layers])
        for hook in self.down._forward_hooks.values():
            y = hook(self.down, (), y)
        return y.squeeze(0) if input.dim() == 1 else y

    def _run_fused(self, x: Any, gate: str | None, biases: Sequence[Any]) -> Any:
        """Return the MLP's output by kernels that read the layers' parameters, without calls of the layers.

        `biases`: in the order gate (if there is one), up, down; None for a layer without one.
        """
        up, down = self.up.weight, self.down.weight
        if gate and all(b is None for b in biases) and multiplies_both_at_once(x, self.gate.weight, up):
            return gated_mlp(x, self.gate.weight, up, down, gate, self.recompute)
        epilogue, operands = _linear_epilogue(self.activation), {}
        *gate_bias, bias, down_bias = biases
        if gate:
            epilogue = partial(_gate, gate)
            operands["gate"] = gemm(x, self.gate.weight.mT)
            if gate_bias[0] is not None:  # added here, so that the same kernel sums its gradient
                operands["gate_bias"] = gate_bias[0]
        if bias is not None:
            operands["bias"] = bias
        return gemm_then_linear(
            x, up.mT, down.mT, epilogue=epilogue, operands=operands, bias=down_bias, recompute=self.recompute
        )

    def extra_repr(self) -> str:
        """Return the arguments for repr()."""
        return f"activation={self.activation!r}" + ", recompute=True" * self.recompute


def _has_hooks(activation: Activation) -> bool:
    return isinstance(activation, nn.Module) and has_hooks(activation)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of a module runs more than its class's forward: hooks, or a forward of the instance."""
    return bool(module._forward_pre_hooks or module._forward_hooks or _replaces_forward(module))


def _replaces_forward(module: nn.Module) -> bool:
    """Return whether a module has hooks of the backward pass, or a forward of its own, such as one of accelerate."""
    own_forward = hasattr(module, "forward") and "forward" in module.__dict__  # Dynamo guards what hasattr reads
    return bool(own_forward or module._backward_hooks or module._backward_pre_hooks)


def _may_be_read(layer: nn.Module) -> bool:
    """Return whether a kernel may read a linear layer's parameters in place of a call of the layer.

    It may not if a call would do anything else: hooks (except those of tensor parallelism), another forward, or a
    weight that wraps other tensors.
    """
    weight = layer._parameters.get("weight")
    if type(layer).forward is not nn.Linear.forward or _replaces_forward(layer) or _is_wrapper(weight):
        return False
    if not (layer._forward_pre_hooks or layer._forward_hooks):
        return True
    hooks = *layer._forward_pre_hooks.values(), *layer._forward_hooks.values()
    return is_dtensor(weight) and all(map(_is_of_tensor_parallelism, hooks))


def _is_wrapper(weight: Any) -> bool:
    """Return whether a weight is of a subclass of Tensor that wraps other tensors, as torchao's quantized weights.

    A DTensor does not count.
    """
    kind = type(weight)  # torch's is_traceable_wrapper_subclass is False while Dynamo traces
    return kind is not nn.Parameter and hasattr(kind, "__tensor_flatten__") and not is_dtensor(weight)


@assume_constant_result
def _is_of_tensor_parallelism(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is of torch's ColwiseParallel or RowwiseParallel: it changes placements, and no values.

    Such a hook is a closure over a partial of a function in the module of these styles.
    """
    functions = [getattr(cell.cell_contents, "func", None) for cell in getattr(hook, "__closure__", None) or ()]
    return any(getattr(f, "__module__", None) == "torch.distributed.tensor.parallel.style" for f in functions)


def _check_activation(activation: Activation, gated_names: Iterable[str] = ()) -> Activation:
    """Return an activation that is a function, None or a known name. Raises ArgumentError for others."""
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
    """Epilogue: return activation(gate + gate_bias) * (acc + bias); `gate` is another GEMM's result."""
    g = gate if gate_bias is None else gate + gate_bias
    return resolve_activation(activation)(g) * (acc if bias is None else acc + bias)
