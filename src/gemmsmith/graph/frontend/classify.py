"""Classification of epilogue operands by shape: scalar, row, column or matrix."""

from __future__ import annotations

from typing import Literal

from gemmsmith.core.errors import EpilogueError
from gemmsmith.core.graph import BroadcastDims


def classify(name: str, shape: tuple[int, ...], acc_shape: tuple[int, ...]) -> BroadcastDims:
    """Return the dimensions of an accumulator of shape (M, N) or (B, M, N) along which an operand of `shape` varies.

    () and (1,) are scalars, (N,) is a row, (M, 1) a column, (M, N) a matrix, each with an optional leading batch of B
    or 1. N/2 in place of N stands for one value per two columns, as in the halves that `deinterleave` returns. An
    operand varies along a dimension if it has the accumulator's length there, even 1: for N = 1, (M, 1) is a matrix;
    only (1,) is always a scalar. Raises EpilogueError, with the operand's `name`, for a shape that does not broadcast.
    """
    *_, rows, columns = acc_shape
    batch, m, n = ((None,) * (3 - len(shape)) + tuple(shape))[-3:]
    columns_per_value: Literal[0, 1, 2] | None = None
    if n is None or (n == 1 and (columns != 1 or len(shape) == 1)):
        columns_per_value = 0
    elif n == columns:
        columns_per_value = 1
    elif 2 * n == columns:
        columns_per_value = 2
    others_broadcast = m in (None, 1, rows) and batch in (None, 1, acc_shape[0]) and len(shape) <= len(acc_shape)
    if columns_per_value is None or not others_broadcast:
        raise EpilogueError(_no_broadcast_message(name, shape, acc_shape))
    return BroadcastDims(batch == acc_shape[0], 1 if m == rows else 0, columns_per_value)


def _no_broadcast_message(name: str, shape: tuple[int, ...], acc_shape: tuple[int, ...]) -> str:
    """Return the message for a shape that does not broadcast, with the shapes that do."""
    *_, m, n = acc_shape
    if tuple(shape) == (m,):
        return f"{name}: got shape {shape}, one value per row of the output {acc_shape}; use ({m}, 1), a column"
    batch = f", or a batch of {acc_shape[0]} or 1 in front of two dimensions" if len(acc_shape) == 3 else ""
    half = f" ({n // 2} instead of {n} for halves)" if n % 2 == 0 else ""
    return (
        f"{name}: got shape {tuple(shape)}, which does not broadcast to the output shape {tuple(acc_shape)}; "
        f"use (), ({n},), ({m}, 1) or ({m}, {n}){batch}{half}"
    )


def describe(broadcast_dims: BroadcastDims) -> str:
    """Describe an operand's kind and shape, without its batch."""
    columns = {0: "1", 1: "N", 2: "N/2"}[broadcast_dims.columns_per_value]
    if broadcast_dims.varies_along_m:
        return f"a {'matrix' if broadcast_dims.varies_along_n else 'column'} (M, {columns})"
    return f"a row ({columns},)" if broadcast_dims.varies_along_n else "a scalar"
