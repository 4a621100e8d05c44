"""gemmsmith.torch.grouped_gemm: a differentiable grouped GEMM with a fused epilogue that can be compiled."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, overload

import torch

from gemmsmith.binding import checks
from gemmsmith.binding.request import Epilogue, Request
from gemmsmith.binding.results import arrange_results
from gemmsmith.core.errors import ARGUMENTS, ARGUMENTS_OF_GROUPS, ArgumentError
from gemmsmith.core.scalars import as_bools
from gemmsmith.graph.frontend.fingerprint import fingerprint
from gemmsmith.host.cached_run import record_runs, run_cached
from gemmsmith.torch.api import (
    Operand,
    OutDtype,
    Tensors,
    autocast,
    check_operands_are_read,
    check_tensor,
    combine_two,
    convert_results,
    is_fast_path,
    read_operands,
    refuse_arguments,
)
from gemmsmith.torch.autograd import differentiable_gemm, differentiable_slices
from gemmsmith.torch.backward_plan import numbers_and_tensors, result_names
from gemmsmith.torch.cached_call import cache_call
from gemmsmith.torch.fallback import FLOAT_DTYPES
from gemmsmith.torch.graph_serialization import ENTRY_SEPARATOR
from gemmsmith.torch.ops import by_rows, fp32_precision, rows_shape, slices_shape
from gemmsmith.torch.plain_tensors import in_groups, read_arguments, run_cached_call, run_or_call, sees_operators
from gemmsmith.torch.tracing import serialize_epilogue

_SUPPORTED_ARGUMENTS = {"epilogue", "operands", "out_dtype", "batch_invariant"}
_UNSUPPORTED_ARGUMENTS = frozenset({*ARGUMENTS, *ARGUMENTS_OF_GROUPS} - _SUPPORTED_ARGUMENTS)


@overload
def grouped_gemm(
    a: torch.Tensor, b: Tensors, *, offsets: torch.Tensor, along: Literal["m", "k"] = "m", epilogue: None = None,
    recompute: bool = False, out_dtype: OutDtype = None, operands: Mapping[str, Operand] | None = None,
    **named: Operand,
) -> torch.Tensor: ...  # fmt: skip


@overload
def grouped_gemm(
    a: torch.Tensor, b: Tensors, *, offsets: torch.Tensor, along: Literal["m", "k"] = "m",
    epilogue: Epilogue | None = None, recompute: bool = False, out_dtype: OutDtype = None,
    operands: Mapping[str, Operand] | None = None, **named: Operand,
) -> Any: ...  # fmt: skip


def grouped_gemm(
    a: torch.Tensor, b: Tensors, *, offsets: torch.Tensor, along: Literal["m", "k"] = "m",
    epilogue: Epilogue | None = None, recompute: bool = False, out_dtype: OutDtype = None,
    operands: Mapping[str, Operand] | None = None, **named: Operand,
) -> Any:  # fmt: skip
    """Differentiable product for each of several groups; works with autograd and torch.compile.

    Args:
        a: (m, k), bf16, fp16, fp32, or float64 on the CPU; rows of a group follow one another. Along K on a GPU fp32 is
            multiplied by PyTorch, one group after the other, whose sizes the host waits for.
        b: (groups, k, n); (k, n) along K. Along M also a tuple of two, as in gemmsmith.torch.gemm.
        offsets: (groups,), int32, on a's device: the ends of the groups, as in torch.nn.functional.grouped_mm. They are
            not read on the host.
        along: "m": row i is multiplied by the matrix of its group, to (m, n); rows behind the last group are zero.
            "k": each group has a slice of K, to (groups, m, n).
        epilogue: a function of the product and of operands by name, as in gemmsmith.torch.gemm; along M only, and
            without reductions.
        recompute: as in gemmsmith.torch.gemm.
        out_dtype: as in gemmsmith.torch.gemm; along M only.
        operands: operands whose names are also arguments of this function.
        **named: the other operands, of shapes (), (n,), (m, 1) or (m, n).

    Returns:
        A tensor, a tuple or a dict, as the function returns.

    Raises:
        ArgumentError: an argument, which the message names, is not valid.
        EpilogueError: the function is not a valid epilogue, or has no gradient.
    """
    if along not in ("m", "k"):
        raise ArgumentError(f'along: got {along!r}; use "m" or "k"')
    if recompute is not False:
        (recompute,) = as_bools(recompute=recompute)
    values = checks.merge_operands(operands, named)
    if named and not _UNSUPPORTED_ARGUMENTS.isdisjoint(named):
        refuse_arguments("grouped_gemm", named, _UNSUPPORTED_ARGUMENTS)
    of_two = ()
    if isinstance(b, tuple):
        b = combine_two(a, b, *values.values())
        of_two, b = (b, b[0]) if isinstance(b, tuple) else ((), b)
    a, b = autocast(a, b)
    arguments = None
    if not (of_two or along == "k" or sees_operators()):
        arguments = read_arguments(fingerprint(epilogue), (recompute, out_dtype), a, b, values, offsets)
        if (cached := run_cached_call(arguments, a, b, values, offsets)) is not None:
            return cached
    _check_tensors(a, b, offsets)
    if of_two and along == "k":
        raise ArgumentError('b: got a tuple with along="k"; use one tensor')
    if along == "k":
        if epilogue is not None or values:
            raise ArgumentError('epilogue: got one with along="k"; use along="m", or apply it to the result')
        if out_dtype is not None:
            raise ArgumentError(f'out_dtype: got {out_dtype} with along="k"; use along="m", or convert the result')
        slices_shape(a.shape, b.shape, offsets.shape)
        return differentiable_slices(a, b, offsets)
    shape = rows_shape(a.shape, b.shape, offsets.shape)
    if of_two or is_fast_path(a, b, *values.values()):
        values, source = {name: by_rows(x) for name, x in values.items()}, arguments and arguments.source
        fields = None, values, epilogue, None, None, out_dtype
        request = Request(a, of_two or b, *fields, precision=fp32_precision(a), fingerprint=source)
        return run_or_call(arguments, a, partial(run_cached, in_groups(request, offsets)))
    check_operands_are_read(epilogue, values)
    values, signature = read_operands(values, a, shape)
    serialized = serialize_epilogue(epilogue, shape, signature, (), None if arguments is None else arguments.source)
    if out_dtype is not None:
        serialized = convert_results(serialized, out_dtype, a)
    if f"{ENTRY_SEPARATOR}reduce " in serialized:
        raise ArgumentError("epilogue: got a reduction, which has no gradient here; use gemmsmith.grouped_gemm")
    run = partial(differentiable_gemm, serialized, a, b, *numbers_and_tensors(serialized, values), recompute, offsets)
    results, runs = (run(), []) if arguments is None else record_runs(run)
    names = result_names(serialized)
    if arguments is not None and arguments.call.needs_grad:
        cache_call(arguments, runs, serialized, a, b, values, recompute, results, names)
    return arrange_results(dict(zip(names, results, strict=True)), names)


def _check_tensors(a: Any, b: Any, offsets: Any) -> None:
    """Raise ArgumentError for tensors of layouts, devices or dtypes that a grouped GEMM does not multiply."""
    for name, x in (("a", a), ("b", b), ("offsets", offsets)):
        check_tensor(name, x, a)
    if offsets.dtype != torch.int32:
        raise ArgumentError(f"offsets: got {offsets.dtype}; use torch.int32")
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in FLOAT_DTYPES or x.dtype != a.dtype:
            raise ArgumentError(f"{name}: got {x.dtype}; use bf16, fp16 or fp32, the same for a and b")
