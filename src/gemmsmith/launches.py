"""What runs for one product: at most two packings, the GEMM, and a step for each reduction; with their arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import FP32, in_fp32
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import Result
from gemmsmith.core.pointer import Pointer
from gemmsmith.core.problem import MAX_EXTENT, BoundProblem, Matrix, Problem
from gemmsmith.core.spec import EpilogueSpec, KernelSpec
from gemmsmith.core.tensor_map import TensorMap
from gemmsmith.epilogue.device.outputs import result_argument
from gemmsmith.epilogue.device.reductions import Partials, is_atomic, partials, partials_argument, representatives
from gemmsmith.kernels.build import build
from gemmsmith.kernels.pack import BoundPacking, Packing, pack
from gemmsmith.kernels.reduce import BoundReduction, reduce
from gemmsmith.kernels.reduce import shape as reduce_shape
from gemmsmith.lang.kernel import Kernel, aligned

Argument = int | float | TensorMap | tuple[int, ...] | Pointer
WORKSPACE = Pointer("workspace")
Addresses = Mapping[str, int | float]
"""By the names of Pointers: A and B are "a" and "b", "workspace" and "flags" what they say, operands and results what
the kernel's arguments for them are called."""


@dataclass(frozen=True)
class Launch:
    """A kernel, its arguments by name, and how many clusters have work; a backend starts at most as many as fit,
    and no more than an order has entries."""

    kernel: Kernel
    clusters: int
    arguments: Mapping[str, Argument]

    @staticmethod
    def of(kernel: Kernel, bound: Any, workspace: Pointer = WORKSPACE) -> Launch:
        """A kernel for what its parameters and its grid are bound to; its scratch memory begins at `workspace`."""
        return Launch(kernel, kernel.grid(bound), kernel.arguments(bound, workspace, Pointer("flags")))

    def at(self, addresses: Addresses) -> dict[str, Any]:
        """The arguments with every Pointer put in."""
        return {name: placed(x, addresses) for name, x in self.arguments.items()}


def placed(argument: Argument, addresses: Addresses) -> Any:
    """An argument for arrays at these addresses."""
    if isinstance(argument, Pointer):
        place = addresses[argument.name]
        return place + argument.offset if argument.offset else place
    if isinstance(argument, TensorMap) and isinstance(argument.address, Pointer):
        return replace(argument, address=placed(argument.address, addresses))
    return argument


@dataclass(frozen=True)
class Route:
    """How a problem is computed: what is packed first, the GEMM with its epilogue, and what is reduced afterwards.

    `arrays` are the epilogue's operands and results in memory, by name: (rows, columns) each, 1 where it does not
    vary. Reductions' results are contiguous.
    """

    problem: Problem
    packings: tuple[Packing | None, Packing | None]
    spec: KernelSpec
    arrays: Mapping[str, Matrix]

    @staticmethod
    def of(
        problem: Problem,
        config: Config,
        epilogue: EpilogueSpec | None = None,
        arrays: Mapping[str, Matrix] | None = None,
    ) -> Route:
        """ConfigError where the config cannot work; ArgumentError where a packed operand would be too large.

        Without an epilogue: the bare product, whose only array is "out".
        """
        packings = tuple(None if m.tma_ready or problem.k == 0 else Packing.of(m) for m in (problem.a, problem.b))
        for name, packing in zip("ab", packings, strict=True):
            if packing and packing.total > MAX_EXTENT:
                raise ArgumentError(
                    f"{name}: TMA cannot read its strides or address and it is too large to pack; "
                    "use rows that are multiples of 16 bytes at a 16-byte aligned address"
                )
        a, b = (p.packed if p else m for p, m in zip(packings, (problem.a, problem.b), strict=True))
        reached = replace(problem, a=a, b=b)
        spec = KernelSpec.of(reached, config, epilogue)
        return Route(reached, (packings[0], packings[1]), spec, arrays or {"out": problem.d})

    @property
    def kernel(self) -> Kernel:
        return build(self.spec)

    @cached_property
    def bound(self) -> BoundProblem:
        """The problem that the GEMM is launched for: operands that are packed lie in the workspace, one after the
        other."""
        at, workspace = [], WORKSPACE
        for packing, name in zip(self.packings, "ab", strict=True):
            at.append(workspace if packing else Pointer(name))
            workspace += aligned(packing.bytes) if packing else 0
        return BoundProblem.of(self.problem, at[0], at[1], self.arrays)

    @property
    def _packed_bytes(self) -> int:
        return sum(aligned(packing.bytes) for packing in self.packings if packing)

    @property
    def workspace_bytes(self) -> int:
        """Device memory for packed operands and the GEMM's scratch memory."""
        return 0 if self.empty else self._packed_bytes + self.kernel.scratch_bytes(self.bound)

    @property
    def flag_bytes(self) -> int:
        """Device memory that is zero before and after every run."""
        return 0 if self.empty else self.kernel.scratch_bytes(self.bound, zeroed=True)

    @property
    def empty(self) -> bool:
        """Whether the product has no elements: only the reductions, of nothing, are then left to write."""
        return 0 in (self.problem.batch, self.problem.m, self.problem.n)

    @cached_property
    def launches(self) -> list[Launch]:
        """The launches, in order. Of an empty product only the reductions are left."""
        graph = self.spec.epilogue.graph
        reduced = [(r, partials(r, self.spec, self.problem)) for r in graph.results if graph.is_reduced(r)]
        if self.empty:
            return [self._zeros(r, shape) for r, shape in reduced if shape.batch * shape.elements]
        packed = [
            Launch.of(pack(), BoundPacking(packing, Pointer(name), at))
            for packing, name, at in zip(self.packings, "ab", (self.bound.a_at, self.bound.b_at), strict=True)
            if packing
        ]
        product = Launch.of(self.kernel, self.bound, WORKSPACE + self._packed_bytes)
        shared = representatives(graph, self.spec.epilogue.atomic)
        zeros, seconds = [], []
        for r, shape in reduced:
            if is_atomic(r, self.spec) and r.name in shared:
                zeros.append(self._zeros(r, shape))
            else:  # without partials where the value is known
                source = product.arguments[partials_argument(shared[r.name])] if r.name in shared else 0
                seconds.append(self._second(r, shape, source))
        return [*packed, *zeros, product, *seconds]

    def _zeros(self, result: Result, shape: Partials) -> Launch:
        """The result of reducing nothing."""
        return self._second(result, replace(shape, parts=0), 0)

    def _second(self, result: Result, shape: Partials, source: Any) -> Launch:
        out = Pointer(result_argument(result.name))
        (kind, axis), known = self.spec.epilogue.graph.nodes[result.node].value, self.spec.epilogue.graph.known(result)
        count, scale, offset = self._reduced_elements(result, axis), 1.0, 0.0
        if known is not None and count:
            offset = {"sum": known * count, "logsumexp": known + math.log(count)}.get(kind, known)
            kind, shape = "sum", replace(shape, parts=0)
        elif kind == "mean":
            scale = 1 / count if count else math.nan
        kernel = reduce(kind, result.dtype or FP32, *reduce_shape(shape))
        return Launch.of(kernel, BoundReduction(shape, source, out, scale, in_fp32(offset)))

    def _reduced_elements(self, result: Result, axis: str) -> int:
        """How many elements of the product, or of a half, one element of the result is made of."""
        graph, p = self.spec.epilogue.graph, self.problem
        n = p.n // max(graph.extents()[graph.nodes[result.node].inputs[0]].width, 1)
        return {"n": n, "m": p.m, "all": p.batch * p.m * n}[axis]
