"""The reference for D = A @ B: computed in float64, rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmsmith.core.dtypes import BF16, DType
from gemmsmith.core.errors import ArgumentError

Array = np.ndarray[Any, Any]
ROWS = 64
"""BLAS sums in an order that depends on the number of rows: it gets so many at a time, the last ones padded."""


def exact(a: Array, b: Array) -> Array:
    """A @ B in float64. a (..., m, k) and b (..., k, n), any float dtype -> (..., m, n); batches broadcast.

    The products of bf16, fp16 and fp32 elements are exact or rounded once; a sum of k of them errs by at most
    k * 2^-53 * (|A| |B|); a row's sums do not depend on the other rows. NaN and Inf propagate
    as IEEE 754 says; k = 0 gives zeros.
    Raises ArgumentError when the shapes do not match.
    """
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise ArgumentError(f"a, b: got shapes {a.shape} and {b.shape}; use (..., m, k) and (..., k, n)")
    *batch, m, k = a.shape
    blocks = -(-m // ROWS)
    padded = np.zeros((*batch, blocks * ROWS, k))
    padded[..., :m, :] = a
    with np.errstate(invalid="ignore", over="ignore"):
        d = np.matmul(padded.reshape(*batch, blocks, ROWS, k), b.astype(np.float64, copy=False)[..., None, :, :])
    found: Array = d.reshape(*d.shape[:-3], blocks * ROWS, b.shape[-1])[..., :m, :]
    return found


def rounded(x: Array, dtype: DType) -> Array:
    """float64 `x` rounded once to `dtype`, to nearest, ties to even; beyond the range it becomes Inf."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if dtype is BF16:
            x = _to_odd_float32(x)  # ml_dtypes goes through float32 and would round to nearest twice
        return x.astype(dtype.numpy)


def product(a: Array, b: Array, output: DType) -> Array:
    """A @ B in float64, rounded once to `output`.

    a (m, k) or (batch, m, k), b (k, n) or (batch, k, n), of bf16 (ml_dtypes), fp16 or fp32; a batch of 1 and a
    missing batch broadcast. Gives (m, n) or (batch, m, n) of `output`. Raises ArgumentError on mismatched shapes.
    """
    return rounded(exact(a, b), output)


def _to_odd_float32(x: Array) -> Array:
    """Rounds to odd: truncates, and sets the last bit if anything was lost, so that the next rounding is right.

    Source: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using
    rounding to odd", 2008.
    """
    nearest = np.asarray(x, np.float32)
    bits = nearest.view(np.uint32) - (np.abs(nearest) > np.abs(x))
    odd: Array = np.asarray(bits | (nearest != x), np.uint32).view(np.float32)
    return np.where(np.isnan(x), nearest, odd)
