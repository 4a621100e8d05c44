"""How far a simulated product is, and how finely its accesses are told apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gemmsmith
from gemmsmith import Config
from gemmsmith.backends.sim import Hazard
from gemmsmith.backends.sim.memory.shadow import Shadow
from gemmsmith.backends.sim.run import run
from gemmsmith.binding.request import Request
from gemmsmith.core.dtypes import BF16
from gemmsmith.host.planned_gemm import PlannedGemm
from gemmsmith.host.plans import Plan

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
    assert (
        not Plan(PlannedGemm(Request(a, b, config=config, epilogue=epilogue)))
        .simulate(a, b, progress=told.append)
        .hazards
    )
    assert told == sorted(told)
    if k:
        assert len(told) > 4
        assert 0 < told[0] < told[-1] == 1


@pytest.mark.parametrize("missing", [0, 1])
def test_results_are_written(missing: int) -> None:
    """With a tile fewer than D has, elements of it stay what they were."""
    a, b = np.ones((128, 64), BF16.numpy), np.ones((64, 136), BF16.numpy)[:, :130]
    d = np.full((128, 136), 7, BF16.numpy)[:, :130]  # what is behind its rows is not written
    plan = PlannedGemm(Request(a, b, d, config=SMALL.replace(design="tma")))
    (launch,) = plan.launches.all
    tiles: Any = launch.arguments["cluster_tiles"]
    launch = replace(launch, arguments={**launch.arguments, "cluster_tiles": tiles - missing})
    found = run(replace(plan.launches, all=(launch,)), plan.binding.arguments, 0, None).hazards
    assert [hazard.kind for hazard in found] == ["unwritten result"] * missing
    assert np.count_nonzero(d == 64) == d.size - missing * 64 * 2
    if missing:
        assert f"{64 * 2} of {d.size} elements of out are unwritten" in found[0].message


def test_neighboring_bytes_are_no_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 9 bytes, whose ends other CTAs store: with shadow memory of every two bytes that would be one."""

    def hazards() -> list[Hazard]:
        a, b = np.ones((130, 40), BF16.numpy), np.ones((40, 9), BF16.numpy)
        config = SMALL.replace(tile=(64, 8, 32))
        return gemmsmith.simulate(a, b, epilogue=lambda acc: acc.to("fp8_e4m3"), config=config).hazards

    assert hazards() == []
    split = Shadow._refine_cells
    monkeypatch.setattr(Shadow, "_refine_cells", lambda self, multiple: split(self, multiple & ~1 | 2))
    assert "write after write of out" in str(hazards()[0])
