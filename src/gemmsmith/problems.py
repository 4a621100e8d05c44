"""From arrays to a `Problem`: torch.matmul's shape rules for matrices and batches, and every check of arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from gemmsmith.arrays import ArrayInfo, describe, overlap, row_major
from gemmsmith.core.dtypes import BF16, FP16, FP32, DType, as_dtype
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.problem import MAX_EXTENT, Matrix, Problem


class Formulation(NamedTuple):
    """A problem, and how it relates to the arrays it was made from.

    `swapped`: the problem is D^T = B^T @ A^T, so its `a` lies at b's address and its `b` at a's. `shape` is the
    shape that `out` has for the caller, `output` its dtype.
    """

    problem: Problem
    swapped: bool
    shape: tuple[int, ...]
    output: DType


def problem_of(a: Any, b: Any, out: Any = None, out_dtype: Any = None, accumulate: Any = "fp32") -> Problem:
    """The `problem` of `formulate`, without the relation to the arrays."""
    return formulate(a, b, out, out_dtype, accumulate).problem


def formulate(
    a: Any, b: Any, out: Any = None, out_dtype: Any = None, accumulate: Any = "fp32", *, literal: bool = False,
    swap_ab: bool = False,
) -> Formulation:  # fmt: skip
    """What `out = a @ b` is as a problem of strided matrices, with everything checked.

    Shapes, as in torch.matmul: (m, k) @ (k, n) -> (m, n); with a batch on either side or both, (batch, m, k) @
    (batch, k, n) -> (batch, m, n), where a batch of 1, or none, is broadcast (stride 0). Extents may be 0.
    a and b are arrays, Specs or ArrayInfos, both bf16 or both fp16, of any strides >= 0; accumulate is "fp32", or
    "fp16" for fp16 operands. out, if given, has exactly the result's shape, can be written, has no element twice
    and shares no byte with a or b; its dtype is out_dtype (bf16, fp16, fp32; default: out's, or the operands').

    Two changes make the problem faster. A column-major out becomes `Problem.T`, so that
    the kernel's D has unit column stride whenever out has a unit stride. And where b is the same for the whole
    batch and the batch continues the rows of a and out, it is folded into M: one problem of batch * m rows. `literal`
    leaves both to the caller; `swap_ab` takes the other of the problem and its transpose.

    Raises ArgumentError, naming the argument, what was given and what would work.
    """
    a_info, b_info = describe(a, "a"), describe(b, "b")
    out_info = None if out is None else describe(out, "out")
    accumulator = _check_dtypes(a_info, b_info, accumulate)
    output = _output_dtype(a_info, out_info, out_dtype)
    shape = _result_shape(a_info, b_info)
    for name, info in (("a", a_info), ("b", b_info), ("out", out_info)):
        if info is not None:
            _check_memory(name, info)
    if shape and shape[0] > MAX_EXTENT:
        raise ArgumentError(f"a, b: the result's batch is {shape[0]}; use at most {MAX_EXTENT}")
    _check_places({"a": a_info, "b": b_info} | ({"out": out_info} if out_info else {}))
    if out_info is None:
        out_info = ArrayInfo(output, shape, row_major(shape), 0, a_info.device, a_info.index, True)
    else:
        _check_out(out_info, shape, a_info, b_info)

    batch = shape[0] if len(shape) == 3 else 1
    problem = Problem(_matrix(a_info, batch), _matrix(b_info, batch), _matrix(out_info, batch), accumulator)
    if literal:
        return Formulation(problem, False, shape, output)
    problem = _folded(problem)
    swapped = (problem.d.canonical().contiguous == "rows") != swap_ab
    if swapped:
        problem = _folded(problem.T)
    problem = replace(problem, a=problem.a.canonical(), b=problem.b.canonical(), d=problem.d.canonical())
    return Formulation(problem, swapped, shape, output)


# -- checks --------------------------------------------------------------------------------------------------------


def _check_dtypes(a: ArrayInfo, b: ArrayInfo, accumulate: Any) -> DType:
    for name, info in (("a", a), ("b", b)):
        if info.dtype not in (BF16, FP16):
            raise ArgumentError(f"{name}: got dtype {info.dtype}; operands are bf16 or fp16")
    if a.dtype != b.dtype:
        raise ArgumentError(f"b: got dtype {b.dtype} with a of {a.dtype}; use the same for both")
    try:
        accumulator = as_dtype(accumulate, "accumulate")
    except ArgumentError:
        raise ArgumentError(f"accumulate: got {accumulate!r}; use fp32, or fp16 for fp16 operands") from None
    if accumulator == FP16 and a.dtype != FP16:
        raise ArgumentError(
            f"accumulate: got fp16 for operands of {a.dtype}, and no such instruction exists; "
            "use fp32, or fp16 operands"
        )
    if accumulator not in (FP16, FP32):
        raise ArgumentError(f"accumulate: got {accumulator}; use fp32, or fp16 for fp16 operands")
    return accumulator


def _output_dtype(a: ArrayInfo, out: ArrayInfo | None, out_dtype: Any) -> DType:
    if out is not None and out.dtype.is_integer:
        raise ArgumentError(f"out: got dtype {out.dtype}; use bf16, fp16 or fp32")
    if out_dtype is None:
        return a.dtype if out is None else out.dtype
    output = as_dtype(out_dtype, "out_dtype")
    if out is not None and out.dtype != output:
        raise ArgumentError(f"out: got dtype {out.dtype} with out_dtype {output}; use one of them, or the same")
    return output


def _result_shape(a: ArrayInfo, b: ArrayInfo) -> tuple[int, ...]:
    for name, info, want in (("a", a, "(m, k) or (batch, m, k)"), ("b", b, "(k, n) or (batch, k, n)")):
        if len(info.shape) not in (2, 3):
            hint = "; a vector needs a dimension of 1" if len(info.shape) == 1 else ""
            raise ArgumentError(f"{name}: got shape {tuple(info.shape)}; use {want}{hint}")
    if a.shape[-1] != b.shape[-2]:
        raise ArgumentError(
            f"b: got shape {tuple(b.shape)}, whose k is {b.shape[-2]}, with a of shape {tuple(a.shape)}, "
            f"whose k is {a.shape[-1]}; use the same k"
        )
    batches = {info.shape[0] for info in (a, b) if len(info.shape) == 3}
    if len(batches - {1}) > 1:
        raise ArgumentError(
            f"b: got a batch of {b.shape[0]} with a's batch of {a.shape[0]}; use the same, or 1 on either side"
        )
    batch = (max(batches - {1}, default=1),) if batches else ()
    return (*batch, a.shape[-2], b.shape[-1])


def _check_memory(name: str, x: ArrayInfo) -> None:
    if any(n > MAX_EXTENT for n in x.shape):
        raise ArgumentError(f"{name}: got shape {tuple(x.shape)}; use extents of at most {MAX_EXTENT}")
    if any(s < 0 and n > 1 for n, s in zip(x.shape, x.strides, strict=True)):
        raise ArgumentError(f"{name}: got strides {tuple(x.strides)}; use strides >= 0, for instance a copy")
    if sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True) if n) * x.itemsize >= 2**63:
        raise ArgumentError(f"{name}: got shape {tuple(x.shape)}, strides {tuple(x.strides)}; use less than 2^63 bytes")
    if x.address % x.itemsize:
        raise ArgumentError(f"{name}: got address {x.address:#x}; use a multiple of the element's {x.itemsize} bytes")


def _check_places(infos: dict[str, ArrayInfo]) -> None:
    places = {name: info.place for name, info in infos.items() if info.device != "spec"}
    if len(set(places.values())) > 1:
        listed = ", ".join(f"{name} on {place}" for name, place in places.items())
        raise ArgumentError(f"{', '.join(places)}: got {listed}; use arrays of one device")


def _check_out(out: ArrayInfo, shape: tuple[int, ...], a: ArrayInfo, b: ArrayInfo) -> None:
    if tuple(out.shape) != shape:
        raise ArgumentError(f"out: got shape {tuple(out.shape)}; use {shape}")
    if not out.writable:
        raise ArgumentError("out: got a read-only array; use one that can be written")
    reach = 0
    for stride, extent in sorted(zip(out.strides, out.shape, strict=True)):
        if extent > 1 and 0 not in shape:
            if stride <= reach:
                raise ArgumentError(
                    f"out: got strides {tuple(out.strides)} for shape {shape}, which may put elements on the same "
                    "memory; use an array without overlap"
                )
            reach += (extent - 1) * stride
    for name, operand in (("a", a), ("b", b)):
        if overlap(out, operand):
            raise ArgumentError(f"out: shares memory with {name}; use an array of its own")


# -- layout --------------------------------------------------------------------------------------------------------


def _matrix(x: ArrayInfo, batch: int) -> Matrix:
    *outer, rows, cols = x.shape
    own_batch = outer[0] if outer else 1
    stride = x.strides[0] if own_batch > 1 else 0
    return Matrix(x.dtype, rows, cols, x.strides[-2], x.strides[-1], batch, stride, x.alignment)


def _folded(p: Problem) -> Problem:
    """The problem with its batch folded into M, if one row stride reaches all rows of a and d, and b is broadcast."""
    rows = p.batch * p.m
    if p.batch <= 1 or p.b.batch_stride or not 0 < rows <= MAX_EXTENT:
        return p
    a, d = _stacked(p.a), _stacked(p.d)
    return p if a is None or d is None else replace(p, a=a, b=replace(p.b, batch=1), d=d)


def _stacked(x: Matrix) -> Matrix | None:
    row_stride = x.row_stride if x.rows > 1 else x.batch_stride
    if x.batch_stride <= 0 or x.batch_stride != x.rows * row_stride:
        return None
    return replace(x, rows=x.batch * x.rows, row_stride=row_stride, batch=1, batch_stride=0)
