"""Who records gradients of a call: autograd, a transform of torch.func, an exporter."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from gemmsmith.core.errors import ArgumentError
from gemmsmith.torch.dynamo import assume_constant_result


def in_functorch_transform() -> bool:
    """Return whether a torch.func transform or forward mode is active. Raises ArgumentError for torch.func.jvp."""
    if torch.compiler.is_dynamo_compiling():
        return False
    stack = torch._C._functorch.get_interpreter_stack() or ()
    if any(interpreter.key() == torch._C._functorch.TransformType.Jvp for interpreter in stack):
        raise ArgumentError("a, b: got forward mode, which gemm does not support; use reverse mode, as torch.func.grad")
    return bool(stack) or forward_ad._current_level >= 0


@assume_constant_result  # Dynamo enters the transforms that it traces, and guards the others
def _transforms() -> tuple[str, ...]:
    """Return the names of torch.func's active transforms, such as "Vmap" and "Grad"; forward mode counts as "Jvp"."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return (*(interpreter.key().name for interpreter in stack), *["Jvp"] * (forward_ad._current_level >= 0))


def refuse_transforms(name: str) -> None:
    """Raise ArgumentError in vmap, in forward mode, and in compiled torch.func.grad, which MoE experts do not support.

    `name`: the argument that the message names.
    """
    transforms = _transforms()
    if "Vmap" in transforms:
        raise ArgumentError(f"{name}: got torch.func.vmap, which the experts do not support; use a batch (..., dim)")
    if "Jvp" in transforms:
        raise ArgumentError(f"{name}: got forward mode, which the experts do not support; use torch.autograd.grad")
    if "Grad" in transforms and torch.compiler.is_dynamo_compiling():  # not compiled, the backward pass refuses it
        raise ArgumentError(f"{name}: got torch.func.grad in compiled code; use torch.autograd.grad")


def operators_record_gradients() -> bool:
    """Return whether a program is recorded now that will call operators, whose Autograd kernels then record gradients.

    torch.export and torch.jit.trace record one; so does Dynamo within transforms of torch.func. There Dynamo takes
    tensors that require gradients for ones that do not, and would not record an autograd.Function.
    """
    return bool(_is_exporting() or (torch.compiler.is_dynamo_compiling() and _transforms()))


@assume_constant_result
def _is_exporting() -> bool:
    return bool(torch.compiler.is_exporting() or torch.jit.is_tracing())


def needs_grad(*tensors: Any) -> bool:
    """Return whether gradients of one of these tensors are recorded, now or when a recorded program runs."""
    if torch.compiler.is_dynamo_compiling() and _transforms():  # Dynamo does not see which tensors require gradients
        return bool(torch.is_grad_enabled())
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def records_now(*tensors: Any) -> bool:
    """Return whether autograd records gradients of these tensors now, not when a recorded program runs."""
    return needs_grad(*tensors) and not operators_record_gradients()


def check_once_differentiable() -> None:
    """Raise ArgumentError in a backward pass that is itself recorded: its function has no second derivatives.

    create_graph=True and torch.func.grad record backward passes.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():
        if torch._C._functorch.get_interpreter_stack():
            raise ArgumentError(
                "torch.func: got a gradient of a function without second derivatives, which torch.func.grad records; "
                "use torch.autograd.grad, or gemmsmith.torch.gemm"
            )
        raise ArgumentError(
            "create_graph: got True for a function without second derivatives; use gemmsmith.torch.gemm"
        )
