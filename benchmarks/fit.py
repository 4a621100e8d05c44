"""Fits the constants of tuning/model.py to surveys, and says what its choices lose on shapes that were held out.

What is minimized: for each shape the squared errors of the logarithms of the estimated times, but for an error that
all its configs share; configs count the less the slower they are. The constants' logarithms are varied, by damped least
squares with numerical derivatives of the model itself. `regret` is how much slower the choice is than the fastest
config of its shape, the mean of logarithms; the fastest of many noisy times is too fast, so some of it is noise.

All GPUs count alike. A survey's blocks are too short for the power limit, so the products that it holds are taken from
sweeps, whose finalists ran in longer ones. With --correction the constants stay, and what they miss is fitted by ridge
regression (tuning/correction.py): written to correction.json, after a cross-validation over shapes.

    cd benchmarks/results
    python ../fit.py survey-h200.json survey-??-h100.json \\
        --sweep sweep-{third,fourth,fifth,seventh,eighth}-h200.json sweep-layouts-h100.json [--correction]
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from suite import POWER_LIMITED, SMALL, Shape, block_scaled, specs

import gemmsmith
from gemmsmith import Config
from gemmsmith.core.dtypes import as_dtype
from gemmsmith.core.problem import Problem
from gemmsmith.tuning import correction, model
from gemmsmith.tuning.depth import for_16_bits, in_16_bits
from gemmsmith.tuning.gpus import H200, Gpu, named
from gemmsmith.tuning.space import Space

FITTED = (
    "SM_BYTES_PER_CYCLE", "FILL_BYTES_PER_CYCLE", "MERGED", "OFF_LINES", "OFF_SECTORS",
    "READ_AGAIN", "SHORT_ROWS", "IDLE", "FILL_CYCLES", "MEET_CYCLES", "STAGE_CYCLES", "STORE_BYTES_PER_CYCLE",
    "ELEMENT_CYCLES", "SHARE_CYCLES", "CLUSTER_SHARE_CYCLES", "BYTES_OF_SHARE_PER_CYCLE", "SHARPNESS",
    "LOOP_CYCLES", "LOOP_CYCLES_PER_K", "DEEPER_128", "DEEPER_256", "ENERGY_FLOPS", "ENERGY_L2", "ENERGY_FILL",
    "ENERGY_READ", "ENERGY_DRAM", "OUT_OF_STEP",
)  # fmt: skip
"""Names in the model."""
SLOWER, KEPT = 0.15, 3e-4
"""A config that is slower by this, in logarithms, counts 1/e; and how much a constant's squared change costs."""
DTYPES = {"bf16": "bf16", "fp8": "fp8_e4m3"}
"""Of the operands of surveys; where they are named by a layout, bf16."""
LONG = 2
"""How often a sweep's shape counts."""
HELD_OUT = 5
"""Every fifth shape; and parts of the cross-validation."""
RIDGE, CONFIGS = 500, 64
"""How much the squared coefficients of the correction cost, of numbers with deviation 1, where each shape counts as
that many configs."""


@dataclass(frozen=True)
class Contest:
    """A shape's configs, their times and how much each counts, 1 in all."""

    problem: Problem
    space: Space
    log_us: np.ndarray[Any, Any]
    weight: np.ndarray[Any, Any]
    gpu: Gpu = H200

    @property
    def power_limited(self) -> bool:
        """Whether the chip's power limit holds the product."""
        return 2 * self.problem.m * self.problem.n * self.problem.k >= POWER_LIMITED

    def estimates(self) -> np.ndarray[Any, Any]:
        """The logarithms of the model's times."""
        return np.log(model.estimate(self.problem, self.space, gpu=self.gpu).cycles)

    def errors(self) -> np.ndarray[Any, Any]:
        """Weighted, and without what they share."""
        errors = self.estimates() - self.log_us
        return np.asarray(np.sqrt(self.weight) * (errors - np.sum(self.weight * errors)))

    def regret(self, correction: Any = 0) -> float:
        """Of the choice, with a correction of the estimates' logarithms."""
        return float(self.log_us[np.argmin(self.estimates() + correction)] - self.log_us.min())

    def numbers(self) -> np.ndarray[Any, Any]:
        """What the correction depends on, for each config."""
        return correction.numbers(self.problem, self.space, model.estimate(self.problem, self.space, gpu=self.gpu))


def problem(operands: str, shape: Shape) -> Problem:
    """Of bf16 operands, A row-major and B column-major, or of the layout that is named; or of FP8 ones with block
    scales."""
    if operands == "fp8":
        (a, b), scales = block_scaled(shape)
        return gemmsmith.plan(a, b, **scales, out_dtype="bf16", config=SMALL).problem
    return gemmsmith.plan(*specs(shape, layout="nt" if operands == "bf16" else operands), config=SMALL).problem


def contests(survey: Path) -> list[Contest]:
    """A survey's shapes, of operands as it measures them, but as the model sees them."""
    found, read = [], json.loads(survey.read_text())
    operands = read.get("operands", "bf16")
    configs = [for_16_bits(Config.stored(c), as_dtype(DTYPES.get(operands, "bf16"))) for c in read["configs"]]
    for row in read["rows"]:
        m, n, k = (row[name] for name in "mnk")
        found.append(contest(operands, (m, n, k), [(configs[i], us) for i, us in row["us"]], gpu_of(read)))
    return found


def gpu_of(file: dict[str, Any]) -> Gpu:
    """The one that a file's times are of."""
    gpu = named(str(file["machine"]))
    assert gpu
    return gpu


def contest(operands: str, shape: Shape, timed: list[tuple[Config, float]], gpu: Gpu) -> Contest:
    """A shape's, of configs and their times."""
    space = replace(Space.of([c for c, _ in timed]), stages=np.array([c.stages for c, _ in timed], float))
    log_us = np.log([us for _, us in timed])
    weight = np.exp((log_us.min() - log_us) / SLOWER)
    return Contest(in_16_bits(problem(operands, shape)), space, log_us, weight / weight.sum(), gpu)


def finalists(sweep: Path) -> list[Contest]:
    """Those shapes of a sweep that the power limit holds, and their finalists; where a sweep is of one layout, no
    swapped ones, whose stores were slow then, and no shares of K."""
    found, read = [], json.loads(sweep.read_text())
    for row in read["rows"]:
        m, n, k = (row[name] for name in "mnk")
        timed = [(Config.stored(c["config"]), c["us"]) for c in row["configs"] if c["ratio"]]
        if "layout" not in row:
            timed = [(c, us) for c, us in timed if c.splits == 1 and not c.swap_ab]
        if len(timed) > 1:
            found.append(contest(row.get("layout", "bf16"), (m, n, k), timed, gpu_of(read)))
    return [c for c in found if c.power_limited]


def fit(contests: list[Contest], rounds: int = 12) -> None:
    """Moves the model's constants to where the errors are least."""
    start = np.log([getattr(model, name) for name in FITTED])

    def residuals(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        for name, value in zip(FITTED, np.exp(x), strict=True):
            setattr(model, name, float(value))
        errors = np.concatenate([c.errors() for c in contests]) / len(contests) ** 0.5
        return np.concatenate([errors, KEPT**0.5 * (x - start)])

    x, damping = start, 1e-3
    now = residuals(x)
    for _ in range(rounds):
        steps = 1e-3 * np.eye(len(x))
        slopes = np.stack([(residuals(x + step) - now) / 1e-3 for step in steps], axis=1)
        square = slopes.T @ slopes
        move = np.linalg.solve(square + damping * np.diag(np.diag(square)), -slopes.T @ now)
        tried = residuals(x + np.clip(move, -0.3, 0.3))
        if tried @ tried < now @ now:
            x, now, damping = x + np.clip(move, -0.3, 0.3), tried, damping / 3
        else:
            damping *= 10
        print(f"error {(now @ now) ** 0.5:.4f}", flush=True)
    residuals(x)


def fit_correction(contests: list[Contest]) -> np.ndarray[Any, Any]:
    """The coefficients of tuning/correction.py, by ridge regression."""
    rows, errors = [], []
    for c in contests:
        weight = np.sqrt(c.weight * CONFIGS)[:, None]
        x, y = c.numbers(), (c.log_us - c.estimates())[:, None]
        rows.append(weight * (x - c.weight @ x))
        errors.append(weight * (y - c.weight @ y))
    x, y = np.concatenate(rows), np.concatenate(errors)
    deviation = np.sqrt(np.mean(x**2, axis=0)) + 1e-6
    x = x / deviation
    return np.asarray(np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ y)[:, 0] / deviation)


def cross_validated(contests: list[Contest]) -> list[Any]:
    """For each contest the correction that is fitted to the other shapes'."""
    shapes = list(dict.fromkeys((c.problem.m, c.problem.n, c.problem.k) for c in contests))
    random.Random(0).shuffle(shapes)
    part = {shape: i % HELD_OUT for i, shape in enumerate(shapes)}
    parts = [part[c.problem.m, c.problem.n, c.problem.k] for c in contests]
    fitted = [fit_correction([c for c, p in zip(contests, parts, strict=True) if p != i]) for i in range(HELD_OUT)]
    return [
        np.clip(c.numbers() @ fitted[p], -correction.MOST, correction.MOST)
        for c, p in zip(contests, parts, strict=True)
    ]


def balanced(contests: list[Contest]) -> list[Contest]:
    """Each as often as makes all GPUs count alike."""
    counts = Counter(c.gpu for c in contests)
    return [c for c in contests for _ in range(round(max(counts.values()) / counts[c.gpu]))]


def regrets(contests: list[Contest], corrections: list[Any] | None = None) -> str:
    """By the number of rows."""
    parts = []
    pairs = list(zip(contests, corrections or [0] * len(contests), strict=True))
    for fewest, most in ((1, 64), (65, 512), (513, 1 << 20)):
        found = [c.regret(x) for c, x in pairs if fewest <= c.problem.m <= most]
        parts.append(f"M {fewest} to {most}: {np.mean(found) if found else 0:.4f} of {len(found)}")
    return "   ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("surveys", type=Path, nargs="+", help="files that survey.py wrote")
    parser.add_argument("--correction", action="store_true", help="leave the constants, fit what they miss")
    parser.add_argument("--sweep", type=Path, nargs="+", default=[], help="files that sweep.py wrote")
    arguments = parser.parse_args()
    every = [c for path in arguments.surveys for c in contests(path)]
    short = balanced([c for c in every if not c.power_limited])
    long = [c for path in arguments.sweep for c in finalists(path)]
    if arguments.correction:
        long = balanced(long)
        corrections = cross_validated(short + long)
        for name, part, of in (("surveys", short, corrections), ("sweeps", long, corrections[len(short) :])):
            print(f"regret, {name}, of the model alone: {regrets(part)}")
            print(f"cross-validated, corrected: {regrets(part, of[: len(part)])}")
        found = [float(f"{x:.4g}") for x in fit_correction(short + long)]
        correction.FILE.write_text(json.dumps(found) + "\n")
        return
    held_out = every[::HELD_OUT]
    print(f"regret, held out: before   {regrets(held_out)}")
    fit([c for i, c in enumerate(short) if i % HELD_OUT] + LONG * long)
    print(f"regret, held out: after    {regrets(held_out)}")
    for name in FITTED:
        print(f"{name} = {getattr(model, name):.4g}")


if __name__ == "__main__":
    main()
