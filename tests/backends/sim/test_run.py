"""How far a simulated product is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemmsmith import Config
from gemmsmith.plans import Plan

SMALL = Config(tile=(64, 64, 32), cluster=(1, 1), stages=3, consumers=1)


def row_sums(acc: Any) -> Any:
    return acc, acc.sum(-1)


@pytest.mark.parametrize(
    ("config", "m", "n", "k", "epilogue"),
    [
        (SMALL.replace(cluster=(2, 1)), 200, 136, 96, None),
        (SMALL.replace(design="tma"), 130, 72, 64, None),
        (SMALL.replace(design="pingpong", consumers=2), 130, 136, 64, None),
        (SMALL.replace(splits=0), 130, 72, 160, None),
        (SMALL.replace(cluster_splits=2), 130, 72, 160, None),
        (SMALL.replace(swap_ab=True), 20, 200, 64, None),
        (SMALL, 70, 77, 33, None),  # packed first
        (SMALL, 70, 72, 64, row_sums),  # and a second step
        (SMALL, 70, 72, 0, None),
    ],
)
def test_progress_ends_at_one(rng: np.random.Generator, config: Config, m: int, n: int, k: int, epilogue: Any) -> None:
    a, b = rng.standard_normal((m, k)).astype(np.float16), rng.standard_normal((k, n)).astype(np.float16)
    told: list[float] = []
    assert not Plan(a, b, config=config, epilogue=epilogue).simulate(a, b, progress=told.append).hazards
    assert told == sorted(told)
    if k:
        assert len(told) > 4
        assert 0 < told[0] < told[-1] == 1
