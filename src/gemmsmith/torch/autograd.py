"""A differentiable GEMM with a fused epilogue: an autograd.Function around the operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.graph.frontend.derivative import (
    GRAD_OUTPUT_PREFIX,
    GRAD_PREFIX,
    INPUT_PREFIX,
    OUTPUT_PREFIX,
    SAVED_PREFIX,
)
from gemmsmith.graph.frontend.interleave import interleave
from gemmsmith.torch import graph_serialization
from gemmsmith.torch.autograd_state import in_functorch_transform, needs_grad, operators_record_gradients, records_now
from gemmsmith.torch.backward_plan import (
    A,
    B,
    ForwardSpec,
    GradKernel,
    Names,
    ReductionResult,
    dynamo_constant,
    make_forward_spec,
    make_grad_kernels,
    number_names,
    result_names,
    tensor_names,
)
from gemmsmith.torch.define_op import LIBRARY, below_autograd, record_gradients
from gemmsmith.torch.fallback import FLOAT_DTYPES
from gemmsmith.torch.graph_serialization import PLAIN_GEMM
from gemmsmith.torch.ops import OPERATORS, SLICES, as_tuple, call_op, matmul_shape, multiply_slices, run_or_dispatch


def differentiable_gemm(
    epilogue: str, a: Any, b: Any, numbers: Sequence[float] = (), operands: Sequence[Any] = (),
    recompute: bool = False, offsets: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the results of an epilogue on a @ b, in the graph's order, with gradients if they are recorded.

    The arguments are those of `call_op`. `recompute`: save nothing beyond the results, and recompute the GEMM in
    backward. Raises ArgumentError if something requires a gradient that does not have one.
    """
    if not (needs_grad(a, b, *operands) or in_functorch_transform()) or operators_record_gradients():
        return as_tuple(call_op(epilogue, a, b, numbers, operands, offsets))
    return run_forward(*plan_forward(epilogue, a, b, operands, recompute), a, b, numbers, operands, offsets)


def run_forward(
    spec: ForwardSpec, wrt: Names, a: Any, b: Any, numbers: Sequence[float], operands: Sequence[Any],
    offsets: Any = None, apply: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Run a forward pass as `plan_forward` has planned it, record its gradients, and return the user's results.

    `spec`, `wrt`: the plan, and the inputs that need gradients. `apply`: calls an autograd.Function with the arguments
    of `GemmFunction.forward`; None: that of `GemmFunction`.
    """
    if apply is None:
        slow = torch.compiler.is_dynamo_compiling() or in_functorch_transform()
        apply = GemmFunction.apply if slow else fast_apply
    outputs = apply(spec, wrt, tuple(numbers), offsets, a, b, *operands)
    return outputs[: len(spec.user_outputs)]  # type: ignore[no-any-return]


def plan_forward(epilogue: str, a: Any, b: Any, operands: Sequence[Any], recompute: bool) -> tuple[ForwardSpec, Names]:
    """Return the plan of an epilogue's forward pass, and the names of the inputs that need gradients.

    The names are A, B and those of operands.
    """
    needs_all = in_functorch_transform()
    inputs = zip((A, B, *tensor_names(epilogue)), (a, b, *operands), strict=True)
    wrt = tuple([name for name, x in inputs if x.requires_grad or (needs_all and x.is_floating_point())])
    if a.dtype not in FLOAT_DTYPES:
        raise ArgumentError(f"a: got {a.dtype}, with something that requires grad; use bf16, or torch.no_grad()")
    return make_forward_spec(epilogue, wrt, str(a.dtype), recompute), wrt


class GemmFunction(torch.autograd.Function):
    """The autograd function of a GEMM with its epilogue: returns the user's results, then those that backward reads.

    A separate `setup_context`, and `vmap`, make it work in torch.func's transforms.
    """

    @staticmethod
    def forward(
        spec: ForwardSpec, wrt: Names, numbers: Any, offsets: Any, a: Any, b: Any, *operands: Any
    ) -> tuple[Any, ...]:
        return as_tuple(call_op(spec.epilogue, a, b, numbers, operands, offsets))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Save the tensors that backward reads, the numbers, and the shapes of a, b and the operands."""
        spec, wrt, numbers, offsets, *arrays = inputs
        ctx.spec, ctx.wrt, ctx.numbers, ctx.dtype = spec, wrt, numbers, arrays[0].dtype
        ctx.shapes, ctx.b_is_column_major = [x.shape for x in arrays], is_column_major(arrays[1])
        save_for_backward(ctx, spec, offsets, arrays, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return run_backward(ctx, ctx.saved_tensors, gradients)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Any, ...], int]:
        """Run the calls of torch.func.vmap: as one batched GEMM if a and b are matrices, else one after the other.

        `info.batch_size`: how many calls. `dims`: the dimension of each input along which the calls' inputs lie, or
        None if all calls get the same. Returns the results, stacked along dimension 0, and that 0.
        """
        spec, wrt, scalars, offsets, *arrays = inputs
        if offsets is not None:
            raise ArgumentError("offsets: got torch.vmap of a grouped GEMM; use a loop")
        batch_first = [x if d is None else x.movedim(d, 0) for x, d in zip(arrays, dims[4:], strict=True)]
        batched = [d is not None for d in dims[4:]]
        (a, b, *operands), (_, b_batched, *operands_batched) = batch_first, batched
        graph = graph_serialization.deserialize(spec.epilogue)
        reduces_batch = any(n.op == "reduce" and n.attribute[1] != "n" and n.attribute[1] != "m" for n in graph.nodes)
        # One call per element if the results reduce the batch, or a or b has a batch already.
        if reduces_batch or a.dim() - batched[0] != 2 or b.dim() - b_batched != 2:
            outputs_per_element = [
                GemmFunction.apply(*inputs[:4], *[x[i] if d else x for x, d in zip(batch_first, batched, strict=True)])
                for i in range(info.batch_size)
            ]
            return tuple(torch.stack(column) for column in zip(*outputs_per_element, strict=True)), 0
        if not (batched[0] or b_batched):
            a = a.expand(info.batch_size, *a.shape)
        operands = [_as_batched_matrix(x) if d else x for x, d in zip(operands, operands_batched, strict=True)]
        names = tuple(n for n, d in zip(tensor_names(spec.epilogue), operands_batched, strict=True) if d)
        batched_spec = spec._replace(epilogue=_batch_operands(spec.epilogue, names))
        return GemmFunction.apply(batched_spec, wrt, scalars, None, a, b, *operands), 0


def _apply_in_transform(*arguments: Any) -> tuple[Any, ...]:
    """Apply `GemmFunction` in an operator's Autograd kernel, which one transform of torch.func has called at its level.

    Transforms around that one call the kernel again, from the operator that `forward` calls.
    """
    with enable_single_level_autograd_function():
        return _FunctionAtLevel.apply(*arguments)  # type: ignore[no-any-return]


class _FunctionAtLevel(torch.autograd.function._SingleLevelFunction):
    """`GemmFunction` at the level of one transform of torch.func; torch makes such a class for an autograd.Function."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Any, ...]:
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():  # the transforms around it record, too
            return GemmFunction.forward(*arguments)

    setup_context, backward = staticmethod(GemmFunction.setup_context), staticmethod(GemmFunction.backward)


fast_apply = super(torch.autograd.Function, GemmFunction).apply
"""`apply` without binding the signature of forward, which takes most of a call's time on the host."""


def run_backward(ctx: Any, saved_tensors: Sequence[Any], gradients: Sequence[Any]) -> tuple[Any, ...]:
    """Return the gradients of `GemmFunction.forward`'s inputs, from those of its outputs, some of which may be None.

    `ctx` has the attributes that `setup_context` sets. `saved_tensors`: offsets (or None), and the tensors of the
    forward plan's `saved_names`.
    """
    epilogue, dtype, (offsets, *saved) = ctx.spec.epilogue, ctx.dtype, saved_tensors
    shape = matmul_shape(*ctx.shapes[:2]) if offsets is None else (ctx.shapes[0][0], ctx.shapes[1][2])
    values = dict(zip(ctx.spec.saved_names, saved, strict=True))
    reads_rows_behind = offsets is not None and any(name not in (A, B) for name in ctx.wrt)
    for name, x in zip(number_names(epilogue), ctx.numbers, strict=True):
        values[INPUT_PREFIX + name] = x
    outputs = []
    for i, (name, g) in enumerate(zip(result_names(epilogue), gradients, strict=True)):
        # Under compile, hidden outputs receive a zero gradient: skip it. In eager mode they only have one for
        # second derivatives.
        is_hidden = name.startswith(SAVED_PREFIX) and torch.compiler.is_dynamo_compiling()
        if g is not None and i not in ctx.spec.nondifferentiable and not is_hidden:
            outputs.append(name)
            # Rows behind the last group are constant zeros: their gradient must not reach an operand
            if reads_rows_behind:
                g = torch.where(torch.arange(shape[0], device=g.device).unsqueeze(1) < offsets[-1], g, 0)
            values[GRAD_OUTPUT_PREFIX + name] = g
    if not outputs:
        return (None,) * (4 + len(ctx.shapes))
    reductions, kernels, passthrough_grad_output = make_grad_kernels(
        epilogue, ctx.spec.saved_outputs, tuple(outputs), ctx.wrt, str(dtype)
    )
    like = values[GRAD_OUTPUT_PREFIX + outputs[0]]
    for r in reductions:
        _expand_reduction_grad(r, values, shape, dtype, like)  # no results of groups are reductions
    grads = {}
    for kernel in kernels:
        grads.update(_run_grad_kernel(kernel, values, shape, dtype, like, offsets))
    if passthrough_grad_output:
        grads["out"] = values[passthrough_grad_output].expand(shape)
    grad_a, grad_b = _grad_a_and_b(grads.get("out"), values.get(A), values.get(B), ctx, offsets)
    grad_operands = [grads.get(GRAD_PREFIX + name) for name in tensor_names(epilogue)]
    all_grads = zip((grad_a, grad_b, *grad_operands), ctx.shapes, strict=True)
    return (None, None, None, None, *[None if g is None else sum_to_size(g, shape_) for g, shape_ in all_grads])


def save_for_backward(
    ctx: Any, spec: ForwardSpec, offsets: Any, arrays: Sequence[Any], outputs: tuple[Any, ...]
) -> None:
    """Save on `ctx` the tensors that the backward pass of a forward plan reads.

    `outputs`: all results, those included that only backward reads.
    """
    saveable = (*arrays, *outputs)
    ctx.save_for_backward(offsets, *[saveable[i] for i in spec.saved_indices])
    ctx.set_materialize_grads(False)
    if spec.nondifferentiable:
        ctx.mark_non_differentiable(*[outputs[i] for i in spec.nondifferentiable])


def _expand_reduction_grad(
    r: ReductionResult, values: dict[str, Any], shape: tuple[Any, ...], dtype: Any, like: Any
) -> None:
    """Unsqueeze a reduction's value and gradient in `values`, so that they broadcast against the reduced matrix.

    Also divide the gradient of a mean by the number of elements, and that of a maximum or minimum by the number of
    elements that are equal to it. `values`: by the names of `derivative`'s operands, such as d_name for a gradient;
    modified. `shape`: that of a @ b. `dtype`: a's.
    """
    dims = [i for i, index in enumerate("bmn"[3 - len(shape) :]) if index in r.over]
    for name in (GRAD_OUTPUT_PREFIX + r.name, OUTPUT_PREFIX + r.name):
        if name in values and not r.keepdim:
            for i in dims:
                values[name] = values[name].unsqueeze(i)
    name = GRAD_OUTPUT_PREFIX + r.name
    if name in values and r.is_mean:
        sizes, count = (*shape[:-1], shape[-1] // r.input_column_divisor), 1
        for i in dims:
            count = count * sizes[i]
        values[name] = values[name] / count
    if name in values and r.tie_count_kernel:
        values[name] = values[name] / _run_grad_kernel(r.tie_count_kernel, values, shape, dtype, like)["out"]


def _run_grad_kernel(
    kernel: GradKernel, values: dict[str, Any], shape: tuple[Any, ...], dtype: Any, like: Any, offsets: Any = None
) -> dict[str, Any]:
    """Run a kernel of the backward pass, and return its results by name.

    `values`: tensors and numbers by name: A, B, and the names of `derivative`'s operands. `shape`: that of a @ b.
    `dtype`: a's. A kernel that does not read a @ b gets an a and a b with k = 0, made like `like`.
    """
    tensors = [
        values[name].expand(*shape[:-1], shape[-1] // columns_per_value) if columns_per_value else values[name]
        for name, columns_per_value in kernel.tensors
    ]
    if kernel.reads_accumulator:
        a, b = values[A], values[B]
    else:
        offsets = None
        a = like.new_empty((*shape[:-1], 0), dtype=dtype)
        b = like.new_empty((0, shape[-1]), dtype=dtype)
    numbers = [values[name] for name in kernel.numbers]
    results = differentiable_gemm(kernel.epilogue, a, b, numbers, tensors, offsets=offsets)
    return dict(zip(kernel.results, results, strict=True))


def _grad_a_and_b(grad_acc: Any, a: Any, b: Any, ctx: Any, offsets: Any) -> tuple[Any, Any]:
    """Return the gradients of a and b, grad_acc @ b.mT and a.mT @ grad_acc; None for one that is not needed.

    `grad_acc`: None if it is zero. `a` and `b`: None if their values are not needed.
    """
    grad_a = grad_b = None
    if grad_acc is not None and ctx.needs_input_grad[4]:
        (grad_a,) = differentiable_gemm(PLAIN_GEMM, grad_acc, transposed(b), offsets=offsets)
    if grad_acc is not None and ctx.needs_input_grad[5]:
        if a.dim() == 3 and len(ctx.shapes[1]) == 2:  # b's gradient sums over the rows of all batches
            a, grad_acc = a.flatten(0, 1), grad_acc.flatten(0, 1)
        grad_b = weight_gradient(a, grad_acc, ctx.b_is_column_major, offsets)
    return grad_a, grad_b


def is_column_major(b: Any) -> bool:
    """Return whether columns are contiguous in memory, as in the transpose of a row-major parameter."""
    return b.dim() > 1 and b.stride(-2) == 1 and b.stride(-1) > 1  # type: ignore[no-any-return]


def weight_gradient(a: Any, gradient: Any, column_major: bool, offsets: Any = None) -> Any:
    """Return the gradient of b in a @ b, which is a.mT @ gradient.

    It is `column_major` as b is: otherwise autograd would copy the gradient of a parameter whose transpose is b. With
    `offsets`, the ends of groups of rows, it is (groups, k, n), from each group's rows.
    """
    x, y = (gradient, a) if column_major else (a, gradient)  # column-major: the transpose of gradient.mT @ a
    if offsets is not None:
        product = differentiable_slices(transposed(x), y, offsets)
    else:
        (product,) = differentiable_gemm(PLAIN_GEMM, transposed(x), y)
    return transposed(product) if column_major else product


def differentiable_slices(a: Any, b: Any, offsets: Any) -> Any:
    """Return (groups, m, n), a[:, slice] @ b[slice] for each group's slice of K, with gradients if they are recorded.

    a is (m, k), b (k, n); `offsets` (groups,) are the slices' ends.
    """
    if not records_now(a, b):
        return multiply_slices(a, b, offsets)
    return _SlicesFunction.apply(a, b, offsets)


class _SlicesFunction(torch.autograd.Function):
    """`differentiable_slices` as an autograd function: the gradients are products of groups of rows."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, offsets: Any) -> Any:
        ctx.save_for_backward(a, b, offsets)
        return below_autograd(multiply_slices, a, b, offsets)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        """Return the gradients of a and b, products of groups of rows; offsets have none."""
        (a, b, offsets), grad_a, grad_b = ctx.saved_tensors, None, None
        if ctx.needs_input_grad[0]:  # its transpose (k, m), whose rows are divided into the groups
            (grad_a,) = differentiable_gemm(PLAIN_GEMM, b, transposed(gradient), offsets=offsets)
            grad_a = transposed(grad_a)
        if ctx.needs_input_grad[1]:
            (grad_b,) = differentiable_gemm(PLAIN_GEMM, transposed(a), gradient, offsets=offsets)
        return grad_a, grad_b, None


def transposed(x: Any) -> Any:
    """Return x.mT, for saved tensors of a backward pass, too.

    The attribute mT would fail there: Dynamo reads attributes of saved tensors before the forward pass, and compiled
    autograd then misses them.
    """
    return x.transpose(-2, -1)


def sum_to_size(g: Any, shape: Any) -> Any:
    """Return a gradient g of an operand that was broadcast, summed to the operand's shape."""
    while g.dim() > len(shape):
        g = g.squeeze(0) if g.shape[0] == 1 else g.sum(0)
    for i, size in enumerate(shape):
        if size == 1 and g.shape[i] != 1:
            g = g.sum(i, keepdim=True)
    return g


def _as_batched_matrix(x: Any) -> Any:
    """Return an operand with a leading batch dimension as (batch, rows, columns)."""
    return x.reshape(x.shape[0], *(1,) * (3 - x.dim()), *x.shape[1:])


@dynamo_constant
def _batch_operands(epilogue: str, names: tuple[str, ...]) -> str:
    """Return the serialized epilogue whose operands of these names have a value for each batch."""
    graph = graph_serialization.deserialize(epilogue)
    operands = [
        replace(o, broadcast_dims=o.broadcast_dims._replace(batch=o.broadcast_dims.batch or o.name in names))
        for o in graph.operands
    ]
    return graph_serialization.serialize(EpilogueGraph(graph.nodes, tuple(operands), graph.results))


# -- the Autograd kernels of operators: exported programs and some compiled code call operators and need gradients ---
def _autograd_kernel(op: Any) -> Callable[..., Any]:
    """Return the kernel of an operator gemm_{o} for the dispatch key Autograd, which records gradients if needed."""

    def kernel(
        a: Any, b: Any, b2: Any, offsets: Any, key: int, epilogue: str, numbers: list[float], operands: list[Any]
    ) -> Any:  # fmt: skip
        """Compute the operator's results, and record their gradients if autograd or a transform asks for them.

        Raises ArgumentError for tensors with a tangent of forward mode.
        """
        inputs = (a, b, *operands) if b2 is None else (a, b, b2, *operands)
        if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in inputs):
            raise ArgumentError(f"{op.name()}: got a dual tensor, of forward mode; use reverse mode")
        if records_now(*inputs):
            b = b if b2 is None else interleave(b, b2)
            plan = plan_forward(epilogue, a, b, operands, recompute=False)
            apply = _apply_in_transform if in_functorch_transform() else None
            results = run_forward(*plan, a, b, numbers, operands, offsets, apply)
            return results if len(results) > 1 else results[0]
        arguments = a, b, b2, offsets, key, epilogue, numbers, operands
        both = b if b2 is None else (b, b2)
        return run_or_dispatch(epilogue, a, both, numbers, operands, lambda: below_autograd(op, *arguments), offsets)

    return kernel


for _op in OPERATORS.values():
    LIBRARY.impl(_op.overloadpacket.__name__, _autograd_kernel(_op), "Autograd")
record_gradients(SLICES, differentiable_slices)
