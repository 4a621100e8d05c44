"""The launch sequence of a GEMM: operand repacking, the GEMM, and the second step of its reductions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from gemmsmith.binding.binding import Binding
from gemmsmith.core.arguments import Pointer
from gemmsmith.core.dtypes import FP32, overflow_as_fp32
from gemmsmith.core.graph import Result, reduced_dims
from gemmsmith.core.problem import BoundProblem, Problem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.inputs import operand_argument
from gemmsmith.epilogue.outputs import result_argument
from gemmsmith.epilogue.partials import (
    PartialsShape,
    merge_batches,
    partials_argument,
    partials_shape,
    ranges_argument,
    shared_partials,
)
from gemmsmith.graph.reductions import REDUCTIONS
from gemmsmith.kernels.build import build
from gemmsmith.kernels.pack import BoundPacking, operand_packings, replace_packed_operands, tf32_residual_packings
from gemmsmith.kernels.reduce import BoundReduction, ReduceSpec, reduce_kernel
from gemmsmith.lang.kernel import align_scratch
from gemmsmith.lang.launch import WORKSPACE, Launch, Launches


def build_launches(binding: Binding, spec: KernelSpec) -> Launches:
    """Return the launches of a GEMM whose kernel has that spec, in order.

    First copies of operands that the kernel cannot read as they are ("packed") and, with 3xTF32, residuals of A and B
    are written to the start of the workspace. Then results with atomic additions are set to zero, the GEMM runs, and
    the partial results of reductions are combined ("second step"). For an empty GEMM (batch, M or N is 0) only the
    identities of reductions are written, such as 0 for a sum.

    Raises ArgumentError if partial results are too large.
    """
    problem, graph = binding.problem, spec.epilogue.graph
    reduced = [
        (r, merge_batches(partials_shape(r, spec, problem), graph.nodes[r.node].attribute[1]))
        for r in graph.results if graph.is_reduction(r)
    ]  # fmt: skip
    if 0 in (problem.batch, problem.m, problem.n):
        written = [_identity(r, spec, problem, shape) for r, shape in reduced if shape.total_outputs]
        return Launches(spec, binding.swapped, _second_steps(written, spec))
    pointers, workspace, packing_launches = (Pointer("a"), Pointer("b")), WORKSPACE, []
    packings = operand_packings(problem, spec.design)
    packed, residual_packings = replace_packed_operands(problem, packings), tf32_residual_packings(problem, spec.design)
    packings += residual_packings
    operand_pointers = [*pointers, *pointers[: len(packings) - 2]]  # residuals are computed from a and b, too
    for i, packing in enumerate(packings):
        if packing and packing.total_vectors:
            kernel = replace(packing, chip=spec.chip).make_kernel()
            packing_launches.append(Launch.from_kernel(kernel, BoundPacking(packing, operand_pointers[i], workspace)))
            operand_pointers[i], workspace = workspace, workspace + align_scratch(packing.bytes)
    others = {
        f"{name}_residual": (packing.packed, pointer)
        for name, packing, pointer in zip("ab", residual_packings, operand_pointers[2:], strict=False)
    }
    for name in binding.product.arrays if binding.product else ():
        others[name] = binding.arrays[name], Pointer(operand_argument(name))
    bound = BoundProblem.from_problem(packed, operand_pointers[0], operand_pointers[1], binding.arrays, others)
    kernel = build(spec)
    gemm = Launch.from_kernel(kernel, bound, workspace)
    shared = shared_partials(graph, spec.epilogue.deterministic)
    zero_fills, second_steps = [], []
    for r, shape in reduced:
        if spec.epilogue.is_atomic(r) and r.name in shared:
            zero_fills.append(_identity(r, spec, problem, shape))
        else:  # the reduction of a constant has no partials: the second step writes its value
            source = gemm.arguments[partials_argument(shared[r.name])] if r.name in shared else 0
            ranges = gemm.arguments[ranges_argument(shared[r.name])] if shape.groups else 0
            second_steps.append(_second_step(r, spec, problem, shape, source, ranges))
    workspace += kernel.scratch_bytes(bound)
    final = _second_steps(second_steps, spec, workspace)
    ordered = (*packing_launches, *_second_steps(zero_fills, spec), gemm, *final)
    flag_bytes = kernel.scratch_bytes(bound, zero_initialized=True)  # all kernels have the same ones
    for launch in final:
        workspace += launch.kernel.scratch_bytes(second_steps)
        flag_bytes = max(flag_bytes, launch.kernel.scratch_bytes(second_steps, zero_initialized=True))
    return Launches(spec, binding.swapped, ordered, workspace.offset, flag_bytes)


def _second_steps(
    reductions: list[BoundReduction], spec: KernelSpec, workspace: Pointer = WORKSPACE
) -> tuple[Launch, ...]:
    """Return the one launch that combines the partial results of all reductions (their second steps); () if none."""
    if not reductions:
        return ()
    return (Launch.from_kernel(reduce_kernel(tuple(r.spec for r in reductions), spec.chip), reductions, workspace),)


def _identity(result: Result, spec: KernelSpec, problem: Problem, shape: PartialsShape) -> BoundReduction:
    """Return a second step without partials, which writes a reduction's identity, such as 0 for a sum."""
    return _second_step(result, spec, problem, replace(shape, num_partials=0), 0)


def _second_step(
    result: Result, spec: KernelSpec, problem: Problem, shape: PartialsShape, source: Any, ranges: Any = 0
) -> BoundReduction:
    """Return the second step of a reduction: out = scale * total + offset, where `total` combines the partials.

    `source`: the partials' address; 0 if there are none. `ranges`: in a grouped GEMM, the address of the range of
    partials of each group; else 0.
    """
    graph, out = spec.epilogue.graph, Pointer(result_argument(result.name))
    node, constant = graph.nodes[result.node], graph.constant_operand_of(result)
    kind, axis = REDUCTIONS[node.attribute[0]], node.attribute[1]
    dims = graph.broadcast_dims[node.inputs[0]]
    m, n = problem.m // dims.row_divisor, problem.n // dims.column_divisor
    count = math.prod({"b": problem.batch, "m": m, "n": n}[dim] for dim in reduced_dims(axis))  # reduced elements
    scale, offset = 1.0, 0.0
    if constant is not None and count:  # all elements are equal: the result is `offset`, the total of no partials is 0
        offset = kind.of_constant(constant, count)
        kind, shape = REDUCTIONS["sum"], replace(shape, num_partials=0)
    elif kind.divides:
        scale = 1 / count if count else math.nan
    reduce_spec = ReduceSpec.from_partials(kind, result.dtype or FP32, shape)
    return BoundReduction(reduce_spec, shape, source, out, scale, overflow_as_fp32(offset), ranges)
