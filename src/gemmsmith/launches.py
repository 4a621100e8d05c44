"""What runs for one product: packings of operands, the GEMM, and a second step for each reduction."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from gemmsmith.binding import Binding
from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import FP32, in_fp32
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import Result, over
from gemmsmith.core.pointer import Pointer
from gemmsmith.core.problem import MAX_EXTENT, BoundProblem, Problem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.device.outputs import result_argument
from gemmsmith.epilogue.device.reductions import (
    Partials,
    combined,
    is_atomic,
    partials,
    partials_argument,
    representatives,
)
from gemmsmith.kernels.build import build
from gemmsmith.kernels.pack import BoundPacking, low_parts, packed, packings
from gemmsmith.kernels.reduce import BoundReduction, reduce
from gemmsmith.kernels.reduce import shape as reduce_shape
from gemmsmith.lang.kernel import aligned
from gemmsmith.lang.launch import WORKSPACE, Launch, Launches


def kernel_spec(binding: Binding, config: Config) -> KernelSpec:
    """The GEMM's spec: of operands as TMA reads them, packed where it cannot.

    ConfigError where the config cannot work; ArgumentError where a packed operand would be too large.
    """
    for name, packing in zip("ab", packings(binding.problem, config), strict=True):
        if packing and packing.total > MAX_EXTENT:
            raise ArgumentError(
                f"{name}: TMA cannot read its strides or address and it is too large to pack; "
                "use rows that are multiples of 16 bytes at a 16-byte aligned address"
            )
    for name, packing in zip("ab", low_parts(binding.problem, config), strict=False):
        if packing.total > MAX_EXTENT:
            raise ArgumentError(f"{name}: its low part is too large to pack; use precision='tf32'")
    return KernelSpec.of(packed(binding.problem, config), config, binding.spec)


def launches(binding: Binding, spec: KernelSpec) -> Launches:
    """The launches for a product whose kernel has that spec. ArgumentError where partial results would be too large.

    Packed operands lie at the workspace's begin, one after the other. Of a product without elements only its
    reductions, of nothing, are left to write; that needs neither operands nor memory.
    """
    problem, graph = binding.problem, spec.epilogue.graph
    reduced = [
        (r, combined(partials(r, spec, problem), graph.nodes[r.node].value[1]))
        for r in graph.results if graph.is_reduced(r)
    ]  # fmt: skip
    if 0 in (problem.batch, problem.m, problem.n):
        written = [(r, shape) for r, shape in reduced if shape.batch * shape.elements]
        return Launches(spec, binding.swapped, tuple(_of_nothing(r, spec, problem, shape) for r, shape in written))
    given, workspace, packing_launches = (Pointer("a"), Pointer("b")), WORKSPACE, []
    low = low_parts(problem, spec.config)
    copied = [*packings(problem, spec.config), *low]
    at = [*given, *given[: len(copied) - 2]]
    for i, packing in enumerate(copied):
        if packing and packing.total:
            kernel = replace(packing, chip=spec.chip).kernel
            packing_launches.append(Launch.of(kernel, BoundPacking(packing, at[i], workspace)))
            at[i], workspace = workspace, workspace + aligned(packing.bytes)
    low_at = tuple((x.packed, where) for x, where in zip(low, at[2:], strict=True))
    bound = BoundProblem.of(packed(problem, spec.config), at[0], at[1], binding.arrays, low_at)
    kernel = build(spec)
    product = Launch.of(kernel, bound, workspace)
    shared = representatives(graph, spec.epilogue.atomic)
    zeros, seconds = [], []
    for r, shape in reduced:
        if is_atomic(r, spec) and r.name in shared:
            zeros.append(_of_nothing(r, spec, problem, shape))
        else:  # without partials where the value is known
            source = product.arguments[partials_argument(shared[r.name])] if r.name in shared else 0
            seconds.append(_reduction(r, spec, problem, shape, source))
    scratch, flags = kernel.scratch_bytes(bound), kernel.scratch_bytes(bound, zeroed=True)
    ordered = (*packing_launches, *zeros, product, *seconds)
    return Launches(spec, binding.swapped, ordered, workspace.offset + scratch, flags)


def _of_nothing(result: Result, spec: KernelSpec, problem: Problem, shape: Partials) -> Launch:
    return _reduction(result, spec, problem, replace(shape, parts=0), 0)


def _reduction(result: Result, spec: KernelSpec, problem: Problem, shape: Partials, source: Any) -> Launch:
    """The second step of a reduction, whose partials lie at `source`."""
    graph, out = spec.epilogue.graph, Pointer(result_argument(result.name))
    node, known = graph.nodes[result.node], graph.known(result)
    kind, axis = node.value
    extent = graph.extents()[node.inputs[0]]
    m, n = problem.m // max(extent.height, 1), problem.n // max(extent.width, 1)
    count = math.prod({"b": problem.batch, "m": m, "n": n}[index] for index in over(axis))  # that one is made of
    scale, offset = 1.0, 0.0
    if known is not None and count:
        offset = {"sum": known * count, "logsumexp": known + math.log(count)}.get(kind, known)
        kind, shape = "sum", replace(shape, parts=0)
    elif kind == "mean":
        scale = 1 / count if count else math.nan
    kernel = reduce(kind, result.dtype or FP32, *reduce_shape(shape), spec.chip)
    return Launch.of(kernel, BoundReduction(shape, source, out, scale, in_fp32(offset)))
