"""PyTorch operators that compute a GEMM with a fused epilogue: gemmsmith::gemm_{o}, also of groups, and grouped_gemm_k.

    gemm_{o}(Tensor a, Tensor b, Tensor? b2, Tensor? offsets, int key, str epilogue, float[] numbers, Tensor[] operands)
        -> Tensor, ...
    grouped_gemm_k(Tensor a, Tensor b, Tensor offsets) -> Tensor

gemm_{o} has o results. a is (m, k) or (batch, m, k), b (k, n) or (batch, k, n). `epilogue` is a serialized graph. `key`
is a hash of `epilogue`, placed first because DTensor's sharding cache only looks at arguments after the first int.
`numbers` and `operands` are the epilogue's operands that are Python numbers and that are tensors, in the graph's order.
Results have the strides of gemmsmith.gemm's. With `b2` the product is that by the columns of b and b2, which alternate
in groups of 8. With `offsets` (groups,), int32, the ends of groups, rows of a (m, k) are multiplied by their group's
matrix of b (groups, k, n); rows of the results behind the last group are zero.

grouped_gemm_k returns (groups, m, n), a[:, slice] @ b[slice] for each group's slice of K.

On a Hopper GPU the operators run gemmsmith.gemm and grouped_gemm, except for fp32 along K. On other GPUs they run
PyTorch's operations, and on the CPU the float64 reference; both compute one group after the other, and the host reads
the groups' sizes. If a is float64, what is fp32 otherwise is float64, and nothing else is rounded.
torch.set_float32_matmul_precision selects how fp32 operands are multiplied: "highest" by 3xTF32, otherwise by TF32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from gemmsmith.arrays import as_numpy
from gemmsmith.backends.reference.epilogue import execute
from gemmsmith.backends.reference.matmul import matmul_float64, rounded, wrap_int32
from gemmsmith.binding.request import Request
from gemmsmith.binding.results import result_shape, result_strides
from gemmsmith.core.dtypes import BF16, FP16, FP32, INT8, INT32, DType, as_dtype
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import EpilogueGraph, Result, reduced_dims
from gemmsmith.core.problem import MAX_STRIDE_BYTES, TMA_ALIGNMENT_BYTES
from gemmsmith.graph.frontend.interleave import interleave
from gemmsmith.host.cached_run import run_cached
from gemmsmith.torch import fallback, graph_serialization, sharding
from gemmsmith.torch.define_op import LIBRARY, below_autograd, define_op
from gemmsmith.torch.dynamo import assume_constant_result
from gemmsmith.torch.fallback import TORCH_DTYPES
from gemmsmith.torch.plain_tensors import (
    TENSOR_TYPES,
    in_groups,
    multiplies_in_tf32,
    read_arguments,
    run_or_call,
    runs_kernels,
    sees_operators,
)

MAX_OPERANDS = 8
"""Tensors that an epilogue may read, at most. Chosen; not measured."""
MAX_RESULTS = 4
"""Results that an epilogue may have, at most. Chosen; not measured."""


def call_op(
    epilogue: str, a: Any, b: Any, numbers: Sequence[float] = (), operands: Sequence[Any] = (), offsets: Any = None
) -> Any:
    """Return the results of the operator for an epilogue: a tensor or a tuple of tensors.

    Args:
        epilogue: the serialized epilogue.
        a: (m, k) or (batch, m, k).
        b: (k, n), (batch, k, n), or (groups, k, n) with offsets; or a tuple of two such, whose columns alternate.
        numbers: the epilogue's operands that are numbers, in the graph's order.
        operands: the epilogue's operands that are tensors, in the graph's order.
        offsets: (groups,), the ends of groups of rows, or None.
    """
    return run_or_dispatch(
        epilogue, a, b, numbers, operands, lambda: _dispatch(epilogue, a, b, numbers, operands, offsets), offsets
    )


def run_or_dispatch(
    epilogue: str, a: Any, b: Any, numbers: Sequence[float], operands: Sequence[Any], dispatch: Callable[[], Any],
    offsets: Any = None,
) -> Any:  # fmt: skip
    """Return the operator's results: without torch's dispatcher if nothing sees the operator, else by `dispatch`.

    `dispatch` calls the operator. The others are the arguments of `call_op`.
    """
    if sees_operators() or not runs_kernels(a):
        return dispatch()
    if isinstance(b, tuple):
        launches = all(type(x) in TENSOR_TYPES and x.device == a.device for x in (a, *b, *operands))
        return _launch(epilogue, a, b, offsets, numbers, operands) if launches else dispatch()
    values = operands_by_name(graph_serialization.deserialize(epilogue), numbers, operands)
    arguments = read_arguments(epilogue, offsets is None, a, b, values, offsets)
    return as_outputs(run_or_call(arguments, a, dispatch))


def _dispatch(epilogue: str, a: Any, b: Any, numbers: Sequence[float], operands: Sequence[Any], offsets: Any) -> Any:
    num_outputs, key = op_signature(epilogue)
    b, b2 = b if isinstance(b, tuple) else (b, None)
    arguments = a, b, b2, offsets, key, epilogue, list(numbers), list(operands)
    if torch.compiler.is_dynamo_compiling() or torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return OPERATORS[num_outputs](*arguments)
    return below_autograd(OPERATORS[num_outputs], *arguments)  # no gradients, or within an autograd.Function


@assume_constant_result
def op_signature(epilogue: str) -> tuple[int, int]:
    """Return a serialized epilogue's number of results, which selects its operator, and the operator's argument key.

    Also registers the operators with DTensor, if that has been imported. Raises ArgumentError if there are too many
    operands or results.
    """
    sharding.register(list(OPERATORS.values()))
    return _op_signature(epilogue)


@lru_cache(maxsize=1024)
def _op_signature(epilogue: str) -> tuple[int, int]:
    """Return the number of results of a serialized epilogue, and its digest. Raises ArgumentError beyond the limits."""
    graph = graph_serialization.deserialize(epilogue)
    num_inputs, num_outputs = len(graph.tensor_names), len(graph.results)
    if num_inputs > MAX_OPERANDS:
        raise ArgumentError(f"operands: got {num_inputs} tensors; use at most {MAX_OPERANDS}")
    if num_outputs > MAX_RESULTS:
        raise ArgumentError(f"epilogue: got a function with {num_outputs} results; use at most {MAX_RESULTS}")
    return num_outputs, graph_serialization.digest(epilogue)


def matmul_shape(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return (m, n) or (batch, m, n) for a and b of these shapes. Raises ArgumentError if they do not match."""
    is_valid = len(a) in (2, 3) and len(b) in (2, 3) and a[-1] == b[-2]
    batch: tuple[Any, ...] = tuple([shape[0] for shape in (a, b) if len(shape) == 3])
    if len(batch) == 2:
        is_valid = is_valid and (batch[0] == batch[1] or batch[0] == 1 or batch[1] == 1)
        batch = (batch[1] if batch[0] == 1 else batch[0],)
    if not is_valid:
        raise ArgumentError(
            f"a, b: got shapes {tuple(a)} and {tuple(b)}; use (m, k) and (k, n), a batch in front of either"
        )
    return (*batch, a[-2], b[-1])


def rows_shape(a: tuple[Any, ...], b: tuple[Any, ...], offsets: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the shape (m, n) of a product by groups of rows. Raises ArgumentError if the inputs' do not match."""
    if len(a) != 2 or len(b) != 3 or a[1] != b[1] or len(offsets) != 1 or offsets[0] != b[0]:
        raise ArgumentError(
            f"a, b, offsets: got shapes {tuple(a)}, {tuple(b)} and {tuple(offsets)}; use (m, k), (groups, k, n) and "
            "(groups,)"
        )
    return a[0], b[2]


def slices_shape(a: tuple[Any, ...], b: tuple[Any, ...], offsets: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the shape (groups, m, n) of products by slices of K. Raises ArgumentError if the inputs' do not match."""
    if len(a) != 2 or len(b) != 2 or a[1] != b[0] or len(offsets) != 1:
        raise ArgumentError(
            f"a, b, offsets: got shapes {tuple(a)}, {tuple(b)} and {tuple(offsets)}; use (m, k), (k, n) and (groups,)"
        )
    return offsets[0], a[0], b[1]


def result_dtype(graph: EpilogueGraph, result: Result, a: torch.dtype) -> torch.dtype:
    """Return torch's dtype of a result of an epilogue, for an a of dtype `a`."""
    is_reduction_or_scale = graph.nodes[result.node].op in ("reduce", "scale")
    if a == torch.float64:
        return a if result.dtype in (None, FP32) else TORCH_DTYPES[result.dtype]
    default = FP32 if is_reduction_or_scale else _default_matrix_dtype(graph, as_dtype(a, "a", allow_integers=True))
    return TORCH_DTYPES[result.dtype or default]


def _default_matrix_dtype(graph: EpilogueGraph, a: DType) -> DType:
    """Return the dtype of matrix results for which the graph sets none, as in gemmsmith.gemm; `a`: a's dtype."""
    if a == INT8:
        return INT32 if graph.is_identity else BF16
    return a if a in (BF16, FP16, FP32) else BF16


def _fake_kernel(a: Any, b: Any, b2: Any, offsets: Any, key: int, epilogue: str, *_: Any) -> Any:
    """Return empty tensors of the results' shapes, dtypes and strides: gemm_{o} on fake tensors and on meta."""
    graph, b = graph_serialization.deserialize(epilogue), _interleaved(b, b2)
    shape = matmul_shape(a.shape, b.shape) if offsets is None else rows_shape(a.shape, b.shape, offsets.shape)
    results = []
    for r in graph.results:
        of_result, dtype = result_shape(graph, r, shape), result_dtype(graph, r, a.dtype)
        strides = result_strides(graph, r, of_result)
        results.append(
            a.new_empty_strided(of_result, strides, dtype=dtype) if strides else a.new_empty(of_result, dtype=dtype)
        )
    return _one_or_tuple(results)


def _cpu_kernel(
    a: Any, b: Any, b2: Any, offsets: Any, key: int, epilogue: str, *numbers_and_operands: Any
) -> Any:  # fmt: skip
    """Compute the results of gemm_{o} on the CPU: in float64 by the reference, rounded to the results' dtypes.

    With groups PyTorch's operations compute them.
    """
    graph, b = graph_serialization.deserialize(epilogue), _interleaved(b, b2)
    if offsets is not None:
        return run_by_torch(epilogue, a, b, offsets, *numbers_and_operands)
    results = _fake_kernel(a, b, None, None, key, epilogue)
    by_name = operands_by_name(graph, *numbers_and_operands)
    operand_values = {name: x if isinstance(x, float) else _as_float64(x) for name, x in by_name.items()}
    accumulator = matmul_float64(_as_float64(a), _as_float64(b))
    values = execute(graph, wrap_int32(accumulator) if a.dtype == torch.int8 else accumulator, operand_values)
    for r, out in zip(graph.results, as_tuple(results), strict=True):
        if out.dtype == torch.float64:
            out.numpy()[...] = values[r.name]
        else:
            as_numpy(out)[...] = rounded(values[r.name], as_dtype(out.dtype, allow_integers=True))
    return results


def _cuda_kernel(a: Any, b: Any, b2: Any, offsets: Any, key: int, epilogue: str, *numbers_and_operands: Any) -> Any:
    if fallback.kernels_unsupported(a.get_device()):
        return run_by_torch(epilogue, a, _interleaved(b, b2), offsets, *numbers_and_operands)
    return _launch(epilogue, a, b if b2 is None else (b, b2), offsets, *numbers_and_operands)


def decompose(
    a: Any, b: Any, b2: Any, offsets: Any, key: int, epilogue: str, numbers: Sequence[float], operands: Sequence[Any]
) -> Any:
    """Compute gemm_{o} for `decompositions`: on the CPU, too, as torch.matmul multiplies."""
    return run_by_torch(epilogue, a, _interleaved(b, b2), offsets, numbers, operands, _multiply_recorded)


def _launch(epilogue: str, a: Any, b: Any, offsets: Any, numbers: Sequence[float], operands: Sequence[Any]) -> Any:
    """Return the results of the operator by gemmsmith.gemm, or grouped_gemm. The arguments are those of `call_op`."""
    b = read_together(*b) if isinstance(b, tuple) else b
    graph = graph_serialization.deserialize(epilogue)
    return as_outputs(run_cached(as_request(graph, a, b, numbers, operands, offsets)))


def _lengths(offsets: Any, extent: int) -> list[int]:
    """Copy the groups' ends to the host, and return the rows (or K) of each group, and last those of none.

    Raises ArgumentError if the ends decrease, or exceed `extent`, the number of rows (or K) that the groups divide.
    """
    ends = offsets.tolist()
    lengths = [end - begin for begin, end in zip([0, *ends], [*ends, extent], strict=True)]
    if any(isinstance(end, torch.SymInt) for end in ends):
        for length in lengths:
            torch._check(length >= 0)  # by the program that is recorded, when it runs
    elif min(lengths) < 0:
        raise ArgumentError(f"offsets: got {ends} for {extent} rows; use ends that do not decrease")
    return lengths


def _matmul(a: Any, b: Any) -> Any:
    """Return a @ b by PyTorch: in float64 on the CPU, otherwise as `fallback.matmul`."""
    return a.double() @ b.double() if a.device.type == "cpu" else fallback.matmul(a, b)


def _multiply(a: Any, b: Any, offsets: Any, matmul: Any = _matmul) -> Any:
    """Return a @ b, with groups by one product after the other; rows behind the last group are zero."""
    if offsets is None:
        return matmul(a, b)
    m, _ = rows_shape(a.shape, b.shape, offsets.shape)
    *lengths, rest = _lengths(offsets, m)
    products = map(matmul, a[: m - rest].split(lengths), b)
    return torch.nn.functional.pad(torch.cat([*products]), (0, 0, 0, rest))


def _multiply_recorded(a: Any, b: Any, offsets: Any) -> Any:
    """Do the same in a program, on the CPU, too, as torch multiplies; groups in bf16 at once if their rows allow it."""
    strides = [x for x in (*a.stride(), *b.stride()) if x != 1]
    # AOTInductor calls it from torch 2.14 on, on rows that are aligned to 16 bytes.
    if offsets is None or a.dtype != torch.bfloat16 or any(x % 8 for x in strides) or torch.__version__ < (2, 14):
        return _multiply(a, b, offsets, fallback.matmul)
    return torch.where(_is_in_group(a, offsets), torch._grouped_mm(a, b, offs=offsets).float(), 0)


def _is_in_group(a: Any, offsets: Any) -> Any:
    """Return (m, 1): whether rows of a are in a group."""
    return torch.arange(a.shape[0], device=a.device).unsqueeze(1) < offsets[-1]


def run_by_torch(
    epilogue: str, a: Any, b: Any, offsets: Any, numbers: Sequence[float], operands: Sequence[Any],
    multiply: Callable[[Any, Any, Any], Any] = _multiply,
) -> Any:  # fmt: skip
    """Return the results of the operator by PyTorch's operations.

    The arguments are those of `call_op`, with one tensor b. `multiply` returns the accumulator of a, b and offsets.
    """
    graph, accumulator = graph_serialization.deserialize(epilogue), multiply(a, b, offsets)
    values = fallback.evaluate_graph(graph, accumulator, operands_by_name(graph, numbers, operands))
    if offsets is not None:
        is_in_group = _is_in_group(a, offsets)
        for r in graph.results:
            x = values[r.name]
            if not (graph.is_reduction(r) and "m" in reduced_dims(graph.nodes[r.node].attribute[1])):
                values[r.name] = torch.where(is_in_group if x.dim() > 1 else is_in_group[:, 0], x, 0)
    results = [fallback.round_to_dtype(values[r.name], result_dtype(graph, r, a.dtype)) for r in graph.results]
    return _one_or_tuple([x.contiguous() for x in results])


def as_request(
    graph: EpilogueGraph, a: Any, b: Any, numbers: Sequence[float], operands: Sequence[Any], offsets: Any = None
) -> Request:
    """Return the request of gemmsmith.gemm, or of grouped_gemm, that computes a call of the operator.

    `graph`: the epilogue; one that only returns the accumulator is requested without an epilogue. The others are the
    arguments of `call_op`.
    """
    output = graph.results[0].dtype
    if graph.is_identity and output in (None, BF16, FP16, FP32):
        request = Request(a, b, out_dtype=output, precision=fp32_precision(a))
    else:
        operands = operands if offsets is None else [by_rows(x) for x in operands]
        by_name = operands_by_name(graph, numbers, operands)
        request = Request(a, b, operands=by_name, epilogue=graph, precision=fp32_precision(a))
    return request if offsets is None else in_groups(request, offsets)


def as_outputs(results: Any) -> Any:
    """Return the results of gemmsmith.gemm (a tensor, a tuple or a dict) as the operator does: a tensor or a tuple."""
    return tuple(results.values()) if isinstance(results, dict) else results


def _one_or_tuple(results: Sequence[Any]) -> Any:
    return tuple(results) if len(results) > 1 else results[0]


def as_tuple(results: Any) -> tuple[Any, ...]:
    """Return the results of gemmsmith.gemm, or of an operator, as a tuple."""
    outputs = as_outputs(results)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def by_rows(x: Any) -> Any:
    """Return a tensor operand (n,) or (m, n) of gemmsmith.grouped_gemm as (1, 1, n) or (1, m, n), others as they are.

    With three dimensions it is one for all groups. With fewer, if n or m is the number of groups, grouped_gemm would
    take it as a value or a row for each group.
    """
    return x.reshape((1,) * (3 - x.dim()) + x.shape) if isinstance(x, torch.Tensor) and 0 < x.dim() < 3 else x


def read_together(b: Any, b2: Any) -> Any:
    """Return the tuple (b, b2) if TMA can read both as one operand, else one copy whose columns are theirs in turns."""
    return (b, b2) if can_read_together(b, b2) else interleave(b, b2)


def can_read_together(b: Any, b2: Any) -> bool:
    """Return whether one tensor map can address two operands b whose columns alternate.

    That needs equal strides, contiguous columns, strides and addresses that are multiples of 16 bytes, elements of less
    than 4 bytes, and a distance that is a valid stride.
    """
    strides = (b.stride(-1), *b.stride()[:-2])
    is_aligned = not (b.data_ptr() | b2.data_ptr() | b.element_size() * math.gcd(*strides)) % TMA_ALIGNMENT_BYTES
    reads_both = b.stride() == b2.stride() and b.stride(-2) == 1 and is_aligned and b.element_size() < 4
    return reads_both and 0 < abs(b.data_ptr() - b2.data_ptr()) < MAX_STRIDE_BYTES


def _interleaved(b: Any, b2: Any) -> Any:
    """Return b if b2 is None, else a copy of both in one tensor whose columns are theirs in turns."""
    return b if b2 is None else interleave(b, b2)


def operands_by_name(graph: EpilogueGraph, numbers: Sequence[float], operands: Sequence[Any]) -> dict[str, Any]:
    """Return an operator's numbers and tensors by the names of the epilogue's operands."""
    numbers_, tensors = iter(numbers), iter(operands)
    return {o.name: next(numbers_ if o.dtype is None else tensors) for o in graph.operands}


def fp32_precision(a: Any) -> str | None:
    """Return gemmsmith.gemm's argument `precision`: by torch's setting if a is fp32, else None."""
    if a.dtype != torch.float32:
        return None
    return "tf32" if multiplies_in_tf32() else "3xtf32"


def _as_float64(x: Any) -> Any:
    # The array is a copy: torch cannot resize storage that numpy refers to, which FSDP does.
    x = x.detach().resolve_neg()
    return x.clone().numpy() if x.dtype == torch.float64 else as_numpy(x).astype(np.float64)


def _count_flops(a: Any, b: Any, b2: Any = None, offsets: Any = None, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a call of gemm_{o}, from the shapes of its tensors; with groups, as if all rows had one."""
    batch = max((shape[0] for shape in (a, b) if len(shape) == 3), default=1) if offsets is None else 1
    return 2 * int(batch) * int(a[-2]) * int(a[-1]) * int(b[-1]) * (1 if b2 is None else 2)


def _define_gemm(results: int) -> Any:
    returns = ", ".join(["Tensor"] * results)
    op = define_op(
        f"gemm_{results}(Tensor a, Tensor b, Tensor? b2, Tensor? offsets, int key, str epilogue, float[] numbers, "
        f"Tensor[] operands) -> {returns if results == 1 else f'({returns})'}", _fake_kernel, _cpu_kernel, _cuda_kernel,
        _count_flops, decompose,
    )  # fmt: skip
    _define_batching(op)
    return op


def _define_batching(op: Any) -> None:
    """Let vmap run an operator once for each element of a batch: torch's own fallbacks take no lists of tensors."""

    def run_each(size: int, dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> list[Any]:
        """Return the results of `size` calls, stacked along dimension 0. `dims`: see `_element`."""
        each = [as_tuple(op(*_element(arguments, dims, i))) for i in range(size)]
        return [torch.stack(x) for x in zip(*each, strict=True)]

    def in_vmap(info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        results = run_each(info.batch_size, dims, arguments)
        return _one_or_tuple(results), _one_or_tuple([0] * len(results))

    def in_batched_backward(*arguments: Any) -> Any:  # of autograd's is_grads_batched, which has a vmap of its own
        """Run the operator where autograd.grad(..., is_grads_batched=True) wraps a batch of gradients in one tensor.

        That is torch's older vmap, which calls the kernel of the dispatch key Batched with wrapped tensors. They are
        unwrapped here, and the results are wrapped again.
        """
        # The current nesting level
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        is_batched = torch._C._functorch.is_legacy_batchedtensor
        tensors, (*others, operands) = arguments[:4], arguments[4:]
        dims = [0 if x is not None and is_batched(x) else None for x in (*tensors, *operands)]
        plain = [
            x if dim is None else torch._remove_batch_dim(x, level, 1, 0)
            for x, dim in zip((*tensors, *operands), dims, strict=True)
        ]
        size = next(x.shape[0] for x, dim in zip(plain, dims, strict=True) if dim is not None)
        results = run_each(size, (*dims[:4], *[None] * 3, dims[4:]), (*plain[:4], *others, plain[4:]))
        return _one_or_tuple([torch._add_batch_dim(x, 0, level) for x in results])

    torch.library.register_vmap(op, in_vmap, lib=LIBRARY)
    LIBRARY.impl(op.overloadpacket.__name__, in_batched_backward, "Batched")


def _element(x: Any, dim: Any, i: int) -> Any:
    """Return element i of a batch of arguments x. `dim`: the batch dimension of x, or None if x is not batched.

    If x is a list (or tuple), so is `dim`, with the dimension of each of its elements, and the result.
    """
    if isinstance(dim, (list, tuple)):
        return [_element(y, d, i) for y, d in zip(x, dim, strict=True)]
    return x if dim is None else x.select(dim, i)


OPERATORS = {results: _define_gemm(results) for results in range(1, MAX_RESULTS + 1)}
"""The operators by their numbers of results."""


# -- along K ---------------------------------------------------------------------------------------------------------
def _slices_by_groups(a: Any, b: Any, offsets: Any) -> Any:
    slices_shape(a.shape, b.shape, offsets.shape)
    lengths = _lengths(offsets, a.shape[1])
    pairs = zip(a.split(lengths, 1)[:-1], b.split(lengths), strict=False)
    return torch.stack([_matmul(x, y) for x, y in pairs]).to(a.dtype)


def _kernels_multiply_slices(a: Any) -> bool:
    return runs_kernels(a) and a.dtype != torch.float32  # no kernel zeroes parts of k-tiles


def _slices_cuda(a: Any, b: Any, offsets: Any) -> Any:
    if not _kernels_multiply_slices(a):
        return _slices_by_groups(a, b, offsets)
    return run_cached(in_groups(Request(a, b, precision=fp32_precision(a)), offsets, "k"))


SLICES = define_op(
    "grouped_gemm_k(Tensor a, Tensor b, Tensor offsets) -> Tensor",
    lambda a, b, offsets: a.new_empty(slices_shape(a.shape, b.shape, offsets.shape)), _slices_by_groups, _slices_cuda,
    lambda a, b, *_, **__: _count_flops(a, b), _slices_by_groups,
)  # fmt: skip
"""The operator grouped_gemm_k."""


def multiply_slices(a: Any, b: Any, offsets: Any) -> Any:
    """Return (groups, m, n), a[:, slice] @ b[slice] for each group's slice of K, whose ends are `offsets`.

    Calls the operator grouped_gemm_k, or repeats the launches of an earlier call. Records no gradients.
    """
    if sees_operators() or not _kernels_multiply_slices(a):
        return SLICES(a, b, offsets)
    arguments = read_arguments("grouped_gemm_k", None, a, b, {}, offsets)
    return run_or_call(arguments, a, lambda: SLICES(a, b, offsets))
