"""The tuner's space: configs that can be built, of every kind, ranked; and measuring that keeps the better ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

import gemmsmith
from gemmsmith import Config, Spec
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import EpilogueSpec
from gemmsmith.launches import Route
from gemmsmith.problems import problem_of
from gemmsmith.tuning.choose import ranked
from gemmsmith.tuning.measure import halving, settled
from gemmsmith.tuning.model import estimate
from gemmsmith.tuning.space import Space, space


def problem(m: int, n: int, k: int) -> Problem:
    return problem_of(Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, k)))


@given(m=some.integers(1, 9000), n=some.integers(1, 9000), k=some.integers(1, 9000))
def test_ranked_configs_can_be_built(m: int, n: int, k: int) -> None:
    p = problem(m, n, k)
    found = ranked(p, most=12)
    assert found
    assert len(set(found)) == len(found)
    for config in found:
        route = Route.of(p.T if config.swap else p, config)
        assert route.clusters >= 1
    estimates = estimate(p, Space.of(found)).cycles
    assert (estimates > 0).all()
    assert (np.diff(estimates) >= 0).all()


def relu_sums(acc: Any) -> Any:
    y = acc.maximum(0.0)
    return y, y.sum(-1)


@pytest.mark.parametrize("epilogue", [None, relu_sums, lambda acc, c: acc + c])
@pytest.mark.parametrize("strides", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("n", [1000, 1104, 40])
def test_what_is_chosen_fits_in_every_layout(epilogue: Any, strides: str, n: int) -> None:
    """MN-major tiles are padded: 300 x 520 x 1000 by tiles of 64 x 40 had a stage too many."""
    m, k = 300, 520
    a = Spec((m, k), "fp16", (k, 1) if strides[0] == "n" else (1, m))
    b = Spec((k, n), "fp16", (n, 1) if strides[1] == "n" else (1, k))
    operands = {"c": Spec((m, n), "fp16")} if epilogue is not None and epilogue is not relu_sums else None
    plan = gemmsmith.plan(a, b, epilogue=epilogue, operands=operands)
    problem, spec = plan.problem.T if plan.config.swap else plan.problem, plan.bound.spec if plan.bound else None
    for config in [plan.config, *ranked(problem, spec, most=40)]:
        built = gemmsmith.plan(a, b, epilogue=epilogue, operands=operands, config=config)
        assert built.source


@pytest.mark.parametrize(("shape", "kinds"), [
    ((16, 4096, 4096), {"swap", "splits", "cluster_splits", "stream"}),
    ((512, 4096, 4096), {"pingpong", "stream"}),
    ((1024, 4096, 8192), {"pingpong", "stream"}),
])  # fmt: skip
def test_every_kind_is_there(shape: tuple[int, int, int], kinds: set[str]) -> None:
    p = problem(*shape)
    found = set()
    every = space(EpilogueSpec.bare(p.d))
    for c, sensible in zip(every.configs, every.sensible(p), strict=True):
        if not sensible:
            continue
        found |= {name for name, there in (("pingpong", c.design == "pingpong"), ("swap", c.swap),
                  ("splits", c.splits > 1), ("stream", c.splits == 0), ("cluster_splits", c.cluster_splits > 1))
                  if there}  # fmt: skip
    assert kinds <= found


def test_halving_finds_the_fastest(rng: np.random.Generator) -> None:
    configs = [Config(stages=s, swizzle=w) for s in range(2, 10) for w in range(1, 9)]
    truth = dict(zip(configs, rng.uniform(10, 100, len(configs)), strict=True))
    broken = configs[5]
    timed: list[float] = []

    def measure(config: Config, us: float) -> float:
        if config == broken:
            raise RuntimeError("does not run")
        timed.append(us)
        return truth[config] * (1 + rng.normal() / us)

    found = halving(configs, measure)
    assert len(found) == len(configs) - 1
    assert broken not in [x.config for x in found]
    best = min((c for c in configs if c != broken), key=truth.__getitem__)
    assert found[0].config == best
    assert sum(timed) < 1e6


def test_large_products_are_warmed_up() -> None:
    asked: list[int] = []

    def replay(times: int) -> float:
        asked.append(times)
        return 20.0 * times

    assert settled(replay, 1000.0, 1e6) == 20.0
    assert settled(replay, 1000.0, 1e12) == 20.0
    assert asked == [1, 50, 1, 50, 50]
