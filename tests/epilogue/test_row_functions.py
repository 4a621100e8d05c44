"""Functions of a whole row: scales of quantized rows, and the k largest of a row."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tests.epilogue.identity import TILE, small, through

import gemmsmith
from gemmsmith import ConfigError, Spec
from gemmsmith.core.dtypes import as_dtype

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


def test_what_is_not_finite_in_a_row(rng: np.random.Generator) -> None:
    """NaN or +Inf, or nothing but -Inf, makes all of its row NaN, and no other; -Inf has no share."""
    x = small(rng, (64, 32))
    x[0, 7], x[1, 3], x[2], x[3, 5:] = np.nan, np.inf, -np.inf, -np.inf
    x[4, 9], x[5, ::2] = -np.inf, -np.inf
    x[6, [1, 30]] = np.nan, np.inf
    # the product itself would be NaN in whole rows: what is not finite is an operand
    found = gemmsmith.simulate(
        np.zeros((64, 16), np.float16), np.zeros((16, 32), np.float16), config=WIDE, operands={"x": x},
        epilogue=lambda acc, x: gemmsmith.top_k_softmax(acc + x, 8), out_dtype="fp32",
    )  # fmt: skip
    assert found.hazards == []
    want = gemmsmith.gemm(
        np.zeros((64, 16), np.float16), np.zeros((16, 32), np.float16), operands={"x": x}, out_dtype="fp32",
        epilogue=lambda acc, x: gemmsmith.top_k_softmax(acc + x, 8),
    )  # fmt: skip
    np.testing.assert_allclose(found.result, want, rtol=1e-5)
    assert np.isnan(want).all(1).tolist() == [True, True, True, False, False, False, True] + [False] * 57
    assert (want[3, 5:] == 0).all()
    assert want[4, 9] == 0


def test_row_fragments_are_shared_by_all_readers(rng: np.random.Generator) -> None:
    """Two row functions, a result and a sum of one value, which is kept in registers once."""

    def every(acc, bias):
        x = acc + bias
        return x, gemmsmith.top_k_softmax(x, 2), *gemmsmith.quantize(x, "1x32"), x.sum(-1)

    x, bias = small(rng, (64, 32)), small(rng, (32,))
    found = through(x, every, WIDE, bias=bias, out_dtype="fp32")
    wants = gemmsmith.gemm(x, np.eye(32, dtype=np.float16), epilogue=every, bias=bias, out_dtype="fp32")
    for got, want in zip(found, wants, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_rows_of_200_columns(dtype: str, rng: np.random.Generator) -> None:
    """More elements than are fetched at once: a bias of each, used before and behind."""
    numpy = as_dtype(dtype).numpy
    a, b = (rng.standard_normal(shape).astype(np.float32).astype(numpy) for shape in ((70, 20), (20, 200)))
    bias = rng.standard_normal(200).astype(np.float32)

    def shares(acc, bias):
        y = gemmsmith.top_k_softmax(acc + bias, 7)
        return y * bias, y.sum(-2)

    done = gemmsmith.simulate(a, b, epilogue=shares, bias=bias, out_dtype="fp32")
    assert done.hazards == []
    for got, want in zip(done.result, gemmsmith.gemm(a, b, epilogue=shares, bias=bias, out_dtype="fp32"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("n", [136, 144])
def test_a_matrix_beside_wide_rows(n: int, dtype: type, rng: np.random.Generator) -> None:
    """It is read a few columns at a time, as the row is."""
    x, c = small(rng, (64, n)), small(rng, (64, n), dtype)
    config = TILE.replace(tile=(64, n, 16))
    found = through(x, lambda acc, c: gemmsmith.top_k_softmax(acc + c, 3) * c, config, c=c, out_dtype="fp32")
    value = x.astype(np.float64) + c
    order = np.argsort(-value, axis=1, kind="stable")[:, :3]
    top = np.exp(np.take_along_axis(value, order, 1) - value.max(1, keepdims=True))
    want = np.zeros(value.shape)
    np.put_along_axis(want, order, top / top.sum(1, keepdims=True), 1)
    np.testing.assert_allclose(found, want * c, rtol=1e-5)


def test_rows_that_no_tile_holds() -> None:
    """The reference needs no kernel; a plan says how many columns work."""
    a, b = np.ones((2, 16), np.float32), np.arange(16 * 600, dtype=np.float32).reshape(16, 600)
    found = gemmsmith.gemm(a, b, epilogue=lambda acc: gemmsmith.top_k_softmax(acc, 3))
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-6)
    for backend in ("sim", "cuda"):
        with pytest.raises(ConfigError, match="top_k_softmax: got rows of 600 columns.* use up to 256"):
            gemmsmith.plan(a, b, epilogue=lambda acc: gemmsmith.top_k_softmax(acc, 3), backend=backend)
    a, b = Spec((64, 512), "fp8_e4m3"), Spec((512, 256), "fp8_e4m3", (1, 512))
    scales = {"scale_a": Spec((64, 4), "fp32"), "scale_b": Spec((4, 256), "fp32")}
    with pytest.raises(ConfigError, match="quantize: got blocks of 256 columns, .* use up to 192"):
        gemmsmith.plan(a, b, **scales, epilogue=lambda acc: gemmsmith.quantize(acc, "1x256"))
