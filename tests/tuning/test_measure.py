"""Rounds that keep the faster configs, and what is warmed up, or repeated."""

from __future__ import annotations

import numpy as np
import pytest

from gemmsmith import Config
from gemmsmith.tuning.search import steady_state_us, successive_halving


def test_halving_finds_the_fastest(rng: np.random.Generator) -> None:
    configs = [Config(stages=s, raster_group=w) for s in range(2, 10) for w in range(1, 9)]
    truth = dict(zip(configs, rng.uniform(10, 100, len(configs)), strict=True))
    broken = configs[5]
    timed: list[float] = []

    def measure(config: Config, us: float) -> float:
        if config == broken:
            raise RuntimeError("does not run")
        timed.append(us)
        return truth[config] * (1 + rng.normal() / us)

    found = successive_halving(configs, measure)
    assert len(found) == len(configs) - 1
    assert broken not in [x.config for x in found]
    best = min((c for c in configs if c != broken), key=truth.__getitem__)
    assert found[0].config == best
    assert sum(timed) == pytest.approx(4.51e6, rel=0.005)  # seconds, most of them for the last four
    assert len(timed) == 63 + 16 + 6 + 4


def test_large_products_are_warmed_up() -> None:
    asked: list[int] = []

    def replay(times: int) -> float:
        asked.append(times)
        return 20.0 * times

    assert steady_state_us(replay, 1000.0, 1e6) == 20.0
    assert steady_state_us(replay, 1000.0, 1e12) == 20.0
    assert steady_state_us(replay, 1.0, 1e6) == 20.0
    assert asked == [1, 50, 1, 50, 50, 1, 2]
