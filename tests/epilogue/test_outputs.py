"""Results leave by TMA or by threads; nothing is written outside of them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tests.epilogue.identity import TILE, small, through

import gemmsmith

DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("m", "n"), [(70, 56), (64, 9), (1, 48), (65, 1)])
@pytest.mark.parametrize("form", ["rows", "columns", "padded"])
def test_nothing_is_written_beside_a_result(dtype: str, m: int, n: int, form: str, rng: np.random.Generator) -> None:
    x, kind = small(rng, (m, n)), DTYPES[dtype]
    store = np.full((n + 2, m + 3) if form == "columns" else (m + 2, n + (8 if form == "padded" else 0)), 99, kind)
    out = store[:n, :m].T if form == "columns" else store[:m, :n]
    out[...] = np.nan
    through(x, lambda acc: acc * 2, out=out, out_dtype=dtype)
    np.testing.assert_array_equal(out.astype(np.float32), 2 * x.astype(np.float32))
    out[...] = 99
    assert (store == 99).all()


def test_several_results_of_different_dtypes(rng: np.random.Generator) -> None:
    x = small(rng, (70, 56))

    def several(acc):
        return {"half": acc.to("fp16"), "single": (acc + 1).to("fp32"), "brain": (acc * 2).to("bf16")}

    found = through(x, several)
    wide = x.astype(np.float32)
    for name, want in (("half", wide), ("single", wide + 1), ("brain", 2 * wide)):
        np.testing.assert_array_equal(found[name].astype(np.float32), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [56, 57])
def test_scales_of_every_dtype_are_one_a_row_and_block(dtype: str, n: int, rng: np.random.Generator) -> None:
    x = small(rng, (70, n))
    x[:, ::16] = 28  # amax is 448 / 16: the scale is exact
    config = TILE.replace(tile=(64, 32, 32))

    def quantized(acc):
        q, scale = gemmsmith.quantize(acc, "1x16")
        return q, scale.to(dtype)

    q, scale = through(x, quantized, config)
    assert scale.shape == (70, -(-n // 16))
    assert scale.dtype == DTYPES[dtype]
    np.testing.assert_array_equal(scale.astype(np.float32), np.full(scale.shape, 1 / 16))
    np.testing.assert_array_equal(np.asarray(q).astype(np.float32), (16 * x.astype(np.float32)).astype(q.dtype))


def test_integers_of_several_subtiles_are_exact(rng: np.random.Generator) -> None:
    """More than fp32 holds: two subtiles of 64 columns, and one of what is left."""
    a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((70, 1100), (1100, 144)))
    a[0], b[:, 0], b[:, 100] = -128, -128, 127
    config = gemmsmith.Config(tile=(64, 144, 64), cluster=(1, 1), stages=2, consumers=1)
    done = gemmsmith.simulate(a, np.asfortranarray(b), config=config)
    assert done.hazards == []
    assert done.result[0, 0] > 2**24
    np.testing.assert_array_equal(done.result, a.astype(np.int64) @ b.astype(np.int64))
