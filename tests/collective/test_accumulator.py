"""The accumulator: rows beyond one wgmma, every width, both accumulations and outputs, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from tests.collective.products import check

import gemmsmith
from gemmsmith import Config


@pytest.mark.parametrize("rows", [64, 128, 192])
@pytest.mark.parametrize("n", [8, 24, 64])
def test_blocks_of_64_rows(rows: int, n: int, rng: np.random.Generator) -> None:
    config = Config(tile=(rows, n, 64), cluster=(1, 1), consumers=1, stages=2)
    check(config, rows + 3, n + 1, 80, rng)


@pytest.mark.parametrize("depth", [16, 32, 64, 128])
def test_every_step_of_a_tiles_depth_counts(depth: int, rng: np.random.Generator) -> None:
    check(Config(tile=(64, 16, depth), cluster=(1, 1), consumers=1, stages=2), 64, 16, depth + 8, rng)


@pytest.mark.parametrize("out_dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("accumulate", ["fp16", "fp32"])
def test_sums_are_rounded_where_they_are_kept(accumulate: str, out_dtype: str) -> None:
    """2048 + 1 is 2048 in fp16; in fp32 it stays until it is stored."""
    a, b = np.ones((64, 80), np.float16), np.ones((80, 8), np.float16)
    a[:, 0] = 2048
    a[:, 1:64], a[:, 65:] = 0, 0  # 2048 in the first k-tile, 1 in the second
    config = Config(tile=(64, 8, 64), cluster=(1, 1), consumers=1, stages=2)
    done = gemmsmith.simulate(a, b, config=config, accumulate=accumulate, out_dtype=out_dtype)
    want = 2049 if (accumulate, out_dtype) == ("fp32", "fp32") else 2048
    assert done.hazards == []
    np.testing.assert_array_equal(done.result.astype(np.float32), np.full((64, 8), want))
