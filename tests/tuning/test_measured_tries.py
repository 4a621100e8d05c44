"""The choice against measured times of heavy epilogues and of grouped GEMMs: regrets as they were when it was fitted.

A change of the model that moves a number here is a new fit: it has to lower the regret.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks import contest  # noqa: E402
from benchmarks.rows import load  # noqa: E402
from benchmarks.speed import fused, grouped  # noqa: E402
from benchmarks.suite import SMALL  # noqa: E402
from gemmsmith import Config  # noqa: E402
from gemmsmith.core.epilogue_spec import EpilogueSpec  # noqa: E402
from gemmsmith.core.mma import WGMMA  # noqa: E402
from gemmsmith.core.spec import KernelSpec  # noqa: E402
from gemmsmith.epilogue.epilogue_plan import plan_epilogue  # noqa: E402
from gemmsmith.tuning.candidates import transposed_epilogue  # noqa: E402
from gemmsmith.tuning.config_table import ConfigTable  # noqa: E402
from gemmsmith.tuning.gpus import H100, H200, Gpu  # noqa: E402
from gemmsmith.tuning.grouped import mean_rows, total_cycles  # noqa: E402
from gemmsmith.tuning.model import estimate  # noqa: E402

pytestmark = pytest.mark.torch
LEAST = 5
"""Configs of a GEMM that are compared."""


def regret(us: Iterable[float], estimates: np.ndarray[Any, Any]) -> float:
    """Return how much slower than the fastest the first by the model is, as a logarithm."""
    times = np.array(list(us))
    return float(np.log(times[estimates.argmin()] / times.min()))


@pytest.mark.parametrize(("results", "gpu", "count", "ratio", "mean"), [
    ("tries-heavy-h100", H100, 834, 7.29035, 0.04032), ("tries-subtiles-h100", H100, 180, 7.29005, 0.05843),
    ("tries-subtiles-h200", H200, 100, 7.25688, 0.06761),
])  # fmt: skip
def test_heavy_epilogues(results: str, gpu: Gpu, count: int, ratio: float, mean: float) -> None:
    """Kernels with the subtiles and buffers that a config has now, without spills: their number, mean ratio, regret."""
    timed = defaultdict[fused.Job, list[contest.Row]](list)
    for row in load(results)["rows"]:
        if "columns" in row and "spilled_bytes" not in row and row.get("variant") not in ("nohint", "nostore"):
            timed[fused.job_of(row)].append(row)
    regrets, ratios, used = [], [], 0
    for job, rows in timed.items():
        binding = fused.planned(job, SMALL)._planned.binding
        rows = [row for row in rows if has_these_subtiles(row, binding.spec)]
        if len(rows) < LEAST:
            continue
        table = ConfigTable.from_configs([Config.parse(row["config"]) for row in rows], binding.spec)
        cycles = estimate(binding.problem, table, binding.spec, gpu).cycles
        regrets.append(regret((row["us"] for row in rows), cycles))
        ratios.append(np.median(np.log(cycles / [row["us"] for row in rows])))
        used += len(rows)
    assert (used, np.mean(ratios), np.mean(regrets)) == pytest.approx((count, ratio, mean), abs=1e-5)


def has_these_subtiles(row: contest.Row, epilogue: EpilogueSpec) -> bool:
    """Return whether a config's epilogue still has the subtiles and buffers that a row's kernel had."""
    config = Config.parse(row["config"])
    oriented = transposed_epilogue(epilogue) if config.swap_ab else epilogue
    plan = plan_epilogue(KernelSpec(config, WGMMA.instructions[0], ("K", "K"), oriented))
    return [row[x] for x in ("columns", "load_stages", "store_stages")] == [
        plan.epi_tile_n, plan.load_stages, plan.store_stages
    ]  # fmt: skip


@pytest.mark.parametrize(("results", "gpu", "mean"), [
    ("tries-grouped-h100", H100, 0.05001), ("tries-grouped-h200", H200, 0.06260),
])  # fmt: skip
def test_grouped(results: str, gpu: Gpu, mean: float) -> None:
    """The mean regret of ten GEMMs, nine on the H100."""
    timed, regrets = defaultdict[grouped.Job, list[contest.Row]](list), []
    for row in load(results)["rows"]:
        timed[grouped.Job(*(row[name] for name in grouped.Job._fields))].append(row)
    for job, rows in timed.items():
        plan = grouped.planned(job, Config.parse(rows[0]["config"]))
        epilogue = plan._planned.unswapped_epilogue
        problem, configs = mean_rows(plan._planned.unswapped), [Config.parse(row["config"]) for row in rows]
        table = ConfigTable.from_configs(configs, epilogue)
        cycles = total_cycles(problem, table, epilogue, gpu)
        regrets.append(regret((row["us"] for row in rows), cycles))
    assert np.mean(regrets) == pytest.approx(mean, abs=1e-5)
