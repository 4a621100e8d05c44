"""Executing a plan on random normal data, on any backend, and what is told of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gemmsmith.backends.reference import bounds
from gemmsmith.plans import Plan

SIMULATED_LIMIT = 512
"""Where the GPU executes, the timeline is drawn from a problem of at most that size each way."""


@dataclass(frozen=True)
class Outcome:
    """What an execution gave; `speed` is time and TFLOP/s, or simulated cycles."""

    backend: str
    report: bounds.Report
    hazards: list[Any]
    speed: str
    files: dict[str, str]

    @property
    def ok(self) -> bool:
        return self.report.ok and not self.hazards

    def rows(self, plan: Plan) -> dict[str, Any]:
        """The table, in order."""
        rows: dict[str, Any] = {
            "problem": str(plan.problem),
            "config": str(plan.config),
            "backend": self.backend,
            "result": "right" if self.ok else "WRONG",
            "error": str(self.report),
        }
        if self.backend != "reference":
            r = plan.resources
            rows["resources"] = (
                f"{r.registers} registers, {r.spill_stores + r.spill_loads} bytes spilled, "
                f"{plan.kernel.shared_bytes} bytes of shared memory"
            )
        if self.backend == "sim":
            rows["hazards"] = "none" if not self.hazards else "\n".join(map(str, self.hazards))
        rows["speed"] = self.speed
        return rows | self.files


def execute(plan: Plan, sizes: tuple[int, int, int], layout: str, backend: str, seed: int, folder: Path) -> Outcome:
    """Runs the plan, compares with float64, writes the CUDA file and the timeline."""
    a, b, out = operands(plan, sizes, layout, seed)
    files: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    hazards: list[Any] = []
    if backend == "reference":
        Plan(a, b, out, config=plan.config, backend="reference", accumulate=plan.accumulate).run(a, b, out)
        speed = "not timed: the meaning, in float64"
    else:
        source = folder / f"{plan.kernel.name}.cu"
        source.write_text(plan.source)
        files["cuda_file"] = str(source)
        if backend == "cuda":
            speed = _on_gpu(plan, a, b, out)
            small = tuple(min(size, SIMULATED_LIMIT) for size in sizes)
            simulation = plan.simulate(*operands(plan, (small[0], small[1], small[2]), layout, seed))
        else:
            simulation = plan.simulate(a, b, out, seed=seed)
            hazards = simulation.hazards
            speed = f"{simulation.cycles} simulated cycles"
        picture, trace = folder / "timeline.png", folder / "timeline.json"
        simulation.timeline.picture(picture)
        simulation.timeline.trace(trace)
        files |= {"timeline": str(picture), "trace": f"{trace} (ui.perfetto.dev)"}
    report = bounds.check(out, a, b, plan.accumulate, plan.output)
    return Outcome(backend, report, hazards, speed, files)


def operands(plan: Plan, sizes: tuple[int, int, int], layout: str, seed: int) -> tuple[Any, Any, Any]:
    """A (m, k), B (k, n) of random normal data and a D full of NaN, numpy, in the plan's dtypes and the layout."""
    m, n, k = sizes
    rng = np.random.default_rng(seed)
    dtype = plan.spec.operand.numpy

    def matrix(rows: int, columns: int, order: str) -> Any:
        shape = (rows, columns) if order == "n" else (columns, rows)
        x = rng.standard_normal(shape, dtype=np.float32).astype(dtype)
        return x if order == "n" else x.T

    return matrix(m, k, layout[0]), matrix(k, n, layout[1]), np.full((m, n), np.nan, plan.output.numpy)


def _on_gpu(plan: Plan, a: Any, b: Any, out: Any) -> str:
    from gemmsmith.backends.cuda import driver, launcher
    from gemmsmith.backends.cuda.memory import DeviceArray

    driver.require_hopper(0)
    with launcher.device_guard(0):
        device = [DeviceArray.from_numpy(x) for x in (a, b, out)]
        plan.run(*device)
        out[...] = device[2].numpy()
        repeats = max(3, int(0.2 * 5e14 / max(plan.problem.flops, 10**8)))
        microseconds = launcher.time_launches(lambda: plan.run(*device), 0, repeats)
    return f"{microseconds:.1f} us, {plan.problem.flops / microseconds / 1e6:.0f} TFLOP/s (one buffer, back to back)"
