"""Launches: the kernels that a backend runs, with their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from gemmsmith.core.arguments import Pointer, TensorMap
from gemmsmith.lang.kernel import Kernel

Argument = int | float | TensorMap | tuple[int, ...] | Pointer
WORKSPACE = Pointer("workspace")
Addresses = Mapping[str, int | float]
"""Addresses (or scalars) by Pointer name: "a", "b", "workspace", "flags", and the argument names of operands and
results."""


EMPTY: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class Launch:
    """A kernel, its arguments by name, and the number of clusters with work.

    The grid of a persistent kernel has fewer clusters, if fewer are resident at once. Arguments may be Pointers, for
    which `resolve` takes addresses.
    """

    kernel: Kernel
    work_clusters: int
    arguments: Mapping[str, Argument]

    @classmethod
    def from_kernel(cls, kernel: Kernel, bound: Any, workspace: Pointer = WORKSPACE) -> Launch:
        """Return the launch of a kernel for the problem `bound`. `workspace`: where its scratch buffers begin."""
        return cls(kernel, kernel.work_clusters(bound), kernel.arguments(bound, workspace, Pointer("flags")))

    def resolve(self, addresses: Addresses, interleave_strides: Mapping[str, int] = EMPTY) -> dict[str, Any]:
        """Return the arguments with every Pointer replaced by its address or number in `addresses`.

        `interleave_strides`: for two arrays whose columns alternate, the bytes from one to the other, by Pointer name,
        if that differs from the distance of the arrays that were bound.
        """
        return {name: _resolve(x, addresses, interleave_strides) for name, x in self.arguments.items()}


@dataclass(frozen=True)
class Launches:
    """All launches of one GEMM, in order, and the device memory that they need.

    Attributes:
        spec: The KernelSpec of the GEMM, opaque to `lang`, or None.
        swapped: The kernel computes D^T, with A and B exchanged.
        all: The launches.
        workspace_bytes: Bytes of the workspace, scratch memory with any contents.
        flag_bytes: Bytes of flags, which are zero before and after each run.
        is_dependent: The first kernel may start before the stream's previous one has finished, and waits for it
            (programmatic dependent launch). Later kernels always may.
    """

    spec: Any
    swapped: bool
    all: tuple[Launch, ...]
    workspace_bytes: int = 0
    flag_bytes: int = 0
    is_dependent: bool = False


def _resolve(argument: Argument, addresses: Addresses, interleave_strides: Mapping[str, int] = EMPTY) -> Any:
    """Return an argument with the address, or the number, that its Pointer or its tensor map's Pointer stands for."""
    if isinstance(argument, Pointer):
        address, offset = addresses[argument.name], argument.offset
        if argument.reaches_other:  # its offset is the distance to the other of two arrays
            offset = interleave_strides.get(argument.name, offset)
        return address + offset if offset else address
    if isinstance(argument, TensorMap) and isinstance(argument.address, Pointer):
        stride = interleave_strides.get(argument.address.name, argument.interleave_stride)
        return replace(argument, address=_resolve(argument.address, addresses), interleave_stride=stride)
    return argument
