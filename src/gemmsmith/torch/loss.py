"""Cross-entropy of a linear layer whose logits are not stored."""

from __future__ import annotations

from typing import Any

import torch

from gemmsmith.core.dtypes import FP32
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import BroadcastDims
from gemmsmith.graph.frontend.tracer import trace
from gemmsmith.torch.api import autocast, expect_tensor
from gemmsmith.torch.autograd import PLAIN_GEMM, differentiable_gemm
from gemmsmith.torch.autograd_state import check_once_differentiable, in_functorch_transform, is_exporting, needs_grad
from gemmsmith.torch.backward_plan import dynamo_constant
from gemmsmith.torch.graph_serialization import serialize
from gemmsmith.torch.ops import call_op
from gemmsmith.torch.tracing import dtype_from_name

ACCUMULATE_EPILOGUES = {
    (False, False): PLAIN_GEMM,
    (False, True): " | accumulator | out 0 fp32",
    (True, False): "c m,n fp32 | accumulator; operand: c; add 0 1 | out 2",
    (True, True): "c m,n fp32 | accumulator; operand: c; add 0 1 | out 2 fp32",
}
"""Serialized epilogues of a GEMM in a chain of accumulating ones, by whether it adds to `c`, and whether its result is
accumulated further and therefore fp32."""
LABEL_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""Dtypes of targets."""


def cross_entropy(input: Any, weight: Any, target: Any, ignore_index: int, reduction: str, chunks: int) -> Any:
    """Return the loss of `FusedLinearCrossEntropy`, which documents the arguments.

    Returns:
        A scalar, or (...) if reduction is "none"; fp32, or float64 if the input is.
    """
    x = as_batched_input(input, weight).flatten(0, -2)
    _check_target(target, input.shape[:-1])
    x, weight = autocast(x, weight)
    labels = target.reshape(-1, 1).long()
    ignored = labels == ignore_index
    valid = (labels >= 0) & (labels < weight.shape[0])
    loss_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    weights = torch.where(ignored, 0.0, torch.where(valid, 1.0, float("nan"))).to(loss_dtype)
    if needs_grad(x, weight) and reduction != "none" and not (in_functorch_transform() or is_exporting()):
        loss_scale = 1.0
        if reduction == "mean" and x.dtype == torch.float16:  # fp16 gradients of a sum overflow, of a mean underflow
            loss_scale = (~ignored).sum().clamp(min=1).rsqrt()
        needs_input_grad = x.requires_grad, weight.requires_grad
        return _mean(
            _CrossEntropyFunction.apply(x, weight, labels, weights * loss_scale, chunks, needs_input_grad) / loss_scale,
            ignored,
            reduction,
        )
    losses_epilogue = _serialized_epilogues(int(weight.shape[0]), str(labels.dtype))[0]
    lse, label_logit = differentiable_gemm(losses_epilogue, x, weight.mT, [], [labels], recompute=True)
    losses = torch.where(ignored, 0.0, (lse - label_logit) * weights)
    return losses.reshape(target.shape) if reduction == "none" else _mean(losses.sum(), ignored, reduction)


def as_batched_input(x: Any, weight: Any) -> Any:
    """Return a layer's input, with a row dimension if it is one row.

    Raises ArgumentError if the shape or dtype does not match the layer's weight.
    """
    expect_tensor("input", x)
    if x.dim() == 0 or x.shape[-1] != weight.shape[-1]:
        raise ArgumentError(f"input: got shape {tuple(x.shape)}; use (..., {weight.shape[-1]})")
    if x.dtype != weight.dtype and not (x.is_meta or torch.is_autocast_enabled(x.device.type)):
        raise ArgumentError(f"input: got {x.dtype} with a weight of {weight.dtype}; use the same for both")
    return x.unsqueeze(0) if x.dim() == 1 else x


def _check_target(target: Any, shape: tuple[Any, ...]) -> None:
    expect_tensor("target", target)
    if tuple(target.shape) != tuple(shape) or target.dtype not in LABEL_DTYPES:
        raise ArgumentError(
            f"target: got shape {tuple(target.shape)} of {target.dtype}; use integers of shape {tuple(shape)}"
        )


def _mean(total: Any, ignored: Any, reduction: str) -> Any:
    """Return the sum, or the mean over the rows that are not ignored: NaN if there are none, as in F.cross_entropy."""
    if reduction == "sum":
        return total
    count = (~ignored).sum()
    return torch.where(count > 0, total / count.clamp(min=1), float("nan"))


class _CrossEntropyFunction(torch.autograd.Function):
    """The weighted sum of the rows' losses, whose gradients are computed in the forward pass, chunk by chunk.

    `needs_input_grad` selects the gradients with respect to x and weight. That of weight is a sum over the chunks,
    which is fp32 until the last one.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, labels: Any, weights: Any, chunks: int, needs_input_grad: tuple[bool, bool]
    ) -> Any:
        classes, _ = weight.shape
        _, losses_and_logits, logits_grad = _serialized_epilogues(classes, str(labels.dtype))
        total = weights.new_zeros(())
        grad_x_parts: list[Any] = []
        grad_weight: list[Any] = []
        count = chunks if x.shape[0] >= chunks else 1
        row_chunks = [y.tensor_split(count) for y in (x, labels, weights)]
        for i, (x_chunk, labels_chunk, weights_chunk) in enumerate(zip(*row_chunks, strict=True)):
            logits, lse, label_logit = call_op(losses_and_logits, x_chunk, weight.mT, [], [labels_chunk])
            total = total + torch.where(weights_chunk == 0, 0.0, (lse - label_logit) * weights_chunk).sum()
            empty = x_chunk.new_empty((x_chunk.shape[0], 0)), x_chunk.new_empty((0, classes))
            grad_logits = call_op(logits_grad, *empty, [], [labels_chunk, logits, lse, weights_chunk])
            if needs_input_grad[0]:
                grad_x_parts.append(call_op(PLAIN_GEMM, grad_logits, weight, [], []))
            if needs_input_grad[1]:
                grad_weight = [
                    call_op(ACCUMULATE_EPILOGUES[i > 0, i + 1 < count], grad_logits.mT, x_chunk, [], grad_weight)
                ]
        ctx.save_for_backward(torch.cat(grad_x_parts) if needs_input_grad[0] else None, *(grad_weight or [None]))
        return total

    @staticmethod
    def backward(ctx: Any, g: Any) -> tuple[Any, ...]:
        check_once_differentiable()
        compiling = torch.compiler.is_dynamo_compiling()
        # The saved gradients are as large as the weight: scale them in place, unless another backward may follow.
        keeps_graph = compiling or torch._C._autograd._get_current_graph_task_keep_graph()
        grads = [None if x is None else (x * g).to(x.dtype) if keeps_graph else x.mul_(g) for x in ctx.saved_tensors]
        return (*grads, None, None, None, None)


def _losses(acc: Any, labels: Any) -> Any:
    label_mask = labels.one_hot(acc.shape[-1])
    return acc.logsumexp(-1, keepdim=True), (acc * label_mask).sum(-1, keepdim=True)


def _losses_and_logits(acc: Any, labels: Any) -> Any:
    """Return the logits unrounded, too: exp(logit - logsumexp) is a probability only of the same logits."""
    return (acc.float(), *_losses(acc, labels))


def _logits_grad(acc: Any, labels: Any, logits: Any, lse: Any, weights: Any) -> Any:
    """Return the gradient of the logits. The accumulator is that of an empty GEMM."""
    return ((logits - lse).exp() - labels.one_hot(acc.shape[-1])) * weights


@dynamo_constant
def _serialized_epilogues(classes: int, labels_dtype: str) -> tuple[str, str, str]:
    """Return `_losses`, `_losses_and_logits` and `_logits_grad` serialized, for this number of classes."""
    column, matrix = BroadcastDims(rows_per_value=1), BroadcastDims(True, 1, 1)
    labels = {"labels": (column, dtype_from_name(labels_dtype))}
    logits = {"logits": (matrix, FP32), "lse": (column, FP32), "weights": (column, FP32)}

    def serialized(function: Any, operands: Any) -> str:
        return serialize(trace(function, (2, classes), operands))

    return (
        serialized(_losses, labels),
        serialized(_losses_and_logits, labels),
        serialized(_logits_grad, labels | logits),
    )
