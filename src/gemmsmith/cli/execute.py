"""Execution of a plan on random operands, on any backend, and the report of the outcome."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from gemmsmith.backends.cuda import compiler
from gemmsmith.backends.reference import bounds
from gemmsmith.backends.sim.execute.counters import Counters
from gemmsmith.backends.sim.report.verdict import Verdict
from gemmsmith.cli.progress import ProgressCallback
from gemmsmith.cli.tables import KernelCounts
from gemmsmith.core.dtypes import FP32, DType
from gemmsmith.core.errors import ArgumentError, MissingPackageError
from gemmsmith.core.integers import ceil_div
from gemmsmith.core.problem import SCALE_BLOCK
from gemmsmith.host.plans import Plan
from gemmsmith.tuning.gpus import gpu_at
from gemmsmith.tuning.model import covers_config

MAX_SIMULATED_SIZE = 512
"""Largest M, N and K of the problem whose timeline is simulated in addition to a run on the GPU."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of an execution.

    Attributes:
        sizes: m, n, k.
        backend: "cuda", "sim" or "reference".
        report: The comparison of D with float64.
        hazards: The simulator's hazards; empty for other backends.
        timings: time_us and tflops (GPU), or cycles and the ctas that took them (simulator), or empty.
        files: Paths by kind: source, timeline, trace.
        kernel_counts: The simulator's counts, one per kernel, if counters were requested.
        verdict: Whether the simulated schedules speak for all; None for other backends.
    """

    sizes: tuple[int, int, int]
    backend: str
    report: bounds.Report
    hazards: list[Any]
    timings: dict[str, float]
    files: dict[str, str]
    kernel_counts: tuple[KernelCounts, ...] = ()
    verdict: Verdict | None = None

    @property
    def ok(self) -> bool:
        """True if D is correct and there are no hazards."""
        return self.report.is_ok and not self.hazards

    def to_json(self, plan: Plan) -> dict[str, Any]:
        """Return the outcome as a dict that can be written as JSON.

        "max" is an absolute error; `max_over_bound` and the Frobenius norms are relative. They are null if D has an
        unexpected NaN or Inf.
        """
        m, n, k = self.sizes
        r = self.report
        error = {"max": r.max_error, "max_over_bound": r.ratio, "elements_beyond_bound": r.num_out_of_bound,
                 "frobenius": r.frobenius, "frobenius_bound": r.frobenius_bound}  # fmt: skip
        mma, scales = plan.binding.mma, plan.binding.scales
        accumulate = "promoted" if plan.problem.promoted else f"{plan.accumulator_dtype}"
        problem = {"m": m, "n": n, "k": k, "operands": " x ".join(dict.fromkeys((f"{mma.a}", f"{mma.b}"))),
                   "output": f"{plan.out_dtype}", "accumulate": accumulate}  # fmt: skip
        if any(x != "none" for x in scales):
            problem |= {"scale_a": scales[0], "scale_b": scales[1]}
        result: dict[str, Any] = {
            "problem": problem,
            "config": vars(plan.config),
            "backend": self.backend,
            "result": "pass" if self.ok else "fail",
            "error": {name: x if math.isfinite(x) else None for name, x in error.items()},
        }
        if self.backend != "reference" and compiler.is_available():
            result |= resources(plan)
        if self.backend == "sim":
            result["hazards"] = [h.to_json() for h in self.hazards]
        if self.verdict:
            result |= self.verdict.to_json()
        result |= self.timings
        if self.backend != "reference" and covers_config(plan.config):
            result["estimated_us"] = plan.estimated_us
        if self.kernel_counts:
            result["counters"] = [x.to_json() for x in self.kernel_counts]
        return result | {"files": self.files}

    def to_rows(self, plan: Plan) -> dict[str, str]:
        """Return the outcome as lines of text: value by title, in order."""
        rows = {
            "problem": f"{plan.problem.T if plan.binding.swapped else plan.problem}",
            "config": f"{plan.config}",
            "backend": self.backend,
            "result": "pass" if self.ok else "FAIL",
            "error": f"{self.report}",
        }
        if self.backend != "reference" and compiler.is_available():
            r = resources(plan)
            spilled, shared = f"{r['spill_bytes']} bytes spilled", f"{r['shared_bytes']} bytes of shared memory"
            rows["resources"] = f"{r['registers']} registers, {spilled}, {shared}"
        elif self.backend == "sim":
            rows["resources"] = "known to NVRTC only, which is not installed"
        if self.backend == "sim":
            rows["hazards"] = "\n".join(map(str, self.hazards)) or "none"
        if self.verdict:
            rows["verdict"] = f"{self.verdict}"
        if self.backend == "sim":
            rows["schedule"] = "{cycles} simulated cycles on {ctas} CTAs; no speed".format(**self.timings)
        if self.backend == "cuda":
            rows["speed"] = "{time_us:.1f} us, {tflops:.0f} TFLOP/s (one buffer, back to back)".format(**self.timings)
        if self.backend != "reference" and covers_config(plan.config):
            rows["estimate"] = f"{plan.estimated_us:.1f} us on an {gpu_at(0).name}, by the model that chooses configs"
        if self.backend == "reference":
            rows["speed"] = "not timed (float64 reference)"
        return rows


def resources(plan: Plan) -> dict[str, int]:
    """Return the kernel's registers per thread, bytes of spills, and bytes of dynamic shared memory per CTA."""
    r = plan.resources
    spill_bytes = r.spill_store_bytes + r.spill_load_bytes
    return {"registers": r.registers, "spill_bytes": spill_bytes, "shared_bytes": plan.kernel.shared_bytes}


@dataclass(frozen=True)
class RandomOperands:
    """Random operands.

    `layout`: row-major (n) or column-major (t), for A and B. `scales`: scale granularity of each, one of
    options.SCALES, or None. `seed`: also used for the simulated schedule.
    """

    layout: str
    scales: tuple[str | None, str | None]
    seed: int

    def make(self, plan: Plan, sizes: tuple[int, int, int]) -> tuple[list[Any], dict[str, Any]]:
        """Return ([A (m, k), B (k, n), D (m, n)], scales by name), as numpy arrays in the plan's dtypes.

        D is filled with a value that no result has (NaN, or the least integer), so that elements that the kernel does
        not write count as wrong.
        """
        m, n, k = sizes
        rng, mma = np.random.default_rng(self.seed), plan.binding.mma

        def matrix(rows: int, columns: int, order: str, dtype: DType) -> Any:
            shape = (rows, columns) if order == "n" else (columns, rows)
            x: Any = rng.integers(-128, 128, shape) if dtype.is_integer else rng.standard_normal(shape, np.float32)
            return x.astype(dtype.numpy) if order == "n" else x.astype(dtype.numpy).T

        a, b = matrix(m, k, self.layout[0], mma.a), matrix(k, n, self.layout[1], mma.b)
        d = np.full((m, n), -(2**31) if plan.out_dtype.is_integer else np.nan, plan.out_dtype.numpy)
        shapes = zip(("scale_a", "scale_b"), scale_shapes(sizes, self.scales), strict=True)
        scales = {name: rng.uniform(0.5, 2, x) for name, x in shapes if x is not None}
        return [a, b, d], {name: np.asarray(x, np.float32) for name, x in scales.items()}


def scale_shapes(sizes: tuple[int, int, int], scales: tuple[str | None, str | None]) -> list[tuple[int, ...] | None]:
    """Return the shapes of scale_a and scale_b for granularities of options.SCALES; None for no scales.

    `sizes`: m, n, k. B's granularity is that of B seen as N x K, so its shape is the transpose of such a shape.
    """
    m, n, k = sizes
    blocks = ceil_div(k, SCALE_BLOCK)

    def shape(rows: int, scale: str | None) -> tuple[int, ...] | None:
        row_blocks = ceil_div(rows, SCALE_BLOCK)
        shapes = {"tensor": (), "rows": (rows, 1), "1x128": (rows, blocks), "128x128": (row_blocks, blocks)}
        return shapes[scale] if scale else None

    shape_b = shape(n, scales[1])
    return [shape(m, scales[0]), shape_b and shape_b[::-1]]


def execute(
    plan: Plan, sizes: tuple[int, int, int], operands: RandomOperands, backend: str, folder: Path,
    progress: ProgressCallback, counters: Counters | None = None, schedules: int = 1,
) -> Outcome:  # fmt: skip
    """Run the plan, compare with float64, and write the CUDA file and the timeline.

    A run on the GPU also simulates a problem of at most MAX_SIMULATED_SIZE for the timeline.

    Args:
        plan: The plan.
        sizes: m, n, k.
        operands: The random operands.
        backend: "cuda", "sim" or "reference".
        folder: Where the files are written.
        progress: Called with what is being done.
        counters: Counts what the simulated instructions of each source line do; None: no counts.
        schedules: The most schedules that are simulated.

    Raises:
        ArgumentError: The problem needs more memory than there is.
        OSError: The files cannot be written.
    """
    _require_memory(plan, sizes, backend)
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    if backend != "reference":
        source = folder / f"{plan.kernel.name}.cu"
        source.write_text(plan.source)
        files["source"] = str(source)
    progress("generating operands")
    (a, b, out), scales = operands.make(plan, sizes)
    hazards, verdict, timings = list[Any](), None, dict[str, float]()
    if backend == "reference":
        progress("multiplying in float64")
        plan.run(a, b, out, **scales)
    else:
        on_progress = partial(progress, "simulating")
        if backend == "cuda":
            progress("running on the GPU")
            timings = _time_on_gpu(plan, [a, b, out], scales)
            m, n, k = (min(size, MAX_SIMULATED_SIZE) for size in sizes)
            small, small_scales = operands.make(plan, (m, n, k))
            simulation = plan.simulate(*small, **small_scales, progress=on_progress, record=True)
        else:
            simulation = plan.simulate(
                a, b, out, **scales, seed=operands.seed, progress=on_progress, counters=counters, record=True,
                schedules=schedules,
            )  # fmt: skip
            ctas = simulation.record.grid if simulation.record else 0
            timings = {"cycles": simulation.cycles, "ctas": ctas}
            hazards, verdict = simulation.hazards, simulation.verdict
        if simulation.record:  # an empty D needs no kernel
            progress("plotting the timeline")
            picture, trace = folder / "timeline.png", folder / "timeline.json"
            try:
                simulation.timeline.plot(picture)
                files["timeline"] = str(picture)
            except MissingPackageError as missing:
                click.echo(f"no picture of the timeline: {missing}", err=True)
            simulation.timeline.write_trace(trace)
            files["trace"] = str(trace)
    progress("comparing with float64")
    problem = plan.problem
    report = bounds.check(
        out, a, b, plan.accumulator_dtype, plan.out_dtype, promoted=problem.promoted,
        on_cuda_cores=problem.a.dtype == FP32, **scales,
    )  # fmt: skip
    counts = tuple(KernelCounts.from_kernel(x, counters.lines(x)) for x in counters.kernels) if counters else ()
    return Outcome(sizes, backend, report, hazards, timings, files, counts, verdict)


def _require_memory(plan: Plan, sizes: tuple[int, int, int], backend: str) -> None:
    """Raise ArgumentError if A, B, D and the float64 copies for checking them exceed this machine's memory."""
    m, n, k = sizes
    arrays = plan.problem.a.dtype.bytes * (m * k + k * n) + plan.out_dtype.bytes * m * n
    doubles = 4 * k * n + (m * k + m * n) * (backend == "reference")  # bounds.check's B, |B|, temporaries
    needed = arrays + max(4 * m * k, 8 * doubles)
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > available:
        raise ArgumentError(
            f"--m, --n, --k: {m} x {n} x {k} takes {needed / 1e9:.0f} GB of memory, and this machine has "
            f"{available / 1e9:.0f} GB; use smaller ones"
        )


def _time_on_gpu(plan: Plan, arrays: list[Any], scales: dict[str, Any]) -> dict[str, float]:
    """Run the plan on the GPU, copy D back into the last of `arrays` (A, B, D), and return the time and TFLOP/s.

    The number of repeated runs is such that a GEMM at 500 TFLOP/s takes 0.2 s, at least 3.
    """
    from gemmsmith.backends.cuda import driver, kernel_loader
    from gemmsmith.backends.cuda.cuda_graph import time_calls
    from gemmsmith.backends.cuda.memory import DeviceArray

    driver.require_chip(0)
    with kernel_loader.device_guard(0):
        device_arrays = [DeviceArray.from_numpy(x) for x in arrays]
        keywords: dict[str, Any] = {name: DeviceArray.from_numpy(x) for name, x in scales.items()}
        keywords["workspace"] = DeviceArray.allocate(plan.workspace_bytes)
        plan.run(*device_arrays, **keywords)
        arrays[-1][...] = device_arrays[-1].numpy()
        repeats = max(3, int(0.2 * 5e14 / max(plan.problem.flops, 10**8)))
        timed = partial(time_calls, lambda: plan.run(*device_arrays, **keywords), 0)
        timed(max(1, repeats // 5))  # warm-up
        microseconds = timed(repeats) / repeats
    return {"time_us": microseconds, "tflops": plan.problem.flops / microseconds / 1e6}
