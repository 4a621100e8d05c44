"""Why a config was chosen: what the text says is what the model says."""

from __future__ import annotations

from typing import Any

import pytest

import gemmsmith
from gemmsmith import Config, Spec
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.problem import Problem
from gemmsmith.tuning import model
from gemmsmith.tuning.choose import rank_configs
from gemmsmith.tuning.config_table import ConfigTable
from gemmsmith.tuning.explain_config import NUM_ALTERNATIVES, explain_config
from gemmsmith.tuning.model import estimate
from gemmsmith.tuning.packing_cost import SM_CLOCK_MHZ


def problem(m: int, n: int, k: int) -> Problem:
    return bind(Request(Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, k)))).problem


@pytest.mark.parametrize(
    ("shape", "tile", "bound"),
    [
        ((8192, 8192, 8192), (128, 256, 64), "compute"),
        ((16, 16384, 16384), (64, 64, 64), "memory"),
        ((16384, 16384, 16384), (128, 152, 64), "power"),
    ],
)
def test_what_bounds_a_product(
    shape: tuple[int, int, int], tile: tuple[int, int, int], bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bound == "power":  # a chip with less of it
        monkeypatch.setattr(model, "FLOPS_PER_CYCLE_AT_700W", 0.5 * model.FLOPS_PER_CYCLE_AT_700W)
    p, config = problem(*shape), Config("pingpong" if bound == "power" else "cooperative", tile, cluster=(1, 2))
    config = config.replace(consumers=1, stages=12) if bound == "memory" else config
    e = estimate(p, ConfigTable.from_configs([config]))
    bounds = {"compute": e.work_cycles[0], "memory": e.memory_cycles[0], "power": e.power_limited_cycles[0]}
    assert max(bounds, key=bounds.__getitem__) == bound
    said = ", ".join(f"{name} bound alone {cycles:.0f}" for name, cycles in bounds.items())
    assert f"; {said}: {bound}-bound\n" in explain_config(p, config, None, "chosen")


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (Config(tile=(128, 256, 64), cluster=(2, 1), stages=4), "math"),
        (Config(tile=(64, 64, 64), cluster=(1, 1), stages=8, consumers=1), "copies"),
        (Config(tile=(64, 8, 64), cluster=(1, 1), stages=2, consumers=1), "copy latency"),
    ],
)
def test_what_limits_a_k_tile(config: Config, limit: str) -> None:
    p = problem(4096, 4096, 4096)
    e = estimate(p, ConfigTable.from_configs([config]))
    larger = "math" if e.math_cycles[0] >= e.copy_cycles[0] else "copies"
    assert limit == ("copy latency" if e.k_tile_cycles[0] > 1.2 * max(e.math_cycles[0], e.copy_cycles[0]) else larger)
    assert f"limited by {limit}\n" in explain_config(p, config, None, "given")


def test_the_config_comes_first_and_then_the_best_alternatives() -> None:
    p = problem(4096, 4096, 4096)
    best = rank_configs(p, limit=NUM_ALTERNATIVES + 1)
    for config in (best[0], best[2], Config()):
        first, *lines = explain_config(p, config, None, "chosen by hand").split("\n")
        assert first == f"{config}: chosen by hand"
        alternatives = [line for line in lines if line.startswith("alternative: ")]
        assert len(alternatives) == NUM_ALTERNATIVES
        others = [c for c in best if c != config][:NUM_ALTERNATIVES]
        space = ConfigTable.from_configs(others)
        us = estimate(p, space).cycles / SM_CLOCK_MHZ
        assert alternatives == [f"alternative: {time:.1f} us {c}" for time, c in zip(us, others, strict=True)]


def test_a_swapped_plan_is_explained_with_its_epilogue() -> None:
    """As it was chosen: for the product that is not transposed."""

    def epilogue(acc: Any, bias: Any) -> Any:
        return (acc + bias).maximum(0.0)

    a, b, bias = Spec((16, 4096), "bf16"), Spec((4096, 28672), "bf16", (1, 4096)), Spec((28672,), "bf16")
    plan = gemmsmith.plan(a, b, epilogue=epilogue, bias=bias, config=Config(tile=(128, 16, 64), swap_ab=True))
    p = bind(Request(a, b, operands={"bias": bias}, epilogue=epilogue))
    assert plan.why == explain_config(p.problem, plan.config, p.spec, "given", names="ba")
    assert plan.why != explain_config(p.problem, plan.config, None, "given")


def test_a_config_without_wgmma() -> None:
    """The model knows none, so it says nothing of one."""
    config = Config("mma_multistage", (128, 128, 32), (1, 1))
    plan = gemmsmith.plan(Spec((512, 1024), "bf16"), Spec((1024, 768), "bf16"), config=config)
    assert plan.why == f"{config}: given"
