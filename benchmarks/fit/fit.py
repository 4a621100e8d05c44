"""Fit the constants of tuning/model.py to surveys, and report the regret of its choices on held-out shapes.

The objective is, for each shape, the squared errors of the logarithms of the estimated times, up to an error that all
its configs share; slower configs have smaller weights. The logarithms of the constants are optimized by damped least
squares with numerical derivatives of the model itself. `regret` is how much slower the choice is than the fastest
config of its shape, as a mean of logarithms; the fastest of many noisy times is too fast, so part of it is noise.

All GPUs have equal weight. A survey's blocks are too short for the power limit, so power-limited GEMMs are taken from
sweeps, whose finalists ran in longer ones. With --power only the constants of the power limit are fitted, to sweeps and
to the long blocks of power.py.

    python -m benchmarks.fit.fit survey-h200 survey-{nn,nt,tn,tt}-h100 --pairs public-models-h200 \\
        --sweep sweep-{third,fourth,fifth,seventh,eighth}-h200 sweep-{layouts,choice}-h100
    python -m benchmarks.fit.fit survey-h200 --power power-h200 \\
        --sweep sweep-{third,fourth,fifth,seventh,eighth}-h200 sweep-{layouts,choice}-h100
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import gemmsmith
from benchmarks.rows import by_shape, load
from benchmarks.suite import SMALL, Shape, block_scaled, specs
from gemmsmith import Config
from gemmsmith.core.dtypes import as_dtype
from gemmsmith.core.problem import Problem
from gemmsmith.tuning import model
from gemmsmith.tuning.config_table import ConfigTable
from gemmsmith.tuning.costs import SM_CLOCK_MHZ
from gemmsmith.tuning.dtype_equivalence import as_16bit_problem, config_for_16bit
from gemmsmith.tuning.gpus import H200, Gpu, find_gpu

POWER = (
    "FLOPS_PER_CYCLE_AT_700W",
    "L2_BYTES_PER_CYCLE_AT_700W",
    "SMEM_FILL_BYTES_PER_CYCLE_AT_700W",
    "WGMMA_READ_BYTES_PER_CYCLE_AT_700W",
)
"""Names of the constants of the power limit in tuning/model.py, but DRAM's: GEMMs at the limit hardly depend on it."""
FITTED = (
    "L2_TO_SM_BYTES_PER_CYCLE",
    "SMEM_FILL_BYTES_PER_CYCLE",
    "GPC_MERGED_READ_FRACTION",
    "CONSECUTIVE_MERGED_READ_FRACTION",
    "UNALIGNED_OVERHEAD",
    "UNALIGNED_SECTOR_OVERHEAD",
    "UNALIGNED_TILE_OVERHEAD",
    "REREAD_FRACTION",
    "SHORT_ROW_OVERHEAD",
    "LAUNCH_AND_FILL_CYCLES",
    "CLUSTER_SYNC_CYCLES",
    "FILL_CYCLES_PER_STAGE",
    "EPILOGUE_BYTES_PER_CYCLE",
    "EPILOGUE_CYCLES_PER_ELEMENT",
    "SPLIT_REDUCTION_CYCLES",
    "CLUSTER_SPLIT_CYCLES",
    "SPLIT_REDUCTION_BYTES_PER_CYCLE",
    "MATH_COPY_NORM_EXPONENT",
    "BOUND_NORM_EXPONENT",
    "LOOP_CYCLES",
    "LOOP_CYCLES_PER_K",
    "TILE_K_128_SLOWDOWN",
    *POWER,
    "DRAM_BYTES_PER_CYCLE_AT_700W",
    "STREAM_K_ENERGY_OVERHEAD",
)
"""Names of the fitted constants in tuning/model.py."""
SLOWER = 0.15
"""A config that is slower than the fastest by this, in logarithms, has weight 1/e. Chosen; not measured."""
CONSTANT_CHANGE_COST, POWER_CHANGE_COST = 3e-4, 1e-5
"""Penalties on the squared change of a constant's logarithm: of all constants, and of POWER alone. Chosen."""
DTYPES = {"bf16": "bf16", "fp8": "fp8_e4m3"}
"""Dtypes of the operands of surveys; bf16 for surveys that are named by a layout."""
LONG = 2
"""Weight of a sweep's shape. Chosen; not measured."""
LONG_PAIRS = 2
"""Weight of a GEMM of power.py, whose kernels are today's, relative to a sweep's. Chosen of 2, 6 and 20."""
HELD_OUT = 5
"""Every HELD_OUT-th shape is held out."""


@dataclass(frozen=True)
class Contest:
    """A shape's configs, their times and their weights, which add up to 1."""

    problem: Problem
    space: ConfigTable
    log_us: np.ndarray[Any, Any]
    weight: np.ndarray[Any, Any]
    gpu: Gpu = H200

    @property
    def power_limited(self) -> bool:
        """Return whether the GEMM is power-limited."""
        return self.problem.flops > self.gpu.short_flops

    def estimates(self) -> np.ndarray[Any, Any]:
        """Return the logarithms of the model's times."""
        return np.log(model.estimate(self.problem, self.space, gpu=self.gpu).cycles)

    def errors(self) -> np.ndarray[Any, Any]:
        """Return the weighted errors without their mean."""
        errors = self.estimates() - self.log_us
        return np.asarray(np.sqrt(self.weight) * (errors - np.sum(self.weight * errors)))

    def regret(self) -> float:
        """Return the regret of the choice."""
        return float(self.log_us[np.argmin(self.estimates())] - self.log_us.min())


def problem(operands: str, shape: Shape) -> Problem:
    """Return the problem of bf16 operands in a layout ("bf16" is nt), or of fp8 operands with block scales."""
    if operands == "fp8":
        (a, b), scales = block_scaled(shape)
        return gemmsmith.plan(a, b, **scales, out_dtype="bf16", config=SMALL).problem
    return gemmsmith.plan(*specs(shape, layout="nt" if operands == "bf16" else operands), config=SMALL).problem


def contests(survey: str) -> list[Contest]:
    """Return the contests of a survey, as 16-bit problems."""
    results, file = [], load(survey)
    operands = file.get("operands", "bf16")
    configs = [config_for_16bit(Config.parse(c), as_dtype(DTYPES.get(operands, "bf16"))) for c in file["configs"]]
    for row in file["rows"]:
        m, n, k = (row[name] for name in "mnk")
        results.append(contest(operands, (m, n, k), [(configs[i], us) for i, us in row["us"]], gpu_of(file)))
    return results


def pairs(name: str) -> list[Contest]:
    """Return contests of two configs: the one that was chosen, and the one that was faster (public_models.py)."""
    file, results = load(name), []
    for row in file["rows"]:
        if row["config"] != row["untuned"]:
            timed = [(Config.parse(row[x]), row[us]) for x, us in (("untuned", "untuned_us"), ("config", "us"))]
            results.append(contest("bf16", (row["m"], row["n"], row["k"]), timed, gpu_of(file)))
    return results


def power_pairs(name: str, blocks: str = "long") -> list[Contest]:
    """Return contests of two configs in long or in short blocks (power.py)."""
    file, results = load(name), []
    for row in file["rows"]:
        timed = [(Config.parse(x), us[blocks]) for x, us in row["us"].items() if x not in ("torch", "cublaslt")]
        if len(timed) > 1:
            results.append(contest(row["layout"], (row["m"], row["n"], row["k"]), timed, gpu_of(file)))
    return results


def gpu_of(file: dict[str, Any]) -> Gpu:
    """Return the GPU on which a file's times were measured."""
    gpu = find_gpu(str(file["machine"]))
    assert gpu
    return gpu


def contest(operands: str, shape: Shape, timed: list[tuple[Config, float]], gpu: Gpu) -> Contest:
    """Return the contest of a shape's configs and their times."""
    space = replace(
        ConfigTable.from_configs([c for c, _ in timed]), stages=np.array([c.stages for c, _ in timed], float)
    )
    log_us = np.log([us for _, us in timed])
    weight = np.exp((log_us.min() - log_us) / SLOWER)
    return Contest(as_16bit_problem(problem(operands, shape)), space, log_us, weight / weight.sum(), gpu)


def finalists(name: str) -> list[Contest]:
    """Return the contests of a sweep's shapes and finalists.

    Sweeps of one layout only: the power-limited shapes, without swap_ab, whose stores were slow then, and without
    split-K.
    """
    results, file = [], load(name)
    of_layouts = "layout" in file["rows"][0]
    for rows in by_shape(file["rows"]):
        m, n, k = (rows[0][name] for name in "mnk")
        timed = [(Config.parse(r["config"]), r["us"]) for r in rows if r["ratio"]]
        if not of_layouts:
            timed = [(c, us) for c, us in timed if c.splits == 1 and not c.swap_ab]
        if len(timed) > 1:
            results.append(contest(rows[0].get("layout", "bf16"), (m, n, k), timed, gpu_of(file)))
    return [c for c in results if c.power_limited or of_layouts]


def fit(
    contests: list[Contest], names: Sequence[str] = FITTED, change_cost: float = CONSTANT_CHANGE_COST, rounds: int = 12
) -> None:  # fmt: skip
    """Move the model's constants of these names to the minimum of the errors."""
    start = np.log([getattr(model, name) for name in names])

    def residuals(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        for name, value in zip(names, np.exp(x), strict=True):
            setattr(model, name, float(value))
        errors = np.concatenate([c.errors() for c in contests]) / len(contests) ** 0.5
        return np.concatenate([errors, change_cost**0.5 * (x - start)])

    x, damping = start, 1e-3
    now = residuals(x)
    for _ in range(rounds):
        steps = 1e-3 * np.eye(len(x))
        jacobian = np.stack([(residuals(x + step) - now) / 1e-3 for step in steps], axis=1)
        square = jacobian.T @ jacobian
        move = np.linalg.solve(square + damping * np.diag(np.diag(square)), -jacobian.T @ now)
        tried = residuals(x + np.clip(move, -0.3, 0.3))
        if tried @ tried < now @ now:
            x, now, damping = x + np.clip(move, -0.3, 0.3), tried, damping / 3
        else:
            damping *= 10
        print(f"error {(now @ now) ** 0.5:.4f}", flush=True)
    residuals(x)


def fit_power(contests: list[Contest]) -> None:
    """Fit the constants of the power limit, and scale them and DRAM's so that times are right in the mean."""
    for _ in range(3):
        fit(contests, POWER, POWER_CHANGE_COST)
        ratio = np.mean([np.mean(c.estimates() - c.log_us) for c in contests]) - np.log(SM_CLOCK_MHZ)
        for name in (*POWER, "DRAM_BYTES_PER_CYCLE_AT_700W"):
            setattr(model, name, getattr(model, name) * float(np.exp(2 * ratio)))
        print(f"estimated over measured time {np.exp(ratio):.3f}", flush=True)


def balanced(contests: list[Contest]) -> list[Contest]:
    """Repeat contests so that all GPUs have equal weight."""
    counts = Counter(c.gpu for c in contests)
    return [c for c in contests for _ in range(round(max(counts.values()) / counts[c.gpu]))]


def regrets(contests: list[Contest]) -> str:
    """Return the mean regrets by number of rows."""
    parts = []
    for fewest, most in ((1, 64), (65, 512), (513, 1 << 20)):
        results = [c.regret() for c in contests if fewest <= c.problem.m <= most]
        parts.append(f"M {fewest} to {most}: {np.mean(results) if results else 0:.4f} of {len(results)}")
    return "   ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("surveys", nargs="+", help="names of results of survey.py")
    parser.add_argument("--sweep", nargs="+", default=[], help="names of results of sweep.py")
    parser.add_argument("--pairs", nargs="+", default=[], help="names of results of public_models.py")
    parser.add_argument("--power", nargs="+", default=[], help="names of results of power.py: fit only the power limit")
    arguments = parser.parse_args()
    all_contests = [c for name in arguments.surveys for c in contests(name)]
    short = balanced([c for c in all_contests if not c.power_limited])
    long = [c for name in arguments.sweep for c in finalists(name)]
    two = [c for name in arguments.pairs for c in pairs(name)]
    validation = all_contests[::HELD_OUT]
    print(f"regret, held out: before   {regrets(validation)}")
    if arguments.power:
        pairs_in_long_blocks = [c for name in arguments.power for c in power_pairs(name)]
        fit_power([c for c in long if c.power_limited] + LONG_PAIRS * pairs_in_long_blocks)
    else:
        fit([c for i, c in enumerate(short) if i % HELD_OUT] + LONG * long + two)
    print(f"regret, held out: after    {regrets(validation)}")
    for name in FITTED:
        print(f"{name} = {getattr(model, name):.4g}")


if __name__ == "__main__":
    main()
