"""Executing a plan on random normal data, on any backend, and reporting the outcome."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gemmsmith.backends.reference import bounds
from gemmsmith.backends.sim.counters import Counters
from gemmsmith.cli.counters import Counted
from gemmsmith.cli.progress import Tell
from gemmsmith.core.dtypes import FP32, DType
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.problem import SCALE_BLOCK
from gemmsmith.plans import Plan

SIMULATED_LIMIT = 512
"""On a GPU the timeline is simulated for a problem with at most this M, N and K."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of an execution. `speed` has time_us and tflops, or cycles (simulator), or nothing; `files` are paths
    by kind: source, timeline, trace; `counted`: the kernels' counters, if asked for."""

    sizes: tuple[int, int, int]
    backend: str
    report: bounds.Report
    hazards: list[Any]
    speed: dict[str, float]
    files: dict[str, str]
    counted: tuple[Counted, ...] = ()

    @property
    def ok(self) -> bool:
        return self.report.ok and not self.hazards

    def facts(self, plan: Plan) -> dict[str, Any]:
        """For JSON: errors are absolute, `max_over_bound` and the norms relative, null where NaN or Inf is out of
        place."""
        m, n, k = self.sizes
        r = self.report
        error = {"max": r.max_error, "max_over_bound": r.ratio, "elements_beyond_bound": r.wrong,
                 "frobenius": r.frobenius, "frobenius_bound": r.frobenius_bound}  # fmt: skip
        mma, scales = plan.binding.mma, plan.binding.scales
        accumulate = "promoted" if plan.problem.promoted else f"{plan.accumulate}"
        problem = {"m": m, "n": n, "k": k, "operands": " x ".join(dict.fromkeys((f"{mma.a}", f"{mma.b}"))),
                   "output": f"{plan.output}", "accumulate": accumulate}  # fmt: skip
        if any(x != "none" for x in scales):
            problem |= {"scale_a": scales[0], "scale_b": scales[1]}
        facts: dict[str, Any] = {
            "problem": problem,
            "config": vars(plan.config),
            "backend": self.backend,
            "result": "right" if self.ok else "wrong",
            "error": {name: x if math.isfinite(x) else None for name, x in error.items()},
        }  # fmt: skip
        if self.backend != "reference":
            facts |= resources(plan)
        if self.backend == "sim":
            facts["hazards"] = [{"kind": h.kind, "where": f"{h.where}", "message": h.message} for h in self.hazards]
        counted = {"counters": [x.facts() for x in self.counted]} if self.counted else {}
        return facts | self.speed | counted | {"files": self.files}

    def rows(self, plan: Plan) -> dict[str, str]:
        """The outcome as lines of text: title and value, in order."""
        rows = {
            "problem": f"{plan.problem}",
            "config": f"{plan.config}",
            "backend": self.backend,
            "result": "right" if self.ok else "WRONG",
            "error": f"{self.report}",
        }
        if self.backend != "reference":
            r = resources(plan)
            rows["resources"] = (
                f"{r['registers']} registers, {r['spill_bytes']} bytes spilled, "
                f"{r['shared_bytes']} bytes of shared memory"
            )
        if self.backend == "sim":
            rows["hazards"] = "\n".join(map(str, self.hazards)) or "none"
        rows["speed"] = {
            "cuda": "{time_us:.1f} us, {tflops:.0f} TFLOP/s (one buffer, back to back)",
            "sim": "{cycles} simulated cycles",
        }.get(self.backend, "not timed: the meaning, in float64").format(**self.speed)
        return rows | self.files


def resources(plan: Plan) -> dict[str, int]:
    """The kernel's registers a thread, bytes of spills, and bytes of shared memory a CTA."""
    r = plan.resources
    spilled = r.spill_stores + r.spill_loads
    return {"registers": r.registers, "spill_bytes": spilled, "shared_bytes": plan.kernel.shared_bytes}


@dataclass(frozen=True)
class Data:
    """How random operands are made: row-major (n) or column-major (t) each; what shares a scale of each, one of
    options.SCALES, or None; the seed, which is the schedule's too."""

    layout: str
    scales: tuple[str | None, str | None]
    seed: int

    def made(self, plan: Plan, sizes: tuple[int, int, int]) -> tuple[list[Any], dict[str, Any]]:
        """A (m, k), B (k, n) and a D of which no element is right, numpy, in the plan's dtypes; and scales by name."""
        m, n, k = sizes
        rng, mma = np.random.default_rng(self.seed), plan.binding.mma

        def matrix(rows: int, columns: int, order: str, dtype: DType) -> Any:
            shape = (rows, columns) if order == "n" else (columns, rows)
            integers = dtype.is_integer
            x = rng.integers(-128, 128, shape) if integers else rng.standard_normal(shape, dtype=np.float32)
            return x.astype(dtype.numpy) if order == "n" else x.astype(dtype.numpy).T

        a, b = matrix(m, k, self.layout[0], mma.a), matrix(k, n, self.layout[1], mma.b)
        d = np.full((m, n), -(2**31) if plan.output.is_integer else np.nan, plan.output.numpy)
        shapes = zip(("scale_a", "scale_b"), scale_shapes(sizes, self.scales), strict=True)
        scales = {name: rng.uniform(0.5, 2, x) for name, x in shapes if x is not None}
        return [a, b, d], {name: np.asarray(x, np.float32) for name, x in scales.items()}


def scale_shapes(sizes: tuple[int, int, int], scales: tuple[str | None, str | None]) -> list[tuple[int, ...] | None]:
    """The shapes of scale_a and scale_b, by what shares one scale."""
    m, n, k = sizes
    of_a, of_b = (
        {None: None, "tensor": (), "rows": (rows, 1), "1x128": (rows, -(-k // SCALE_BLOCK)),
         "128x128": (-(-rows // SCALE_BLOCK), -(-k // SCALE_BLOCK))}[scale]
        for rows, scale in zip((m, n), scales, strict=True)
    )  # fmt: skip
    return [of_a, of_b and of_b[::-1]]


def execute(
    plan: Plan, sizes: tuple[int, int, int], data: Data, backend: str, folder: Path, tell: Tell,
    counters: Counters | None = None,
) -> Outcome:  # fmt: skip
    """Runs the plan, compares with float64, writes the CUDA file and the timeline; `counters` count if given. Raises
    ArgumentError where that needs more memory than there is, OSError where the files cannot be written."""
    _require_memory(plan, sizes, backend)
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    if backend != "reference":
        source = folder / f"{plan.kernel.name}.cu"
        source.write_text(plan.source)
        files["source"] = str(source)
    tell("making data")
    (a, b, out), scales = data.made(plan, sizes)
    hazards: list[Any] = []
    speed: dict[str, float] = {}
    if backend == "reference":
        tell("multiplying in float64")
        plan.run(a, b, out, **scales)
    else:
        simulating = partial(tell, "simulating")
        if backend == "cuda":
            tell("running on the GPU")
            speed = _on_gpu(plan, [a, b, out], scales)
            m, n, k = (min(size, SIMULATED_LIMIT) for size in sizes)
            small, small_scales = data.made(plan, (m, n, k))
            simulation = plan.simulate(*small, **small_scales, progress=simulating)
        else:
            options: dict[str, Any] = {"seed": data.seed, "progress": simulating, "counters": counters}
            simulation = plan.simulate(a, b, out, **scales, **options)
            hazards, speed = simulation.hazards, {"cycles": simulation.cycles}
        tell("drawing the timeline")
        picture, trace = folder / "timeline.png", folder / "timeline.json"
        simulation.timeline.picture(picture)
        simulation.timeline.trace(trace)
        files |= {"timeline": str(picture), "trace": str(trace)}
    tell("comparing with float64")
    problem = plan.problem
    report = bounds.check(
        out, a, b, plan.accumulate, plan.output, promoted=problem.promoted, in_fp32=problem.a.dtype == FP32, **scales
    )
    counted = tuple(Counted.of(kernel, counters.lines(kernel)) for kernel in counters.kernels) if counters else ()
    return Outcome(sizes, backend, report, hazards, speed, files, counted)


def _require_memory(plan: Plan, sizes: tuple[int, int, int], backend: str) -> None:
    """Raises ArgumentError if A, B, D and the float64 copies for checking them exceed this machine's memory."""
    m, n, k = sizes
    arrays = plan.problem.a.dtype.bytes * (m * k + k * n) + plan.output.bytes * m * n
    doubles = 4 * k * n + (m * k + m * n) * (backend == "reference")  # bounds.check's B, |B|, temporaries
    needed = arrays + max(4 * m * k, 8 * doubles)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise ArgumentError(
            f"--m, --n, --k: {m} x {n} x {k} takes {needed / 1e9:.0f} GB of memory, and this machine has "
            f"{there / 1e9:.0f} GB; use smaller ones"
        )


def _on_gpu(plan: Plan, arrays: list[Any], scales: dict[str, Any]) -> dict[str, float]:
    """Writes the result into the last of the arrays."""
    from gemmsmith.backends.cuda import driver, launcher
    from gemmsmith.backends.cuda.memory import DeviceArray

    driver.require_chip(0)
    with launcher.device_guard(0):
        device = [DeviceArray.from_numpy(x) for x in arrays]
        of_device: dict[str, Any] = {name: DeviceArray.from_numpy(x) for name, x in scales.items()}
        of_device["workspace"] = DeviceArray.of_bytes(plan.workspace_bytes)
        plan.run(*device, **of_device)
        arrays[-1][...] = device[-1].numpy()
        repeats = max(3, int(0.2 * 5e14 / max(plan.problem.flops, 10**8)))
        microseconds = launcher.time_launches(lambda: plan.run(*device, **of_device), 0, repeats)
    return {"time_us": microseconds, "tflops": plan.problem.flops / microseconds / 1e6}
