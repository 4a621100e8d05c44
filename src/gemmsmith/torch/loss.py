"""Cross-entropy of a linear layer whose logits are not stored."""

from __future__ import annotations

from typing import Any

import torch

from gemmsmith.core.dtypes import FP16, FP32
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import BroadcastDims
from gemmsmith.graph.frontend.tracer import trace
from gemmsmith.torch.api import autocast, expect_tensor
from gemmsmith.torch.autograd import PLAIN_GEMM, differentiable_gemm
from gemmsmith.torch.autograd_state import check_once_differentiable, in_functorch_transform, is_exporting, needs_grad
from gemmsmith.torch.backward_plan import dynamo_constant
from gemmsmith.torch.graph_serialization import serialize
from gemmsmith.torch.in_place import call_in_place
from gemmsmith.torch.ops import call_op
from gemmsmith.torch.tracing import dtype_from_name

LABEL_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""Dtypes of targets."""


def cross_entropy(
    input: Any, weight: Any, target: Any, ignore_index: int, reduction: str, chunks: int, low_memory: bool
) -> Any:
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
            _CrossEntropyFunction.apply(x, weight, labels, weights * loss_scale, chunks, low_memory, needs_input_grad)
            / loss_scale,
            ignored,
            reduction,
        )
    losses_epilogue = _serialized_epilogues(int(weight.shape[0]), str(labels.dtype))[0]
    lse, label_logit = differentiable_gemm(losses_epilogue, x, weight.mT, [], [labels], recompute=True)
    losses = torch.where(ignored, 0.0, (lse - label_logit) * weights)
    return losses.reshape(target.shape) if reduction == "none" else _mean(losses.sum(), ignored, reduction)


def as_batched_input(x: Any, weight: Any) -> Any:
    """Return a layer's input, with a row dimension if it is one row.

    Raises ArgumentError if the shape, dtype or device does not match the layer's weight.
    """
    expect_tensor("input", x)
    if x.dim() == 0 or x.shape[-1] != weight.shape[-1]:
        raise ArgumentError(f"input: got shape {tuple(x.shape)}; use (..., {weight.shape[-1]})")
    if x.device != weight.device:
        raise ArgumentError(f"input: got a tensor on {x.device} with a weight on {weight.device}; use one device")
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
    which is fp32 until the last one, or of weight's dtype with `low_memory`. The last chunk is added in the backward
    pass, where the sum is multiplied by the gradient of the loss in the same epilogue.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, labels: Any, weights: Any, chunks: int, low_memory: bool,
        needs_input_grad: tuple[bool, bool],
    ) -> Any:  # fmt: skip
        classes, _ = weight.shape
        fp16_logits = low_memory and x.dtype.itemsize == 2
        _, losses_and_logits, logits_grad = _serialized_epilogues(classes, str(labels.dtype), fp16_logits)
        total = weights.new_zeros(())
        grad_x_parts: list[Any] = []
        grad_weight = None
        count = chunks if x.shape[0] >= chunks else 1
        row_chunks = [y.tensor_split(count) for y in (x, labels, weights)]
        for i, (x_chunk, labels_chunk, weights_chunk) in enumerate(zip(*row_chunks, strict=True)):
            grad_logits = None  # of the previous chunk, whose memory the logits get
            logits, lse, label_logit = call_op(losses_and_logits, x_chunk, weight.mT, [], [labels_chunk])
            total = total + torch.where(weights_chunk == 0, 0.0, (lse - label_logit) * weights_chunk).sum()
            empty = x_chunk.new_empty((x_chunk.shape[0], 0)), x_chunk.new_empty((0, classes))
            grad_logits = call_in_place(logits_grad, *empty, logits, [labels_chunk, lse, weights_chunk])
            del logits
            if needs_input_grad[0]:
                grad_x_parts.append(call_op(PLAIN_GEMM, grad_logits, weight, [], []))
            if needs_input_grad[1] and i + 1 < count:
                grad_weight = _sum(grad_weight, grad_logits.mT, x_chunk, is_fp32=not low_memory)
        factors = (grad_logits, x_chunk) if needs_input_grad[1] else (None, None)
        ctx.save_for_backward(torch.cat(grad_x_parts) if needs_input_grad[0] else None, grad_weight, *factors)
        return total

    @staticmethod
    def backward(ctx: Any, g: Any) -> tuple[Any, ...]:
        check_once_differentiable()
        compiling = torch.compiler.is_dynamo_compiling()
        keeps_graph = compiling or torch._C._autograd._get_current_graph_task_keep_graph()
        grad_x, grad_weight, grad_logits, x_chunk = ctx.saved_tensors
        if grad_x is not None:  # in place, unless another backward may follow
            grad_x = (grad_x * g).to(grad_x.dtype) if keeps_graph else grad_x.mul_(g)
        if grad_logits is not None:
            grad_weight = _sum(grad_weight, grad_logits.mT, x_chunk, g, in_place=not keeps_graph)
        return grad_x, grad_weight, None, None, None, None, None


def _sum(c: Any, a: Any, b: Any, g: Any = None, is_fp32: bool = False, in_place: bool = True) -> Any:
    """Return a @ b, plus c and times the scalar g if they are not None, in a's dtype or fp32.

    With `in_place` in c's memory, if that has as many bits.
    """
    epilogue = _sum_epilogue("" if c is None else str(c.dtype), g is not None, is_fp32)
    scale = [] if g is None else [g]
    if c is None or not in_place:
        return call_op(epilogue, a, b, [], scale if c is None else [c, *scale])
    return call_in_place(epilogue, a, b, c, scale)


@dynamo_constant
def _sum_epilogue(c: str, is_scaled: bool, is_fp32: bool) -> str:
    """Return the serialized epilogue that adds c, of this dtype, and multiplies by g."""
    operands = {"c": (BroadcastDims(True, 1, 1), dtype_from_name(c))} if c else {}
    operands |= {"g": (BroadcastDims(), FP32)} if is_scaled else {}

    def scaled_sum(acc: Any, **others: Any) -> Any:
        total = acc + others["c"] if c else acc
        scaled = total * others["g"] if is_scaled else total
        return scaled.float() if is_fp32 else scaled

    return serialize(trace(scaled_sum, (2, 2), operands))


def _losses(acc: Any, labels: Any) -> Any:
    label_mask = labels.one_hot(acc.shape[-1])
    return acc.logsumexp(-1, keepdim=True), (acc * label_mask).sum(-1, keepdim=True)


def _losses_and_logits(acc: Any, labels: Any) -> Any:
    """Return the logits unrounded, too: exp(logit - logsumexp) is a probability only of the same logits."""
    return (acc.float(), *_losses(acc, labels))


def _losses_and_fp16_logits(acc: Any, labels: Any) -> Any:
    """Return the logits in fp16, 3 bits more than bf16's in as much memory, and the losses of these."""
    logits = acc.half()
    return (logits, *_losses(logits.float(), labels))


def _logits_grad(acc: Any, c: Any, labels: Any, lse: Any, weights: Any) -> Any:
    """Return the gradient of the logits c. The accumulator is that of an empty GEMM."""
    return ((c - lse).exp() - labels.one_hot(acc.shape[-1])) * weights


@dynamo_constant
def _serialized_epilogues(classes: int, labels_dtype: str, fp16_logits: bool = False) -> tuple[str, str, str]:
    """Return `_losses`, `_losses_and_logits` and `_logits_grad` serialized, for this number of classes."""
    column, matrix = BroadcastDims(rows_per_value=1), BroadcastDims(True, 1, 1)
    labels = {"labels": (column, dtype_from_name(labels_dtype))}
    logits, others = {"c": (matrix, FP16 if fp16_logits else FP32)}, {"lse": (column, FP32), "weights": (column, FP32)}

    def serialized(function: Any, operands: Any) -> str:
        return serialize(trace(function, (2, classes), operands))

    return (
        serialized(_losses, labels),
        serialized(_losses_and_fp16_logits if fp16_logits else _losses_and_logits, labels),
        serialized(_logits_grad, logits | labels | others),
    )
