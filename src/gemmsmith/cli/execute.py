"""Execution of a plan on random operands, on any backend, and the report of the outcome."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np

from gemmsmith.arrays import Spec
from gemmsmith.backends.cuda import compiler
from gemmsmith.backends.reference import bounds
from gemmsmith.backends.reference.tolerances import check_results
from gemmsmith.backends.sim.execute.counters import Counters
from gemmsmith.backends.sim.report.verdict import Verdict
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.binding.results import outputs_by_name
from gemmsmith.cli.options import ProgressCallback
from gemmsmith.cli.problem import Choices, Sizes, make_plan, make_request
from gemmsmith.cli.tables import KernelCounts
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.errors import ArgumentError, MissingPackageError
from gemmsmith.host.planned_gemm import PlannedGemm, evaluate_reference
from gemmsmith.host.plans import Plan
from gemmsmith.host.simulation import Simulation
from gemmsmith.tuning.gpus import H100
from gemmsmith.tuning.model import covers_config

MAX_SIMULATED_SIZE = 512
"""Largest M, N and K of the problem whose timeline is simulated in addition to a run on the GPU."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of an execution.

    Attributes:
        epilogue: The option --epilogue, or None.
        hazards: The simulator's hazards; empty for other backends.
        timings: time_us and tflops (GPU), or cycles and the ctas that took them (simulator), or empty.
        files: Paths by kind: source, timeline, trace, page.
        kernel_counts: The simulator's counts, one per kernel, if counters were requested.
        verdict: Whether the simulated schedules speak for all; None for other backends.
    """

    sizes: tuple[int, int, int]
    backend: str
    epilogue: str | None
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

    def to_json(self, plan: PlannedGemm) -> dict[str, Any]:
        """Return the outcome as a dict that can be written as JSON.

        "max" is an absolute error; `max_over_bound` and the Frobenius norms are relative. They are null if D has an
        unexpected NaN or Inf.
        """
        m, n, k = self.sizes
        r = self.report
        error = {"max": r.max_error, "max_over_bound": r.ratio, "elements_beyond_bound": r.num_out_of_bound,
                 "frobenius": r.frobenius, "frobenius_bound": r.frobenius_bound}  # fmt: skip
        mma, scales = plan.binding.mma, plan.binding.scales
        accumulate = "promoted" if plan.problem.promoted else f"{plan.problem.accumulator_dtype}"
        problem = {"m": m, "n": n, "k": k, "operands": " x ".join(dict.fromkeys((f"{mma.a}", f"{mma.b}"))),
                   "output": f"{plan.binding.out_dtype}", "accumulate": accumulate}  # fmt: skip
        if plan.problem.batch > 1:
            problem["batch"] = plan.problem.batch
        if self.epilogue:
            problem["epilogue"] = self.epilogue
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
        if self.backend != "reference" and not math.isnan(us := Plan(plan).estimated_us):
            result["estimated_us"] = us
        if self.kernel_counts:
            result["counters"] = [x.to_json() for x in self.kernel_counts]
        return result | {"files": self.files}

    def to_rows(self, plan: PlannedGemm) -> dict[str, str]:
        """Return the outcome as lines of text: value by title, in order."""
        rows = {
            "problem": f"{plan.caller_problem}",
            **({"epilogue": self.epilogue} if self.epilogue else {}),
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
        if self.backend != "reference" and not math.isnan(us := Plan(plan).estimated_us):
            gpu = plan.gpu if covers_config(plan.config) else H100
            rows["estimate"] = f"{us:.1f} us on an {gpu.name}, by the model that chooses configs"
        if self.backend == "reference":
            rows["speed"] = "not timed (float64 reference)"
        return rows


def resources(plan: PlannedGemm) -> dict[str, int]:
    """Return the kernel's registers per thread, bytes of spills, and bytes of dynamic shared memory per CTA."""
    r = Plan(plan).resources
    spill_bytes = r.spill_store_bytes + r.spill_load_bytes
    return {"registers": r.registers, "spill_bytes": spill_bytes, "shared_bytes": plan.kernel.shared_bytes}


def random_arrays(request: Request, group_sizes: tuple[int, ...] | None, seed: int) -> Request:
    """Return the request with random numpy arrays in place of its Specs, and with results that hold no result yet.

    Scales are uniform in 0.5 ... 2, integers in -128 ... 127, and all others from a normal distribution. Results hold
    NaN, or the least integer, so that elements that the kernel does not write count as wrong. `group_sizes`: the rows
    of each group of a grouped GEMM.
    """
    rng = np.random.default_rng(seed)

    def array(spec: Spec) -> Any:
        shape, strides = spec.shape, spec.strides or ()
        is_column_major = len(shape) > 1 and strides[-2] < strides[-1]
        if is_column_major:
            shape = (*shape[:-2], shape[-1], shape[-2])
        is_integer = spec.dtype.is_integer
        x: Any = rng.integers(-128, 128, shape) if is_integer else rng.standard_normal(shape, np.float32)
        x = np.asarray(x).astype(spec.dtype.numpy)
        return x.swapaxes(-1, -2) if is_column_major else x

    def scale(spec: Spec | None) -> Any:
        return None if spec is None else np.asarray(rng.uniform(0.5, 2, spec.shape), np.float32)

    a, b = array(request.a), array(request.b)
    scales = {"scale_a": scale(request.scale_a), "scale_b": scale(request.scale_b)}
    operands = {
        name: array(x) if isinstance(x, Spec) else float(rng.standard_normal()) for name, x in request.operands.items()
    }
    if group_sizes:
        operands["sizes"] = np.asarray(group_sizes, np.int32)
    filled = request._replace(a=a, b=b, operands=operands, **scales)
    results = bind(filled).allocate_results().results
    for x in results.values():
        x[...] = np.iinfo(x.dtype).min if np.issubdtype(x.dtype, np.integer) else np.nan
    return filled._replace(out=results if request.epilogue else results["out"])


def compare(plan: PlannedGemm, request: Request) -> bounds.Report:
    """Compare the results of a request's arrays with float64: plain products by their bounds, others by tolerances."""
    if request.epilogue:
        binding = bind(request)
        graph = binding.source_graph
        results = {name: np.asarray(x) for name, x in outputs_by_name(request.out).items()}
        return check_results(graph, evaluate_reference(binding), results, binding.mma, request.a.shape[-1])
    problem = plan.problem
    check = partial(
        bounds.check, accumulator_dtype=problem.accumulator_dtype, out_dtype=plan.binding.out_dtype,
        promoted=problem.promoted, on_cuda_cores=problem.a.dtype == FP32,
    )  # fmt: skip
    out, a, b, scale_a, scale_b = request.out, request.a, request.b, request.scale_a, request.scale_b
    if not request.grouping:
        return check(out, a, b, scale_a=scale_a, scale_b=scale_b)
    ends = np.cumsum(request.operands["sizes"])
    reports = [
        check(out[begin:end], a[begin:end], b[g], scale_a=_of_group(scale_a, slice(begin, end)),
              scale_b=_of_group(scale_b, g))
        for g, (begin, end) in enumerate(pairwise([0, *ends]))
    ]  # fmt: skip
    rest = np.zeros_like(out[ends[-1] :])
    reports.append(check(out[ends[-1] :], rest[:, :0].astype(a.dtype), b[0][:0]))  # rows behind the groups are 0
    return max(reports, key=lambda report: report.ratio)


def _of_group(scale: Any, part: Any) -> Any:
    """Return a group's scales: `part` of those that have rows or groups, or the one for all."""
    return scale if scale is None or scale.ndim == 0 else scale[part]


def execute(
    choices: Choices, sizes: Sizes, seed: int, backend: str, folder: Path, progress: ProgressCallback,
    counters: Counters | None = None, schedules: int = 1, page: Path | None = None, first_step: int = 0,
) -> tuple[PlannedGemm, Outcome]:  # fmt: skip
    """Run the plan of a command's options, compare with float64, and write the CUDA file and the timeline to `folder`.

    A run on the GPU also simulates a problem of at most MAX_SIMULATED_SIZE for the timeline. `seed`: of the random
    arrays and of the simulated schedule. `schedules`: the most that are simulated; with a page, how many. `page`: the
    HTML file to step through the simulation of each schedule, from `first_step` on. Raises ArgumentError if the problem
    needs more memory than there is, or the page has no such step; OSError if a file cannot be written.
    """
    problem, groups = make_request(choices, sizes), choices["groups"]
    plan = make_plan(problem, choices)
    _require_memory(plan, sizes, backend)
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    if backend != "reference":
        source = folder / f"{plan.kernel.name}.cu"
        source.write_text(plan.kernel.source)
        files["source"] = str(source)
    progress("generating operands")
    request = random_arrays(problem, groups, seed)
    hazards, verdict, timings = list[Any](), None, dict[str, float]()
    if backend == "reference":
        progress("multiplying in float64")
        plan.run(request.a, request.b, request.out, **request.inputs)
    else:
        on_progress = partial(progress, "simulating")
        if backend == "cuda":
            progress("running on the GPU")
            timings = _time_on_gpu(plan, request)
            small_groups = groups and tuple(min(x, MAX_SIMULATED_SIZE // len(groups)) for x in groups)
            m, n, k = (min(size, MAX_SIMULATED_SIZE) for size in sizes)
            small_choices = {**choices, "groups": small_groups}
            small = random_arrays(make_request(small_choices, (m, n, k)), small_groups, seed)
            simulation = Plan(plan).simulate(
                small.a, small.b, small.out, **small.inputs, progress=on_progress, record=True
            )
        else:
            simulations = _simulate(plan, request, seed, schedules, on_progress, counters, stops=page is None)
            simulation = next((x for x in simulations if x.hazards), simulations[0])
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
            if page is not None and backend == "sim":
                page.parent.mkdir(parents=True, exist_ok=True)
                simulations[0].to_html(page, first_step, simulations[1:])
                files["page"] = str(page)
        elif page is not None or counters:
            click.echo("an empty D needs no kernel: there is no page, and nothing is counted", err=True)
    progress("comparing with float64")
    report = compare(plan, request)
    counts = tuple(KernelCounts.from_kernel(x, counters.lines(x)) for x in counters.kernels) if counters else ()
    return plan, Outcome(sizes, backend, choices["epilogue"], report, hazards, timings, files, counts, verdict)


def _simulate(
    plan: PlannedGemm, request: Request, seed: int, schedules: int, progress: Callable[[float], None],
    counters: Counters | None, *, stops: bool,
) -> list[Simulation]:  # fmt: skip
    """Simulate a plan on a request's arrays: at most `schedules`, with the seeds from `seed` on.

    `counters`: count what the first one does. `stops`: as soon as one speaks for all; else each schedule is run, and is
    a simulation of its own.
    """

    def simulate(seed: int, schedules: int = 1, counters: Counters | None = None) -> Simulation:
        return Plan(plan).simulate(
            request.a, request.b, request.out, **request.inputs, seed=seed, progress=progress, counters=counters,
            record=True, schedules=schedules,
        )  # fmt: skip

    if stops:
        return [simulate(seed, schedules, counters)]
    results = outputs_by_name(request.out).values()
    before = [x.copy() for x in results]
    simulations = [simulate(seed, counters=counters)]
    for other in range(seed + 1, seed + schedules):
        for x, saved in zip(results, before, strict=True):
            x[...] = saved
        simulations.append(simulate(other))
    return [replace(x, verdict=replace(x.verdict, schedules=schedules)) for x in simulations]


def _require_memory(plan: PlannedGemm, sizes: tuple[int, int, int], backend: str) -> None:
    """Raise ArgumentError if A, B, D and the float64 copies for checking them exceed this machine's memory."""
    m, n, k = sizes
    m *= plan.problem.batch
    arrays = plan.problem.a.dtype.bytes * (m * k + k * n) + plan.binding.out_dtype.bytes * m * n
    doubles = 4 * k * n + (m * k + m * n) * (backend == "reference")  # bounds.check's B, |B|, temporaries
    needed = arrays + max(4 * m * k, 8 * doubles)
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > available:
        raise ArgumentError(
            f"--m, --n, --k: {m} x {n} x {k} takes {needed / 1e9:.0f} GB of memory, and this machine has "
            f"{available / 1e9:.0f} GB; use smaller ones"
        )


def _time_on_gpu(plan: PlannedGemm, request: Request) -> dict[str, float]:
    """Run the plan on the GPU, copy the results back into those of the request, and return the time and TFLOP/s.

    The number of repeated runs is such that a GEMM at 500 TFLOP/s takes 0.2 s, at least 3.
    """
    from gemmsmith.backends.cuda import driver, kernel_loader
    from gemmsmith.backends.cuda.cuda_graph import time_calls
    from gemmsmith.backends.cuda.memory import DeviceArray

    def on_gpu(x: Any) -> Any:
        return DeviceArray.from_numpy(x) if isinstance(x, np.ndarray) else x

    driver.require_chip(0)
    results = outputs_by_name(request.out)
    with kernel_loader.device_guard(0):
        a, b, scale_a, scale_b = map(on_gpu, (request.a, request.b, request.scale_a, request.scale_b))
        operands = {name: on_gpu(x) for name, x in request.operands.items()}
        out = {name: on_gpu(x) for name, x in results.items()}
        workspace = DeviceArray.allocate(plan.launches.workspace_bytes)
        call = partial(
            plan.run, a, b, out if request.epilogue else out["out"], scale_a=scale_a, scale_b=scale_b,
            operands=operands, workspace=workspace,
        )  # fmt: skip
        call()
        for name, x in out.items():
            results[name][...] = x.numpy()
        repeats = max(3, int(0.2 * 5e14 / max(plan.problem.flops, 10**8)))
        time_calls(call, 0, max(1, repeats // 5))  # warm-up
        microseconds = time_calls(call, 0, repeats) / repeats
    return {"time_us": microseconds, "tflops": plan.problem.flops / microseconds / 1e6}
