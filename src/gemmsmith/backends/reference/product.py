"""The reference for D = A @ B: computed in float64, rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmsmith.core.dtypes import BF16, E4M3, E5M2, INT32, LARGEST, TF32, TF32_BITS, DType
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.mma import Mma
from gemmsmith.core.problem import SCALE_BLOCK

Array = np.ndarray[Any, Any]
ROWS = 64
"""BLAS sums in an order that depends on the number of rows: it gets so many at a time, the last ones padded."""


def exact(a: Array, b: Array) -> Array:
    """A @ B in float64. a (..., m, k) and b (..., k, n), any float dtype or int8 -> (..., m, n); batches broadcast.

    The products of elements are exact or rounded once, sums of int8 ones exact; a sum of k of them errs by at most
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


def multiplied(a: Array, b: Array, mma: Mma) -> Array:
    """A @ B in float64 as the instruction has it that multiplies them, but for its rounding: of TF32 operands the bits
    that it reads, sums of integers modulo 2^32."""
    if mma.a == TF32:
        a, b = as_tf32(a), as_tf32(b)
    product = exact(a, b)
    return wrapped(product) if mma.d == INT32 else product


def wrapped(product: Array) -> Array:
    """Sums of integers as int32 has them, modulo 2^32."""
    return product.astype(np.int64).astype(np.int32).astype(np.float64)


def in_blocks(a: Array, b: Array, scale_a: Array | None, scale_b: Array | None) -> Array:
    """The sum over blocks of 128 of k of A @ B times their scales, in float64. scale_a (..., m, k/128) or
    (..., m/128, k/128), scale_b (..., k/128, n) or (..., k/128, n/128), rounded up; None for ones."""
    total = exact(a[..., :0], b[..., :0, :])
    for block, first in enumerate(range(0, a.shape[-1], SCALE_BLOCK)):
        part = exact(a[..., first : first + SCALE_BLOCK], b[..., first : first + SCALE_BLOCK, :])
        with np.errstate(invalid="ignore", over="ignore"):
            if scale_a is not None:
                part = part * _of_each(scale_a[..., block], a.shape[-2])[..., None]
            if scale_b is not None:
                part = part * _of_each(scale_b[..., block, :], b.shape[-1])[..., None, :]
            total = total + part
    return total


def _of_each(scales: Array, count: int) -> Array:
    """The scale of each of `count` rows, whose own it is or that of their block of 128."""
    own = scales.astype(np.float64)
    return own if own.shape[-1] == count else np.repeat(own, SCALE_BLOCK, axis=-1)[..., :count]


def as_tf32(x: Array) -> Array:
    """fp32 elements as tensor cores read them: their upper 19 bits."""
    return (np.ascontiguousarray(x).view(np.uint32) & TF32_BITS).view(np.float32)


def rounded(x: Array, dtype: DType) -> Array:
    """float64 `x` rounded once to `dtype`, to nearest, ties to even; beyond the range it becomes Inf, and fp8's largest
    value where that is the dtype."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if dtype in (E4M3, E5M2):
            x = np.clip(x, -LARGEST[dtype], LARGEST[dtype])
        if dtype in (BF16, E4M3, E5M2):
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
