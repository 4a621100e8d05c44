"""What a backend runs: kernels with their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gemmsmith.core.pointer import Pointer
from gemmsmith.core.spec import KernelSpec
from gemmsmith.core.tensor_map import TensorMap
from gemmsmith.lang.kernel import Kernel

Argument = int | float | TensorMap | tuple[int, ...] | Pointer
WORKSPACE = Pointer("workspace")
Addresses = Mapping[str, int | float]
"""By the names of Pointers: A and B are "a" and "b", "workspace" and "flags" what they say, operands and results what
the kernel's arguments for them are called."""


@dataclass(frozen=True)
class Launch:
    """A kernel, its arguments by name, and how many clusters have work; of a persistent kernel a backend starts at most
    as many as fit, and no more than an order has entries."""

    kernel: Kernel
    clusters: int
    arguments: Mapping[str, Argument]

    @staticmethod
    def of(kernel: Kernel, bound: Any, workspace: Pointer = WORKSPACE) -> Launch:
        """A kernel for what its parameters and its grid are bound to; its scratch memory begins at `workspace`."""
        return Launch(kernel, kernel.grid(bound), kernel.arguments(bound, workspace, Pointer("flags")))

    def at(self, addresses: Addresses) -> dict[str, Any]:
        """The arguments with every Pointer put in."""
        return {name: _at(x, addresses) for name, x in self.arguments.items()}


@dataclass(frozen=True)
class Launches:
    """All launches of one product, in order, and the device memory they need: a workspace, and flags that are zero
    before and after every run. `spec` is the GEMM's, if there is one; where `swapped` its A is the caller's b, its B
    the a."""

    spec: KernelSpec | None
    swapped: bool
    all: tuple[Launch, ...]
    workspace_bytes: int = 0
    flag_bytes: int = 0


def _at(argument: Argument, addresses: Addresses) -> Any:
    if isinstance(argument, Pointer):
        address = addresses[argument.name]
        return address + argument.offset if argument.offset else address
    if isinstance(argument, TensorMap) and isinstance(argument.address, Pointer):
        return replace(argument, address=_at(argument.address, addresses))
    return argument
