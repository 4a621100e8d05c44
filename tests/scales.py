"""Operands of fp8 and their scales in memory that is NaN around them, and digits that tell which scales were used."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
UE8M0, FP32 = np.dtype(ml_dtypes.float8_e8m0fnu), np.dtype(np.float32)
BLOCK = 128
RECIPES = [(1, 128), (1, 1), (128, 1), (128, 128), (1, 0), (0, 128)]
"""For how many rows of a, and columns of b, one block scale is; 0: there are none."""
Array = np.ndarray[Any, Any]
Recipe = tuple[int, int]


def within(x: Array, turned: bool = False, pad: int = 16) -> Array:
    """The same in memory that has NaN behind each row, and before and behind the matrix; `turned`: column-major."""
    x = x.swapaxes(-1, -2) if turned else x
    *batch, rows, columns = x.shape
    width = columns + pad if pad % 16 else -(-columns // 16) * 16 + pad
    store = np.full((*batch, rows + 2, width), np.nan, x.dtype)
    inner = store[..., 1:-1, :columns]
    inner[...] = x
    return inner.swapaxes(-1, -2) if turned else inner


def operands(
    rng: np.random.Generator, m: int, n: int, k: int, dtypes: tuple[Any, Any] = (E4M3, E4M3), outliers: bool = False
) -> list[Array]:
    """a (m, k) and b (k, n), normally distributed, K-major; with `outliers` one in a hundred a thousand times as large,
    as far as e4m3 reaches."""
    a, b = (rng.standard_normal((rows, k), np.float32) for rows in (m, n))
    if outliers:
        a, b = (np.clip(0.1 * x * np.where(rng.random(x.shape) < 0.01, 1000, 1), -448, 448) for x in (a, b))
    return [within(a.astype(dtypes[0])), within(b.astype(dtypes[1])).T]


def ones(m: int, n: int, k: int) -> list[Array]:
    return [within(np.ones((m, k), E4M3)), within(np.ones((n, k), E4M3)).T]


def shapes(m: int, n: int, k: int, recipe: Recipe) -> tuple[Any, Any]:
    """Of scale_a and scale_b."""
    blocks, (a_scale, b_scale) = -(-k // BLOCK), recipe
    return a_scale and (-(-m // a_scale), blocks), b_scale and (blocks, -(-n // b_scale))


def scales(
    rng: np.random.Generator, m: int, n: int, k: int, recipe: Recipe, *, spread: int = 4, dtype: Any = FP32,
    turned: bool = False, pad: int = 3,
) -> list[Array | None]:  # fmt: skip
    """Random ones from 2^-spread to 2^spread."""
    result: list[Array | None] = []
    for shape in shapes(m, n, k, recipe):
        x = 2.0 ** rng.uniform(-spread, spread, shape) if shape else None
        result.append(None if x is None else within(x.astype(dtype), turned, pad))
    return result


def digits(
    m: int, n: int, k: int, recipe: Recipe, *, dtype: Any = FP32, turned: bool = False, pad: int = 3
) -> tuple[list[Array | None], Array]:
    """Scales that are powers of two, and the product of ones that they scale, exact in fp32 up to 12 blocks of K: the
    sum over them of the block's width times 2 to a number of the block, and to numbers of the row's and the column's
    scale. A block's number is another for each, and changes from one to the next on either side."""
    blocks = np.arange(-(-k // BLOCK))
    of_rows, of_columns = (np.zeros((x, len(blocks))) for x in (m, n))
    given: list[Array | None] = []
    sides = zip(shapes(m, n, k, recipe), recipe, (of_rows, of_columns), strict=True)
    for side, (shape, rows, exponents) in enumerate(sides):
        if not shape:
            given.append(None)
            continue
        numbers = np.arange(shape[side])[:, None] * (11, 7)[side] % (17, 13)[side] - 6
        own = numbers + (blocks if side == (0 if recipe[0] else 1) else blocks % 2 * 2)
        exponents[:] = own[np.arange(len(exponents)) // rows]
        given.append(within((2.0 ** (own if side == 0 else own.T)).astype(dtype), turned, pad))
    widths = np.minimum(BLOCK, k - BLOCK * blocks)
    return given, (widths * 2.0**of_rows) @ (2.0**of_columns).T
