"""Evaluation of an epilogue's graph by PyTorch's operations, for GPUs that the kernels do not run on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, INT32
from gemmsmith.core.errors import DeviceError
from gemmsmith.core.graph import EpilogueGraph, Node, reduced_dims

TORCH_DTYPES = {
    BF16: torch.bfloat16, FP16: torch.float16, FP32: torch.float32, E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2, INT32: torch.int32,
}  # fmt: skip
"""torch's dtypes of results."""
HOPPER_CAPABILITY = (9, 0)
"""Compute capability that the kernels require."""
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes that torch multiplies, and that can have gradients."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in (
        "neg", "abs", "sign", "floor", "round", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt",
        "reciprocal", "sin", "cos", "tanh", "sigmoid", "erf", "relu", "add", "sub", "mul", "div", "maximum", "minimum",
        "pow", "hypot", "logaddexp", "lt", "le", "gt", "ge", "eq", "ne",
    )},
    **{name: getattr(F, name) for name in ("softplus", "gelu", "silu", "mish", "hardswish")},
    "detach": lambda x: x,
    "ndtr": torch.special.ndtr,
    "softplus_of_sigmoid": lambda x, s: F.softplus(x),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "leaky_relu": lambda x, slope: torch.where(x > 0, x, x * slope),
    "elu": lambda x, alpha: torch.where(x > 0, x, alpha * torch.expm1(torch.clamp(x, max=0))),
    "hardtanh": lambda x, low, high: torch.minimum(torch.maximum(x, low), high),
    "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not,
    "where": lambda c, x, y: torch.where(c != 0, x, y),
    "fma": lambda a, b, c: a * b + c,
}  # fmt: skip


@lru_cache(maxsize=64)
def kernels_unsupported(index: int) -> bool:
    """Return whether the kernels do not run on this GPU. Warns once per GPU if so."""
    capability = torch.cuda.get_device_capability(index)
    if capability == HOPPER_CAPABILITY:
        return False
    name = torch.cuda.get_device_name(index)
    warnings.warn(
        f"gemmsmith's kernels require compute capability 9.0; falling back to PyTorch ops on {name}", stacklevel=2
    )
    return True


def matmul(a: Any, b: Any) -> Any:
    """Return a @ b, rounded as torch rounds it, in the dtype in which epilogues compute. int8 is exact modulo 2^32."""
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
        operands: tensors and numbers by name, as in the reference backend's `execute`.

    Raises:
        DeviceError: the graph has an operation without a torch equivalent: quantize or top_k_softmax.
    """
    values: list[Any] = []
    for node in graph.nodes:
        value = _evaluate_node(node, [values[i] for i in node.inputs], accumulator, operands)
        values.append(value.to(accumulator.dtype))  # a predicate is 0 or 1, as in the kernels
    results = {}
    for r in graph.results:
        value = values[r.node]
        if graph.is_reduction(r):
            results[r.name] = (
                value if r.keepdim else value.squeeze(_reduction_dims(graph.nodes[r.node].attribute[1], accumulator))
            )
        else:
            results[r.name] = _broadcast(value, accumulator, graph.broadcast_dims()[r.node].columns_per_value)
    return results


def round_to_dtype(x: Any, dtype: torch.dtype) -> Any:
    """Return x in a result's dtype. fp8 saturates values out of range, where torch returns NaN or an infinity."""
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


def _evaluate_node(node: Node, inputs: list[Any], accumulator: Any, operands: Mapping[str, Any]) -> Any:
    match node.op:
        case "accumulator":
            return accumulator
        case "constant":
            return accumulator.new_tensor(node.attribute)
        case "operand":
            x = operands[node.attribute]
            return x if isinstance(x, torch.Tensor) else accumulator.new_tensor(x)
        case "chunk":
            values = _broadcast(inputs[0], accumulator, 1)
            return values.unflatten(-1, (-1, 2, 8))[..., node.attribute[0], :].flatten(-2)
        case "interleave":
            halves = [_broadcast(x, accumulator, 2).unflatten(-1, (-1, 8)) for x in inputs]
            return torch.stack(halves, -2).flatten(-3)
        case "one_hot":
            return torch.arange(accumulator.shape[-1], device=accumulator.device) == inputs[0]
        case "cast":
            return round_to_dtype(inputs[0], TORCH_DTYPES[node.attribute])
        case "reduce":
            return _reduce(inputs[0], accumulator, *node.attribute)
    if node.op not in _FUNCTIONS:
        raise DeviceError(
            f"{node.op}: not supported in the PyTorch fallback on GPUs other than Hopper; use H100 or H200"
        )
    return _FUNCTIONS[node.op](*inputs)


def _broadcast(x: Any, accumulator: Any, width: int) -> Any:
    """Broadcast x to all elements: over all columns of the accumulator, or of its halves."""
    columns = x.shape[-1] if x.dim() and x.shape[-1] > 1 else accumulator.shape[-1] // max(width, 1)
    return x.expand(*accumulator.shape[:-1], columns)


def _reduction_dims(axis: str, accumulator: Any) -> tuple[int, ...]:
    """Return the dimensions of the accumulator that a reduction runs over."""
    return tuple(i for i, index in enumerate("bmn"[3 - accumulator.dim() :]) if index in reduced_dims(axis))


def _reduce(x: Any, accumulator: Any, kind: str, axis: str) -> Any:
    dims = _reduction_dims(axis, accumulator)
    x = _broadcast(x, accumulator, 1)
    if kind == "logsumexp":
        return torch.logsumexp(x, dims, keepdim=True)
    if kind in ("max", "min"):
        return getattr(torch, "a" + kind)(x, dims, keepdim=True)
    return getattr(torch, kind)(x, dims, keepdim=True)
