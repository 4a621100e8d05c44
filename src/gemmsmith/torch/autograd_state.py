"""Who records gradients of a call: autograd, a transform of torch.func, an exporter."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from gemmsmith.core.errors import ArgumentError


def in_functorch_transform() -> bool:
    """Return whether a torch.func transform or forward mode is active. Raises ArgumentError for torch.func.jvp."""
    if torch.compiler.is_dynamo_compiling():
        return False
    stack = torch._C._functorch.get_interpreter_stack() or ()
    if any(interpreter.key() == torch._C._functorch.TransformType.Jvp for interpreter in stack):
        raise ArgumentError("a, b: got forward mode, which gemm does not support; use reverse mode, as torch.func.grad")
    return bool(stack) or forward_ad._current_level >= 0


@torch.compiler.assume_constant_result  # Dynamo guards both
def _transforms() -> tuple[str, ...]:
    """Return the names of torch.func's active transforms; forward mode is a Jvp."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return (*(interpreter.key().name for interpreter in stack), *["Jvp"] * (forward_ad._current_level >= 0))


def refuse_transforms(name: str) -> None:
    """Raise ArgumentError, about the argument `name`, in vmap, in forward mode, and in compiled torch.func.grad."""
    transforms = _transforms()
    if "Vmap" in transforms:
        raise ArgumentError(f"{name}: got torch.func.vmap, which the experts do not support; use a batch (..., dim)")
    if "Jvp" in transforms:
        raise ArgumentError(f"{name}: got forward mode, which the experts do not support; use torch.autograd.grad")
    if "Grad" in transforms and torch.compiler.is_dynamo_compiling():  # which would lose gradients of weights
        raise ArgumentError(f"{name}: got torch.func.grad in compiled code; use torch.autograd.grad")


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """Return whether torch.export or torch.jit.trace records operators.

    Their Autograd kernels record gradients when the exported program runs.
    """
    return bool(torch.compiler.is_exporting() or torch.jit.is_tracing())


def needs_grad(*tensors: Any) -> bool:
    """Return whether autograd records gradients of these tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def records_now(*tensors: Any) -> bool:
    """Return whether autograd records gradients of these tensors now, not when an exported program runs."""
    return needs_grad(*tensors) and not is_exporting()


def check_once_differentiable() -> None:
    """Raise ArgumentError if a backward pass is itself recorded, by create_graph=True or torch.func.grad."""
    if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():
        if torch._C._functorch.get_interpreter_stack():
            raise ArgumentError(
                "torch.func: got a gradient of a function without second derivatives, which torch.func.grad records; "
                "use torch.autograd.grad, or gemmsmith.torch.gemm"
            )
        raise ArgumentError(
            "create_graph: got True for a function without second derivatives; use gemmsmith.torch.gemm"
        )
