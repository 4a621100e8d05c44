"""PyTorch operators that compute a grouped GEMM: gemmsmith::grouped_gemm_{i}_{o} and gemmsmith::grouped_gemm_k.

    grouped_gemm_{i}_{o}(Tensor a, Tensor b, Tensor offsets, int key, str epilogue, float[] numbers, Tensor x0, ...)
        -> Tensor, ...
    grouped_gemm_of_two_{i}_{o}(Tensor a, Tensor b, Tensor b2, Tensor offsets, ...) -> Tensor, ...
    grouped_gemm_k(Tensor a, Tensor b, Tensor offsets) -> Tensor

offsets (groups,), int32, are the ends of the groups. The first multiplies rows of a (m, k) by their group's matrix of
b (groups, k, n), with a fused epilogue as in ops.py; rows of the results behind the last group are zero. The second
returns (groups, m, n), a[:, slice] @ b[slice] for each group's slice of K.

On a Hopper GPU gemmsmith.grouped_gemm runs, but not for fp32 along K. Elsewhere PyTorch's operations run, one group
after the other, whose sizes the host reads; in float64 on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from gemmsmith.binding.request import Request
from gemmsmith.binding.results import result_shape
from gemmsmith.core.errors import ArgumentError
from gemmsmith.host.cached_run import run_cached
from gemmsmith.torch import fallback, graph_serialization
from gemmsmith.torch.ops import (
    as_outputs,
    as_request,
    define_gemms,
    define_op,
    fp32_precision,
    operands_by_name,
    result_dtype,
)
from gemmsmith.torch.plain_tensors import in_groups, read_arguments, run_or_call, runs_kernels, sees_operators


def rows_shape(a: tuple[Any, ...], b: tuple[Any, ...], offsets: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return (m, n). Raises ArgumentError if the shapes do not match."""
    if len(a) != 2 or len(b) != 3 or a[1] != b[1] or len(offsets) != 1 or offsets[0] != b[0]:
        raise ArgumentError(
            f"a, b, offsets: got shapes {tuple(a)}, {tuple(b)} and {tuple(offsets)}; use (m, k), (groups, k, n) and "
            "(groups,)"
        )
    return a[0], b[2]


def slices_shape(a: tuple[Any, ...], b: tuple[Any, ...], offsets: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return (groups, m, n). Raises ArgumentError if the shapes do not match."""
    if len(a) != 2 or len(b) != 2 or a[1] != b[0] or len(offsets) != 1:
        raise ArgumentError(
            f"a, b, offsets: got shapes {tuple(a)}, {tuple(b)} and {tuple(offsets)}; use (m, k), (k, n) and (groups,)"
        )
    return offsets[0], a[0], b[1]


def _ends(offsets: Any, extent: int) -> list[int]:
    """Return the groups' ends on the host. Raises ArgumentError if they decrease, or exceed the extent."""
    ends = offsets.tolist()
    if any(end < begin for begin, end in zip([0, *ends], ends, strict=False)) or (ends and ends[-1] > extent):
        raise ArgumentError(f"offsets: got {ends} for {extent} rows; use ends that do not decrease")
    return ends  # type: ignore[no-any-return]


def _matmul(a: Any, b: Any) -> Any:
    """Return a @ b: in float64 on the CPU."""
    return a.double() @ b.double() if a.device.type == "cpu" else fallback.matmul(a, b)


# -- along M ---------------------------------------------------------------------------------------------------------
def _fake_rows(a: Any, b: Any, offsets: Any, key: int, epilogue: str, numbers: list[float], *operands: Any) -> Any:
    graph, shape = graph_serialization.deserialize(epilogue), rows_shape(a.shape, b.shape, offsets.shape)
    results = [a.new_empty(result_shape(graph, r, shape), dtype=result_dtype(graph, r, a.dtype)) for r in graph.results]
    return results[0] if len(results) == 1 else tuple(results)


def rows_by_groups(a: Any, b: Any, offsets: Any, key: int, epilogue: str, numbers: list[float], *operands: Any) -> Any:
    """Compute the results by PyTorch's operations, one group after the other."""
    graph, (m, n) = graph_serialization.deserialize(epilogue), rows_shape(a.shape, b.shape, offsets.shape)
    accumulators, begin = [], 0
    for group, end in enumerate(_ends(offsets, m)):
        accumulators.append(_matmul(a[begin:end], b[group]))
        begin = end
    accumulators.append(_matmul(a[:0], b[0]).new_zeros((m - begin, n)))
    values = fallback.evaluate_graph(graph, torch.cat(accumulators), operands_by_name(graph, numbers, operands))
    results = []
    for r in graph.results:
        result = fallback.round_to_dtype(values[r.name], result_dtype(graph, r, a.dtype)).contiguous()
        result[begin:] = 0
        results.append(result)
    return results[0] if len(results) == 1 else tuple(results)


def _rows_cuda(a: Any, b: Any, offsets: Any, key: int, epilogue: str, numbers: list[float], *operands: Any) -> Any:
    if fallback.kernels_unsupported(a.get_device()):
        return rows_by_groups(a, b, offsets, key, epilogue, numbers, *operands)
    graph = graph_serialization.deserialize(epilogue)
    return as_outputs(run_cached(as_request(graph, a, b, numbers, operands, offsets)))


# -- along K ---------------------------------------------------------------------------------------------------------
def _fake_slices(a: Any, b: Any, offsets: Any) -> Any:
    return a.new_empty(slices_shape(a.shape, b.shape, offsets.shape))


def _slices_by_groups(a: Any, b: Any, offsets: Any) -> Any:
    """Compute the result by PyTorch's operations, one group after the other."""
    slices_shape(a.shape, b.shape, offsets.shape)
    ends = _ends(offsets, a.shape[1])
    pairs = zip([0, *ends], ends, strict=False)
    return torch.stack([_matmul(a[:, begin:end], b[begin:end]) for begin, end in pairs]).to(a.dtype)


def _kernels_multiply_slices(a: Any) -> bool:
    return runs_kernels(a) and a.dtype != torch.float32  # no kernel zeroes parts of k-tiles


def _slices_cuda(a: Any, b: Any, offsets: Any) -> Any:
    if not _kernels_multiply_slices(a):
        return _slices_by_groups(a, b, offsets)
    return run_cached(_slices_request(a, b, offsets))


def _slices_request(a: Any, b: Any, offsets: Any) -> Request:
    return in_groups(Request(a, b, precision=fp32_precision(a)), offsets, "k")


def _count_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return 2 * int(a[0]) * int(a[1]) * int(b[-1])


ARRAYS = "Tensor a, Tensor b, Tensor offsets"


ROWS, ROWS_OF_TWO = define_gemms("grouped_gemm", ARRAYS, _fake_rows, _count_flops, rows_by_groups, _rows_cuda)
"""The operators along M by their numbers of tensor operands and of results; the second multiply by two operands b."""
SLICES = define_op(
    "grouped_gemm_k", f"({ARRAYS}) -> Tensor", _fake_slices, _count_flops, CPU=_slices_by_groups, CUDA=_slices_cuda
)


def multiply_slices(a: Any, b: Any, offsets: Any) -> Any:
    """Call the operator along K, or run its launches if an earlier call has cached them."""
    if sees_operators() or not _kernels_multiply_slices(a):
        return SLICES(a, b, offsets)
    arguments = read_arguments("grouped_gemm_k", None, a, b, {}, offsets)
    return run_or_call(arguments, a, lambda: SLICES(a, b, offsets))
