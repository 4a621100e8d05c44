"""Conversion of arrays to the kernel's matrices: chooses D or D^T, and folds the batch into M if possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from gemmsmith.arrays import ArrayInfo, row_major
from gemmsmith.binding.checks import Multiplication
from gemmsmith.core.dtypes import TF32, DType
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.grouping import Grouping
from gemmsmith.core.problem import MAX_EXTENT, SCALE_NAMES, Matrix, Problem, Scale
from gemmsmith.core.product import Product, Role
from gemmsmith.core.scale_spec import ScaleSpec
from gemmsmith.epilogue.inputs import operand_argument
from gemmsmith.epilogue.outputs import result_argument


class OrientedProblem(NamedTuple):
    """The GEMM that the kernel computes, with its epilogue.

    Attributes:
        swapped: Whether the kernel computes D^T = B^T @ A^T, so that its A is the user's b, transposed.
        spec: The epilogue in the kernel's orientation.
        arrays: Operands and matrix results of the epilogue, and arrays of the product, by name.
    """

    problem: Problem
    swapped: bool
    spec: EpilogueSpec
    arrays: dict[str, Matrix]


def orient_problem(
    spec: EpilogueSpec, arguments: Mapping[str, ArrayInfo | float], shape: tuple[int, ...], out_dtype: DType,
    multiplication: Multiplication, scale_granularity: Mapping[Role, int], product: Product | None,
    grouping: Grouping | None, groups: int, swapped: bool | None = None,
) -> OrientedProblem:  # fmt: skip
    """Return the GEMM that the kernel computes, as strided matrices.

    `spec`: in the user's orientation. `out_dtype`: D's dtype if no result is a matrix. `scale_granularity`: rows
    (columns, of b) per block scale, by operand that has block scales. `product`: None for torch.matmul's. `swapped`:
    compute D^T = B^T @ A^T; None: if D is column-major, as kernels store rows faster.
    """
    graph, batch = spec.graph, shape[0] if len(shape) == 3 else 1
    arrays: dict[str, Matrix] = {}
    for operand in graph.operands:
        if isinstance(x := arguments[operand_argument(operand.name)], ArrayInfo):
            arrays[operand.name] = to_matrix(x, batch, broadcast=not operand.broadcast_dims.is_matrix)
    for r in graph.results:
        if isinstance(x := arguments[result_argument(r.name)], ArrayInfo) and not graph.is_reduction(r):
            arrays[r.name] = to_matrix(x, batch)
    for name in product.arrays if product else ():
        if isinstance(x := arguments[operand_argument(name)], ArrayInfo):
            arrays[name] = to_matrix(x, 1)
    d_name = next(iter(graph.matrix_result_names), "")
    given = arguments["a"], arguments["b"]
    a, b = (
        to_matrix(x, 1 if product else batch)
        for x in multiplication.as_elements(*(x for x in given if isinstance(x, ArrayInfo)))
    )
    mma, promoted = multiplication.mma, multiplication.promoted
    default = ArrayInfo(out_dtype, shape, row_major(shape), 0, "spec", 0, True)
    d = arrays[d_name] if d_name else to_matrix(default, batch)
    scale_a, scale_b = (
        Scale(operand_argument(name), to_matrix(x, matrices), scale_granularity[role])
        if role in scale_granularity and isinstance(x := arguments[operand_argument(name)], ArrayInfo) else None
        for (role, name), matrices in zip(SCALE_NAMES.items(), (batch, groups or batch), strict=True)
    )  # fmt: skip
    scale_b = scale_b and replace(scale_b, matrix=scale_b.matrix.T)
    problem = Problem(a, b, d, mma.d, promoted, (scale_a, scale_b), is_3xtf32=promoted and mma.a == TF32)
    if product:
        problem = replace(problem, extents=(shape[-2], shape[-1]), grouping=grouping, groups=groups)
    if graph.is_identity and not product:
        problem = _fold_batch(problem)
    if swapped is None:
        can_swap = (product is None or product.is_transposable) and not multiplication.is_mixed
        swapped = can_swap and problem.d.canonical().is_column_major and graph.is_transposable
    if swapped:
        problem, arrays = problem.T, {name: x.T for name, x in arrays.items()}
        spec = spec.with_graph(graph.transposed)
    if graph.is_identity and not product:
        problem = _fold_batch(problem)
        arrays[d_name] = problem.d
    for name in spec.graph.matrix_names:
        arrays[name] = arrays[name].canonical()
    problem = problem.with_matrices(problem.a.canonical(), problem.b.canonical(), problem.d.canonical(), problem.scales)
    return OrientedProblem(problem, swapped, spec.for_arrays(arrays), arrays)


def to_matrix(x: ArrayInfo, batch: int, broadcast: bool = False) -> Matrix:
    """Return an array of up to three dimensions as a Matrix of (batch, rows, columns).

    An array without a batch, or with a batch of 1, is broadcast over `batch`. `broadcast`: a single row or column is
    broadcast, too: its stride is 0.
    """
    array_batch, m, n = (1, 1, 1, *x.shape)[-3:]
    array_batch_stride, row_stride, col_stride = (0, 0, 0, *x.strides)[-3:]
    if broadcast:
        row_stride, col_stride = row_stride if m != 1 else 0, col_stride if n != 1 else 0
    if array_batch != 1:  # the arrays of some designs have a batch of their own
        batch, batch_stride = array_batch, array_batch_stride
    else:
        batch_stride = 0
    return Matrix(x.dtype, m, n, row_stride, col_stride, batch, batch_stride, x.alignment, x.interleave_stride)


def _fold_batch(p: Problem) -> Problem:
    """Return the problem with its batch folded into M, as one GEMM of batch * m rows; unchanged if impossible.

    One row stride must reach all rows of a, of its scales and of d; b and its scales must be broadcast.
    """
    rows, (scale_a, scale_b) = p.batch * p.m, p.scales
    if p.batch <= 1 or p.b.batch_stride or not 0 < rows <= MAX_EXTENT or (scale_b and scale_b.matrix.batch_stride):
        return p
    a, d, stacked_scale_a = _stack_batch(p.a), _stack_batch(p.d), scale_a and _stack_scale_batch(scale_a, p.m)
    if a is None or d is None or (scale_a and not stacked_scale_a):
        return p
    scale_b = scale_b and replace(scale_b, matrix=replace(scale_b.matrix, batch=1))
    return replace(p, a=a, b=replace(p.b, batch=1), d=d, scales=(stacked_scale_a, scale_b))


def _stack_scale_batch(x: Scale, m: int) -> Scale | None:
    """Return the block scales of a with the batch folded into rows; None if that is impossible or slower.

    It is impossible if a scale would cover rows of two batches, or if one row stride does not reach all rows. It is
    slower if TMA can load the scales with their batch, but not the folded ones.
    """
    matrix = _stack_batch(x.matrix)
    stacked = replace(x, matrix=matrix) if matrix and m % x.granularity == 0 else None
    before, after = ScaleSpec.from_scale(x), ScaleSpec.from_scale(stacked)
    return None if before and after and before.by_tma and not after.by_tma else stacked


def _stack_batch(x: Matrix) -> Matrix | None:
    """Return the matrix with its batch folded into rows, or None if one row stride does not reach all rows."""
    row_stride = x.row_stride if x.rows > 1 else x.batch_stride
    if x.batch_stride <= 0 or x.batch_stride != x.rows * row_stride:
        return None
    return replace(x, rows=x.batch * x.rows, row_stride=row_stride, batch=1, batch_stride=0)
