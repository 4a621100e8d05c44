"""The choice against measured times: errors and regrets of the models, as they were when these were fitted.

A change of a model that moves a number here is a new fit: it has to lower the error or the regret. Only the last two
surveys are of kernels that do not load rows past the end; their clusters are in the grid's order.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
from docs import figures

from benchmarks.fit.fit import contests, finalists, power_pairs
from benchmarks.rows import load
from benchmarks.suite import specs
from gemmsmith import Config, Plan
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.chip import HOPPER
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.make_spec import make_spec
from gemmsmith.tuning.choose import estimate_us, sustained_us
from gemmsmith.tuning.choose_sm80 import sgemm_estimate
from gemmsmith.tuning.gpus import H100


@pytest.mark.parametrize(("results", "error", "ratio", "regret"), [
    ("survey-h200", 0.05721, 7.42331, 0.03622), ("survey-nn-h100", 0.05874, 7.37083, 0.04694),
    ("survey-tn-h100", 0.06624, 7.35186, 0.03907), ("survey-tt-h100", 0.07441, 7.38370, 0.10974),
    ("survey-fp8-h200", 0.07191, 7.51266, 0.05606), ("sweep-third-h200", 0.01073, 7.38231, 0.00576),
    ("sweep-layouts-h100", 0.01209, 7.38975, 0.00450), ("choice-middle-h200", 0.05243, 7.44556, 0.02903),
    ("survey-middle-h200", 0.04443, 7.44612, 0.02006), ("unseen-middle-h200", 0.04935, 7.43288, 0.01818),
])  # fmt: skip
def test_wgmma(results: str, error: float, ratio: float, regret: float) -> None:
    """The error of a shape's configs, up to one that all of them share, as benchmarks/fit minimizes it; the logarithm
    of estimated cycles per measured microsecond; how much slower than the fastest the first by the model is."""
    shapes = finalists(results) if results.startswith("sweep") else contests(results)
    errors = np.concatenate([shape.errors() for shape in shapes])
    ratios = np.concatenate([shape.estimates() - shape.log_us for shape in shapes])
    found = (errors @ errors / len(shapes)) ** 0.5, ratios.mean(), np.mean([shape.regret() for shape in shapes])
    assert found == pytest.approx((error, ratio, regret), abs=1e-5)


def test_power_decides_in_long_blocks() -> None:
    """Of two configs beyond SHORT_FLOPS: the root mean square by which the ratio of their times in long blocks differs
    from that in short blocks between others, which share one clock, and from that of `sustained_us`."""
    short, sustained = [], []
    for in_long, in_short in zip(power_pairs("power-h200"), power_pairs("power-h200", "short"), strict=True):
        identity = EpilogueSpec.identity(in_long.problem.d)
        us = [
            sustained_us(in_long.problem, identity, config, float(np.exp(x)))
            for config, x in zip(in_short.space.configs, in_short.log_us, strict=True)
        ]
        short.append(np.diff(in_long.log_us - in_short.log_us)[0])
        sustained.append(np.diff(in_long.log_us - np.log(us))[0])
    found = (np.array([short, sustained]) ** 2).mean(1) ** 0.5
    assert found == pytest.approx((0.0644, 0.0148), abs=1e-4)


def test_sgemm() -> None:
    """The same of tiles 8 deep on an H100, in four layouts; the spread of a shape's configs is not weighted."""
    shapes = defaultdict[tuple[int, int, int, str], list[tuple[Config, float]]](list)
    for row in load("tries-fp32-h100")["rows"]:
        if row["config"] != "torch" and row.get("run") is None and Config.parse(row["config"]).tile[2] == 8:
            shapes[row["m"], row["n"], row["k"], row["layout"]].append((Config.parse(row["config"]), row["us"]))
    ratios, spreads, regrets = [], [], []
    for (m, n, k, layout), timed in shapes.items():
        problem = bind(Request(*specs((m, n, k), "fp32", layout))).problem
        described = [make_spec(problem.T if c.swap_ab else problem, c) for c, _ in timed]
        cycles = np.array([sgemm_estimate(problem, m, x, HOPPER).cycles for x in described])
        us = np.array([t for _, t in timed])
        ratios.append(np.log(cycles / us).mean())
        spreads.append(np.log(cycles / us).std())
        regrets.append(us[cycles.argmin()] / us.min() - 1)
    assert (np.mean(ratios), np.mean(spreads), np.mean(regrets)) == pytest.approx(
        (7.385583, 0.130134, 0.013494), abs=1e-6
    )


@pytest.mark.parametrize(("results", "planned", "count"), [
    ("kinds-h100", figures.plain, 71), ("layers-h100", figures.plain, 11), ("dense-unseen-h200", figures.plain, 95),
    ("epilogues-h200", figures.fused, 24),
    ("fp8-unseen-h200", figures.block_scaled, 13), ("fp8-h200", figures.block_scaled, 50),
])  # fmt: skip
def test_what_was_measured_is_what_is_chosen(results: str, planned: Callable[[figures.Row], Plan], count: int) -> None:
    """What a later model has not chosen anew: of an H100, mostly what the page shows."""
    assert len(figures.current(results, planned)) == count


def test_estimated_microseconds() -> None:
    """Of what an H200 measured of layers in no table: in the geometric mean, and of half of them at most so far off."""
    ratios = []
    for row in load("dense-unseen-h200")["rows"]:
        problem = bind(Request(*specs((row["m"], row["n"], row["k"])))).problem
        ratios.append(estimate_us(problem, Config.parse(row["config"])) / row["us"])
    assert statistics.geometric_mean(ratios) == pytest.approx(1.0500, abs=1e-3)
    assert np.median(np.abs(np.log(ratios))) == pytest.approx(0.0396, abs=1e-3)


def test_fragments_that_threads_load() -> None:
    """Of TF32 in layouts whose A wgmma reads from registers, on an H100: estimated over measured times of tiles that
    share B, and of one that does not, which was much slower in one layout (nn)."""
    ratios = defaultdict[bool, list[float]](list)
    for row in load("tries-tf32-h100")["rows"]:
        problem = bind(Request(*specs((row["m"], row["n"], row["k"]), "fp32", row["layout"]), precision="tf32")).problem
        for name, us in row["us"].items():
            if found := re.fullmatch(r"(coop|ping) (\d+)x(\d+) (\d)x(\d)", name):
                kind, m, n, *cluster = found[1], *map(int, found.groups()[1:])
                design = {"coop": "cooperative", "ping": "pingpong"}[kind]
                config = Config(design, (m, n, 32), tuple(cluster), 4)
                ratios[cluster[0] > 1].append(np.log(estimate_us(problem, config, gpu=H100) / us))
    assert (np.mean(ratios[True]), np.std(ratios[True])) == pytest.approx((-0.0322, 0.0558), abs=1e-4)
    assert (np.mean(ratios[False]), np.std(ratios[False])) == pytest.approx((-0.3470, 0.0746), abs=1e-4)
