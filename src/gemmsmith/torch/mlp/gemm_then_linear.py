"""Two GEMMs in sequence (a back-to-back GEMM), as of an MLP: the second one multiplies the first one's epilogue.

In the backward pass the GEMM with weight2 computes the gradient of the first one's result. The derivative of the first
one's epilogue is computed in the epilogue of that GEMM, so that this gradient is not stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gemmsmith.arrays import INTERLEAVE_COLUMNS
from gemmsmith.binding import checks
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import BroadcastDims
from gemmsmith.core.scalars import as_bools
from gemmsmith.graph.frontend.derivative import GRAD_PREFIX, INPUT_PREFIX
from gemmsmith.graph.frontend.tracer import trace
from gemmsmith.torch.api import FP8, autocast, check_tensor, is_autocast, is_dtensor, prepare
from gemmsmith.torch.autograd import (
    differentiable_gemm,
    is_column_major,
    plan_forward,
    sum_to_size,
    transposed,
    weight_gradient,
)
from gemmsmith.torch.autograd_state import (
    check_once_differentiable,
    in_functorch_transform,
    needs_grad,
    operators_record_gradients,
)
from gemmsmith.torch.backward_plan import (
    GradKernel,
    Names,
    backward_fused_into_dgrad,
    dynamo_constant,
    make_forward_spec,
    number_names,
    numbers_and_tensors,
    result_names,
    tensor_names,
)
from gemmsmith.torch.graph_serialization import PLAIN_GEMM, graph_dtype, serialize
from gemmsmith.torch.mlp.gated_epilogues import HALVES, epilogue_of
from gemmsmith.torch.ops import as_tuple, call_op


def gemm_then_linear(
    a: Any, b: Any, weight2: Any, *, epilogue: Any, operands: Mapping[str, Any], bias: Any = None,
    recompute: bool = False,
) -> Any:  # fmt: skip
    """Return `epilogue(a @ b) @ weight2 + bias`, with gradients.

    The backward pass computes the epilogue's derivative in the epilogue of the GEMM with weight2. There are no second
    derivatives.

    Args:
        a: (..., m, k), in a dtype of `gemm`.
        b: (k, n), in a's dtype.
        weight2: (n, p), in the dtype of the epilogue's result.
        epilogue: a function with one result of shape (..., m, n), as in `gemm`.
        operands: its operands by name, as in `gemm`: with a's leading dimensions, (..., m, n) or (..., m, 1), or (n,),
            or a number.
        bias: (p,) or None.
        recompute: save nothing beyond the arguments; the backward pass multiplies a and b again.

    Returns:
        A tensor (..., m, p).

    Raises:
        ArgumentError: an argument, which the message names, is not valid.
        EpilogueError: the function is not a valid epilogue, or has no gradient.
    """
    (recompute,) = as_bools(recompute=recompute)
    a, b, weight2 = autocast(a, b, weight2)
    for name, x in (("a", a), ("weight2", weight2), *[("bias", bias)] * (bias is not None)):
        check_tensor(name, x, a)
    serialized, a, b, operand_values, leading_shape, shape = prepare(
        a, b, epilogue, checks.merge_operands(operands, {}), {}
    )
    if a.dim() != 2 or b.dim() != 2:
        raise ArgumentError("operands: got one with a batch dimension but without m rows; call gemm twice")
    if weight2.dim() != 2:
        raise ArgumentError(f"weight2: got {weight2.dim()} dimensions; use (n, p)")
    if bias is not None and tuple(bias.shape) != tuple(weight2.shape[1:]):
        raise ArgumentError(f"bias: got shape {tuple(bias.shape)}; use {tuple(weight2.shape[1:])}")
    if len(result_names(serialized)) != 1:
        raise ArgumentError(f"epilogue: got a function with {len(result_names(serialized))} results; use one")
    y = _run_both(serialized, a, b, *numbers_and_tensors(serialized, operand_values), weight2, bias, recompute)
    return y.reshape(*leading_shape, shape[-2], y.shape[-1])


def _run_both(
    epilogue: str, a: Any, b: Any, numbers: Sequence[float], operands: Sequence[Any], weight2: Any, bias: Any,
    recompute: bool,
) -> Any:  # fmt: skip
    """Return epilogue(a @ b) @ weight2 + bias, with gradients, for arrays with two dimensions.

    `epilogue`: serialized; `numbers`, `operands`: its operands that are numbers, and tensors, in the graph's order.
    """
    spec, wrt = plan_forward(epilogue, a, b, operands, recompute=False)
    has_gradient = wrt and torch.is_grad_enabled() and 0 not in spec.nondifferentiable
    if not has_gradient or in_functorch_transform() or operators_record_gradients():  # has second derivatives, too
        (h,) = differentiable_gemm(epilogue, a, b, numbers, operands, recompute)
        return differentiable_gemm(*_second_product(h, weight2, bias))[0]
    plan = _plan(epilogue, wrt, str(a.dtype))
    return _GemmThenLinear.apply(plan, recompute, tuple(numbers), a, weight2, bias, b, *operands)[0]


def multiplies_both_at_once(x: Any, gate: Any, up: Any) -> bool:
    """Return whether `gated_mlp` can compute an MLP of input x and weights gate and up (hidden, dim).

    It needs bf16, fp16 or autocast, no DTensors, no transforms of torch.func, and a hidden size that is a multiple of
    8.
    """
    is_16bit = x.dtype in (torch.bfloat16, torch.float16) or is_autocast(x)
    is_plain = not (any(map(is_dtensor, (x, gate, up))) or in_functorch_transform() or operators_record_gradients())
    return is_16bit and is_plain and gate.shape == up.shape and not gate.shape[0] % INTERLEAVE_COLUMNS


def gated_mlp(x: Any, gate: Any, up: Any, down: Any, activation: str, recompute: bool = False) -> Any:
    """Return down (activation(gate x) * up x), with gradients. No second derivatives.

    Args:
        x: (..., dim), in 16 bits or under autocast to them.
        gate: (hidden, dim).
        up: (hidden, dim).
        down: (dim, hidden).
        activation: silu, gelu, gelu_tanh or relu.
        recompute: save no products; backward multiplies by gate and up again.
    """
    x, gate, up, down = autocast(x, gate, up, down)
    rows, weights = x.flatten(0, -2), (transposed(gate), transposed(up))
    if needs_grad(x, gate, up, down):
        plan = _gated_plan(activation, str(rows.dtype))
        y = _GemmThenLinear.apply(plan, recompute, (), rows, transposed(down), None, *weights)[0]
    else:
        h = call_op(epilogue_of("gated", activation, str(rows.dtype)), rows, weights)
        y = call_op(*_second_product(h, transposed(down), None))
    return y.view(*x.shape[:-1], down.shape[0])


class _Plan(NamedTuple):
    """How two GEMMs in sequence are computed and differentiated. Epilogues are serialized.

    Attributes:
        epilogue: the first GEMM's epilogue, whose first result the second GEMM multiplies; backward reads the others.
        shorter: an epilogue with the first result only.
        saved_names: the names under which `gradients` reads what is saved.
        saved_indices: the positions of that among a, the arrays b, the operands and the first GEMM's results.
        gradients: the GEMM of the backward pass that multiplies the gradient by weight2.
        products: which of its results are the gradients of a's products with each array b.
    """

    epilogue: str
    shorter: str
    saved_names: Names
    saved_indices: tuple[int, ...]
    gradients: GradKernel
    products: Names


@dynamo_constant
def _plan(epilogue: str, wrt: Names, dtype: str) -> _Plan:
    """Return the plan of an epilogue with one array b. `wrt`: inputs that need gradients; `dtype`: a's."""
    spec = make_forward_spec(epilogue, wrt, dtype, recompute=False)
    gradients = backward_fused_into_dgrad(spec.epilogue, spec.saved_outputs, wrt, dtype)
    return _Plan(spec.epilogue, spec.epilogue, spec.saved_names, spec.saved_indices, gradients, ("out",))


@dynamo_constant
def _gated_plan(activation: str, dtype: str) -> _Plan:
    """Return the plan of a gate, with two arrays b. Backward reads both products, gate and up. `dtype`: a's."""
    forward, shorter, backward = (epilogue_of(x, activation, dtype) for x in ("gate_and_halves", "gated", "backward"))
    products = result_names(backward)
    gradients = GradKernel(backward, False, tuple((name, 0) for name in HALVES), (), products)
    return _Plan(forward, shorter, HALVES, (4, 5), gradients, products)  # behind a, gate, up and h


class _GemmThenLinear(torch.autograd.Function):
    """The autograd function of two GEMMs in sequence.

    It returns the second GEMM's result, and, unless backward recomputes them, the results of the first one, so that
    they can be saved.
    """

    @staticmethod
    def forward(
        plan: _Plan, recompute: bool, numbers: Any, a: Any, weight2: Any, bias: Any, *arrays: Any
    ) -> tuple[Any, ...]:
        """Run both GEMMs; with `recompute` the first one without results that only backward reads.

        `arrays`: the arrays b, then the epilogue's operands that are tensors.
        """
        outputs = _multiply_first(plan, plan.shorter if recompute else plan.epilogue, numbers, a, arrays)
        y = call_op(*_second_product(outputs[0], weight2, bias))
        return (y,) if recompute else (y, *outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Save what backward reads: a, the weights, and what the plan names; with `recompute` the operands instead."""
        ctx.plan, ctx.recompute, ctx.numbers, a, weight2, bias, *arrays = inputs
        ctx.shapes, ctx.bias_dtype = [x.shape for x in arrays], None if bias is None else bias.dtype
        ctx.weight2_is_column_major, ctx.are_column_major = is_column_major(weight2), [*map(is_column_major, arrays)]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        count = len(ctx.plan.products)
        saved = arrays[count:] if ctx.recompute else _read_by_backward(ctx.plan, a, arrays, output[1:])
        ctx.save_for_backward(a, weight2, *arrays[:count], *saved)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Return the gradients of forward's inputs, from that of the second GEMM's result.

        One GEMM, with weight2, computes the gradients of the epilogue's operands and of the products, from which those
        of a and the arrays b follow.
        """
        check_once_differentiable()
        gradient, plan, count = gradients[0], ctx.plan, len(ctx.plan.products)
        if gradient is None:
            return (None,) * (6 + len(ctx.shapes))
        a, weight2, *saved = ctx.saved_tensors
        weights = saved[:count]
        if ctx.recompute:
            outputs = _multiply_first(plan, plan.epilogue, ctx.numbers, a, saved)
            h, *values = _read_by_backward(plan, a, saved, outputs)
        else:
            h, *values = saved[count:]
        grads = _gradients(plan, gradient, weight2, values, ctx.numbers)
        _, _, _, needs_a, needs_weight2, needs_bias, *needs = ctx.needs_input_grad
        products = [grads.get(name) for name in plan.products]
        of_weights = [
            weight_gradient(a, g, column_major) if is_needed and g is not None else None
            for g, is_needed, column_major in zip(products, needs, ctx.are_column_major, strict=False)
        ]
        of_operands = [
            sum_to_size(grads[GRAD_PREFIX + name], shape) if GRAD_PREFIX + name in grads else None
            for name, shape in zip(tensor_names(plan.epilogue), ctx.shapes[count:], strict=True)
        ]
        return (
            None, None, None, _sum_of_products(products, weights) if needs_a else None,
            weight_gradient(h, gradient, ctx.weight2_is_column_major) if needs_weight2 else None,
            gradient.sum(0, dtype=ctx.bias_dtype) if needs_bias else None, *of_weights, *of_operands,
        )  # fmt: skip


def _multiply_first(plan: _Plan, epilogue: str, numbers: Sequence[float], a: Any, arrays: Sequence[Any]) -> Any:
    """Return the results of the first GEMM with this epilogue; `arrays`: the arrays b, then the epilogue's operands."""
    count = len(plan.products)
    b = arrays[0] if count == 1 else tuple(arrays[:count])
    return as_tuple(call_op(epilogue, a, b, numbers, arrays[count:]))


def _read_by_backward(plan: _Plan, a: Any, arrays: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Return the matrix that the second GEMM multiplies, followed by the tensors that the gradients' epilogue reads."""
    saveable = (a, *arrays, *outputs)
    return [outputs[0], *[saveable[i] for i in plan.saved_indices]]


def _gradients(
    plan: _Plan, gradient: Any, weight2: Any, saved: Sequence[Any], numbers: Sequence[float]
) -> dict[str, Any]:
    """Return the gradients of the products and of the operands, by the names of `derivative`'s results."""
    kernel, values = plan.gradients, dict(zip(plan.saved_names, saved, strict=True))
    values |= {INPUT_PREFIX + name: x for name, x in zip(number_names(plan.epilogue), numbers, strict=True)}
    results = call_op(
        kernel.epilogue, gradient, transposed(weight2), [values[name] for name in kernel.numbers],
        [values[name] for name, _ in kernel.tensors],
    )  # fmt: skip
    return dict(zip(kernel.results, as_tuple(results), strict=True))


def _sum_of_products(gradients: Sequence[Any], weights: Sequence[Any]) -> Any:
    total = None
    for g, b in zip(gradients, weights, strict=True):
        if g is not None:
            total = call_op(*_product_arguments(g, transposed(b), total))
    return total


def _second_product(h: Any, weight2: Any, bias: Any) -> tuple[Any, ...]:
    """Return the arguments of `call_op` for h @ weight2 + bias. Raises ArgumentError if their dtypes differ."""
    if h.dtype != weight2.dtype and not {h.dtype, weight2.dtype} <= FP8:
        raise ArgumentError(f"weight2: got {weight2.dtype} with a first result of {h.dtype}; use the same for both")
    return _product_arguments(h, weight2, bias)


def _product_arguments(h: Any, weight: Any, addend: Any) -> tuple[Any, ...]:
    """Return the arguments of `call_op` for h @ weight + addend; `addend`: a row, a matrix, or None."""
    if addend is None:
        return PLAIN_GEMM, h, weight
    return _sum_epilogue(str(addend.dtype), addend.dim() == 2), h, weight, [], [addend]


@dynamo_constant
def _sum_epilogue(dtype: str, is_matrix: bool) -> str:
    operands = {"c": (BroadcastDims(False, int(is_matrix), 1), graph_dtype(dtype))}  # type: ignore[arg-type]
    return serialize(trace(lambda acc, c: acc + c, (2, 2), operands))
