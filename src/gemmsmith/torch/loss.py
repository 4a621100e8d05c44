"""The cross-entropy of a linear layer, whose logits are not stored."""

from __future__ import annotations

from typing import Any

import torch

from gemmsmith.core.dtypes import FP32
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import Extent
from gemmsmith.epilogue.frontend.tracer import trace
from gemmsmith.torch.api import autocast
from gemmsmith.torch.backward import constant
from gemmsmith.torch.gradient import BARE, first_derivative_only, product, transforming
from gemmsmith.torch.operator import call
from gemmsmith.torch.text import write
from gemmsmith.torch.tracing import dtype_of

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
    if recorded and reduction != "none" and not transforming():
        part = 1.0
        if reduction == "mean" and x.dtype == torch.float16:  # the gradient of a sum may overflow, rows' may underflow
            part = (~ignored).sum().clamp(min=1).rsqrt()
        return _mean(_Loss.apply(x, weight, labels, weights * part, chunks) / part, ignored, reduction)
    text = _texts(weight.shape[0], weight.shape[1], str(x.dtype), str(labels.dtype))[0]
    lse, of_label = product(text, x, weight.mT, [], [labels], recompute=True)
    each = torch.where(ignored, 0.0, (lse - of_label) * weights)
    return each.reshape(target.shape) if reduction == "none" else _mean(each.sum(), ignored, reduction)


def rows(x: Any, weight: Any) -> Any:
    """The input of a layer with this weight, as a matrix if it is one row. ArgumentError for another shape or dtype."""
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(f"input: got {type(x).__name__}; use a tensor")
    if x.dim() == 0 or x.shape[-1] != weight.shape[-1]:
        raise ArgumentError(f"input: got shape {tuple(x.shape)}; use (..., {weight.shape[-1]})")
    if x.dtype != weight.dtype and not (x.is_meta or torch.is_autocast_enabled(x.device.type)):
        raise ArgumentError(f"input: got {x.dtype} with a weight of {weight.dtype}; use the same for both")
    return x.unsqueeze(0) if x.dim() == 1 else x


def _check_target(target: Any, shape: tuple[Any, ...]) -> None:
    if not isinstance(target, torch.Tensor):
        raise ArgumentError(f"target: got {type(target).__name__}; use a tensor")
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
    """The weighted sum of the rows' losses; the gradients are computed with it, part by part."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, labels: Any, weights: Any, chunks: int) -> Any:
        classes, dim = weight.shape
        _, stored, slope, more = _texts(classes, dim, str(x.dtype), str(labels.dtype))
        total, of_weight, of_rows = weights.new_zeros(()), None, []
        parts = [y.tensor_split(chunks if x.shape[0] >= chunks else 1) for y in (x, labels, weights)]
        for part, label, w in zip(*parts, strict=True):
            logits, lse, of_label = call(stored, part, weight.mT, [], [label])
            total = total + torch.where(w == 0, 0.0, (lse - of_label) * w).sum()
            empty = part.new_empty((part.shape[0], 0)), part.new_empty((0, classes))
            g = call(slope, *empty, [], [label, logits, lse, w])
            of_rows.append(call(BARE, g, weight, [], []))
            of_weight = call(BARE, g.mT, part, [], []) if of_weight is None else call(more, g.mT, part, [], [of_weight])
        ctx.save_for_backward(torch.cat(of_rows), of_weight)
        ctx.spent = False
        return total

    @staticmethod
    def backward(ctx: Any, g: Any) -> tuple[Any, ...]:
        first_derivative_only()
        compiling = torch.compiler.is_dynamo_compiling()
        if not compiling and ctx.spent:
            raise ArgumentError("retain_graph: got a second backward pass; the gradients of a loss are used up by one")
        of_rows, of_weight = ctx.saved_tensors
        if compiling:
            return (of_rows * g).to(of_rows.dtype), (of_weight * g).to(of_weight.dtype), None, None, None
        ctx.spent = True  # they are as large as the weight: not copied
        return of_rows.mul_(g), of_weight.mul_(g), None, None, None


def _losses(acc: Any, labels: Any) -> Any:
    chosen = labels.one_hot(acc.shape[-1])
    return acc.logsumexp(-1, keepdim=True), (acc * chosen).sum(-1, keepdim=True)


def _stored(acc: Any, labels: Any) -> Any:
    return (acc, *_losses(acc, labels))


def _slope(acc: Any, labels: Any, logits: Any, lse: Any, weights: Any) -> Any:
    """The gradient of the logits; the product is empty."""
    return ((logits - lse).exp() - labels.one_hot(acc.shape[-1])) * weights


def _more(acc: Any, c: Any) -> Any:
    return acc + c


@constant
def _texts(classes: int, dim: int, dtype: str, of_labels: str) -> tuple[str, str, str, str]:
    """The epilogues `_losses`, `_stored`, `_slope` and `_more` as texts."""
    column, matrix = Extent(height=1), Extent(True, 1, 1)
    labels = {"labels": (column, dtype_of(of_labels))}
    logits = {"logits": (matrix, dtype_of(dtype)), "lse": (column, FP32), "weights": (column, FP32)}
    more = {"c": (matrix, dtype_of(dtype))}

    def text(function: Any, columns: int, operands: Any) -> str:
        return write(trace(function, (2, columns), operands))

    of_loss = text(_losses, classes, labels), text(_stored, classes, labels)
    return (*of_loss, text(_slope, classes, labels | logits), text(_more, dim, more))
