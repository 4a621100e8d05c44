"""Cross-entropy of a linear layer whose logits are not stored."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import nn

from gemmsmith.core.dtypes import FP16, FP32
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import BroadcastDims
from gemmsmith.core.scalars import as_bools, as_integer
from gemmsmith.graph.frontend.tracer import trace
from gemmsmith.host.cached_run import run_cached
from gemmsmith.torch.api import as_batched_input, autocast, expect_tensor
from gemmsmith.torch.autograd import differentiable_gemm
from gemmsmith.torch.autograd_state import (
    check_once_differentiable,
    in_functorch_transform,
    needs_grad,
    operators_record_gradients,
)
from gemmsmith.torch.backward_plan import dynamo_constant
from gemmsmith.torch.define_op import define_op
from gemmsmith.torch.graph_serialization import PLAIN_GEMM, deserialize, graph_dtype, serialize
from gemmsmith.torch.ops import as_request, call_op, result_dtype
from gemmsmith.torch.plain_tensors import runs_kernels, sees_operators

LABEL_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""Dtypes of targets."""
MIN_ROWS = 4096
"""Rows of a chunk, at least: each chunk reads the weight twice, and reads and writes its gradient."""
MIN_ROWS_LOW_MEMORY, CHUNKS_LOW_MEMORY = 512, 4
"""With `low_memory`: rows of a chunk, at least, and the chunks until one has MIN_ROWS."""
LOGIT_SCALE = 2.0**-8
"""Factor of logits that are stored in fp16: their largest finite value, 65504, then stands for 1.6e7; and below 1/64,
which stands for the least normal number 2^-14, the error is at most 2^-17."""


class FusedLinearCrossEntropy(nn.Module):
    """Cross-entropy of `x @ weight.T` whose logits are not stored.

    Targets equal to ignore_index are excluded from the mean. Any other out-of-range target makes the loss NaN. The
    gradient of the logits is computed in the forward pass, for one chunk of rows after the other, in the memory of the
    chunk's logits. With several chunks the gradient of the weight is a sum in fp32. With bf16 or fp16, the differences
    from the label's logit are stored in fp16: if one exceeds 1.6e7, the gradients are not finite. With reduction="none"
    backward recomputes the GEMM.

    Shapes: input (..., dim), target (...) of integers -> a scalar, or (...) with reduction="none"; fp32, or float64 if
    the input is.

    Args:
        dim: size of the input's last dimension.
        classes: number of classes; weight is (classes, dim).
        ignore_index: the target of rows to ignore.
        reduction: "mean", "sum" or "none".
        chunks: the number of chunks of rows. None: chunks of at least 4096 rows, and only one if the sum in fp32 would
            take more memory than the logits of all rows; with low_memory four of at least 512 rows, at most 4096.
        low_memory: add up the weight's gradient in its dtype, rounded once per chunk: beside the gradients, one chunk's
            logits are allocated.
        device: device of the weight.
        dtype: dtype of the weight: bf16, fp16, fp32, or float64 on the CPU.

    Raises:
        ArgumentError: reduction, ignore_index, chunks or low_memory is not valid.
    """

    def __init__(
        self, dim: int, classes: int, ignore_index: int = -100, reduction: Literal["mean", "sum", "none"] = "mean",
        chunks: int | None = None, low_memory: bool = False, device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ArgumentError(f"reduction: got {reduction!r}; use 'mean', 'sum' or 'none'")
        self.ignore_index, self.reduction = as_integer("ignore_index", ignore_index), reduction
        self.chunks = None if chunks is None else as_integer("chunks", chunks, least=1)
        (self.low_memory,) = as_bools(low_memory=low_memory)  # refuses a device that a caller passes by position
        self.weight = nn.Parameter(torch.empty(classes, dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weight again, as that of nn.Linear is."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of the logits input @ weight.T against target, of shapes (..., dim) and (...)."""
        return cross_entropy(
            input, self.weight, target, self.ignore_index, self.reduction, self.chunks, self.low_memory
        )

    def extra_repr(self) -> str:
        """Return the arguments for repr()."""
        classes, dim = self.weight.shape
        return f"dim={dim}, classes={classes}, ignore_index={self.ignore_index}, reduction={self.reduction!r}"


def cross_entropy(
    input: Any, weight: Any, target: Any, ignore_index: int, reduction: str, chunks: int | None, low_memory: bool
) -> Any:
    """Return the loss of `FusedLinearCrossEntropy`, where the arguments are documented."""
    x = as_batched_input(input, weight).flatten(0, -2)
    _check_target(target, input.shape[:-1])
    x, weight = autocast(x, weight)
    labels = target.reshape(-1, 1).long()
    ignored = labels == ignore_index
    valid = (labels >= 0) & (labels < weight.shape[0])
    loss_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    weights = torch.where(ignored, 0.0, torch.where(valid, 1.0, float("nan"))).to(loss_dtype)
    if needs_grad(x, weight) and reduction != "none" and not (in_functorch_transform() or operators_record_gradients()):
        loss_scale = 1.0
        # In fp16 gradients of the sum may overflow, those of the mean underflow: scale by 1 / sqrt(rows), between both
        if reduction == "mean" and x.dtype == torch.float16:
            loss_scale = (~ignored).sum().clamp(min=1).rsqrt()
        total = _CrossEntropyFunction.apply(
            x, weight, labels, weights * loss_scale, chunks or 0, low_memory, x.requires_grad, weight.requires_grad
        )
        return _mean(total / loss_scale, ignored, reduction)
    losses_epilogue = _serialized_epilogues(int(weight.shape[0]), str(labels.dtype))[0]
    lse, label_logit = differentiable_gemm(losses_epilogue, x, weight.mT, [], [labels], recompute=True)
    losses = torch.where(ignored, 0.0, (lse - label_logit) * weights)
    return losses.reshape(target.shape) if reduction == "none" else _mean(losses.sum(), ignored, reduction)


def _check_target(target: Any, shape: tuple[Any, ...]) -> None:
    expect_tensor("target", target)
    if tuple(target.shape) != tuple(shape) or target.dtype not in LABEL_DTYPES:
        raise ArgumentError(
            f"target: got shape {tuple(target.shape)} of {target.dtype}; use integers of shape {tuple(shape)}"
        )


def _mean(total: Any, ignored: Any, reduction: str) -> Any:
    """Return the loss from the sum `total` of the rows' losses: the sum itself, or the mean over rows not ignored.

    The mean of no rows is NaN, as in F.cross_entropy.
    """
    if reduction == "sum":
        return total
    count = (~ignored).sum()
    return torch.where(count > 0, total / count.clamp(min=1), float("nan"))


class _CrossEntropyFunction(torch.autograd.Function):
    """The weighted sum of the rows' losses.

    The forward pass computes the gradient of the logits, chunk by chunk, and from it those of x and weight, for all
    chunks but the last. The backward pass computes those of the last chunk; epilogues of the same GEMMs add the others
    and multiply by the gradient of the loss.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, labels: Any, weights: Any, chunks: int, low_memory: bool,
        needs_x: bool, needs_weight: bool,
    ) -> Any:  # fmt: skip
        """Return the loss, and save what `_forward` has computed of the gradients.

        `x`: (rows, dim). `weight`: (classes, dim). `labels`: (rows, 1), int64. `weights`: (rows, 1), factors of the
        rows' losses: 0 for ignored rows, NaN for labels of no class. `chunks`: 0 for the default.
        """
        total, *gradients = (_FORWARD if torch.compiler.is_dynamo_compiling() else _forward)(
            x, weight, labels, weights, chunks, low_memory, needs_x, needs_weight
        )
        ctx.needs = needs_x, needs_weight
        ctx.save_for_backward(x, weight, *gradients)
        return total

    @staticmethod
    def backward(ctx: Any, g: Any) -> tuple[Any, ...]:
        """Return the gradients of x and weight: complete those of `forward`, times the gradient g of the loss."""
        check_once_differentiable()
        needs_x, needs_weight = ctx.needs
        arguments = *ctx.saved_tensors, g, needs_x, needs_weight
        if torch.compiler.is_dynamo_compiling():
            grad_x, grad_weight = _BACKWARD(*arguments)
        else:  # in place, unless another backward may follow
            keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
            grad_x, grad_weight = _backward(*arguments, in_place=not keeps_graph)
        return grad_x if needs_x else None, grad_weight if needs_weight else None, *[None] * 6


def _chunk_count(rows: Any, dim: int, itemsize: int, chunks: int, low_memory: bool) -> Any:
    """Return the number of chunks of rows. `rows` may be symbolic: nothing branches on it.

    Several chunks need a sum of the weight's gradients, (classes, dim) in fp32. It takes as much memory as logits in 16
    bits of 2 * dim rows. So these rows are subtracted first, and the others divided into chunks of max(MIN_ROWS, dim)
    rows: a chunk's logits and the sum then never take more memory than the logits of all rows. With `low_memory` the
    sum is in the weight's dtype, so that it takes no memory beside the gradient's.
    """
    if chunks:
        count = torch.sym_min(chunks, rows)
    elif low_memory:
        count = torch.sym_max(torch.sym_min(rows // MIN_ROWS_LOW_MEMORY, CHUNKS_LOW_MEMORY), rows // MIN_ROWS)
    else:
        count = (rows - dim * max(4 // itemsize, 1)) // max(MIN_ROWS, dim)
    return torch.sym_max(count, 1)


def _forward(
    x: Any, weight: Any, labels: Any, weights: Any, chunks: int, low_memory: bool, needs_x: bool, needs_weight: bool
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Return the weighted sum of the rows' losses, and gradients. The arguments: `_CrossEntropyFunction.forward`.

    That is: the sum, (); the gradient of x, without the last chunk's rows; the gradient of weight from all chunks but
    the last, in fp32, or in weight's dtype with low_memory; and the gradient of the last chunk's logits. A gradient of
    x or weight that is not needed, or to which no chunk contributes, has no rows.
    """
    (rows, dim), classes = x.shape, weight.shape[0]
    count = int(_chunk_count(rows, dim, x.dtype.itemsize, chunks, low_memory))
    is_16bit = x.dtype.itemsize == 2
    _, logits_epilogue, gradient_epilogue = _serialized_epilogues(classes, str(labels.dtype), is_16bit)
    operands = [labels, _label_logits(x, weight, labels)] if is_16bit else [labels]
    losses, grad_x, grad_weight = [], [], None
    for i, (x_chunk, weights_chunk, *operands_chunk) in enumerate(
        zip(*(y.tensor_split(count) for y in (x, weights, *operands)), strict=True)
    ):
        grad_logits = None  # of the previous chunk, whose memory the logits get
        logits, lse, label_logit, *maximum = call_op(logits_epilogue, x_chunk, weight.mT, [], operands_chunk)
        losses.append(lse - label_logit)
        empty = x_chunk.new_empty((x_chunk.shape[0], 0)), x_chunk.new_empty((0, classes))
        of_rows = [operands_chunk[0], lse, weights_chunk, *maximum]
        grad_logits = _call_in_place(gradient_epilogue, *empty, logits, of_rows)
        del logits
        if needs_x and i + 1 < count:
            grad_x.append(call_op(PLAIN_GEMM, grad_logits, weight))
        if needs_weight and i + 1 < count:
            grad_weight = _multiply_add(grad_weight, grad_logits.mT, x_chunk, is_fp32=not low_memory)
    return (
        torch.where(weights == 0, 0.0, _joined(losses) * weights).sum(),
        _joined(grad_x) if grad_x else x.new_empty((0, dim)),
        weight.new_empty((0, dim), dtype=_sum_dtype(x, low_memory)) if grad_weight is None else grad_weight,
        grad_logits,
    )


def _joined(parts: list[Any]) -> Any:
    """Return the concatenation of tensors along dimension 0; a single one is not copied."""
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _sum_dtype(x: Any, low_memory: bool) -> torch.dtype:
    """Return the dtype of the sum of the chunks' gradients of weight: fp32, or x's if that is float64 or low_memory."""
    return x.dtype if low_memory or x.dtype == torch.float64 else torch.float32


def _label_logits(x: Any, weight: Any, labels: Any) -> Any:
    """Return the logit of each row's label, (rows, 1); 0 where it is not finite.

    A label of no class gets the logit of another class: its row's loss is NaN or ignored anyway.
    """
    of_labels = torch.nn.functional.embedding(labels[:, 0].clamp(0, weight.shape[0] - 1), weight)
    empty = x.new_empty((x.shape[0], 0)), x.new_empty((0, x.shape[1]))
    return call_op(_row_dot_epilogue(str(x.dtype)), *empty, [], [x, of_labels]).nan_to_num(0, 0, 0)


def _backward(
    x: Any, weight: Any, grad_x: Any, grad_weight: Any, grad_logits: Any, g: Any, needs_x: bool, needs_weight: bool, *,
    in_place: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Return the gradients of x (rows, dim) and of weight (classes, dim), times g; one that is not needed has no rows.

    `_forward` computes the gradients chunk by chunk of rows, but for the last chunk, whose share is added here.
    `grad_x` and `grad_weight` are what `_forward` returns, and may be overwritten if `in_place`. `g`: the gradient of
    the loss, ().
    """
    (rows, dim), last = x.shape, grad_logits.shape[0]
    if needs_x:
        of_last = _multiply_add(None, grad_logits, weight, g)
        if grad_x.shape[0]:
            empty = x.new_empty((rows - last, 0)), x.new_empty((0, dim))
            grad_x = torch.cat([_multiply_add(grad_x, *empty, g, in_place=in_place), of_last])
        else:
            grad_x = of_last
    if needs_weight:
        of_others = grad_weight if grad_weight.shape[0] else None
        grad_weight = _multiply_add(of_others, grad_logits.mT, x[rows - last :], g, in_place=in_place)
    return grad_x if needs_x else x.new_empty((0, dim)), grad_weight if needs_weight else weight.new_empty((0, dim))


def _fake_forward(
    x: Any, weight: Any, labels: Any, weights: Any, chunks: int, low_memory: bool, needs_x: bool, needs_weight: bool
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    (rows, dim), classes = x.shape, weight.shape[0]
    count = _chunk_count(rows, dim, x.dtype.itemsize, chunks, low_memory)
    last, is_sum = rows // count, torch.sym_min(count - 1, 1)
    return (
        weights.new_empty(()),
        x.new_empty((rows - last if needs_x else 0, dim)),
        weight.new_empty((is_sum * classes if needs_weight else 0, dim), dtype=_sum_dtype(x, low_memory)),
        x.new_empty((last, classes)),
    )


def _fake_backward(
    x: Any, weight: Any, grad_x: Any, grad_weight: Any, grad_logits: Any, g: Any, needs_x: bool, needs_weight: bool
) -> tuple[Any, Any]:  # fmt: skip
    (rows, dim), classes = x.shape, weight.shape[0]
    return x.new_empty((rows if needs_x else 0, dim)), weight.new_empty((classes if needs_weight else 0, dim))


def _count_flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of three GEMMs, those of forward and backward: all are counted in forward."""
    return 6 * int(x[0]) * int(x[1]) * int(weight[0])


_FORWARD = define_op(
    "cross_entropy(Tensor x, Tensor weight, Tensor labels, Tensor weights, int chunks, bool low_memory, "
    "bool needs_x, bool needs_weight) -> (Tensor, Tensor, Tensor, Tensor)", _fake_forward, _forward,
    count_flops=_count_flops,
)  # fmt: skip
_BACKWARD = define_op(
    "cross_entropy_backward(Tensor x, Tensor weight, Tensor grad_x, Tensor grad_weight, Tensor grad_logits, Tensor g, "
    "bool needs_x, bool needs_weight) -> (Tensor, Tensor)", _fake_backward, _backward,
)  # fmt: skip


def _multiply_add(c: Any, a: Any, b: Any, g: Any = None, is_fp32: bool = False, in_place: bool = True) -> Any:
    """Return (a @ b + c) * g, without c or g if they are None, in a's dtype, or in fp32 if `is_fp32`.

    `in_place`: the result may overwrite c, if their elements have the same size.
    """
    epilogue = _sum_epilogue("" if c is None else str(c.dtype), g is not None, is_fp32)
    scale = [] if g is None else [g]
    if c is None or not in_place:
        return call_op(epilogue, a, b, [], scale if c is None else [c, *scale])
    return _call_in_place(epilogue, a, b, c, scale)


def _call_in_place(epilogue: str, a: Any, b: Any, c: Any, operands: list[Any]) -> Any:
    """Return the result of a serialized epilogue on a @ b; it overwrites c if a kernel runs and elements are as large.

    That is safe, as each element of c is read before it is written, by the same CTA.
    """
    graph = deserialize(epilogue)
    dtype = result_dtype(graph, graph.results[0], a.dtype)
    writes_c = type(c) is torch.Tensor and c.dtype.itemsize == dtype.itemsize
    if not writes_c or sees_operators() or not runs_kernels(c):
        return call_op(epilogue, a, b, [], [c, *operands])
    out = c.view(dtype)
    run_cached(as_request(graph, a, b, [], [c, *operands])._replace(out=out))
    return out


@dynamo_constant
def _sum_epilogue(c: str, is_scaled: bool, is_fp32: bool) -> str:
    """Return the serialized epilogue (acc + c) * g, in a's dtype or fp32. `c`: its dtype, "" for no c."""
    operands = {"c": (BroadcastDims(True, 1, 1), graph_dtype(c))} if c else {}
    operands |= {"g": (BroadcastDims(), FP32)} if is_scaled else {}

    def scaled_sum(acc: Any, **others: Any) -> Any:
        total = acc + others["c"] if c else acc
        scaled = total * others["g"] if is_scaled else total
        return scaled.float() if is_fp32 else scaled

    return serialize(trace(scaled_sum, (2, 2), operands))


@dynamo_constant
def _row_dot_epilogue(dtype: str) -> str:
    """Return the serialized epilogue that computes the dot product of each row of x with the same row of y.

    x and y are matrix operands of this dtype; the accumulator is not read.
    """
    matrix = BroadcastDims(True, 1, 1), graph_dtype(dtype)
    return serialize(trace(lambda acc, x, y: (x * y).sum(-1, keepdim=True), (2, 2), {"x": matrix, "y": matrix}))


def _losses(acc: Any, labels: Any) -> Any:
    """Epilogue: return the logsumexp of each row of logits, and the label's logit. `labels`: (rows, 1)."""
    is_label = labels.one_hot(acc.shape[-1])  # selects: a product with the logit of another class may be NaN
    return acc.logsumexp(-1, keepdim=True), acc.where(is_label, 0.0).sum(-1, keepdim=True)


def _losses_and_logits(acc: Any, labels: Any) -> Any:
    """Epilogue: return the logits in fp32, and what `_losses` returns."""
    return (acc.float(), *_losses(acc, labels))


def _losses_and_fp16_logits(acc: Any, labels: Any, shift: Any) -> Any:
    """Epilogue: return the logits as differences from `shift`, in fp16, what `_losses` returns, and each row's maximum.

    `shift`: each row's logit of the label, approximately. The fp16 values are multiplied by LOGIT_SCALE, for their
    range. A rounding error is at most 2^-12 of a logit's distance from the label's, and so is small for the logits that
    are near the label's: those have a probability.
    """
    logits = acc - shift
    return ((logits * LOGIT_SCALE).half(), *_losses(logits, labels), logits.max(-1, keepdim=True))


def _logits_grad(acc: Any, c: Any, labels: Any, lse: Any, weights: Any) -> Any:
    """Epilogue of a GEMM with k = 0: return the gradient of the logits c, (softmax(c) - one_hot(labels)) * weights."""
    return ((c - lse).exp() - labels.one_hot(acc.shape[-1])) * weights


def _fp16_logits_grad(acc: Any, c: Any, labels: Any, lse: Any, weights: Any, maximum: Any) -> Any:
    """Epilogue of a GEMM with k = 0: return the gradient of the logits c of `_losses_and_fp16_logits`.

    lse is corrected by the rounding error of the row's largest logit, so that the probability of that class has none.
    """
    error = (maximum * LOGIT_SCALE).half().float() * (1 / LOGIT_SCALE) - maximum
    return _logits_grad(acc, c * (1 / LOGIT_SCALE), labels, lse + error, weights)


@dynamo_constant
def _serialized_epilogues(classes: int, labels_dtype: str, is_16bit: bool = False) -> tuple[str, str, str]:
    """Return three serialized epilogues: the losses, the losses with logits, and the gradient of these logits."""
    column, matrix = BroadcastDims(rows_per_value=1), BroadcastDims(True, 1, 1)
    labels = {"labels": (column, graph_dtype(labels_dtype))}
    c, others = {"c": (matrix, FP16 if is_16bit else FP32)}, {"lse": (column, FP32), "weights": (column, FP32)}

    def serialized(function: Any, operands: Any) -> str:
        return serialize(trace(function, (2, classes), operands))

    if is_16bit:
        logits = serialized(_losses_and_fp16_logits, labels | {"shift": (column, FP32)})
        gradient = serialized(_fp16_logits_grad, c | labels | others | {"maximum": (column, FP32)})
    else:
        logits = serialized(_losses_and_logits, labels)
        gradient = serialized(_logits_grad, c | labels | others)
    return serialized(_losses, labels), logits, gradient
