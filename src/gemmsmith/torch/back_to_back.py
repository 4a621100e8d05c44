"""Two GEMMs in sequence (a back-to-back GEMM).

The derivative of the first one's epilogue is computed in the epilogue of a GEMM of the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import BroadcastDims
from gemmsmith.graph.frontend.derivative import GRAD_PREFIX, INPUT_PREFIX
from gemmsmith.graph.frontend.tracer import trace
from gemmsmith.torch.autograd import (
    PLAIN_GEMM,
    differentiable_gemm,
    is_column_major,
    plan_forward,
    sum_to_size,
    transposed,
    weight_gradient,
)
from gemmsmith.torch.autograd_state import check_once_differentiable, in_functorch_transform, operators_record_gradients
from gemmsmith.torch.backward_plan import (
    ForwardSpec,
    Names,
    backward_fused_into_dgrad,
    dynamo_constant,
    number_names,
    result_names,
    tensor_names,
)
from gemmsmith.torch.graph_serialization import serialize
from gemmsmith.torch.ops import as_tuple, call_op
from gemmsmith.torch.tracing import dtype_from_name


def run_gemm_then_linear(
    epilogue: str, a: Any, b: Any, numbers: Sequence[float], operands: Sequence[Any], weight2: Any, bias: Any,
    recompute: bool,
) -> Any:  # fmt: skip
    """Return epilogue(a @ b) @ weight2 + bias.

    The gradient with respect to the accumulator of the first GEMM is computed in the epilogue of the GEMM with
    weight2, so that the gradient of the first GEMM's result is not stored. No second derivatives.

    a is (m, k), b (k, n), weight2 (n, p), bias (p,) or None. `epilogue` is serialized and has one result, of shape
    (m, n); `numbers` and `operands` are its operands that are numbers and that are tensors, in the graph's order.
    `recompute`: save the arguments only, and multiply a and b again in backward.

    Raises:
        ArgumentError: the epilogue has more than one result, or something has no gradient.
    """
    if len(result_names(epilogue)) != 1:
        raise ArgumentError(f"epilogue: got a function with {len(result_names(epilogue))} results; use one")
    bias_operands = [] if bias is None else [bias]
    second_epilogue = _bias_epilogue(str(bias.dtype)) if bias_operands else PLAIN_GEMM
    spec, wrt = plan_forward(epilogue, a, b, operands, recompute=False)
    needs_grad = wrt and torch.is_grad_enabled() and 0 not in spec.nondifferentiable
    if not needs_grad or in_functorch_transform() or operators_record_gradients():  # supports second derivatives, too
        (h,) = differentiable_gemm(epilogue, a, b, numbers, operands, recompute)
        return differentiable_gemm(second_epilogue, h, weight2, [], bias_operands)[0]
    forward_numbers = tuple([numbers[i] for i in spec.number_indices])
    return _GemmThenLinearFunction.apply(
        spec, wrt, recompute, forward_numbers, second_epilogue, a, b, weight2, bias,
        *[operands[i] for i in spec.tensor_indices],
    )[0]  # fmt: skip


@dynamo_constant
def _bias_epilogue(dtype: str) -> str:
    """Return the serialized epilogue that adds a bias of this dtype."""
    return serialize(
        trace(
            lambda acc, bias: acc + bias, (2, 2), {"bias": (BroadcastDims(columns_per_value=1), dtype_from_name(dtype))}
        )
    )


class _GemmThenLinearFunction(torch.autograd.Function):
    """The second GEMM's result, then, unless backward recomputes them, the outputs of the first one's forward plan."""

    @staticmethod
    def forward(
        spec: ForwardSpec, wrt: Names, recompute: bool, numbers: Any, second_epilogue: str, a: Any, b: Any,
        weight2: Any, bias: Any, *operands: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        outputs = as_tuple(call_op(spec.epilogue, a, b, numbers, operands))
        y = call_op(second_epilogue, outputs[0], weight2, [], [] if bias is None else [bias])
        return (y,) if recompute else (y, *outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        spec, wrt, ctx.recompute, numbers, _, a, b, weight2, bias, *operands = inputs
        ctx.spec, ctx.wrt, ctx.numbers = spec, wrt, numbers
        ctx.column_major = is_column_major(b), is_column_major(weight2)
        ctx.operand_shapes, ctx.bias_dtype = [x.shape for x in operands], None if bias is None else bias.dtype
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        saveable = (a, b, *operands, *output[1:])
        saved = operands if ctx.recompute else [output[1], *[saveable[i] for i in spec.saved_indices]]
        ctx.save_for_backward(a, b, weight2, *saved)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        check_once_differentiable()
        if grad_outputs[0] is None:
            return (None,) * (9 + len(ctx.operand_shapes))
        epilogue = ctx.spec.epilogue
        a, b, weight2, *saved = ctx.saved_tensors
        if ctx.recompute:
            outputs = as_tuple(call_op(epilogue, a, b, ctx.numbers, saved))
            saveable = (a, b, *saved, *outputs)
            saved = [outputs[0], *[saveable[i] for i in ctx.spec.saved_indices]]
        h, *saved = saved
        values = dict(zip(ctx.spec.saved_names, saved, strict=True))
        for name, x in zip(number_names(epilogue), ctx.numbers, strict=True):
            values[INPUT_PREFIX + name] = x
        dgrad = backward_fused_into_dgrad(epilogue, ctx.spec.saved_outputs, ctx.wrt, str(a.dtype))
        dgrad_operands = [values[name] for name, _ in dgrad.tensors]
        results = differentiable_gemm(
            dgrad.epilogue,
            grad_outputs[0],
            transposed(weight2),
            [values[name] for name in dgrad.numbers],
            dgrad_operands,
        )
        grads = dict(zip(dgrad.results, results, strict=True))
        grad_a = grad_b = grad_weight2 = grad_bias = None
        grad_acc = grads.get("out")
        if grad_acc is not None and ctx.needs_input_grad[5]:
            (grad_a,) = differentiable_gemm(PLAIN_GEMM, grad_acc, transposed(b), [], [])
        if grad_acc is not None and ctx.needs_input_grad[6]:
            grad_b = weight_gradient(a, grad_acc, ctx.column_major[0])
        if ctx.needs_input_grad[7]:
            grad_weight2 = weight_gradient(h, grad_outputs[0], ctx.column_major[1])
        if ctx.needs_input_grad[8]:
            grad_bias = grad_outputs[0].sum(0, dtype=ctx.bias_dtype)
        grad_operands = [
            sum_to_size(grads[GRAD_PREFIX + name], shape) if GRAD_PREFIX + name in grads else None
            for name, shape in zip(tensor_names(epilogue), ctx.operand_shapes, strict=True)
        ]
        return (*[None] * 5, grad_a, grad_b, grad_weight2, grad_bias, *grad_operands)
