"""The bounds of `backends.reference.bounds` and `tests.epilogues`, in torch: results are judged where they lie."""

from __future__ import annotations

import math

import ml_dtypes
import torch

from gemmsmith.backends.reference.bounds import STEP_UNDERFLOW_ERROR, reference_mma, step_error
from gemmsmith.core.dtypes import as_dtype


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in float64."""
    return a.double() @ b.double()


def product_bound(
    a: torch.Tensor, b: torch.Tensor, expected: torch.Tensor, accumulate: str, output: torch.dtype
) -> torch.Tensor:
    """What an element of a @ b, `want` in float64, may be off by; a little less where operands are subnormal."""
    mma = reference_mma(as_dtype(a.dtype), as_dtype(b.dtype), as_dtype(accumulate))
    steps = -(-a.shape[-1] // mma.k)
    c = math.expm1(steps * math.log1p(step_error(mma)))
    lost = c * exact(a.abs(), b.abs()) + steps * STEP_UNDERFLOW_ERROR[as_dtype(accumulate)] * (1 + c)
    subnormal = float(ml_dtypes.finfo(as_dtype(output).numpy).smallest_subnormal)
    return lost + as_dtype(output).roundoff * (expected.abs() + lost) + subnormal / 2


def epilogue_bound(expected: torch.Tensor, product: torch.Tensor, output: torch.dtype, *, summed: bool) -> torch.Tensor:
    """What an element of a result, `want`, may be off by: its rounding, and what fp32 and coarse functions lose."""
    loss = (2.0**-11 if torch.finfo(output).bits < 32 else 2.0**-15) * (math.sqrt(product.numel()) if summed else 1)
    largest = max(1.0, float(product.abs().max()), float(expected.abs().max()))
    return 1.01 * as_dtype(output).roundoff * expected.abs() + loss * largest


def wrong(actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> int:
    """Elements that are farther from `want` than their bound, or NaN."""
    return int((~((actual.double() - expected).abs() <= bound)).sum())


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether both hold the same bytes."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    return torch.equal(x.view(integers), y.view(integers))
