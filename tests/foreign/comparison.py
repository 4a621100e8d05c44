"""Comparison of results with float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np


def wide(x: Any) -> np.ndarray[Any, Any]:
    """Return an array or tensor in float64."""
    return x.double().numpy() if hasattr(x, "double") else np.asarray(x).astype(np.float64)


def close(actual: Any, expected: Any, roundings: float = 0, backend: str = "reference", terms: int = 1) -> None:
    """`got` is `want`, rounded once to its dtype. Intermediate `roundings` may each cost a unit of the largest number,
    and fp32 in the simulator a little of it, more in a sum of `terms`."""
    x, y = wide(actual), wide(expected)
    assert x.shape == y.shape
    finfo = ml_dtypes.finfo(str(actual.dtype).removeprefix("torch."))
    unit, largest = max(float(finfo.eps), 1e-9), float(np.abs(y).max(initial=0))
    bound = 0.51 * unit * np.abs(y) + (roundings + 1e-4) * unit * largest + float(finfo.smallest_subnormal)
    if backend == "sim":
        bound += (2.0**-11 if finfo.bits < 32 else 2.0**-15) * math.sqrt(terms) * max(1.0, largest)
    wrong = ~(np.abs(x - y) <= bound)
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size}, at {np.argwhere(wrong)[0]}: got {x[wrong].flat[0]}, want {y[wrong].flat[0]}"
    )


def same_gradients(
    fused: Callable[..., Any],
    plain: Callable[..., Any],
    *inputs: Any,
    roundings: float = 0,
    of_gradients: float = 3,
    backend: str = "reference",
) -> None:
    """Compare results of tensors, and the gradients of those that require them, for random gradients of the results.

    `plain` gets the inputs in float64.
    """
    import torch

    def in_float64(x: Any) -> Any:
        return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x

    exact = [in_float64(x) for x in inputs]
    actual, expected = (y if isinstance(y, tuple) else (y,) for y in (fused(*inputs), plain(*exact)))
    slopes = [torch.randn_like(y) for y in actual]
    for y, right in zip(actual, expected, strict=True):
        close(y.detach(), right.detach(), roundings, backend)
    gradients = torch.autograd.grad(actual, [x for x in inputs if x.requires_grad], slopes)
    exact_slopes = [g.double() for g in slopes]
    rights = torch.autograd.grad(expected, [x for x in exact if x.requires_grad], exact_slopes)
    for g, right in zip(gradients, rights, strict=True):
        close(g, right, of_gradients, backend)
