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
from gemmsmith.cli.progress import Tell
from gemmsmith.core.errors import ArgumentError
from gemmsmith.plans import Plan

SIMULATED_LIMIT = 512
"""On a GPU the timeline is simulated for a problem with at most this M, N and K."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of an execution. `speed` has time_us and tflops, or cycles (simulator), or nothing; `files` are paths
    by kind: source, timeline, trace."""

    sizes: tuple[int, int, int]
    backend: str
    report: bounds.Report
    hazards: list[Any]
    speed: dict[str, float]
    files: dict[str, str]

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
        facts: dict[str, Any] = {
            "problem": {"m": m, "n": n, "k": k, "operands": f"{plan.problem.a.dtype}", "output": f"{plan.output}",
                        "accumulate": f"{plan.accumulate}"},
            "config": vars(plan.config),
            "backend": self.backend,
            "result": "right" if self.ok else "wrong",
            "error": {name: x if math.isfinite(x) else None for name, x in error.items()},
        }  # fmt: skip
        if self.backend != "reference":
            facts |= resources(plan)
        if self.backend == "sim":
            facts["hazards"] = [{"kind": h.kind, "where": f"{h.where}", "message": h.message} for h in self.hazards]
        return facts | self.speed | {"files": self.files}

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


def execute(
    plan: Plan, sizes: tuple[int, int, int], layout: str, backend: str, seed: int, folder: Path, tell: Tell
) -> Outcome:
    """Runs the plan, compares with float64, writes the CUDA file and the timeline. Raises ArgumentError where that
    needs more memory than there is, OSError where the files cannot be written."""
    _require_memory(plan, sizes, backend)
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    if backend != "reference":
        source = folder / f"{plan.kernel.name}.cu"
        source.write_text(plan.source)
        files["source"] = str(source)
    tell("making data")
    a, b, out = operands(plan, sizes, layout, seed)
    hazards: list[Any] = []
    speed: dict[str, float] = {}
    if backend == "reference":
        tell("multiplying in float64")
        Plan(a, b, out, config=plan.config, backend="reference", accumulate=plan.accumulate).run(a, b, out)
    else:
        simulating = partial(tell, "simulating")
        if backend == "cuda":
            tell("running on the GPU")
            speed = _on_gpu(plan, a, b, out)
            m, n, k = (min(size, SIMULATED_LIMIT) for size in sizes)
            simulation = plan.simulate(*operands(plan, (m, n, k), layout, seed), progress=simulating)
        else:
            simulation = plan.simulate(a, b, out, seed=seed, progress=simulating)
            hazards, speed = simulation.hazards, {"cycles": simulation.cycles}
        tell("drawing the timeline")
        picture, trace = folder / "timeline.png", folder / "timeline.json"
        simulation.timeline.picture(picture)
        simulation.timeline.trace(trace)
        files |= {"timeline": str(picture), "trace": str(trace)}
    tell("comparing with float64")
    report = bounds.check(out, a, b, plan.accumulate, plan.output)
    return Outcome(sizes, backend, report, hazards, speed, files)


def _require_memory(plan: Plan, sizes: tuple[int, int, int], backend: str) -> None:
    """Raises ArgumentError if A, B, D and the float64 copies for checking them exceed this machine's memory."""
    m, n, k = sizes
    arrays = 2 * (m * k + k * n) + plan.output.bytes * m * n
    doubles = 4 * k * n + (m * k + m * n) * (backend == "reference")  # bounds.check's B, |B|, temporaries
    needed = arrays + max(4 * m * k, 8 * doubles)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise ArgumentError(
            f"--m, --n, --k: {m} x {n} x {k} takes {needed / 1e9:.0f} GB of memory, and this machine has "
            f"{there / 1e9:.0f} GB; use smaller ones"
        )


def operands(plan: Plan, sizes: tuple[int, int, int], layout: str, seed: int) -> tuple[Any, Any, Any]:
    """A (m, k), B (k, n) of random normal data and a D full of NaN, numpy, in the plan's dtypes and the layout."""
    m, n, k = sizes
    rng = np.random.default_rng(seed)
    dtype = plan.problem.a.dtype.numpy

    def matrix(rows: int, columns: int, order: str) -> Any:
        shape = (rows, columns) if order == "n" else (columns, rows)
        x = rng.standard_normal(shape, dtype=np.float32).astype(dtype)
        return x if order == "n" else x.T

    return matrix(m, k, layout[0]), matrix(k, n, layout[1]), np.full((m, n), np.nan, plan.output.numpy)


def _on_gpu(plan: Plan, a: Any, b: Any, out: Any) -> dict[str, float]:
    from gemmsmith.backends.cuda import driver, launcher
    from gemmsmith.backends.cuda.memory import DeviceArray

    driver.require_chip(0)
    with launcher.device_guard(0):
        device = [DeviceArray.from_numpy(x) for x in (a, b, out)]
        plan.run(*device)
        out[...] = device[2].numpy()
        repeats = max(3, int(0.2 * 5e14 / max(plan.problem.flops, 10**8)))
        microseconds = launcher.time_launches(lambda: plan.run(*device), 0, repeats)
    return {"time_us": microseconds, "tflops": plan.problem.flops / microseconds / 1e6}
