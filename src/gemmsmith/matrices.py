"""From arrays to the matrices that a kernel computes with: of D or D^T, a batch folded into rows where that can be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gemmsmith.arrays import ArrayInfo, Spec, describe
from gemmsmith.core.dtypes import TF32, DType
from gemmsmith.core.mma import Mma
from gemmsmith.core.problem import MAX_EXTENT, SCALE_NAMES, Matrix, Problem, Scale
from gemmsmith.core.spec import EpilogueSpec, ScaleSpec
from gemmsmith.epilogue.device.inputs import operand_argument
from gemmsmith.epilogue.device.outputs import result_argument


def oriented(
    spec: EpilogueSpec, arguments: Mapping[str, ArrayInfo | float], shape: tuple[int, ...], output: DType,
    mma: Mma, promoted: bool, block_rows: Mapping[str, int], swapped: bool | None = None,
) -> tuple[Problem, bool, EpilogueSpec, dict[str, Matrix]]:  # fmt: skip
    """What the kernel computes, for a spec with the user's graph: D^T where `swapped`; None: whichever is faster."""
    graph, batch = spec.graph, shape[0] if len(shape) == 3 else 1
    arrays: dict[str, Matrix] = {}
    for operand in graph.operands:
        if isinstance(x := arguments[operand_argument(operand.name)], ArrayInfo):
            arrays[operand.name] = matrix_of(x, batch, operand.extent.is_matrix)
    for r in graph.results:
        if isinstance(x := arguments[result_argument(r.name)], ArrayInfo) and not graph.is_reduced(r):
            arrays[r.name] = matrix_of(x, batch)
    d = next(iter(graph.stored), "")
    a, b = (
        matrix_of(x, batch, dtype=dtype)  # of fp32 arrays TF32
        for x, dtype in ((arguments["a"], mma.a), (arguments["b"], mma.b))
        if isinstance(x, ArrayInfo)
    )
    of_d = arrays[d] if d else matrix_of(describe(Spec(shape, output)), batch)
    of_a, of_b = (
        Scale(operand_argument(name), matrix_of(x, batch), block_rows[name])
        if name in block_rows and isinstance(x := arguments[operand_argument(name)], ArrayInfo) else None
        for name in SCALE_NAMES
    )  # fmt: skip
    of_b = of_b and replace(of_b, matrix=of_b.matrix.T)
    problem = Problem(a, b, of_d, mma.d, promoted, (of_a, of_b), low_parts=promoted and mma.a == TF32)
    if graph.is_bare:
        problem = _folded(problem)
    if swapped is None:
        swapped = problem.d.canonical().column_major and graph.transposable
    if swapped:
        problem, arrays = problem.T, {name: x.T for name, x in arrays.items()}
        spec = spec.with_graph(graph.transposed())
    if graph.is_bare:
        problem = _folded(problem)
        arrays[d] = problem.d
    arrays |= {name: arrays[name].canonical() for name in spec.graph.matrices}
    problem = replace(problem, a=problem.a.canonical(), b=problem.b.canonical(), d=problem.d.canonical())
    return problem, swapped, spec.over(arrays), arrays


def matrix_of(x: ArrayInfo, batch: int, whole: bool = True, dtype: DType | None = None) -> Matrix:
    """An array as (rows, columns), stride 0 along what it is broadcast over: not those of a `whole` matrix. Its
    elements may be read as of another dtype."""
    missing = 3 - len(x.shape)
    own_batch, m, n = (1,) * missing + tuple(x.shape)
    batch_stride, rows, columns = (0,) * missing + tuple(x.strides)
    if not whole:
        rows, columns = rows * (m != 1), columns * (n != 1)
    stride = batch_stride * (batch > 1 and own_batch != 1)
    return Matrix(dtype or x.dtype, m, n, rows, columns, batch, stride, x.alignment)


def _folded(p: Problem) -> Problem:
    """The problem with its batch folded into M, if one row stride reaches all rows of a, of its scales and of d, and b
    and its scales are broadcast."""
    rows, (of_a, of_b) = p.batch * p.m, p.scales
    if p.batch <= 1 or p.b.batch_stride or not 0 < rows <= MAX_EXTENT or (of_b and of_b.matrix.batch_stride):
        return p
    a, d, scales = _stacked(p.a), _stacked(p.d), of_a and _stacked_scales(of_a, p.m)
    if a is None or d is None or (of_a and not scales):
        return p
    of_b = of_b and replace(of_b, matrix=replace(of_b.matrix, batch=1))
    return replace(p, a=a, b=replace(p.b, batch=1), d=d, scales=(scales, of_b))


def _stacked_scales(x: Scale, m: int) -> Scale | None:
    """None, too, where one scale would be for rows of two products, and where TMA reads the scales of the batch but
    could not read those of the stacked rows."""
    matrix = _stacked(x.matrix)
    found = replace(x, matrix=matrix) if matrix and m % x.rows == 0 else None
    before, after = ScaleSpec.of(x), ScaleSpec.of(found)
    return None if before and after and before.by_tma and not after.by_tma else found


def _stacked(x: Matrix) -> Matrix | None:
    row_stride = x.row_stride if x.rows > 1 else x.batch_stride
    if x.batch_stride <= 0 or x.batch_stride != x.rows * row_stride:
        return None
    return replace(x, rows=x.batch * x.rows, row_stride=row_stride, batch=1, batch_stride=0)
