"""Launches: the kernels that a backend runs, with their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from gemmsmith.core.pointer import Pointer
from gemmsmith.core.tensor_map import TensorMap
from gemmsmith.lang.kernel import Kernel

Argument = int | float | TensorMap | tuple[int, ...] | Pointer
WORKSPACE = Pointer("workspace")
Addresses = Mapping[str, int | float]
"""Addresses (or scalars) by Pointer name: "a", "b", "workspace", "flags", and the argument names of operands and
results."""


EMPTY: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class Launch:
    """A kernel, its arguments by name, and its number of work clusters.

    For a persistent kernel the backend caps the grid at what is resident.
    """

    kernel: Kernel
    work_clusters: int
    arguments: Mapping[str, Argument]

    @classmethod
    def from_kernel(cls, kernel: Kernel, bound: Any, workspace: Pointer = WORKSPACE) -> Launch:
        """Return the launch of a kernel for the problem `bound`, with its scratch memory at `workspace`."""
        return cls(kernel, kernel.work_clusters(bound), kernel.arguments(bound, workspace, Pointer("flags")))

    def resolve(self, addresses: Addresses, interleave_strides: Mapping[str, int] = EMPTY) -> dict[str, Any]:
        """Return the arguments with every Pointer replaced by its address.

        `interleave_strides`: in bytes, those of two arrays each, by Pointer name, if they differ at these addresses.
        """
        return {name: _resolve(x, addresses, interleave_strides) for name, x in self.arguments.items()}


@dataclass(frozen=True)
class Launches:
    """All launches of one GEMM, in order, and the device memory that they need.

    The memory is a workspace, and flags that are zero before and after each run. `spec`: the KernelSpec of the GEMM,
    opaque to `lang`, or None. `swapped`: the kernel computes D^T, with A and B exchanged. `is_dependent`: the first
    kernel may start before the stream's previous one has finished, for which it waits (programmatic dependent launch);
    later kernels always may.
    """

    spec: Any
    swapped: bool
    all: tuple[Launch, ...]
    workspace_bytes: int = 0
    flag_bytes: int = 0
    is_dependent: bool = False


def _resolve(argument: Argument, addresses: Addresses, interleave_strides: Mapping[str, int] = EMPTY) -> Any:
    """Return an argument with the address that its Pointer, or its tensor map's, stands for."""
    if isinstance(argument, Pointer):
        address, offset = addresses[argument.name], argument.offset
        if argument.reaches_other:
            offset = interleave_strides.get(argument.name, offset)
        return address + offset if offset else address
    if isinstance(argument, TensorMap) and isinstance(argument.address, Pointer):
        stride = interleave_strides.get(argument.address.name, argument.interleave_stride)
        return replace(argument, address=_resolve(argument.address, addresses), interleave_stride=stride)
    return argument
