"""The steps of an epilogue in order: what other warpgroups still read is not written over."""

from __future__ import annotations

import numpy as np
import pytest
from tests.collective.exact_gemm import check

from gemmsmith import Config


@pytest.mark.parametrize("depth", [64, 160])
def test_results_wait_for_all_warpgroups_before_they_enter_the_stages(depth: int, rng: np.random.Generator) -> None:
    """The subtiles of one warpgroup are large enough to alias rows of A that another one multiplies."""
    config = Config(tile=(128, 128, 64), cluster=(1, 1), consumers=2, stages=2, alias_epilogue=True)
    for _ in range(3):
        check(config, 128, 128, depth, rng)
