"""Why a config was chosen: what the text says is what the model says."""

from __future__ import annotations

import pytest

from gemmsmith import Config, Spec
from gemmsmith.binding import bind
from gemmsmith.core.problem import Problem
from gemmsmith.tuning.choose import ranked
from gemmsmith.tuning.model import estimate
from gemmsmith.tuning.space import Space
from gemmsmith.tuning.why import MHZ, OTHERS, why


def problem(m: int, n: int, k: int) -> Problem:
    return bind(Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, k))).problem


@pytest.mark.parametrize(("shape", "bound"), [((8192, 8192, 8192), "work-bound"), ((16, 16384, 16384), "memory-bound")])
def test_what_bounds_a_product(shape: tuple[int, int, int], bound: str) -> None:
    p = problem(*shape)
    config, *_ = ranked(p, most=1)
    assert f": {bound}" in why(p, config, None, "chosen")


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (Config(tile=(128, 256, 64), cluster=(2, 1), stages=4), "math"),
        (Config(tile=(64, 64, 64), cluster=(1, 1), stages=8, consumers=1), "copies"),
        (Config(tile=(64, 8, 64), cluster=(1, 1), stages=2, consumers=1), "their latency"),
    ],
)
def test_what_limits_a_k_tile(config: Config, limit: str) -> None:
    p = problem(4096, 4096, 4096)
    e = estimate(p, Space.of([config]))
    larger = "math" if e.math[0] >= e.copies[0] else "copies"
    assert limit == ("their latency" if e.step[0] > 1.2 * max(e.math[0], e.copies[0]) else larger)
    assert f"limited by {limit}\n" in why(p, config, None, "given")


def test_the_config_comes_first_and_the_best_others_beside_it() -> None:
    p = problem(4096, 4096, 4096)
    best = ranked(p, most=OTHERS + 1)
    for config in (best[0], best[2], Config()):
        first, *lines = why(p, config, None, "chosen by hand").split("\n")
        assert first == f"{config}: chosen by hand"
        beside = [line for line in lines if line.startswith("beside it: ")]
        assert len(beside) == OTHERS
        others = [c for c in best if c != config][:OTHERS]
        us = estimate(p, Space.of(others)).cycles / MHZ
        assert beside == [f"beside it: {time:.1f} us {c}" for time, c in zip(us, others, strict=True)]
