"""The steps of an epilogue in order: what other warpgroups still read is not written over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.collective.exact_gemm import check

import gemmsmith
from gemmsmith import Config, Spec
from gemmsmith.epilogue import epilogue_plan


@pytest.mark.parametrize("depth", [64, 160])
def test_results_wait_for_all_warpgroups_before_they_enter_the_stages(depth: int, rng: np.random.Generator) -> None:
    """The subtiles of one warpgroup are large enough to alias rows of A that another one multiplies."""
    config = Config(tile=(128, 128, 64), cluster=(1, 1), consumers=2, stages=2, alias_epilogue=True)
    for _ in range(3):
        check(config, 128, 128, depth, rng)


LOOPED = [
    Config("pingpong", (128, 96, 64), (1, 1), 3),
    Config("cooperative", (64, 160, 64), (1, 1), 3, 1, alias_epilogue=True),
    Config("cooperative", (128, 64, 64), (2, 1), 3, 1, cluster_splits=2),
    Config("cooperative", (256, 64, 64), (1, 1), 3, 2, swap_ab=True),
]


@pytest.mark.parametrize("config", LOOPED, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_loop_over_columns_computes_what_unrolled_subtiles_do(
    config: Config, dtype: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Bit by bit: loads, stores, broadcasts and reductions of each kind."""

    def epilogue(acc: Any, bias: Any, x: Any) -> Any:
        y = (acc + bias) * x
        return y, acc, y.sum(-1), acc.max(-2), y.logsumexp()

    m, n, k = 300, 264, 150
    kind = np.dtype(Spec((1,), dtype).dtype.numpy)
    a, b, x = (rng.standard_normal(shape).astype(kind) for shape in ((m, k), (k, n), (m, n)))
    bias, found = rng.standard_normal(n).astype(kind), []
    for most in (0, 10**9):
        monkeypatch.setattr(epilogue_plan, "MAX_UNROLLED_INSTRUCTIONS", most)
        epilogue_plan.plan_epilogue.cache_clear()
        simulated = gemmsmith.simulate(a, b, epilogue=epilogue, config=config, bias=bias, x=x)
        assert not simulated.hazards
        found.append(simulated.result)
    epilogue_plan.plan_epilogue.cache_clear()
    for looped, unrolled in zip(*found, strict=True):
        np.testing.assert_array_equal(np.asarray(looped, np.float64), np.asarray(unrolled, np.float64))


def test_long_epilogues_fit_the_instruction_cache() -> None:
    """The code of a tile with 120 000 instructions, if it were unrolled, is at most 128 KB."""

    def waves(acc: Any) -> Any:
        y = acc
        for i in (1, 2, 3, 4, 5, 6, 7):
            y = y + (acc * i).sin()
        return y

    a, b = Spec((4096, 4096), "bf16"), Spec((4096, 4096), "bf16", (1, 4096))
    plan = gemmsmith.plan(a, b, epilogue=waves)
    found = epilogue_plan.plan_epilogue(plan._planned.spec)
    assert found.loops_over_columns
    assert sum(line.lstrip().startswith("/*") for line in plan.sass.splitlines()) * 16 < 128 << 10
