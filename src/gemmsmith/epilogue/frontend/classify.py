"""What an operand of an epilogue is, from its shape: a scalar, a row, a column or a matrix; and in words."""

from __future__ import annotations

from typing import Literal

from gemmsmith.core.errors import EpilogueError
from gemmsmith.core.graph import Extent


def classify(name: str, shape: tuple[int, ...], product: tuple[int, ...]) -> Extent:
    """Along which indices of a product of shape (M, N) or (B, M, N) the operand `name` varies.

    () and (1,) are scalars, (N,) is a row, (M, 1) a column, (M, N) a matrix, each with a batch in front of it, B or 1;
    N/2 in place of N is for values of halves, as `deinterleave` gives them. An index that the shape has and that is as
    long as the product's counts as varying, even where that is 1: for N = 1, (M, 1) is a matrix; only (1,) is always a
    scalar.
    Raises EpilogueError for a shape that does not broadcast.
    """
    *_, rows, columns = product
    batch, m, n = ((None,) * (3 - len(shape)) + tuple(shape))[-3:]
    width: Literal[0, 1, 2] | None = None
    if n is None or (n == 1 and (columns != 1 or len(shape) == 1)):
        width = 0
    elif n == columns:
        width = 1
    elif 2 * n == columns:
        width = 2
    fits = width is not None and m in (None, 1, rows) and batch in (None, 1, product[0]) and len(shape) <= len(product)
    if width is None or not fits:
        raise EpilogueError(_message(name, shape, product))
    return Extent(batch == product[0], 1 if m == rows else 0, width)


def _message(name: str, shape: tuple[int, ...], product: tuple[int, ...]) -> str:
    *_, m, n = product
    if tuple(shape) == (m,):
        return f"{name}: got shape {shape}, a value for each row of the product {product}; use ({m}, 1), a column"
    batch = f", or one of these with {product[0]} or 1 in front" if len(product) == 3 else ""
    half = f" (or {n // 2} in place of {n} of halves)" if n % 2 == 0 else ""
    return (
        f"{name}: got shape {tuple(shape)}, which does not broadcast to the product's {tuple(product)}; "
        f"use (), ({n},), ({m}, 1) or ({m}, {n}){batch}{half}"
    )


def in_words(extent: Extent) -> str:
    """What an operand of that extent is, without its batch."""
    columns = {0: "1", 1: "N", 2: "N/2"}[extent.width]
    if extent.height:
        return f"a {'matrix' if extent.width else 'column'} (M, {columns})"
    return f"a row ({columns},)" if extent.width else "a scalar"
