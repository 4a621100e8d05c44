"""The reference for D = A @ B: computed in float64 and rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmsmith.core.dtypes import BF16, E4M3, E5M2, INT32, MAX_FINITE, TF32, TF32_BITS, DType
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.mma import N8_COLUMNS, Mma
from gemmsmith.core.problem import SCALE_BLOCK
from gemmsmith.core.scalars import ceil_div

Array = np.ndarray[Any, Any]
ROWS_PER_MATMUL = 64
"""Rows per BLAS call (zero-padded): the summation order may depend on the number of rows. Chosen; not measured."""


def matmul_float64(a: Array, b: Array) -> Array:
    """Return A @ B in float64, (..., m, n), of floats or int8; batches broadcast.

    Products of elements are exact or rounded once, and sums of int8 products are exact. The error of a sum of k
    products is at most k * 2^-53 * (|A| |B|). A row's sums do not depend on the other rows. NaN and Inf propagate as
    IEEE 754 specifies; k = 0 yields zeros. Raises ArgumentError if the shapes do not match.
    """
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise ArgumentError(f"a, b: got shapes {a.shape} and {b.shape}; use (..., m, k) and (..., k, n)")
    *batch, m, k = a.shape
    blocks = ceil_div(m, ROWS_PER_MATMUL)
    padded = np.zeros((*batch, blocks * ROWS_PER_MATMUL, k))
    padded[..., :m, :] = a
    with np.errstate(invalid="ignore", over="ignore"):
        d = np.matmul(
            padded.reshape(*batch, blocks, ROWS_PER_MATMUL, k), b.astype(np.float64, copy=False)[..., None, :, :]
        )
    result: Array = d.reshape(*d.shape[:-3], blocks * ROWS_PER_MATMUL, b.shape[-1])[..., :m, :]
    return result


def instruction_matmul(a: Array, b: Array, mma: Mma) -> Array:
    """Return A @ B in float64, of the operands as the instruction `mma` reads them.

    It truncates TF32 operands, and its integer sums wrap modulo 2^32.
    """
    if mma.a == TF32:
        a, b = truncate_to_tf32(a), truncate_to_tf32(b)
    result = matmul_float64(a, b)
    return wrap_int32(result) if mma.d == INT32 else result


def wrap_int32(sums: Array) -> Array:
    """Return integer sums wrapped modulo 2^32 to int32's range, in float64."""
    return sums.astype(np.int64).astype(np.int32).astype(np.float64)


def alternating_scales(scales: Array, columns: int) -> Array:
    """Return the scale of each column, (..., columns), of two arrays whose columns alternate in groups of 8.

    `scales`: (..., 2 * blocks): the scale of each block of 128 columns of the first array and of the second, in turn.
    """
    of_array = np.repeat(scales.reshape(*scales.shape[:-1], -1, 2), SCALE_BLOCK, -2)[..., : columns // 2, :]
    groups = of_array.reshape(*scales.shape[:-1], -1, N8_COLUMNS, 2).swapaxes(-1, -2)
    return groups.reshape(*scales.shape[:-1], columns)


def blockwise_scaled_matmul(a: Array, b: Array, scale_a: Array | None, scale_b: Array | None) -> Array:
    """Return A @ B in float64 with block scales: the sum of the products of blocks of 128 of k times their scales.

    `scale_a`: (..., m, k/128) or (..., m/128, k/128), rounded up; `scale_b`: (..., k/128, n) or (..., k/128, n/128);
    None for ones.
    """
    total = matmul_float64(a[..., :0], b[..., :0, :])
    for block, first in enumerate(range(0, a.shape[-1], SCALE_BLOCK)):
        partial = matmul_float64(a[..., first : first + SCALE_BLOCK], b[..., first : first + SCALE_BLOCK, :])
        with np.errstate(invalid="ignore", over="ignore"):
            if scale_a is not None:
                partial = partial * _expand_scales(scale_a[..., block], a.shape[-2])[..., None]
            if scale_b is not None:
                partial = partial * _expand_scales(scale_b[..., block, :], b.shape[-1])[..., None, :]
            total = total + partial
    return total


def _expand_scales(scales: Array, count: int) -> Array:
    scales = scales.astype(np.float64)
    return scales if scales.shape[-1] == count else np.repeat(scales, SCALE_BLOCK, axis=-1)[..., :count]


def truncate_to_tf32(x: Array) -> Array:
    """Return fp32 elements as tensor cores read them: their upper 19 bits."""
    return (np.ascontiguousarray(x).view(np.uint32) & TF32_BITS).view(np.float32)


def rounded(x: Array, dtype: DType) -> Array:
    """Return float64 `x` rounded once to `dtype`, to nearest, ties to even.

    Values out of range become Inf, or the largest finite value for fp8.
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if dtype in (E4M3, E5M2):
            x = np.clip(x, -MAX_FINITE[dtype], MAX_FINITE[dtype])
        if dtype in (BF16, E4M3, E5M2):
            x = _to_odd_float32(x)  # ml_dtypes converts via float32 and would round to nearest twice
        return x.astype(dtype.numpy)


def _to_odd_float32(x: Array) -> Array:
    """Round float64 to fp32 to odd: truncate, and set the last bit if anything was lost.

    A rounding to a narrower dtype afterwards then gives the same as one rounding of the float64.

    Source: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to
    odd", 2008.
    """
    nearest = np.asarray(x, np.float32)
    # One less in the bits is the next number toward zero.
    bits = nearest.view(np.uint32) - (np.abs(nearest) > np.abs(x))
    odd: Array = np.asarray(bits | (nearest != x), np.uint32).view(np.float32)
    return np.where(np.isnan(x), nearest, odd)
