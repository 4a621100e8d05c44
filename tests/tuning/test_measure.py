"""Rounds that keep the faster configs, and what is warmed up, or repeated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemmsmith import Config
from gemmsmith.tuning.search import CLOCK_PERIOD_US, steady_state_us, successive_halving


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


def test_what_counts_of_short_blocks_is_another_time() -> None:
    """The first round drops the config that would take longer at its own power; in a long one its time is right."""
    hot, cool, slow = (Config(stages=s) for s in (2, 3, 4))
    us = {hot: 9.0, cool: 10.0, slow: 12.0}
    sustained = {hot: 11.0, cool: 10.5, slow: 13.0}

    def found(*rounds: tuple[int, float]) -> list[Any]:
        return successive_halving(list(us), lambda config, _: us[config], rounds, sustained=lambda x, _: sustained[x])

    assert [x.config for x in found((3, 1e4))] == [cool, hot, slow]
    assert [x.us for x in found((3, 1e4), (1, CLOCK_PERIOD_US))] == [10.0, 9.0, 12.0]
    assert [x.config for x in found((3, CLOCK_PERIOD_US))] == [hot, cool, slow]


def test_large_products_are_warmed_up() -> None:
    asked: list[int] = []

    def replay(times: int) -> float:
        asked.append(times)
        return 20.0 * times

    assert steady_state_us(replay, 1000.0, 1e6) == 20.0
    assert steady_state_us(replay, 1000.0, 1e12) == 20.0
    assert steady_state_us(replay, 1.0, 1e6) == 20.0
    assert asked == [1, 50, 1, 50, 50, 1, 2]
