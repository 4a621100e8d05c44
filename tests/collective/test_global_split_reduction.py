"""Sums of several clusters through global memory: exact, in a fixed order, with all flags lowered at the end."""

from __future__ import annotations

import numpy as np
import pytest
from tests.collective.exact_gemm import check

import gemmsmith
from gemmsmith import Config, Spec

TILE = Config(tile=(64, 16, 32), cluster=(1, 1), consumers=1, stages=2)


@pytest.mark.parametrize("splits", [0, 2, 3])
@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
def test_sums_of_integers_are_exact(splits: int, accumulate: str, rng: np.random.Generator) -> None:
    """fp16 sums, packed in pairs, are unpacked to be added."""
    check(TILE.replace(splits=splits), 130, 16, 32 * 5 + 8, rng, accumulate=accumulate)


@pytest.mark.parametrize("n", [8, 24, 32])
def test_every_width_of_a_vector(n: int, rng: np.random.Generator) -> None:
    """4 registers a thread, 12 and 16: fp16 has half as many."""
    for accumulate in ("fp32", "fp16"):
        check(TILE.replace(tile=(64, n, 32), splits=2), 64, n, 128, rng, accumulate=accumulate)


def test_several_warpgroups_and_ctas_have_slots_of_their_own(rng: np.random.Generator) -> None:
    config = TILE.replace(tile=(128, 16, 32), consumers=2, cluster=(2, 1), splits=2)
    check(config, 256, 16, 32 * 3, rng)


def test_a_row_of_floats_is_summed_in_the_same_order_every_time(rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((64, 200), (200, 16)))
    first, *others = (
        gemmsmith.simulate(a, b, config=TILE.replace(splits=3), out_dtype="fp32", seed=seed).result for seed in range(2)
    )
    for other in others:
        np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("n", [8, 24])
def test_partial_sums_move_in_vectors_of_16_bytes(n: int) -> None:
    a, b = Spec((64, 512), "bf16"), Spec((512, n), "bf16", (1, 512))
    text = gemmsmith.plan(a, b, config=TILE.replace(tile=(64, n, 32), splits=2)).source
    assert "@p st.global.v4.b32" in text
    assert "@p ld.global.v4.b32" in text


def test_fp16_sums_of_few_columns_move_by_two_registers() -> None:
    a, b = Spec((64, 512), "fp16"), Spec((512, 8), "fp16", (1, 512))
    text = gemmsmith.plan(a, b, config=TILE.replace(tile=(64, 8, 32), splits=2), accumulate="fp16").source
    assert "@p st.global.v2.b32" in text
