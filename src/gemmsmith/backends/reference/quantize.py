"""Quantization as the kernels compute it, bit for bit: in fp32, each operation rounded once."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from gemmsmith.backends.reference.grouped import group_slices
from gemmsmith.core.dtypes import FP32, MAX_FINITE, MIN_SCALE, DType
from gemmsmith.core.grouping import Grouping
from gemmsmith.core.problem import SCALE_BLOCK
from gemmsmith.core.scalars import ceil_div
from gemmsmith.hw.convert import round_to_8_bits

Array = np.ndarray[Any, Any]


def quantize(x: Array, recipe: str, dtype: DType, scale_dtype: DType) -> tuple[Array, Array]:
    """Return (values, scales) of an array (..., m, k).

    `recipe`: what one scale covers: "tensor", "rows" (a row), "1x128" or "128x128" (a block of rows x columns).
    `scale_dtype`: fp32, or ue8m0 for powers of two.
    """
    *batch, m, k = x.shape
    wide = x.astype(np.float32)
    if recipe == "tensor":
        scale, inverse = scales_from_amax(np.abs(wide).max(initial=0.0), dtype, scale_dtype)
        with np.errstate(invalid="ignore"):
            return round_to_8_bits(wide * inverse, dtype), scale
    rows, columns = {"rows": (1, max(k, 1)), "1x128": (1, SCALE_BLOCK), "128x128": (SCALE_BLOCK, SCALE_BLOCK)}[recipe]
    # A row without elements has a scale, too.
    blocks_per_column, blocks_per_row = ceil_div(m, rows), max(ceil_div(k, columns), int(recipe == "rows"))
    padded = np.zeros((*batch, blocks_per_column * rows, blocks_per_row * columns), np.float32)
    padded[..., :m, :k] = wide
    amax = (
        np.abs(padded).reshape(*batch, blocks_per_column, rows, blocks_per_row, columns).max(axis=(-3, -1), initial=0.0)
    )
    scales, inverse = scales_from_amax(amax, dtype, scale_dtype)
    expanded = inverse.repeat(rows, axis=-2).repeat(columns, axis=-1)[..., :m, :k]
    with np.errstate(invalid="ignore"):
        return round_to_8_bits(wide * expanded, dtype), scales


def quantize_groups(
    x: Array, table: Array, grouping: Grouping, dtype: DType, scale_dtype: DType, values: Array, scales: Array,
    ends: Array,
) -> None:  # fmt: skip
    """Quantize the transpose of x (m, n), with a scale for each block of 128 of m.

    The rows of each group are padded with zeros to whole blocks. `table`: int32. Outputs: `values` (n, padded m),
    `scales` (n, padded m / 128), and `ends` (groups,): where each padded group ends; -1 if the table is invalid.
    """
    groups = group_slices(grouping, table, len(x))
    ends[...] = -1
    if groups is None:
        return
    begin = 0
    for g, group in enumerate(groups):
        end = begin + ceil_div(group.stop - group.start, SCALE_BLOCK) * SCALE_BLOCK
        filled = np.zeros((x.shape[1], end - begin), x.dtype)
        filled[:, : group.stop - group.start] = x[group].T
        blocks = slice(begin // SCALE_BLOCK, end // SCALE_BLOCK)
        values[:, begin:end], scales[:, blocks] = quantize(filled, "1x128", dtype, scale_dtype)
        ends[g] = begin = end


def dequantize(values: Array, scales: Array, shares: tuple[int, int], dtype: DType) -> Array:
    """Return values (..., m, k) * scales in fp32, rounded to `dtype`; each scale covers `shares` = (rows, columns)."""
    m, k = values.shape[-2:]
    wide = scales.astype(np.float32)
    for axis, share in zip((-2, -1), shares, strict=True):
        wide = wide.repeat(share, axis=axis)
    with np.errstate(invalid="ignore", over="ignore"):
        result: Array = (values.astype(np.float32) * wide[..., :m, :k]).astype(dtype.numpy)
    return result


def scales_from_amax(amax: Array, dtype: DType, scale_dtype: DType) -> tuple[Array, Array]:
    """Return the scales for the largest magnitudes `amax`, and their reciprocals; values are multiplied by the latter.

    A scale maps `amax` to the largest value of `dtype`; ue8m0 is rounded up to a power of two. It is 1 for amax 0.
    """
    limit, amax = np.float32(MAX_FINITE[dtype]), np.asarray(amax, np.float32)
    # Below MIN_SCALE, a scale or its reciprocal would be subnormal or infinite.
    bounded = np.maximum(amax, limit * np.float32(MIN_SCALE))
    with np.errstate(invalid="ignore"):
        scale = np.where(amax == 0, np.float32(1), bounded * (1 / limit))
        inverse = np.where(amax == 0, np.float32(1), limit / bounded)
    if scale_dtype == FP32:
        return scale, inverse
    finite = np.isfinite(scale)
    exponent = np.where(finite, np.ceil(np.log2(np.where(finite, scale, 1).astype(np.float64))), 0)
    powers = np.where(finite, 2.0**exponent, np.nan).astype(ml_dtypes.float8_e8m0fnu)
    return powers, np.where(finite, 2.0**-exponent, 0).astype(np.float32)
