"""The operators of torch that compute a product with its epilogue: gemmsmith::gemm_{i}_{o}.

    gemm_{i}_{o}(Tensor a, Tensor b, int key, str epilogue, float[] numbers, Tensor x0, ...) -> Tensor, ...

for i operands that are tensors and o results. a (m, k) or (batch, m, k), b (k, n) or (batch, k, n); `epilogue` is a
graph's text, `key` its hash, which comes first because DTensor's cache of shardings knows other arguments from the
first int on. `numbers` are the operands that are Python numbers, in the graph's order, as the tensors are. Results
have the strides of gemmsmith.gemm's. Lists of tensors would cost a microsecond more, and custom_op six.

On a Hopper GPU gemmsmith.gemm runs, on another one torch's operations; on the CPU the float64 reference does. Where a
is float64, what is fp32 elsewhere is float64, and nothing else is rounded. fp32 operands are multiplied as
torch.set_float32_matmul_precision says: "highest" by 3xTF32, else by TF32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import register_flop_formula

from gemmsmith.api import gemm as launch
from gemmsmith.arrays import as_numpy
from gemmsmith.backends.reference.epilogue import execute
from gemmsmith.backends.reference.product import exact, rounded, wrapped
from gemmsmith.binding import result_shape, result_strides
from gemmsmith.core.dtypes import BF16, FP16, FP32, INT8, INT32, DType, as_dtype
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import Graph, Result
from gemmsmith.torch import fallback, sharding, text
from gemmsmith.torch.fallback import DTYPES

MOST_OPERANDS, MOST_RESULTS = 8, 4


def call(epilogue: str, a: Any, b: Any, numbers: Sequence[float], operands: Sequence[Any]) -> Any:
    """The operator of as many operands and results, called: a tensor, or a tuple of them."""
    inputs, outputs, key = arity(epilogue)
    op = OPERATORS[inputs, outputs]
    if torch.compiler.is_dynamo_compiling() or torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return op(a, b, key, epilogue, list(numbers), *operands)
    with torch._C._AutoDispatchBelowAutograd():  # where what is registered for Autograd would call it
        return op(a, b, key, epilogue, list(numbers), *operands)


@torch.compiler.assume_constant_result
def arity(epilogue: str) -> tuple[int, int, int]:
    """Operands that are tensors, results, and the key of a text. ArgumentError where there are too many."""
    sharding.register(list(OPERATORS.values()))
    return _arity(epilogue)


@lru_cache(maxsize=1024)
def _arity(epilogue: str) -> tuple[int, int, int]:
    graph = text.read(epilogue)
    inputs, outputs = sum(o.dtype is not None for o in graph.operands), len(graph.results)
    if inputs > MOST_OPERANDS:
        raise ArgumentError(f"operands: got {inputs} tensors; use at most {MOST_OPERANDS}")
    if outputs > MOST_RESULTS:
        raise ArgumentError(f"epilogue: got a function with {outputs} results; use at most {MOST_RESULTS}")
    return inputs, outputs, text.key(epilogue)


def product_shape(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
    """(m, n) or (batch, m, n) of a and b of these shapes. ArgumentError for shapes that do not match."""
    fits = len(a) in (2, 3) and len(b) in (2, 3) and a[-1] == b[-2]
    batch: tuple[Any, ...] = tuple([shape[0] for shape in (a, b) if len(shape) == 3])
    if len(batch) == 2:
        fits = fits and (batch[0] == batch[1] or batch[0] == 1 or batch[1] == 1)
        batch = (batch[1] if batch[0] == 1 else batch[0],)
    if not fits:
        raise ArgumentError(
            f"a, b: got shapes {tuple(a)} and {tuple(b)}; use (m, k) and (k, n), a batch in front of either"
        )
    return (*batch, a[-2], b[-1])


def result_dtype(graph: Graph, result: Result, a: torch.dtype) -> torch.dtype:
    """The dtype of a result of a product whose a has that dtype."""
    small = graph.nodes[result.node].op in ("reduce", "scale")
    if a == torch.float64:
        return a if result.dtype in (None, FP32) else DTYPES[result.dtype]
    return DTYPES[result.dtype or (FP32 if small else _default(graph, as_dtype(a, "a", integers=True)))]


def _default(graph: Graph, a: DType) -> DType:
    """The dtype of matrices of which the graph says none, as in gemmsmith.gemm."""
    if a == INT8:
        return INT32 if graph.is_bare else BF16
    return a if a in (BF16, FP16, FP32) else BF16


def _fake(a: Any, b: Any, key: int, epilogue: str, numbers: list[float], *operands: Any) -> Any:
    graph, shape = text.read(epilogue), product_shape(a.shape, b.shape)
    made = [_empty(a, graph, r, result_shape(graph, r, shape)) for r in graph.results]
    return made[0] if len(made) == 1 else tuple(made)


def _empty(a: Any, graph: Graph, result: Result, shape: tuple[Any, ...]) -> Any:
    """A result, on a's device."""
    dtype, strides = result_dtype(graph, result, a.dtype), result_strides(graph, result, shape)
    return a.new_empty_strided(shape, strides, dtype=dtype) if strides else a.new_empty(shape, dtype=dtype)


def _on_cpu(a: Any, b: Any, key: int, epilogue: str, numbers: list[float], *operands: Any) -> Any:
    graph, results = text.read(epilogue), _fake(a, b, key, epilogue, numbers, *operands)
    given = {name: x if isinstance(x, float) else _exact(x) for name, x in named(graph, numbers, operands).items()}
    product = exact(_exact(a), _exact(b))
    values = execute(graph, wrapped(product) if a.dtype == torch.int8 else product, given)
    for r, made in zip(graph.results, (results,) if len(graph.results) == 1 else results, strict=True):
        if made.dtype == torch.float64:
            made.numpy()[...] = values[r.name]
        else:
            as_numpy(made)[...] = rounded(values[r.name], as_dtype(made.dtype, integers=True))
    return results


def _on_cuda(a: Any, b: Any, key: int, epilogue: str, numbers: list[float], *operands: Any) -> Any:
    graph = text.read(epilogue)
    given = named(graph, numbers, operands)
    if fallback.needed(a.get_device()):
        values = fallback.evaluated(graph, fallback.multiplied(a, b), given)
        results = tuple(
            [fallback.rounded(values[r.name], result_dtype(graph, r, a.dtype)).contiguous() for r in graph.results]
        )
        return results if len(results) > 1 else results[0]
    output = graph.results[0].dtype
    if graph.is_bare and output in (None, BF16, FP16, FP32):
        return launch(a, b, out_dtype=output, precision=precision(a))
    found = launch(a, b, epilogue=graph, operands=given, precision=precision(a))
    return tuple(found.values()) if isinstance(found, dict) else found


def named(graph: Graph, numbers: Sequence[float], operands: Sequence[Any]) -> dict[str, Any]:
    """An operator's numbers and tensors by their operands' names."""
    of_numbers, of_tensors = iter(numbers), iter(operands)
    return {o.name: next(of_numbers if o.dtype is None else of_tensors) for o in graph.operands}


def precision(a: Any) -> str | None:
    """`precision` of gemmsmith.gemm for a product of this a."""
    if a.dtype != torch.float32:
        return None
    return "3xtf32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _exact(x: Any) -> Any:
    """A tensor's elements in float64."""
    x = x.detach().resolve_neg()  # copied: torch resizes no memory that numpy has seen, as FSDP does
    return x.clone().numpy() if x.dtype == torch.float64 else as_numpy(x).astype(np.float64)


def _flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    batch = max((shape[0] for shape in (a, b) if len(shape) == 3), default=1)
    return 2 * int(batch) * int(a[-2]) * int(a[-1]) * int(b[-1])


def _define(library: torch.library.Library, inputs: int, outputs: int) -> Any:
    name = f"gemm_{inputs}_{outputs}"
    tensors = "".join(f", Tensor x{i}" for i in range(inputs))
    made = "Tensor" if outputs == 1 else f"({', '.join(['Tensor'] * outputs)})"
    # a pass that inserts the operator notes no strides of its inputs: any will do
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
    library.define(f"{name}(Tensor a, Tensor b, int key, str epilogue, float[] numbers{tensors}) -> {made}", tags=tags)
    op = getattr(torch.ops.gemmsmith, name).default
    library.impl(name, _on_cpu, "CPU")
    library.impl(name, _on_cuda, "CUDA")
    torch.library.register_fake(f"gemmsmith::{name}", _fake, lib=library)
    register_flop_formula(op.overloadpacket)(_flops)
    return op


LIBRARY = torch.library.Library("gemmsmith", "DEF")
OPERATORS: dict[tuple[int, int], Any] = {
    (i, o): _define(LIBRARY, i, o) for i in range(MOST_OPERANDS + 1) for o in range(1, MOST_RESULTS + 1)
}
"""By the numbers of operands that are tensors, and of results."""
