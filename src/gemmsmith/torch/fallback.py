"""Evaluation of an epilogue's graph by PyTorch's operations, for GPUs that the kernels do not run on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, INT32, DType
from gemmsmith.core.errors import DeviceError
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.graph.functions import Refused
from gemmsmith.graph.operations import GraphArrays, reduced_axes
from gemmsmith.graph.reductions import REDUCTIONS

TORCH_DTYPES = {
    BF16: torch.bfloat16, FP16: torch.float16, FP32: torch.float32, E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2, INT32: torch.int32,
}  # fmt: skip
"""torch's dtypes of results."""
HOPPER_CAPABILITY = (9, 0)
"""Compute capability that the kernels require."""
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes that torch multiplies, and that can have gradients."""


@lru_cache(maxsize=64)
def kernels_unsupported(index: int) -> bool:
    """Return whether the kernels do not run on the GPU with this index. Warns once per GPU if so."""
    capability = torch.cuda.get_device_capability(index)
    if capability == HOPPER_CAPABILITY:
        return False
    name = torch.cuda.get_device_name(index)
    warnings.warn(
        f"gemmsmith's kernels require compute capability 9.0; falling back to PyTorch ops on {name}", stacklevel=2
    )
    return True


def matmul(a: Any, b: Any) -> Any:
    """Return a @ b, rounded as torch rounds it, in the dtype in which epilogues compute: fp32, or float64 of float64.

    A product of int8 is exact modulo 2^32, like an int32 accumulator, and is returned in float64.
    """
    if a.dtype == torch.int8:
        return (a.double() @ b.double()).long().int().double()
    if a.dtype not in FLOAT_DTYPES:
        a, b = a.float(), b.float()
    result = a @ b
    return result if result.dtype == torch.float64 else result.float()


def evaluate_graph(graph: EpilogueGraph, accumulator: Any, operands: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of an epilogue by name, in the accumulator's dtype.

    Args:
        graph: the epilogue.
        accumulator: a @ b, (m, n) or (batch, m, n).
        operands: tensors and numbers by name; their shapes broadcast to the accumulator's.

    Raises:
        DeviceError: the graph has an operation that is not available in PyTorch's operations, such as quantize and
            top_k_softmax.
    """
    arrays = _Tensors(graph, accumulator, operands)
    values, dims, results = arrays.compute(), graph.broadcast_dims, {}
    for r in graph.results:
        value = values[r.node]
        if not graph.is_reduction(r):
            results[r.name] = arrays.full(value, max(dims[r.node].columns_per_value, 1))
        else:
            axes = reduced_axes(graph.nodes[r.node].attribute[1], accumulator.ndim)
            results[r.name] = value if r.keepdim else value.squeeze(axes)
    return results


def round_to_dtype(x: Any, dtype: torch.dtype) -> Any:
    """Return x in a result's dtype. fp8 saturates values out of range, where torch returns NaN or an infinity."""
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


class _Tensors(GraphArrays):
    """Evaluation of a graph on torch's tensors."""

    library = torch

    def as_value(self, x: Any) -> Any:
        return x.to(self.accumulator) if isinstance(x, torch.Tensor) else self.accumulator.new_full((), x)

    def implementation(self, operation: Any) -> Callable[..., Any]:
        """Return torch's function for an operation, or the one of the operation's name.

        Raises DeviceError, with the reason, if the operation's record says that torch has no function for it.
        """
        function = operation.torch
        if isinstance(function, Refused):
            raise DeviceError(f"{operation.name}: {function.reason}")
        if callable(function):
            return function  # type: ignore[no-any-return]
        name = function or operation.names.split()[0]
        return next(getattr(x, name) for x in (torch, F, torch.special) if hasattr(x, name))  # type: ignore[no-any-return]

    def rounded(self, x: Any, dtype: DType) -> Any:
        return round_to_dtype(x, TORCH_DTYPES[dtype])

    def reduce(self, x: Any, kind: str, axis: str) -> Any:
        function = REDUCTIONS[kind].torch
        function = function if callable(function) else getattr(torch, function)
        return function(x, reduced_axes(axis, x.ndim), keepdim=True)
