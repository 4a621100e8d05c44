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


def cross_entropy(x: Any, weight: Any, target: Any, ignore_index: int, reduction: str, chunks: int) -> Any:
    """See FusedLinearCrossEntropy. x (..., dim), weight (classes, dim), target (...)."""
    if tuple(target.shape) != tuple(x.shape[:-1]) or target.is_floating_point():
        raise ArgumentError(
            f"target: got shape {tuple(target.shape)} of {target.dtype}; use integers of shape {tuple(x.shape[:-1])}"
        )
    dtype = x.dtype
    x, weight = autocast(x, weight)
    rows, labels = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0), target.reshape(-1, 1)
    ignored = labels == ignore_index
    known = (labels >= 0) & (labels < weight.shape[0])
    fine = torch.float64 if x.dtype == torch.float64 else torch.float32
    weights = torch.where(ignored, 0.0, torch.where(known, 1.0, float("nan"))).to(fine)
    if reduction == "mean":
        weights = weights / (~ignored).sum()
    recorded = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if recorded and reduction != "none" and not transforming():
        return _Loss.apply(rows, weight, labels, weights, chunks).to(dtype)
    text = _texts(weight.shape[0], weight.shape[1], str(x.dtype), str(labels.dtype))[0]
    lse, of_label = product(text, rows, weight.mT, [], [labels], recompute=True)
    each = torch.where(ignored, 0.0, (lse - of_label) * weights).to(dtype)
    return each.reshape(target.shape) if reduction == "none" else each.sum()


class _Loss(torch.autograd.Function):
    """The weighted sum of the rows' losses; the gradients are computed with it, part by part."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any, labels: Any, weights: Any, chunks: int) -> Any:
        classes, dim = weight.shape
        _, stored, slope, more = _texts(classes, dim, str(rows.dtype), str(labels.dtype))
        total, of_weight, of_rows = weights.new_zeros(()), None, []
        parts = [x.tensor_split(chunks if rows.shape[0] >= chunks else 1) for x in (rows, labels, weights)]
        for x, label, w in zip(*parts, strict=True):
            logits, lse, of_label = call(stored, x, weight.mT, [], [label])
            total = total + ((lse - of_label) * w).sum()
            empty = x.new_empty((x.shape[0], 0)), x.new_empty((0, classes))
            g = call(slope, *empty, [], [label, logits, lse, w])
            of_rows.append(call(BARE, g, weight, [], []))
            of_weight = call(BARE, g.mT, x, [], []) if of_weight is None else call(more, g.mT, x, [], [of_weight])
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
    """Of `_losses`, `_stored`, `_slope` and `_more`."""
    column, matrix = Extent(height=1), Extent(True, 1, 1)
    labels = {"labels": (column, dtype_of(of_labels))}
    logits = {"logits": (matrix, dtype_of(dtype)), "lse": (column, FP32), "weights": (column, FP32)}
    more = {"c": (matrix, dtype_of(dtype))}

    def text(function: Any, columns: int, operands: Any) -> str:
        return write(trace(function, (2, columns), operands))

    of_loss = text(_losses, classes, labels), text(_stored, classes, labels)
    return (*of_loss, text(_slope, classes, labels | logits), text(_more, dim, more))
