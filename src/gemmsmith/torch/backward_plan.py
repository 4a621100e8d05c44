"""What forward saves and backward computes for an epilogue: constants that torch.compile does not trace.

Names are those of graph.frontend.derivative: x_name is an operand, y_name a result, d_name the gradient of a result,
g_name the gradient of an operand, and "out" the gradient of the accumulator A @ B. Epilogues are serialized graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import GemmsmithError
from gemmsmith.core.graph import EpilogueGraph, Node, Result, reduced_dims
from gemmsmith.graph.frontend.derivative import (
    ACCUMULATOR,
    GRAD_OUTPUT_PREFIX,
    INPUT_PREFIX,
    OUTPUT_PREFIX,
    derivative,
    minmax_results,
    nodes_with_gradient,
    tie_count_graph,
    with_saved_values,
)
from gemmsmith.graph.reductions import REDUCTIONS
from gemmsmith.graph.source_location import epilogue_error
from gemmsmith.torch.dynamo import assume_constant_result, skip_code
from gemmsmith.torch.graph_serialization import deserialize, graph_dtype, serialize
from gemmsmith.torch.ops import MAX_RESULTS, op_signature

A = "@a"
"""Name of a among the names of operands."""
B = "@b"
"""Name of b among the names of operands."""

Names = tuple[str, ...]
P = ParamSpec("P")
R = TypeVar("R")


def dynamo_constant(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of constants: its results are cached, and Dynamo calls it instead of tracing it.

    Its errors are returned as values, and raised in code that Dynamo traces, so that they become errors of the user's
    code instead of errors of Dynamo.
    """
    cached: Callable[..., Any] = lru_cache(maxsize=1024)(function)

    @assume_constant_result
    def outcome(*args: Any, **kwargs: Any) -> tuple[Any, type[GemmsmithError] | None, str]:
        """Return the function's value, or the type and the message of its error: Dynamo takes constants only."""
        try:
            return cached(*args, **kwargs), None, ""
        except GemmsmithError as error:
            return None, type(error), str(error)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function; while Dynamo compiles, by way of `outcome`."""
        if not torch.compiler.is_dynamo_compiling():
            return cached(*args, **kwargs)  # type: ignore[no-any-return]
        value, error, message = outcome(*args, **kwargs)
        if error is not None:
            raise error(message)
        return value  # type: ignore[no-any-return]

    # Compiled alone, the code would be found for other functions, too: nothing guards `outcome`.
    return skip_code(call)


class GradKernel(NamedTuple):
    """A GEMM of the backward pass, whose results are gradients or numbers of elements equal to a maximum or minimum.

    Attributes:
        reads_accumulator: whether that reads A @ B; otherwise the kernel runs with k = 0.
        tensors: names of the operands that are tensors. With each is 0, or, for the gradient of a reduction that is
            read as a matrix, the columns per value of that matrix (see `BroadcastDims`), to which it is expanded first.
        numbers: names of the operands that are numbers.
        results: names of the results: "out", and g_name for the gradient of an operand.
    """

    epilogue: str
    reads_accumulator: bool
    tensors: tuple[tuple[str, int], ...]
    numbers: Names
    results: Names


class ReductionResult(NamedTuple):
    """A result that is a reduction, as the backward pass needs to know it.

    Attributes:
        over: the reduced dimensions, letters of "bmn".
        is_mean: whether the gradient is divided by the number of elements.
        input_column_divisor: N divided by it is the number of columns of the input (see `BroadcastDims`).
        tie_count_kernel: for a maximum or minimum with a gradient, the kernel that counts the elements equal to it,
            among which its gradient is divided; else None.
    """

    name: str
    over: str
    keepdim: bool
    is_mean: bool
    input_column_divisor: int
    tie_count_kernel: GradKernel | None


@dynamo_constant
def tensor_names(epilogue: str) -> Names:
    """Return the names of an epilogue's operands that are tensors."""
    return deserialize(epilogue).tensor_names


@dynamo_constant
def number_names(epilogue: str) -> Names:
    """Return the names of an epilogue's operands that are numbers."""
    return deserialize(epilogue).number_names


@dynamo_constant
def result_names(epilogue: str) -> Names:
    """Return the names of an epilogue's results."""
    return deserialize(epilogue).result_names


def numbers_and_tensors(epilogue: str, operands: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return an epilogue's operands, given by name, as the operator takes them: the numbers, then the tensors."""
    return [operands[name] for name in number_names(epilogue)], [operands[name] for name in tensor_names(epilogue)]


class ForwardSpec(NamedTuple):
    """The plan of a forward pass: the epilogue, extended by results that backward reads, and what is saved.

    Attributes:
        epilogue: the extended epilogue, serialized.
        saved_outputs: names of the matrix results that backward reads instead of computing them again.
        user_outputs: names of the results that the user sees, the first ones.
        saved_names: what is saved: A, B, x_name for operands, y_name for results.
        saved_indices: the positions of these among a, b, the operands that are tensors, and the results.
        nondifferentiable: the positions of the results without a gradient.
    """

    epilogue: str
    saved_outputs: Names
    user_outputs: Names
    saved_names: Names
    saved_indices: tuple[int, ...]
    nondifferentiable: tuple[int, ...]


@dynamo_constant
def make_forward_spec(epilogue: str, wrt: Names, dtype: str, recompute: bool) -> ForwardSpec:
    """Plan the forward pass of an epilogue for the gradients with respect to `wrt`: A, B, and names of operands.

    `dtype`: a's, such as "torch.bfloat16". `recompute`: save nothing beyond the results, and recompute the GEMM in
    backward. Raises EpilogueError if a result has no gradient, ArgumentError if a kernel of the backward pass would
    have too many operands.
    """
    graph = deserialize(epilogue)
    for r in graph.results:
        if r.dtype is not None and r.dtype.bits < 16:
            raise epilogue_error(
                f"{r.name}: got a result in {r.dtype}, which has no gradient; use torch.no_grad(), or bf16"
            )
    extended = graph
    saved_outputs: Names = ()
    if not recompute:
        graph_with_saved, names = with_saved_values(graph, _wrt_with_accumulator(wrt), graph_dtype(dtype))
        if len(graph_with_saved.results) <= MAX_RESULTS:
            # with all operands, also those that nothing reads
            extended, saved_outputs = replace(graph_with_saved, operands=graph.operands), names
    user_outputs = graph.result_names
    has_gradient = nodes_with_gradient(extended, _wrt_with_accumulator(wrt))
    nondifferentiable = tuple(i for i, r in enumerate(extended.results) if not has_gradient[r.node])
    differentiable_outputs = tuple(name for i, name in enumerate(user_outputs) if i not in nondifferentiable)
    serialized = serialize(extended)
    reductions, kernels, _ = make_grad_kernels(serialized, saved_outputs, differentiable_outputs, wrt, dtype)
    for kernel in kernels:
        op_signature(kernel.epilogue)  # raises for too many operands
    grad_kernels = [*kernels, *(r.tie_count_kernel for r in reductions if r.tie_count_kernel)]
    read_names = {name for kernel in grad_kernels for name, _ in kernel.tensors}
    reads_accumulator = any(kernel.reads_accumulator for kernel in grad_kernels)
    read_names |= {A} if reads_accumulator or B in wrt else set()
    read_names |= {B} if reads_accumulator or A in wrt else set()
    inputs = [A, B, *(INPUT_PREFIX + name for name in extended.tensor_names)]
    saveable = [*inputs, *(OUTPUT_PREFIX + name for name in extended.result_names)]
    saved = [(i, name) for i, name in enumerate(saveable) if name in read_names]
    return ForwardSpec(
        serialized, saved_outputs, user_outputs, tuple(name for _, name in saved), tuple(i for i, _ in saved),
        nondifferentiable,
    )  # fmt: skip


@dynamo_constant
def make_grad_kernels(
    epilogue: str, saved_outputs: Names, outputs: Names, wrt: Names, dtype: str
) -> tuple[tuple[ReductionResult, ...], tuple[GradKernel, ...], str]:
    """Plan the backward pass of the epilogue of a forward plan, for the gradients with respect to `wrt`.

    `saved_outputs`: names of the results that are read instead of being computed again. `outputs`: those of the results
    that have gradients. Returns the results that are reductions, whose gradients are expanded first; the kernels; and
    the name of the result whose gradient is also the accumulator's, so that it needs no kernel, or "".
    """
    graph = deserialize(epilogue)
    default_dtype, passthrough_grad_output = graph_dtype(dtype), ""
    reductions = tuple(
        _reduction_result(graph, r, saved_outputs, outputs, default_dtype)
        for r in graph.results if graph.is_reduction(r)
    )  # fmt: skip
    kernels, names = [], _wrt_with_accumulator(wrt)
    for first in range(0, len(names), MAX_RESULTS):
        grads = derivative(graph, outputs, names[first : first + MAX_RESULTS], saved_outputs, default_dtype)
        passed_on = {
            o.name for o in grads.operands if o.name.startswith(GRAD_OUTPUT_PREFIX) and o.dtype == default_dtype
        }
        results = []
        for r in grads.results:
            node = grads.nodes[r.node]
            if r.name == "out" and node.op == "operand" and node.attribute in passed_on:
                passthrough_grad_output = node.attribute
            else:
                results.append(r)
        if results:
            kernels.append(_grad_kernel(replace(grads, results=tuple(results)), reductions))
    return reductions, tuple(kernels), passthrough_grad_output


@dynamo_constant
def backward_fused_into_dgrad(epilogue: str, saved_outputs: Names, wrt: Names, dtype: str) -> GradKernel:
    """Plan an epilogue's backward pass as the epilogue of another GEMM, which computes the gradient of its result.

    In an MLP that other GEMM is the next layer's dgrad (the gradient of its input): its accumulator is the gradient of
    "out", the only result that users see, which therefore is never stored. The arguments are those of
    `make_grad_kernels`. Raises EpilogueError if the gradient needs A @ B, which the other GEMM does not compute.
    """
    graph = deserialize(epilogue)
    derivative_graph = derivative(graph, ["out"], _wrt_with_accumulator(wrt), saved_outputs, graph_dtype(dtype))
    if any(node.op == "accumulator" for node in derivative_graph.nodes):
        raise epilogue_error(
            "out: its gradient needs A @ B, which is not saved; save it, or call gemmsmith.torch.gemm for each GEMM"
        )
    nodes = [Node("accumulator") if n.attribute == GRAD_OUTPUT_PREFIX + "out" else n for n in derivative_graph.nodes]
    operands = tuple(o for o in derivative_graph.operands if o.name != GRAD_OUTPUT_PREFIX + "out")
    return _grad_kernel(EpilogueGraph(tuple(nodes), operands, derivative_graph.results))


def _reduction_result(
    graph: EpilogueGraph, r: Result, saved_outputs: Names, outputs: Names, default: DType
) -> ReductionResult:
    """Return what the backward pass needs to know of a result that is a reduction; see `make_grad_kernels`.

    `default`: dtype of matrices that have none in the graph.
    """
    (inner,), (kind, axis) = graph.nodes[r.node].inputs, graph.nodes[r.node].attribute
    tie_count_kernel = None
    if r in minmax_results(graph) and r.name in outputs:
        tie_count_kernel = _grad_kernel(tie_count_graph(graph, r.name, saved_outputs, default))
    divisor = graph.broadcast_dims[inner].column_divisor
    return ReductionResult(r.name, reduced_dims(axis), r.keepdim, REDUCTIONS[kind].divides, divisor, tie_count_kernel)


def _grad_kernel(graph: EpilogueGraph, reductions: tuple[ReductionResult, ...] = ()) -> GradKernel:
    """Return the kernel that computes a graph of `derivative`.

    The gradient of a result in `reductions` is expanded to a matrix first, where the graph reads it as one.
    """
    reads_accumulator = any(node.op == "accumulator" for node in graph.nodes)
    reduced_grads, tensors = {GRAD_OUTPUT_PREFIX + r.name for r in reductions}, []
    for o in graph.operands:
        if o.dtype is not None:
            is_expanded = o.name in reduced_grads and o.broadcast_dims.is_matrix and o.broadcast_dims.batch
            tensors.append((o.name, o.broadcast_dims.columns_per_value if is_expanded else 0))
    serialized = serialize(graph)
    return GradKernel(serialized, reads_accumulator, tuple(tensors), graph.number_names, graph.result_names)


def _wrt_with_accumulator(names: Names) -> Names:
    """Return the names for `derivative`: the accumulator's gradient stands for those of A and B."""
    accumulator = (ACCUMULATOR,) if A in names or B in names else ()
    return (*accumulator, *(name for name in names if name not in (A, B)))
