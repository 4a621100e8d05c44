"""Pieces of an accumulator through shared memory: every dtype in every swizzle, written and read."""

from __future__ import annotations

import numpy as np
import pytest
from tests.epilogue.identity import TILE, small, through

import gemmsmith
from gemmsmith.core.dtypes import as_dtype

WIDTHS = (8, 16, 24, 32, 64, 96)
"""Of a tile: rows of 16 bytes, which nothing swizzles, to several boxes of 128."""

READ_DTYPES = ("fp16", "bf16", "fp32", "int32", "bool")


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp8_e4m3"])
def test_every_element_is_written_where_it_belongs(n: int, dtype: str, rng: np.random.Generator) -> None:
    x = small(rng, (64, n))
    found = through(x, lambda acc: acc, TILE.replace(tile=(64, n, 32)), out_dtype=dtype)
    np.testing.assert_array_equal(np.asarray(found).astype(np.float32), x.astype(as_dtype(dtype).numpy, copy=False))


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("dtype", READ_DTYPES)
def test_every_element_of_a_matrix_is_read_from_where_it_lies(n: int, dtype: str, rng: np.random.Generator) -> None:
    x, c = small(rng, (64, n)), small(rng, (64, n), as_dtype(dtype, allow_integers=True).numpy)
    found = through(x, lambda acc, c: acc - c, TILE.replace(tile=(64, n, 32)), c=c, out_dtype="fp32")
    np.testing.assert_array_equal(found, x.astype(np.float32) - c.astype(np.float32))


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp8_e4m3"])
def test_subtiles_of_column_major_matrices_are_transposed(n: int, dtype: str, rng: np.random.Generator) -> None:
    """Of D^T, whose rows are D's columns; read and written."""
    x, c = small(rng, (n, 64)), small(rng, (n, 64))
    config = TILE.replace(tile=(64, n, 32), swap_ab=True)
    found = np.asarray(through(x, lambda acc, c: acc - c, config, c=c, out_dtype=dtype))
    want = (x.astype(np.float32) - c.astype(np.float32)).astype(as_dtype(dtype).numpy)
    np.testing.assert_array_equal(found.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("dtype", READ_DTYPES)
def test_subtiles_of_column_major_matrices_are_read(n: int, dtype: str, rng: np.random.Generator) -> None:
    x, c = small(rng, (n, 64)), small(rng, (n, 64), as_dtype(dtype, allow_integers=True).numpy)
    config = TILE.replace(tile=(64, n, 32), swap_ab=True)
    found = through(x, lambda acc, c: acc - c, config, c=c, out_dtype="fp32")
    np.testing.assert_array_equal(found, x.astype(np.float32) - c.astype(np.float32))


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_gated_integers(dtype: str, column_major: bool, rng: np.random.Generator) -> None:
    """Subtiles of 16 columns, or of 32 rows if the tile is swapped."""
    x, c = small(rng, (64, 128)), small(rng, (64, 64), as_dtype(dtype, allow_integers=True).numpy)

    def gated(acc, c):
        gate, up = gemmsmith.deinterleave(acc)
        return gate + 3 * up - c

    config = TILE.replace(tile=(128, 64, 32) if column_major else (64, 32, 32), swap_ab=column_major)
    found = through(x, gated, config, c=c, out_dtype="fp32")
    gate, up = gemmsmith.deinterleave(x.astype(np.float32))
    np.testing.assert_array_equal(found, gate + 3 * up - c)


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp8_e4m3"])
@pytest.mark.parametrize("column_major", [False, True])
def test_gated_columns_of_a_swapped_tile_are_rows(
    n: int, dtype: str, column_major: bool, rng: np.random.Generator
) -> None:
    """Pieces of 32 rows, read and written, as the matrices lie and transposed."""
    x, c = small(rng, (n, 128)), small(rng, (n, 64))
    c = np.asfortranarray(c) if column_major else c
    out = np.full((n, 64), np.nan, as_dtype(dtype).numpy, order="F" if column_major else "C")

    def gated(acc, c):
        gate, up = gemmsmith.deinterleave(acc)
        return gate + 3 * up - c

    config = TILE.replace(tile=(128, n, 32), swap_ab=not column_major)  # D^T is computed anyway
    found = np.asarray(through(x, gated, config, c=c, out=out, out_dtype=dtype))
    gate, up = gemmsmith.deinterleave(x.astype(np.float32))
    want = (gate + 3 * up - c).astype(as_dtype(dtype).numpy).astype(np.float32)
    np.testing.assert_array_equal(found.astype(np.float32), want)


def test_rows_beyond_64_are_further_subtiles(rng: np.random.Generator) -> None:
    x, c = small(rng, (192, 40)), small(rng, (192, 40))
    config = TILE.replace(tile=(192, 40, 32))
    np.testing.assert_array_equal(through(x, lambda acc, c: acc + 2 * c, config, c=c), x + 2 * c)


def test_halves_of_gated_columns_come_together(rng: np.random.Generator) -> None:
    """Groups of 8 columns alternate: gate, up."""
    x = small(rng, (64, 64))

    def gated(acc):
        gate, up = gemmsmith.deinterleave(acc)
        return gate + 3 * up

    groups = x.reshape(64, 4, 2, 8)
    found = through(x, gated, TILE.replace(tile=(64, 64, 32)), out_dtype="fp32")
    np.testing.assert_array_equal(found, (groups[:, :, 0] + 3 * groups[:, :, 1].astype(np.float32)).reshape(64, 32))
