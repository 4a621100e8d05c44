"""The cross-entropy of a linear layer, whose logits are not stored."""

from __future__ import annotations

from typing import Any

import torch

from gemmsmith.core.dtypes import FP32
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import Extent
from gemmsmith.epilogue.frontend.tracer import trace
from gemmsmith.torch.api import autocast, expect_tensor
from gemmsmith.torch.backward import constant
from gemmsmith.torch.gradient import BARE, exporting, first_derivative_only, product, transforming
from gemmsmith.torch.operator import call
from gemmsmith.torch.text import write
from gemmsmith.torch.tracing import dtype_of

SUMS = {
    (False, False): BARE,
    (False, True): " | accumulator | out 0 fp32",
    (True, False): "c m,n fp32 | accumulator; operand: c; add 0 1 | out 2",
    (True, True): "c m,n fp32 | accumulator; operand: c; add 0 1 | out 2 fp32",
}
"""A product that is added to what is known, or the first; in fp32 if more come."""
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def cross_entropy(input: Any, weight: Any, target: Any, ignore_index: int, reduction: str, chunks: int) -> Any:
    """See FusedLinearCrossEntropy. x (..., dim), weight (classes, dim), target (...)."""
    x = rows(input, weight).flatten(0, -2)
    _check_target(target, input.shape[:-1])
    x, weight = autocast(x, weight)
    labels = target.reshape(-1, 1).long()
    ignored = labels == ignore_index
    known = (labels >= 0) & (labels < weight.shape[0])
    fine = torch.float64 if x.dtype == torch.float64 else torch.float32
    weights = torch.where(ignored, 0.0, torch.where(known, 1.0, float("nan"))).to(fine)
    recorded = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if recorded and reduction != "none" and not (transforming() or exporting()):
        part = 1.0
        if reduction == "mean" and x.dtype == torch.float16:  # the gradient of a sum may overflow, rows' may underflow
            part = (~ignored).sum().clamp(min=1).rsqrt()
        wanted = x.requires_grad, weight.requires_grad
        return _mean(_Loss.apply(x, weight, labels, weights * part, chunks, wanted) / part, ignored, reduction)
    text = _texts(int(weight.shape[0]), str(labels.dtype))[0]
    lse, of_label = product(text, x, weight.mT, [], [labels], recompute=True)
    each = torch.where(ignored, 0.0, (lse - of_label) * weights)
    return each.reshape(target.shape) if reduction == "none" else _mean(each.sum(), ignored, reduction)


def rows(x: Any, weight: Any) -> Any:
    """The input of a layer with this weight, as a matrix if it is one row. ArgumentError for another shape or dtype."""
    expect_tensor("input", x)
    if x.dim() == 0 or x.shape[-1] != weight.shape[-1]:
        raise ArgumentError(f"input: got shape {tuple(x.shape)}; use (..., {weight.shape[-1]})")
    if x.dtype != weight.dtype and not (x.is_meta or torch.is_autocast_enabled(x.device.type)):
        raise ArgumentError(f"input: got {x.dtype} with a weight of {weight.dtype}; use the same for both")
    return x.unsqueeze(0) if x.dim() == 1 else x


def _check_target(target: Any, shape: tuple[Any, ...]) -> None:
    expect_tensor("target", target)
    if tuple(target.shape) != tuple(shape) or target.dtype not in INTEGERS:
        raise ArgumentError(
            f"target: got shape {tuple(target.shape)} of {target.dtype}; use integers of shape {tuple(shape)}"
        )


def _mean(total: Any, ignored: Any, reduction: str) -> Any:
    """The sum, or the mean over the rows that count, as F.cross_entropy has it: NaN where there are none."""
    if reduction == "sum":
        return total
    count = (~ignored).sum()
    return torch.where(count > 0, total / count.clamp(min=1), float("nan"))


class _Loss(torch.autograd.Function):
    """The weighted sum of the rows' losses; the gradients are computed with it, part by part: those that are `wanted`,
    of x and of the weight. That of the weight is a sum over the parts, in fp32 until it is whole."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, labels: Any, weights: Any, chunks: int, wanted: tuple[bool, bool]
    ) -> Any:
        classes, _ = weight.shape
        _, stored, slope = _texts(classes, str(labels.dtype))
        total = weights.new_zeros(())
        of_rows: list[Any] = []
        of_weight: list[Any] = []
        count = chunks if x.shape[0] >= chunks else 1
        parts = [y.tensor_split(count) for y in (x, labels, weights)]
        for i, (part, label, w) in enumerate(zip(*parts, strict=True)):
            logits, lse, of_label = call(stored, part, weight.mT, [], [label])
            total = total + torch.where(w == 0, 0.0, (lse - of_label) * w).sum()
            empty = part.new_empty((part.shape[0], 0)), part.new_empty((0, classes))
            g = call(slope, *empty, [], [label, logits, lse, w])
            if wanted[0]:
                of_rows.append(call(BARE, g, weight, [], []))
            if wanted[1]:
                of_weight = [call(SUMS[i > 0, i + 1 < count], g.mT, part, [], of_weight)]
        ctx.save_for_backward(torch.cat(of_rows) if wanted[0] else None, *(of_weight or [None]))
        return total

    @staticmethod
    def backward(ctx: Any, g: Any) -> tuple[Any, ...]:
        first_derivative_only()
        compiling = torch.compiler.is_dynamo_compiling()
        # they are as large as the weight: not copied, unless another backward pass may follow
        kept = compiling or torch._C._autograd._get_current_graph_task_keep_graph()
        of_each = [None if x is None else (x * g).to(x.dtype) if kept else x.mul_(g) for x in ctx.saved_tensors]
        return (*of_each, None, None, None, None)


def _losses(acc: Any, labels: Any) -> Any:
    chosen = labels.one_hot(acc.shape[-1])
    return acc.logsumexp(-1, keepdim=True), (acc * chosen).sum(-1, keepdim=True)


def _stored(acc: Any, labels: Any) -> Any:
    """exp(logit - logsumexp) is a probability where both are of the same logits: those are not rounded."""
    return (acc.float(), *_losses(acc, labels))


def _slope(acc: Any, labels: Any, logits: Any, lse: Any, weights: Any) -> Any:
    """The gradient of the logits; the product is empty."""
    return ((logits - lse).exp() - labels.one_hot(acc.shape[-1])) * weights


@constant
def _texts(classes: int, of_labels: str) -> tuple[str, str, str]:
    """The epilogues `_losses`, `_stored` and `_slope` as texts."""
    column, matrix = Extent(height=1), Extent(True, 1, 1)
    labels = {"labels": (column, dtype_of(of_labels))}
    logits = {"logits": (matrix, FP32), "lse": (column, FP32), "weights": (column, FP32)}

    def text(function: Any, operands: Any) -> str:
        return write(trace(function, (2, classes), operands))

    return text(_losses, labels), text(_stored, labels), text(_slope, labels | logits)
