"""Tuning on a GPU: compile and time the configs that the model ranks first, and save the fastest.

Kernels are compiled in parallel, then timed by successive halving.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from gemmsmith.arrays import Spec, row_major
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.chip import Chip
from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import INT8, DType
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.errors import CompileError, DeviceError, GemmsmithError
from gemmsmith.core.integers import ceil_div
from gemmsmith.core.problem import Problem
from gemmsmith.tuning.choose import rank_configs
from gemmsmith.tuning.choose_sm80 import rank_sm80
from gemmsmith.tuning.gpus import gpu_at
from gemmsmith.tuning.model import covers
from gemmsmith.tuning.tuned_table import save_tuned

_LOGGER = logging.getLogger("gemmsmith")
HALVING_ROUNDS = ((64, 1_500.0), (16, 6_000.0), (6, 20_000.0), (4, 1_050_000.0))
"""(Configs, microseconds per config) of each round of successive halving; chosen. The last duration is one period of an
H200's clock, which oscillates by 5 to 8 % at the power limit (benchmarks/speed/dense.py)."""
MIN_WARMUP_FLOPS = 5e9
"""FLOPs from which a warm-up of the same duration precedes the measurement, since the chip reaches the clock of its
power limit only after a while; chosen, not measured."""


class Measured(NamedTuple):
    """A config and its measured time per call in microseconds."""

    config: Config
    us: float


def steady_state_us(replay: Callable[[int], float], microseconds: float, flops: float) -> float:
    """Return the mean time of one replay, in microseconds.

    A GEMM of MIN_WARMUP_FLOPS or more runs as long before as it is measured: it may be limited by power, and the chip
    reaches its clock at the power limit only after a while.

    Args:
        replay: `replay(n)` runs n replays (of a CUDA graph) and returns the microseconds that they take together.
        microseconds: The total time that the measured replays take, about.
        flops: FLOPs of the GEMM that is measured.
    """
    repeats = max(2, round(microseconds / replay(1)))
    if flops >= MIN_WARMUP_FLOPS:
        replay(repeats)
    return replay(repeats) / repeats


def successive_halving(
    configs: Sequence[Config],
    measure: Callable[[Config, float], float],
    rounds: Iterable[tuple[int, float]] = HALVING_ROUNDS,
    on_progress: Callable[[], None] = lambda: None,
) -> list[Measured]:
    """Measure configs in rounds, of which each keeps the fastest ones and times them longer.

    Return all configs that were measured: those that reached the last round, fastest first, then those that were
    dropped before it, and so on.

    Args:
        configs: The configs.
        measure: `measure(config, us)` times calls for about `us` microseconds and returns the microseconds per call; a
            config for which it raises is left out.
        rounds: (Configs, microseconds per config) of each round, as in HALVING_ROUNDS.
        on_progress: Called after every measurement.
    """
    remaining, times, ranking = list(configs), dict[Config, float](), list[Config]()
    for count, microseconds in rounds:
        ranking = remaining[count:] + ranking
        remaining = remaining[:count]
        for config in remaining:
            try:
                times[config] = measure(config, microseconds)
            except Exception:  # a config that does not run on this GPU is left out
                times.pop(config, None)
            on_progress()
        remaining = sorted((c for c in remaining if c in times), key=times.__getitem__)
    return [Measured(config, times[config]) for config in remaining + ranking if config in times]


def compile_all(kernels: Iterable[tuple[str, ...]], on_progress: Callable[[], None] = lambda: None) -> None:
    """Compile kernels into the cubin cache, in parallel.

    A kernel is (source, name), for Hopper, or (source, name, target). `on_progress` is called after each.
    """
    unique_kernels = sorted(set(kernels))
    if not unique_kernels:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(unique_kernels), os.cpu_count() or 1), mp_context=context) as pool:
        for _ in pool.map(_compile, unique_kernels, chunksize=1):
            on_progress()


def _compile(kernel: tuple[str, ...]) -> None:
    """Compile one of `compile_all`'s kernels into the cubin cache, in a process of the pool."""
    from gemmsmith.backends.cuda.compiler import compile_source

    try:
        compile_source(*kernel)
    except CompileError:
        return  # the same error is raised when it is measured


L2_BYTES = 60 * 2**20
"""L2 of an H200 (datasheet), the largest of the GPUs considered; sets of operands exceed it twice."""
RANDOM_PATTERN_ELEMENTS = 1 << 22
"""Elements of the random pattern that operands repeat; chosen, not measured."""


def tune(
    request: Request, make_plan: Callable[[Request], Any], max_configs: int, on_progress: Callable[[str], None]
) -> list[Measured]:
    """Measure the `max_configs` configs that the model ranks first, save the fastest, and return all, fastest first.

    See `gemmsmith.tune`. The operands that are measured exceed the L2.

    Args:
        request: The GEMM.
        make_plan: Returns the PlannedGemm of a request.
        max_configs: Configs that are measured.
        on_progress: Called with "compile" or "measure" after each of these steps.
    """
    from gemmsmith.backends.cuda import driver, kernel_loader

    binding = bind(request)
    chip, problem = require_gpu(), binding.problem
    plans: dict[Config, Any] = {}
    for config in _top_candidates(problem, chip, max_configs):
        try:
            plans[config] = make_plan(request._replace(config=config))
        except GemmsmithError:  # it does not suit these layouts
            continue
    kernels = ((p.kernel.source, p.kernel.name, chip.target) for p in plans.values())
    compile_all(kernels, lambda: on_progress("compile"))
    with kernel_loader.device_guard(0):
        bench = _Bench(request.a, request.b, binding.out_dtype, plans)
        measured = successive_halving(list(plans), bench.measure, on_progress=lambda: on_progress("measure"))
    if measured:
        save_tuned(problem, measured[0].config, measured[0].us, driver.device_attributes(0).name)
        _LOGGER.info("tuned %s: %s, %.1f us, the fastest of %d", problem, *measured[0], len(measured))
    return measured


def _top_candidates(problem: Problem, chip: Chip, max_configs: int) -> list[Config]:
    """Return the `max_configs` configs with the least estimated time, which are measured.

    Splits of K are considered for all sizes, since a measurement decides.
    """
    if covers(problem.a.dtype, chip):
        return rank_configs(problem, limit=max_configs, gpu=gpu_at(0), any_splits=True)
    return list(islice(rank_sm80(problem, EpilogueSpec.identity(problem.d), chip), max_configs))


def require_gpu() -> Chip:
    """Return the chip of the GPU to measure on.

    Raises:
        DeviceError: There is no GPU.
    """
    from gemmsmith.backends.cuda import driver

    if not driver.is_available():
        raise DeviceError(
            "tune: this machine has no GPU to measure on; use one with a GPU of 8.0 or later. "
            "without tuning the cost model chooses, which needs no GPU"
        )
    return driver.get_device_chip(0)


class _Bench:
    """Measures configs: a CUDA graph per config multiplies several sets of operands in turn.

    Together the sets exceed the L2, so that each GEMM reads its operands from DRAM.
    """

    def __init__(self, a: Spec, b: Spec, output: DType, plans: dict[Config, Any]) -> None:
        """Allocate the sets of A, B and D, with random values.

        `a`, `b`: shapes and layouts. `output`: D's dtype. `plans`: the plan of each config.
        """
        from gemmsmith.backends.cuda.cuda_graph import CudaGraph, Stream
        from gemmsmith.backends.cuda.memory import DeviceArray

        self.plans, self.stream = plans, Stream()
        self.graphs: dict[Config, tuple[CudaGraph, DeviceArray]] = {}  # each with its workspace
        self.flops = 2 * a.shape[0] * a.shape[1] * b.shape[1]
        d = Spec((a.shape[0], b.shape[1]), output)
        size = sum(s.shape[0] * s.shape[1] * s.dtype.bytes for s in (a, b, d))
        rng = np.random.default_rng()
        pattern: Any = rng.standard_normal(RANDOM_PATTERN_ELEMENTS, np.float32)
        if a.dtype == INT8:
            pattern = rng.integers(-128, 128, RANDOM_PATTERN_ELEMENTS)
        count = max(2, ceil_div(2 * L2_BYTES, max(size, 1)))
        patterns = [pattern.astype(s.dtype.numpy) for s in (a, b, d)]
        self.sets = [
            tuple(_filled(s, x, self.stream.handle) for s, x in zip((a, b, d), patterns, strict=True))
            for _ in range(count)
        ]

    def measure(self, config: Config, microseconds: float) -> float:
        """Return the microseconds per GEMM of a config, measured over replays that take about `microseconds` in total.

        The first call for a config loads its kernel and captures its CUDA graph.
        """
        from gemmsmith.backends.cuda.cuda_graph import CudaGraph
        from gemmsmith.backends.cuda.memory import DeviceArray

        if config not in self.graphs:
            plan = self.plans[config]
            workspace = DeviceArray.allocate(plan.launches.workspace_bytes)

            def calls() -> None:
                for a, b, d in self.sets:
                    plan.run(a, b, d, workspace=workspace)

            calls()  # loads the kernel
            self.graphs[config] = CudaGraph(calls, self.stream), workspace
        graph, _ = self.graphs[config]
        return steady_state_us(graph.time_replays, microseconds, self.flops) / len(self.sets)


def _filled(spec: Spec, pattern: Any, stream: int) -> Any:
    """Return a device array of the spec's shape and layout whose memory repeats the numpy array `pattern`.

    `stream`: handle of the CUDA stream that uses it.
    """
    from gemmsmith.backends.cuda.memory import DeviceArray

    itemsize = spec.dtype.bytes
    strides = spec.strides or row_major(spec.shape)
    nbytes = (sum((n - 1) * s for n, s in zip(spec.shape, strides, strict=True)) + 1) * itemsize
    array = DeviceArray(nbytes, spec.shape, tuple(s * itemsize for s in strides), spec.dtype.numpy, stream)
    array.fill(pattern)
    return array
