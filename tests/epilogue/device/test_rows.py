"""Functions of a whole row: scales of quantised rows, and the k largest of a row."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tests.epilogue.device.identity import TILE, small, through

import gemmsmith

WIDE = TILE.replace(tile=(64, 32, 32))


@pytest.mark.parametrize(("dtype", "largest", "numpy"), [
    ("fp8_e4m3", 448, ml_dtypes.float8_e4m3fn), ("fp8_e5m2", 57344, ml_dtypes.float8_e5m2),
])  # fmt: skip
def test_the_largest_of_a_row_becomes_the_largest_of_the_format(
    dtype: str, largest: float, numpy: type, rng: np.random.Generator
) -> None:
    """Wherever in the row it is; the other block, and rows of zeros, have scales of their own."""
    x = small(rng, (70, 64))
    x[np.arange(64), np.arange(64)] = 32 * rng.choice([-1, 1], 64)
    x[5] = 0
    q, scale = through(x, lambda acc: gemmsmith.quantize(acc, "1x32", dtype), WIDE)
    blocks = x.astype(np.float64).reshape(70, 2, 32)
    amax = np.abs(blocks).max(-1)
    want = np.where(amax == 0, 1, amax / largest)
    np.testing.assert_allclose(scale, want, rtol=1e-6)
    assert (scale[5] == 1).all()
    values = np.asarray(q).view(numpy).astype(np.float64).reshape(70, 2, 32)
    assert (np.abs(values).max(-1)[amax > 0] == largest).all()
    np.testing.assert_allclose(values * want[..., None], blocks, rtol=0.13, atol=0.3)
    assert (values[5] == 0).all()


@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_k_largest_share_one(k: int, rng: np.random.Generator) -> None:
    """Of equals the first columns; all others are zero."""
    x = rng.integers(-3, 4, (70, 32)).astype(np.float16)
    found = np.asarray(through(x, lambda acc: gemmsmith.top_k_softmax(acc, k), WIDE, out_dtype="fp32"))
    order = np.argsort(-x.astype(np.float64), axis=1, kind="stable")[:, :k]
    top = np.take_along_axis(x.astype(np.float64), order, 1)
    share = np.exp(top - top[:, :1])
    want = np.zeros(x.shape)
    np.put_along_axis(want, order, share / share.sum(1, keepdims=True), 1)
    np.testing.assert_allclose(found, want, rtol=1e-5)
    assert (np.count_nonzero(found, axis=1) == k).all()


@pytest.mark.parametrize("n", [24, 23])
def test_columns_outside_the_matrix_are_no_part_of_a_row(n: int, rng: np.random.Generator) -> None:
    """Their zeros would be the largest."""
    x = -1 - np.abs(small(rng, (64, n)))
    found = np.asarray(through(x, lambda acc: gemmsmith.top_k_softmax(acc, 3), WIDE, out_dtype="fp32"))
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "sim"])
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("tiny", [1e-44, 1e-38, 1e-36, 2e-34, 1e-33])
def test_tiny_blocks_have_the_least_scale(tiny: float, dtype: str, backend: str, rng: np.random.Generator) -> None:
    """As `quantize` of arrays does: zeros stay zeros, and nothing is NaN."""
    a, b = np.zeros((1, 16), np.float16), np.zeros((16, 128), np.float16)
    c = (rng.uniform(-1, 1, (1, 128)) * (rng.random((1, 128)) < 0.5) * tiny).astype(np.float32)
    c[0, 0] = tiny
    q, scale = gemmsmith.gemm(
        a, b, epilogue=lambda acc, c: gemmsmith.quantize(acc + c, "1x128", dtype), c=c, backend=backend
    )
    values, scales = gemmsmith.quantize(c, "1x128", dtype, backend="reference")
    np.testing.assert_allclose(scale, scales, rtol=1e-6)
    assert scale[0, 0] >= np.float32(2.0**-126)
    off = np.abs(np.asarray(q).astype(float) - np.asarray(values).astype(float))
    assert (off <= np.abs(values.astype(float)) / 4).all()  # a tie may be rounded the other way
