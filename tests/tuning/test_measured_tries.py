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
from gemmsmith.tuning.config_table import ConfigTable  # noqa: E402
from gemmsmith.tuning.correction import corrected_cycles  # noqa: E402
from gemmsmith.tuning.gpus import H100, H200, Gpu  # noqa: E402
from gemmsmith.tuning.grouped import mean_rows, total_cycles  # noqa: E402
from gemmsmith.tuning.model import estimate  # noqa: E402

pytestmark = pytest.mark.torch


def regret(us: Iterable[float], estimates: np.ndarray[Any, Any]) -> float:
    """Return how much slower than the fastest the first by the model is, as a logarithm."""
    times = np.array(list(us))
    return float(np.log(times[estimates.argmin()] / times.min()))


def test_heavy_epilogues() -> None:
    """Eleven epilogues at three K; kernels that spill are no candidates. The mean ratio and regret."""
    timed = defaultdict[fused.Job, list[contest.Row]](list)
    for row in load("tries-heavy-h100")["rows"]:
        if row["epilogue"] != "bare" and "spilled_bytes" not in row:
            timed[fused.job_of(row)].append(row)
    regrets, ratios = [], []
    for job, rows in timed.items():
        binding = fused.planned(job, SMALL).binding
        table = ConfigTable.from_configs([Config.parse(row["config"]) for row in rows], binding.spec)
        cycles = corrected_cycles(binding.problem, table, estimate(binding.problem, table, binding.spec, H100))
        regrets.append(regret((row["us"] for row in rows), cycles))
        ratios.append(np.median(np.log(cycles / [row["us"] for row in rows])))
    assert (np.mean(ratios), np.mean(regrets)) == pytest.approx((7.30354, 0.06715), abs=1e-5)


@pytest.mark.parametrize(("results", "gpu", "mean"), [
    ("tries-grouped-h100", H100, 0.04696), ("tries-grouped-h200", H200, 0.06151),
])  # fmt: skip
def test_grouped(results: str, gpu: Gpu, mean: float) -> None:
    """The mean regret of ten GEMMs, nine on the H100."""
    timed, regrets = defaultdict[grouped.Job, list[contest.Row]](list), []
    for row in load(results)["rows"]:
        timed[grouped.Job(*(row[name] for name in grouped.Job._fields))].append(row)
    for job, rows in timed.items():
        binding = grouped.planned(job, Config.parse(rows[0]["config"]))._unswapped_binding
        problem, configs = mean_rows(binding.problem), [Config.parse(row["config"]) for row in rows]
        table = ConfigTable.from_configs(configs, binding.spec)
        cycles = total_cycles(problem, table, binding.spec, gpu, correct=True)
        regrets.append(regret((row["us"] for row in rows), cycles))
    assert np.mean(regrets) == pytest.approx(mean, abs=1e-5)
