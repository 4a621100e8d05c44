"""An epilogue's graph by torch's own operations, for GPUs that the kernels do not run on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, INT32
from gemmsmith.core.errors import DeviceError
from gemmsmith.core.graph import Graph, Node, over

DTYPES = {
    BF16: torch.bfloat16, FP16: torch.float16, FP32: torch.float32, E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2, INT32: torch.int32,
}  # fmt: skip
"""torch's dtypes of results."""
HOPPER = (9, 0)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Those that torch multiplies, and that have gradients."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in (
        "neg", "abs", "sign", "floor", "round", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt",
        "reciprocal", "sin", "cos", "tanh", "sigmoid", "erf", "relu", "add", "sub", "mul", "div", "maximum", "minimum",
        "pow", "hypot", "logaddexp", "lt", "le", "gt", "ge", "eq", "ne",
    )},
    **{name: getattr(F, name) for name in ("softplus", "gelu", "silu", "mish", "hardswish")},
    "detach": lambda x: x,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "leaky_relu": lambda x, slope: torch.where(x > 0, x, x * slope),
    "elu": lambda x, alpha: torch.where(x > 0, x, alpha * torch.expm1(torch.clamp(x, max=0))),
    "hardtanh": lambda x, low, high: torch.minimum(torch.maximum(x, low), high),
    "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not,
    "where": lambda c, x, y: torch.where(c != 0, x, y),
    "fma": lambda a, b, c: a * b + c,
}  # fmt: skip


@lru_cache(maxsize=64)
def needed(index: int) -> bool:
    """Whether the kernels do not run on this GPU, which a warning says once."""
    capability = torch.cuda.get_device_capability(index)
    if capability == HOPPER:
        return False
    name = torch.cuda.get_device_name(index)
    warnings.warn(
        f"{name} (compute capability {capability}) is no Hopper GPU: gemmsmith uses torch there", stacklevel=2
    )
    return True


def multiplied(a: Any, b: Any) -> Any:
    """a @ b, rounded as torch rounds it, as numbers to compute with; of int8 exact, modulo 2^32."""
    if a.dtype == torch.int8:
        return (a.double() @ b.double()).long().int().double()
    if a.dtype not in FLOATS:
        a, b = a.float(), b.float()
    product = a @ b
    return product if product.dtype == torch.float64 else product.float()


def evaluated(graph: Graph, product: Any, operands: Mapping[str, Any]) -> dict[str, Any]:
    """The results by name, of the product's dtype. product (m, n) or (batch, m, n); operands as in `execute` of the
    reference. DeviceError for quantize and top_k_softmax."""
    values: list[Any] = []
    for node in graph.nodes:
        values.append(_node(node, [values[i] for i in node.inputs], product, operands))
    results = {}
    for r in graph.results:
        value = values[r.node]
        if graph.is_reduced(r):
            results[r.name] = value if r.keepdim else value.squeeze(_dims(graph.nodes[r.node].value[1], product))
        else:
            results[r.name] = _spread(value, product, graph.extents()[r.node].width)
    return results


def rounded(x: Any, dtype: torch.dtype) -> Any:
    """x in a dtype of results; beyond the range of fp8 its largest value, where torch has NaN or an infinity."""
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


def _node(node: Node, inputs: list[Any], product: Any, operands: Mapping[str, Any]) -> Any:
    match node.op:
        case "accumulator":
            return product
        case "constant":
            return product.new_tensor(node.value)
        case "operand":
            x = operands[node.value]
            return x.to(product.dtype) if isinstance(x, torch.Tensor) else product.new_tensor(x)
        case "chunk":
            whole = _spread(inputs[0], product, 1)
            return whole.unflatten(-1, (-1, 2, 8))[..., node.value[0], :].flatten(-2)
        case "interleave":
            halves = [_spread(x, product, 2).unflatten(-1, (-1, 8)) for x in inputs]
            return torch.stack(halves, -2).flatten(-3)
        case "one_hot":
            return torch.arange(product.shape[-1], device=product.device) == inputs[0]
        case "cast":
            return rounded(inputs[0], DTYPES[node.value]).to(product.dtype)
        case "reduce":
            return _reduced(inputs[0], product, *node.value)
    if node.op not in _FUNCTIONS:
        raise DeviceError(f"{node.op}: torch has no such function, and this GPU is no Hopper; use a H100 or H200")
    found = _FUNCTIONS[node.op](*inputs)
    return found if found.dtype == torch.bool else found.to(product.dtype)


def _spread(x: Any, product: Any, width: int) -> Any:
    """x at every element, over all columns of the product or of its halves."""
    columns = x.shape[-1] if x.dim() and x.shape[-1] > 1 else product.shape[-1] // max(width, 1)
    return x.expand(*product.shape[:-1], columns)


def _dims(axis: str, product: Any) -> tuple[int, ...]:
    """The indices of a product that a reduction sums."""
    return tuple(i for i, index in enumerate("bmn"[3 - product.dim() :]) if index in over(axis))


def _reduced(x: Any, product: Any, kind: str, axis: str) -> Any:
    dims = _dims(axis, product)
    x = _spread(x, product, 1).to(product.dtype)
    if kind == "logsumexp":
        return torch.logsumexp(x, dims, keepdim=True)
    if kind in ("max", "min"):
        return getattr(torch, "a" + kind)(x, dims, keepdim=True)
    return getattr(torch, kind)(x, dims, keepdim=True)
