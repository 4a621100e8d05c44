"""A linear layer's cross-entropy whose logits are not stored: what Liger's tests of it cover.

Options without an argument of the module are composed of a GEMM with sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.foreign.comparison import close, same_gradients

import gemmsmith

torch = pytest.importorskip("torch")
gt = pytest.importorskip("gemmsmith.torch")
F = torch.nn.functional
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("poisoned")]

DTYPES = [torch.float64, torch.bfloat16, torch.float16, torch.float32]
REDUCTIONS = ["mean", "sum", "none"]
SHAPES = [(2, 24, 40, 64), (3, 17, 31, 123)]
"""Batch, tokens, width, classes."""


IN_FP32 = 8
"""Roundings of a loss, which is a difference and a sum of fp32 where x is of 16 bits."""


def drawn(shape: tuple[int, ...], dtype: Any, ignored: int = -100, share: float = 0.2) -> tuple[Any, Any, Any]:
    """Return x, weight and targets, of which some are ignored."""
    batch, tokens, width, classes = shape
    x = torch.randn(batch, tokens, width, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (torch.randn(classes, width, dtype=torch.float64) * 2 * width**-0.5).to(dtype).requires_grad_()
    target = torch.randint(classes, (batch, tokens))
    target[torch.rand(batch, tokens) < share] = ignored
    target[0, 0] = 0
    return x, weight, target


def module(width: int, classes: int, dtype: Any, **options: Any) -> Callable[..., Any]:
    """Return FusedLinearCrossEntropy as a function of (x, weight, target)."""
    loss = gt.FusedLinearCrossEntropy(width, classes, dtype=dtype, **options)
    return lambda x, weight, target: torch.func.functional_call(loss, {"weight": weight}, (x, target))


def plain(**options: Any) -> Callable[..., Any]:
    def loss(x: Any, weight: Any, target: Any) -> Any:
        each = F.cross_entropy((x @ weight.mT).flatten(0, -2), target.flatten(), **options)
        return each.reshape(target.shape) if each.dim() else each

    return loss


@pytest.mark.parametrize("ignore_index", [-100, 0, 7])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss(shape: Any, dtype: Any, reduction: str, ignore_index: int) -> None:
    options = {"reduction": reduction, "ignore_index": ignore_index}
    inputs = drawn(shape, dtype, ignore_index, share=0.5 if ignore_index else 0.2)
    inputs[2][0, 1] = 1  # not all are ignored
    fused = module(*shape[2:], dtype, **options)
    of_gradients = 32 if dtype == torch.float32 else 4  # exp(logit - logsumexp) errs by roundings of these
    same_gradients(fused, plain(**options), *inputs, roundings=IN_FP32, of_gradients=of_gradients)


@pytest.mark.parametrize("reduction", REDUCTIONS[:2])
@pytest.mark.parametrize("chunks", [1, 2, 7, 48, 1000])
def test_chunks(chunks: int, reduction: str) -> None:
    fused = module(40, 64, torch.bfloat16, chunks=chunks, reduction=reduction)
    same_gradients(fused, plain(reduction=reduction), *drawn(SHAPES[0], torch.bfloat16), roundings=IN_FP32)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignored", [0, 30])
@pytest.mark.parametrize("integers", [torch.int32, torch.int16, torch.uint8])
def test_labels(integers: Any, ignored: int, reduction: str) -> None:
    """With other integer dtypes; entire chunks are ignored; x and weight are column-major."""
    x, weight, _ = drawn(SHAPES[0], torch.bfloat16)
    x, weight = (y.detach().mT.contiguous().mT.requires_grad_() for y in (x, weight))
    target = torch.randint(64, (2, 24))
    target.view(-1)[:ignored] = 200
    fused = module(40, 64, torch.bfloat16, reduction=reduction, ignore_index=200)

    def exact(x: Any, weight: Any, target: Any) -> Any:
        return plain(reduction=reduction, ignore_index=200)(x, weight, target.long())

    same_gradients(fused, exact, x, weight, target.to(integers), roundings=IN_FP32, of_gradients=4)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_frozen(frozen: str, reduction: str) -> None:
    x, weight, target = drawn(SHAPES[1], torch.bfloat16)
    (x if frozen == "x" else weight).requires_grad_(False)
    fused = module(31, 123, torch.bfloat16, reduction=reduction)
    same_gradients(fused, plain(reduction=reduction), x, weight, target, roundings=IN_FP32)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_without_gradients(dtype: Any, reduction: str) -> None:
    x, weight, target = drawn(SHAPES[1], dtype)
    with torch.no_grad():
        actual = module(31, 123, dtype, reduction=reduction)(x, weight, target)
        assert not actual.requires_grad
        close(actual, plain(reduction=reduction)(x.double(), weight.double(), target), IN_FP32)


@pytest.mark.parametrize("dtype", DTYPES[1:3])
def test_autocast(dtype: Any) -> None:
    """fp32 parameters, multiplied in 16 bits."""
    x, weight, target = drawn(SHAPES[0], torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        loss = module(40, 64, torch.float32)(x, weight, target)
    actual = torch.autograd.grad(loss, [x, weight])
    exact = [y.detach().to(dtype).double().requires_grad_() for y in (x, weight)]
    expected = plain()(*exact, target)
    close(loss.detach(), expected.detach(), IN_FP32)
    for g, right in zip(actual, torch.autograd.grad(expected, exact), strict=True):
        assert g.dtype == torch.float32
        assert (g.double() - right).norm() < 2 * torch.finfo(dtype).eps * right.norm()


# -- what FusedLinearCrossEntropy has no argument for -----------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "label_smoothing": {"smoothing": 0.1}, "softcap": {"cap": 1.5}, "z_loss": {"z_loss": 1e-2},
    "bias": {"bias": True}, "class_weights": {"weighted": True},
    "all": {"smoothing": 0.2, "cap": 4.0, "z_loss": 0.1, "bias": True, "weighted": True},
}  # fmt: skip


def fused_loss(reduction: str, smoothing: float, cap: float, z_loss: float) -> Callable[..., Any]:
    """Compute the loss by one GEMM, whose epilogue returns three numbers per row."""

    def statistics(acc: Any, labels: Any, bias: Any, class_weights: Any) -> Any:
        z = acc + bias
        if cap:
            z = cap * torch.tanh(z / cap)
        label_mask = F.one_hot(labels, z.shape[-1])
        return z.logsumexp(-1), (z * label_mask).sum(-1), (z * class_weights).mean(-1)

    def loss(x: Any, weight: Any, bias: Any, class_weights: Any, target: Any) -> Any:
        operands = {"labels": target.unsqueeze(-1), "bias": bias, "class_weights": class_weights}
        lse, of_label, mean = gt.gemm(x, weight.mT, epilogue=statistics, recompute=True, operands=operands)
        known = target != -100
        w = torch.where(known, class_weights[target.clamp(min=0)], 0)
        row_losses = (1 - smoothing) * w * (lse - of_label) + smoothing * (lse * class_weights.mean() - mean)
        each, extra = torch.where(known, row_losses, 0), torch.where(known, z_loss * lse.square(), 0)
        if reduction == "none":
            return each + extra
        return each.sum() + extra.sum() if reduction == "sum" else each.sum() / w.sum() + extra.sum() / known.sum()

    return loss


def plain_loss(reduction: str, smoothing: float, cap: float, z_loss: float) -> Callable[..., Any]:
    def loss(x: Any, weight: Any, bias: Any, class_weights: Any, target: Any) -> Any:
        z = (x @ weight.mT + bias).flatten(0, -2)
        z = cap * torch.tanh(z / cap) if cap else z
        each = F.cross_entropy(z, target.flatten(), class_weights, reduction=reduction, label_smoothing=smoothing)
        extra = z_loss * z.logsumexp(-1).square() * (target.flatten() != -100)
        if reduction == "none":
            return (each + extra).reshape(target.shape)
        return each + extra.sum() / (1 if reduction == "sum" else (target != -100).sum())

    return loss


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("name", OPTIONS)
def test_by_a_product_with_sums(name: str, dtype: Any, reduction: str) -> None:
    options = {"smoothing": 0.0, "cap": 0.0, "z_loss": 0.0, "bias": False, "weighted": False, **OPTIONS[name]}
    x, weight, target = drawn(SHAPES[1], dtype)
    classes = SHAPES[1][-1]
    bias = torch.randn(classes).to(dtype) if options.pop("bias") else torch.zeros(classes, dtype=dtype)
    fine = torch.float64 if dtype == torch.float64 else torch.float32
    class_weights = torch.rand(classes, dtype=fine) if options.pop("weighted") else torch.ones(classes, dtype=fine)
    functions = (make(reduction, **options) for make in (fused_loss, plain_loss))
    same_gradients(
        *functions, x, weight, bias.requires_grad_(), class_weights, target, roundings=2 * IN_FP32, of_gradients=4
    )


def test_class_weights_with_single_losses() -> None:
    """And any other weights of rows: the loss of each row is differentiable."""
    x, weight, target = drawn(SHAPES[0], torch.float64)
    class_weights = torch.rand(64, dtype=torch.float64)

    def fused(x: Any, weight: Any, target: Any) -> Any:
        w = torch.where(target == -100, 0, class_weights[target.clamp(min=0)])
        return (w * module(40, 64, torch.float64, reduction="none")(x, weight, target)).sum() / w.sum()

    same_gradients(fused, plain(weight=class_weights), x, weight, target)


def test_rows_scaled_by_their_probability() -> None:
    def scaled(loss: Callable[..., Any]) -> Callable[..., Any]:
        def of(*inputs: Any) -> Any:
            each = loss(*inputs)
            return (each * (-each.detach()).exp()).sum()

        return of

    fused = module(40, 64, torch.float64, reduction="none")
    same_gradients(scaled(fused), scaled(plain(reduction="none")), *drawn(SHAPES[0], torch.float64))


def test_accuracy() -> None:
    """A prediction is correct if no logit is larger than that of the label."""
    x, weight, target = drawn(SHAPES[0], torch.float64)

    def statistics(acc: Any, labels: Any) -> Any:
        return acc.amax(-1), (acc * F.one_hot(labels, acc.shape[-1])).sum(-1)

    largest, of_label = gt.gemm(x, weight.mT, epilogue=statistics, labels=target.unsqueeze(-1))
    known = target != -100
    expected = ((x @ weight.mT).argmax(-1) == target)[known]
    assert torch.equal((of_label == largest)[known], expected)


def test_parts_of_the_rows_with_checkpoints() -> None:
    """For a loss without chunks of its own: one chunk's logits are in memory at a time."""
    loss, exact = (make("sum", 0.1, 4.0, 0.1) for make in (fused_loss, plain_loss))

    def in_parts(x: Any, *parameters: Any) -> Any:
        *others, target = parameters
        parts = zip(x.chunk(2), target.chunk(2), strict=True)
        return sum(torch.utils.checkpoint.checkpoint(loss, y, *others, t, use_reentrant=False) for y, t in parts)

    x, weight, target = drawn(SHAPES[0], torch.float64)
    bias, class_weights = (torch.rand(64, dtype=torch.float64) for _ in range(2))
    same_gradients(in_parts, exact, x, weight, bias.requires_grad_(), class_weights, target)


@pytest.mark.parametrize("cap", [0.0, 1.5])
def test_simulated(cap: float, rng: np.random.Generator) -> None:
    """The kernel of the forward pass."""
    m, k, n = 51, 31, 123
    x, w = (torch.from_numpy(rng.standard_normal(s)).bfloat16() for s in ((m, k), (n, k)))
    labels = torch.from_numpy(np.where(rng.random((m, 1)) < 0.2, -100, rng.integers(n, size=(m, 1))))

    def statistics(acc: Any, labels: Any) -> Any:
        z = cap * torch.tanh(acc / cap) if cap else acc
        return {
            "lse": z.logsumexp(-1), "of_label": (z * F.one_hot(labels, n)).sum(-1), "mean": z.mean(-1),
            "largest": z.amax(-1),
        }  # fmt: skip

    out = {name: torch.full((m,), torch.nan) for name in ("lse", "of_label", "mean", "largest")}
    gemmsmith.gemm(x, w.T, epilogue=statistics, labels=labels, out=out, backend="sim")
    z = x.double() @ w.double().T
    z = cap * torch.tanh(z / cap) if cap else z
    label_mask = torch.arange(n) == labels
    expected = {"lse": z.logsumexp(-1), "of_label": (z * label_mask).sum(-1), "mean": z.mean(-1), "largest": z.amax(-1)}
    for name, y in expected.items():
        close(out[name], y, backend="sim")
