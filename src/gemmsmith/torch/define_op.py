"""How an operator of PyTorch is defined: its kernels by device, its gradients, and what it decomposes into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from gemmsmith.core.errors import ArgumentError
from gemmsmith.torch.autograd_state import records_now

LIBRARY = torch.library.Library("gemmsmith", "DEF")
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
"""Functions that compute operators by PyTorch's operations and other operators."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the functions that turn gemmsmith's operators in an exported program into PyTorch's own operations.

    With `program.run_decompositions(gemmsmith.torch.decompositions())` a program of torch.export runs where gemmsmith
    is not, as in C++ by AOTInductor, on any device. Matrices are multiplied as torch.matmul does, epilogues computed in
    fp32 (float64 of float64). The host reads the sizes of groups that are not in bf16.

    Returns:
        The functions by operator. One raises ArgumentError if the operator cannot be decomposed: multiplication in
        FP8, gradients of experts. One raises DeviceError if an epilogue has an operation that PyTorch has not, such as
        `quantize`.
    """
    return dict(DECOMPOSITIONS)


def define_op(
    schema: str, fake: Any, kernel: Any, cuda: Any = None, count_flops: Any = lambda *_, **__: 0, by_torch: Any = None
) -> Any:
    """Define an operator of torch, and return its overload.

    Args:
        schema: its name, arguments and results.
        fake: returns empty tensors of the results' shapes and dtypes, from fake tensors.
        kernel: computes the results.
        cuda: computes them on a GPU; by default `kernel`.
        count_flops: returns the FLOPs of a call, from the shapes of its tensors.
        by_torch: computes them from fake tensors, too, by PyTorch's operations and other operators; None: nothing can.
    """

    def refuse(*_: Any, **__: Any) -> Any:
        raise ArgumentError(f"program: got gemmsmith::{name}, which cannot be decomposed into PyTorch's operations")

    # flexible_layout: passes that insert the operator do not record its inputs' strides, and any strides work.
    name = LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    op = getattr(torch.ops.gemmsmith, name).default
    LIBRARY.impl(name, _on_one_device(op, kernel), "CPU")
    LIBRARY.impl(name, _on_one_device(op, cuda or kernel), "CUDA")
    torch.library.register_fake(f"gemmsmith::{name}", _on_one_device(op, fake), lib=LIBRARY)
    register_flop_formula(op.overloadpacket)(count_flops)
    DECOMPOSITIONS[op] = by_torch or refuse
    return op


def record_gradients(op: Any, record: Callable[..., Any]) -> None:
    """Let an operator's Autograd kernel call `record`, with the operator's arguments, if gradients are recorded.

    `record` returns the operator's results, and records their gradients. Exported programs, which contain the operator,
    need it.
    """

    def kernel(*arguments: Any) -> Any:
        if records_now(*[x for x in arguments if isinstance(x, torch.Tensor)]):
            return record(*arguments)
        return below_autograd(op, *arguments)

    LIBRARY.impl(op.overloadpacket.__name__, kernel, "Autograd")


def below_autograd(op: Callable[..., Any], *arguments: Any) -> Any:
    """Call an operator without its Autograd kernel, so that the dispatcher finds the kernel for the device."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def _on_one_device(op: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel of an operator with a check before it: ArgumentError for tensors on several devices.

    The dispatcher does not refuse these: it calls the kernel for CUDA rather than that for the CPU, and the one for
    meta, which returns empty tensors, rather than both.
    """
    names = [argument.name for argument in op._schema.arguments]

    def run(*arguments: Any) -> Any:
        """Check that all tensors, also those in lists, are on the first one's device, and call the kernel."""
        first = None
        for name, argument in zip(names, arguments, strict=False):
            for x in argument if isinstance(argument, list) else (argument,):
                if isinstance(x, torch.Tensor):
                    first = first or (name, x.device)
                    if x.device != first[1]:
                        raise ArgumentError(
                            f"{name}: got a tensor on {x.device} with {first[0]} on {first[1]}; use one device"
                        )
        return kernel(*arguments)

    return run
