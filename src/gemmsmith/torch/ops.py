"""PyTorch operators that compute a GEMM with a fused epilogue: gemmsmith::gemm_{i}_{o}.

    gemm_{i}_{o}(Tensor a, Tensor b, int key, str epilogue, float[] numbers, Tensor x0, ...) -> Tensor, ...

for i operands that are tensors and o results. a is (m, k) or (batch, m, k), b (k, n) or (batch, k, n). `epilogue` is a
serialized graph. `key` is a hash of `epilogue`, placed first because DTensor's sharding cache only looks at arguments
after the first int. `numbers` are the operands that are Python numbers, in the graph's order, as the tensors are.
Results have the strides of gemmsmith.gemm's. One operator per count avoids lists of tensors, which cost 1 us more per
call; custom_op would cost 6 us more. gemm_of_two_{i}_{o}(Tensor a, Tensor b, Tensor b2, ...) multiplies by the columns
of b and b2, which alternate in groups of 8.

On a Hopper GPU gemmsmith.gemm runs, on other GPUs PyTorch's operations, and on the CPU the float64 reference. If a is
float64, what is fp32 otherwise is float64, and nothing else is rounded. torch.set_float32_matmul_precision selects how
fp32 operands are multiplied: "highest" by 3xTF32, otherwise by TF32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import register_flop_formula

from gemmsmith.arrays import as_numpy
from gemmsmith.backends.reference.epilogue import execute
from gemmsmith.backends.reference.matmul import matmul_float64, rounded, wrap_int32
from gemmsmith.binding.request import Request
from gemmsmith.binding.results import result_shape, result_strides
from gemmsmith.core.dtypes import BF16, FP16, FP32, INT8, INT32, DType, as_dtype
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import EpilogueGraph, Result
from gemmsmith.core.problem import MAX_STRIDE_BYTES, TMA_ALIGNMENT_BYTES
from gemmsmith.graph.frontend.interleave import interleave
from gemmsmith.host.cached_run import run_cached
from gemmsmith.torch import fallback, graph_serialization, sharding
from gemmsmith.torch.fallback import TORCH_DTYPES
from gemmsmith.torch.plain_tensors import (
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
    epilogue: str, a: Any, b: Any, numbers: Sequence[float], operands: Sequence[Any], offsets: Any = None
) -> Any:
    """Call the operator for an epilogue's numbers of operands and results; returns a tensor or a tuple of tensors.

    `b` may be a tuple of two, whose columns alternate. `offsets`: the ends of groups of rows, or None.
    """
    return run_or_dispatch(
        epilogue, a, b, numbers, operands, lambda: _dispatch(epilogue, a, b, numbers, operands, offsets), offsets
    )


def run_or_dispatch(
    epilogue: str, a: Any, b: Any, numbers: Sequence[float], operands: Sequence[Any], dispatch: Callable[[], Any],
    offsets: Any = None,
) -> Any:  # fmt: skip
    """Return the results of a cached run if nothing sees the operator, else of `dispatch`, which calls it."""
    if sees_operators() or isinstance(b, tuple) or not runs_kernels(a):
        return dispatch()
    values = operands_by_name(graph_serialization.deserialize(epilogue), numbers, operands)
    arguments = read_arguments(epilogue, offsets is None, a, b, values, offsets)
    return as_outputs(run_or_call(arguments, a, dispatch))


def _dispatch(epilogue: str, a: Any, b: Any, numbers: Sequence[float], operands: Sequence[Any], offsets: Any) -> Any:
    """Call the operator through the dispatcher."""
    num_inputs, num_outputs, key = op_signature(epilogue)
    arrays, of_two = ((a, *b), "_of_two") if isinstance(b, tuple) else ((a, b), "")
    if offsets is None:
        op = (OPERATORS_OF_TWO if of_two else OPERATORS)[num_inputs, num_outputs]
    else:
        op = getattr(torch.ops.gemmsmith, f"grouped_gemm{of_two}_{num_inputs}_{num_outputs}").default
        arrays = (*arrays, offsets)
    if torch.compiler.is_dynamo_compiling() or torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return op(*arrays, key, epilogue, list(numbers), *operands)
    with torch._C._AutoDispatchBelowAutograd():  # autograd is not needed, or calls this
        return op(*arrays, key, epilogue, list(numbers), *operands)


@torch.compiler.assume_constant_result
def op_signature(epilogue: str) -> tuple[int, int, int]:
    """Return an epilogue's number of tensor operands, its number of results, and its key.

    Raises ArgumentError if there are too many operands or results.
    """
    sharding.register(list(OPERATORS.values()))
    return _op_signature(epilogue)


@lru_cache(maxsize=1024)
def _op_signature(epilogue: str) -> tuple[int, int, int]:
    graph = graph_serialization.deserialize(epilogue)
    num_inputs, num_outputs = sum(o.dtype is not None for o in graph.operands), len(graph.results)
    if num_inputs > MAX_OPERANDS:
        raise ArgumentError(f"operands: got {num_inputs} tensors; use at most {MAX_OPERANDS}")
    if num_outputs > MAX_RESULTS:
        raise ArgumentError(f"epilogue: got a function with {num_outputs} results; use at most {MAX_RESULTS}")
    return num_inputs, num_outputs, graph_serialization.digest(epilogue)


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


def result_dtype(graph: EpilogueGraph, result: Result, a: torch.dtype) -> torch.dtype:
    """Return the dtype of a result for an `a` of this dtype."""
    is_reduction_or_scale = graph.nodes[result.node].op in ("reduce", "scale")
    if a == torch.float64:
        return a if result.dtype in (None, FP32) else TORCH_DTYPES[result.dtype]
    default = FP32 if is_reduction_or_scale else _default_matrix_dtype(graph, as_dtype(a, "a", allow_integers=True))
    return TORCH_DTYPES[result.dtype or default]


def _default_matrix_dtype(graph: EpilogueGraph, a: DType) -> DType:
    """Return the dtype of matrix results for which the graph sets none, as in gemmsmith.gemm."""
    if a == INT8:
        return INT32 if graph.is_identity else BF16
    return a if a in (BF16, FP16, FP32) else BF16


def _fake_kernel(a: Any, b: Any, key: int, epilogue: str, numbers: list[float], *operands: Any) -> Any:
    graph, shape = graph_serialization.deserialize(epilogue), matmul_shape(a.shape, b.shape)
    results = [_empty_result(a, graph, r, result_shape(graph, r, shape)) for r in graph.results]
    return results[0] if len(results) == 1 else tuple(results)


def _empty_result(a: Any, graph: EpilogueGraph, result: Result, shape: tuple[Any, ...]) -> Any:
    """Allocate a result on a's device."""
    dtype, strides = result_dtype(graph, result, a.dtype), result_strides(graph, result, shape)
    return a.new_empty_strided(shape, strides, dtype=dtype) if strides else a.new_empty(shape, dtype=dtype)


def _cpu_kernel(a: Any, b: Any, key: int, epilogue: str, numbers: list[float], *operands: Any) -> Any:
    graph, results = graph_serialization.deserialize(epilogue), _fake_kernel(a, b, key, epilogue, numbers, *operands)
    operand_values = {
        name: x if isinstance(x, float) else _as_float64(x)
        for name, x in operands_by_name(graph, numbers, operands).items()
    }
    accumulator = matmul_float64(_as_float64(a), _as_float64(b))
    values = execute(graph, wrap_int32(accumulator) if a.dtype == torch.int8 else accumulator, operand_values)
    for r, out in zip(graph.results, (results,) if len(graph.results) == 1 else results, strict=True):
        if out.dtype == torch.float64:
            out.numpy()[...] = values[r.name]
        else:
            as_numpy(out)[...] = rounded(values[r.name], as_dtype(out.dtype, allow_integers=True))
    return results


def _cuda_kernel(a: Any, b: Any, key: int, epilogue: str, numbers: list[float], *operands: Any) -> Any:
    graph = graph_serialization.deserialize(epilogue)
    if fallback.kernels_unsupported(a.get_device()):
        operand_values = operands_by_name(graph, numbers, operands)
        values = fallback.evaluate_graph(graph, fallback.matmul(a, b), operand_values)
        dtypes = {r.name: result_dtype(graph, r, a.dtype) for r in graph.results}
        results = tuple([fallback.round_to_dtype(values[x], dtype).contiguous() for x, dtype in dtypes.items()])
        return results if len(results) > 1 else results[0]
    return as_outputs(run_cached(as_request(graph, a, b, numbers, operands)))


def as_request(
    graph: EpilogueGraph, a: Any, b: Any, numbers: Sequence[float], operands: Sequence[Any], offsets: Any = None
) -> Request:
    """Return what the operator asks for: gemmsmith.gemm, or grouped_gemm of groups of rows that end at `offsets`."""
    output = graph.results[0].dtype
    if graph.is_identity and output in (None, BF16, FP16, FP32):
        request = Request(a, b, out_dtype=output, precision=fp32_precision(a))
    else:
        operands = operands if offsets is None else [by_rows(x) for x in operands]
        by_name = operands_by_name(graph, numbers, operands)
        request = Request(a, b, operands=by_name, epilogue=graph, precision=fp32_precision(a))
    return request if offsets is None else in_groups(request, offsets)


def as_outputs(results: Any) -> Any:
    """Return the results of gemmsmith.gemm as the operator does: a tensor, or a tuple."""
    return tuple(results.values()) if isinstance(results, dict) else results


def as_tuple(results: Any) -> tuple[Any, ...]:
    """Return the results of gemmsmith.gemm, or of an operator, as a tuple."""
    outputs = as_outputs(results)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def by_rows(x: Any) -> Any:
    """Return an operand of which gemmsmith.grouped_gemm knows that its rows are not one for each group."""
    return x.reshape((1,) * (3 - x.dim()) + x.shape) if isinstance(x, torch.Tensor) and 0 < x.dim() < 3 else x


def read_together(b: Any, b2: Any) -> Any:
    """Return the tuple of two operands whose columns alternate, or a copy of them if TMA cannot read both."""
    return (b, b2) if can_read_together(b, b2) else interleave(b, b2)


def can_read_together(b: Any, b2: Any) -> bool:
    """Return whether TMA can read two operands whose columns alternate."""
    strides = (b.stride(-1), *b.stride()[:-2])
    is_aligned = not (b.data_ptr() | b2.data_ptr() | b.element_size() * math.gcd(*strides)) % TMA_ALIGNMENT_BYTES
    reads_both = b.stride() == b2.stride() and b.stride(-2) == 1 and is_aligned and b.element_size() < 4
    return reads_both and 0 < abs(b.data_ptr() - b2.data_ptr()) < MAX_STRIDE_BYTES


def of_two(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel of an operator of two operands b whose columns alternate, which are copied into one."""
    return lambda a, b, b2, *others: kernel(a, interleave(b, b2), *others)


def of_two_on_gpu(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the CUDA kernel of an operator of two operands b."""

    def run(a: Any, b: Any, b2: Any, *others: Any) -> Any:
        combine = interleave if fallback.kernels_unsupported(a.get_device()) else read_together
        return kernel(a, combine(b, b2), *others)

    return run


def operands_by_name(graph: EpilogueGraph, numbers: Sequence[float], operands: Sequence[Any]) -> dict[str, Any]:
    """Return an operator's numbers and tensors by the names of the epilogue's operands."""
    numbers_, tensors = iter(numbers), iter(operands)
    return {o.name: next(numbers_ if o.dtype is None else tensors) for o in graph.operands}


def fp32_precision(a: Any) -> str | None:
    """Return gemmsmith.gemm's `precision` for this a: by torch's setting if a is fp32, else None."""
    if a.dtype != torch.float32:
        return None
    return "tf32" if multiplies_in_tf32() else "3xtf32"


def _as_float64(x: Any) -> Any:
    """Return a tensor's elements as a float64 array."""
    # The array is a copy: torch cannot resize storage that numpy refers to, which FSDP does.
    x = x.detach().resolve_neg()
    return x.clone().numpy() if x.dtype == torch.float64 else as_numpy(x).astype(np.float64)


def _count_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    batch = max((shape[0] for shape in (a, b) if len(shape) == 3), default=1)
    return 2 * int(batch) * int(a[-2]) * int(a[-1]) * int(b[-1])


LIBRARY = torch.library.Library("gemmsmith", "DEF")


def define_op(name: str, signature: str, fake: Any, count_flops: Any, **kernels: Any) -> Any:
    """Define an operator with a kernel for each dispatch key, and return its overload.

    `signature`: its arguments and results; `fake`: what infers its results; `count_flops`: of the arguments' shapes.
    """
    # flexible_layout: passes that insert the operator do not record its inputs' strides, and any strides work.
    LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    op = getattr(torch.ops.gemmsmith, name).default
    for key, kernel in kernels.items():
        LIBRARY.impl(name, _on_one_device(op, kernel), key)
    torch.library.register_fake(f"gemmsmith::{name}", _on_one_device(op, fake), lib=LIBRARY)
    register_flop_formula(op.overloadpacket)(count_flops)
    return op


def _on_one_device(op: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator's kernel, which raises ArgumentError for tensors on several devices.

    For these the dispatcher calls the kernel of CUDA before that of the CPU, and the fake one, of meta, before both.
    """
    names = [argument.name for argument in op._schema.arguments]

    def run(*arguments: Any) -> Any:
        first = None
        for name, argument in zip(names, arguments, strict=False):
            for x in argument if isinstance(argument, list) else (argument,):
                if isinstance(x, torch.Tensor):
                    first = first or (name, x.device)
                    if x.device != first[1]:
                        raise ArgumentError(
                            f"{name}: got a tensor on {x.device} with {first[0]} on {first[1]}; use one device"
                        )
        return kernel(*arguments)

    return run


def define_gemms(
    name: str, arrays: str, fake: Any, count_flops: Any, cpu: Callable[..., Any], cuda: Callable[..., Any]
) -> tuple[dict[tuple[int, int], Any], dict[tuple[int, int], Any]]:
    """Define {name}_{i}_{o} for all numbers i of tensor operands and o of results, and {name}_of_two_{i}_{o}.

    The second multiply by two operands b whose columns alternate. `arrays`: the arguments before the epilogue; `cpu`
    and `cuda`: the kernels. Returns the operators by (i, o), then those of two.
    """

    def define(name: str, arrays: str, fake: Any, count_flops: Any, **kernels: Any) -> dict[tuple[int, int], Any]:
        ops = {}
        for i, o in itertools.product(range(MAX_OPERANDS + 1), range(1, MAX_RESULTS + 1)):
            tensors = "".join(f", Tensor x{j}" for j in range(i))
            returns = "Tensor" if o == 1 else f"({', '.join(['Tensor'] * o)})"
            signature = f"({arrays}, int key, str epilogue, float[] numbers{tensors}) -> {returns}"
            ops[i, o] = define_op(f"{name}_{i}_{o}", signature, fake, count_flops, **kernels)
        return ops

    return define(name, arrays, fake, count_flops, CPU=cpu, CUDA=cuda), define(
        f"{name}_of_two", arrays.replace("Tensor b", "Tensor b, Tensor b2"), of_two(fake),
        lambda *shapes, **_: 2 * count_flops(*shapes), CPU=of_two(cpu), CUDA=of_two_on_gpu(cuda),
    )  # fmt: skip


OPERATORS, OPERATORS_OF_TWO = define_gemms(
    "gemm", "Tensor a, Tensor b", _fake_kernel, _count_flops, _cpu_kernel, _cuda_kernel
)
"""The operators by their numbers of tensor operands and of results; the second multiply by two operands b."""
