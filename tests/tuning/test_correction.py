"""The correction of the estimates: finite and bounded for any problem, and its numbers as worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from gemmsmith import Config, Spec
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.problem import Problem
from gemmsmith.tuning.config_table import ConfigTable, configs_for
from gemmsmith.tuning.correction import FEATURE_NAMES, MAX_LOG_CORRECTION, coefficients, corrected_cycles, features
from gemmsmith.tuning.model import estimate


def problem(m: int, n: int, k: int) -> Problem:
    return bind(Request(Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, k)))).problem


def test_a_coefficient_for_each_number_and_each_product_of_two() -> None:
    count = len(FEATURE_NAMES)
    assert coefficients().shape == (count + count * (count + 1) // 2,)


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 1, 1), (207, 4608, 4608), (1 << 20, 8, 1 << 20), (8, 1 << 24, 16)])
def test_it_is_bounded_for_any_shape(shape: tuple[int, int, int]) -> None:
    p = problem(*shape)
    space = configs_for(EpilogueSpec.identity(p.d), p)
    e = estimate(p, space)
    factor = corrected_cycles(p, space, e) / e.cycles
    assert np.isfinite(factor).all()
    assert (abs(np.log(factor)) <= MAX_LOG_CORRECTION + 1e-9).all()


@pytest.mark.parametrize("shape", [(0, 8, 8), (8, 0, 8), (8, 8, 0)])
def test_an_empty_product_needs_none(shape: tuple[int, int, int]) -> None:
    p = problem(*shape)
    space = ConfigTable.from_configs([Config()])
    e = estimate(p, space)
    assert corrected_cycles(p, space, e).tolist() == e.cycles.tolist()


def test_the_numbers_of_a_config() -> None:
    """Worked out by hand, for one config and for one that is swapped."""
    p = problem(300, 4096, 4096)
    space = ConfigTable.from_configs([
        Config(tile=(128, 256, 64), cluster=(2, 1)), Config(tile=(128, 64, 64), cluster=(1, 2), swap_ab=True)
    ])  # fmt: skip
    found = features(p, space, estimate(p, space))[:, :7]
    down, across = np.log2(3), np.log2(5)  # tiles along M
    np.testing.assert_allclose(found, [[0, 1, 0, 0, 1, 0, down], [0, -1, 0, across, 1, 0, across]])
