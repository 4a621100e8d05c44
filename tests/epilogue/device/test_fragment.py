"""Pieces of an accumulator through shared memory: every dtype in every swizzle, written and read."""

from __future__ import annotations

import numpy as np
import pytest
from tests.epilogue.device.identity import TILE, small, through

from gemmsmith.core.dtypes import as_dtype

WIDTHS = (8, 16, 24, 32, 64, 96)
"""Of a tile: rows of 16 bytes, which nothing swizzles, to several boxes of 128."""


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp8_e4m3"])
def test_every_element_is_written_where_it_belongs(n: int, dtype: str, rng: np.random.Generator) -> None:
    x = small(rng, (64, n))
    found = through(x, lambda acc: acc, TILE.replace(tile=(64, n, 32)), out_dtype=dtype)
    np.testing.assert_array_equal(np.asarray(found).astype(np.float32), x.astype(as_dtype(dtype).numpy, copy=False))


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_every_element_of_a_matrix_is_read_from_where_it_lies(n: int, dtype: str, rng: np.random.Generator) -> None:
    x, c = small(rng, (64, n)), small(rng, (64, n), as_dtype(dtype).numpy)
    found = through(x, lambda acc, c: acc - c, TILE.replace(tile=(64, n, 32)), c=c, out_dtype="fp32")
    np.testing.assert_array_equal(found, x.astype(np.float32) - c.astype(np.float32))


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp8_e4m3"])
def test_pieces_of_column_major_matrices_are_transposed(n: int, dtype: str, rng: np.random.Generator) -> None:
    """Of D^T, whose rows are D's columns; read and written."""
    x, c = small(rng, (n, 64)), small(rng, (n, 64))
    config = TILE.replace(tile=(64, n, 32), swap_ab=True)
    found = np.asarray(through(x, lambda acc, c: acc - c, config, c=c, out_dtype=dtype))
    want = (x.astype(np.float32) - c.astype(np.float32)).astype(as_dtype(dtype).numpy)
    np.testing.assert_array_equal(found.astype(np.float32), want.astype(np.float32))


def test_rows_beyond_64_are_further_pieces(rng: np.random.Generator) -> None:
    x, c = small(rng, (192, 40)), small(rng, (192, 40))
    config = TILE.replace(tile=(192, 40, 32))
    np.testing.assert_array_equal(through(x, lambda acc, c: acc + 2 * c, config, c=c), x + 2 * c)


def test_halves_of_gated_columns_come_together(rng: np.random.Generator) -> None:
    """Groups of 8 columns alternate: gate, up."""
    x = small(rng, (64, 64))

    def gated(acc):
        gate, up = acc.chunk(2)
        return gate + 3 * up

    groups = x.reshape(64, 4, 2, 8)
    found = through(x, gated, TILE.replace(tile=(64, 64, 32)), out_dtype="fp32")
    np.testing.assert_array_equal(found, (groups[:, :, 0] + 3 * groups[:, :, 1].astype(np.float32)).reshape(64, 32))
