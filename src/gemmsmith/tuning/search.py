"""Tuning on a GPU: compile and time the configs that the model ranks first, and save the fastest.

Kernels are compiled in parallel, then timed by successive halving.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from gemmsmith.arrays import Spec, row_major
from gemmsmith.backends.cuda.compiler import is_cached
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.chip import HOPPER, Chip
from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import INT8, DType
from gemmsmith.core.errors import DeviceError, GemmsmithError
from gemmsmith.core.scalars import ceil_div
from gemmsmith.tuning.choice import candidates, choose_config
from gemmsmith.tuning.choose import sustained_us
from gemmsmith.tuning.gpus import gpu_at
from gemmsmith.tuning.measured_configs import Entry, key_of, save

_LOGGER = logging.getLogger("gemmsmith")
CLOCK_PERIOD_US = 1_050_000.0
"""Microseconds of a period of an H200's clock, which oscillates by 5 to 8 % at the power limit
(benchmarks/speed/dense.py)."""
HALVING_ROUNDS = ((64, 1_500.0), (16, 6_000.0), (6, 20_000.0), (4, CLOCK_PERIOD_US))
"""(Configs, microseconds per config) of each round of successive halving; chosen."""
MIN_WARMUP_FLOPS = 5e9
"""FLOPs from which a warm-up of the same duration precedes the measurement, since the chip reaches the clock of its
power limit only after a while; chosen, not measured."""


class Measured(NamedTuple):
    """A config and its measured time per call in microseconds."""

    config: Config
    us: float


def steady_state_us(replay: Callable[[int], float], microseconds: float, flops: float) -> float:
    """Return the mean time of one replay, in microseconds, over replays of about `microseconds` in total.

    `replay(n)` runs n replays (of a CUDA graph) and returns the microseconds that they take together. A GEMM of
    MIN_WARMUP_FLOPS or more runs as long before as it is measured: it may be limited by power, and the chip reaches its
    clock at the power limit only after a while.
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
    kept: Config | None = None,
    sustained: Callable[[Config, float], float] = lambda config, us: us,
) -> list[Measured]:
    """Measure configs in rounds, of which each keeps the fastest ones and times them longer.

    Rounds of equally many configs repeat the first of them, in alternating order, and the median counts. Return all
    configs that were measured: those that reached the last round, fastest first, then those that were dropped before
    it, and so on.

    `measure(config, us)` times calls for about `us` microseconds and returns the microseconds per call; a config for
    which it raises is left out. `rounds`: as HALVING_ROUNDS. `on_progress` is called after every measurement. `kept`
    reaches the last round, however slow it is. `sustained(config, us)`: the time that counts, given that of blocks
    shorter than CLOCK_PERIOD_US.
    """
    remaining, times, ranking = list(configs), dict[Config, float](), list[Config]()
    for (count, microseconds), same in groupby(rounds):
        kept_ones = [c for c in remaining[count:] if c == kept]
        ranking = [c for c in remaining[count:] if c != kept] + ranking
        remaining = remaining[:count] + kept_ones
        samples: dict[Config, list[float]] = {config: [] for config in remaining}
        for i, _ in enumerate(same):
            for config in remaining[:: -1 if i % 2 else 1]:
                try:
                    samples[config].append(measure(config, microseconds))
                except Exception:  # a config that does not run on this GPU is left out
                    samples.pop(config, None)
                    times.pop(config, None)
                on_progress()
            remaining = [config for config in remaining if config in samples]
        times |= {config: statistics.median(us) for config, us in samples.items()}
        is_short = microseconds < CLOCK_PERIOD_US
        counting = {config: sustained(config, times[config]) if is_short else times[config] for config in remaining}
        remaining.sort(key=counting.__getitem__)
    return [Measured(config, times[config]) for config in remaining + ranking if config in times]


WORKER = "gemmsmith.backends.cuda.compile_worker"
"""The module that `compile_all` runs in processes."""


def compile_all(kernels: Iterable[tuple[str, ...]], on_progress: Callable[[], None] = lambda: None) -> None:
    """Compile kernels into the cubin cache, in processes of their own; those that are there already are left out.

    A kernel is (source, name), for Hopper, or (source, name, architecture). NVRTC compiles one kernel at a time in a
    process. A process that fails is no error: its kernels are compiled when they are loaded.
    """
    complete = dict.fromkeys((*kernel, HOPPER.target)[:3] for kernel in kernels)
    missing = [kernel for kernel in complete if not is_cached(kernel[0], kernel[2])]
    count = min(len(missing), os.cpu_count() or 1)
    program = f"import runpy, sys; sys.path[:] = {sys.path}; runpy.run_module({WORKER!r}, run_name='__main__')"
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", program], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(count)
    ]  # fmt: skip
    for i, worker in enumerate(workers):  # all have begun: a pipe that is full waits for its reader's start
        assert worker.stdin
        with suppress(OSError):  # it has ended
            worker.stdin.write(json.dumps(missing[i::count]))
            worker.stdin.close()
    for worker in workers:
        with worker:  # waits for its end
            assert worker.stdout
            for _ in worker.stdout:
                on_progress()


L2_BYTES = 60 * 2**20
"""L2 of an H200 (datasheet), the largest of the GPUs considered; sets of operands exceed it twice."""
RANDOM_PATTERN_ELEMENTS = 1 << 22
"""Elements of the random pattern that operands repeat; chosen, not measured."""


def tune(
    request: Request, make_plan: Callable[[Request], Any], max_configs: int, on_progress: Callable[[str], None]
) -> list[Measured]:
    """Measure the `max_configs` configs that the model ranks first, save the fastest, and return all, fastest first.

    See `gemmsmith.tune`. The request has no epilogue. The operands that are measured exceed the L2. `on_progress` is
    called with "compile" or "measure" after each of these steps.
    """
    from gemmsmith.backends.cuda import driver, kernel_loader

    binding = bind(request)
    chip, problem = require_gpu(), binding.problem
    untuned = choose_config(binding, chip, gpu_at(0)).config
    configs = candidates(binding, chip, gpu_at(0), untuned, max_configs, any_order=True)
    with kernel_loader.device_guard(0):
        make_sets = partial(random_sets, request.a, request.b, binding.out_dtype)
        measured = measure(request, configs, make_plan, make_sets, HALVING_ROUNDS, on_progress)
    if measured:
        key, gpu = key_of(problem, binding.spec, chip), driver.device_attributes(0).name
        save([Entry(key, problem.m, measured[0].config, measured[0].us, gpu)])
        _LOGGER.info("tuned %s: %s, %.1f us, the fastest of %d", problem, *measured[0], len(measured))
    return measured


def measure(
    request: Request, configs: Iterable[Config], make_plan: Callable[[Request], Any],
    make_sets: Callable[[int], Sequence[Mapping[str, Any]]], rounds: Iterable[tuple[int, float]],
    on_progress: Callable[[str], None] = lambda step: None, kept: Config | None = None,
) -> list[Measured]:  # fmt: skip
    """Compile and time configs of a request on the current device; return those that ran, fastest first.

    Args:
        request: What is asked for.
        configs: The configs; those that cannot compute it are left out.
        make_plan: Returns the PlannedGemm of a request.
        make_sets: Returns arguments of `PlannedGemm.run`, which are used in turn, given the handle of the stream that
            their arrays are used on.
        rounds: As in `successive_halving`.
        on_progress: Called with "compile" or "measure" after each of these steps.
        kept: As in `successive_halving`.
    """
    plans: dict[Config, Any] = {}
    for config in configs:
        try:
            plans[config] = make_plan(request._replace(config=config))
        except GemmsmithError:  # it does not suit these layouts
            continue
    compile_all(
        ((p.kernel.source, p.kernel.name, p.kernel.chip.target) for p in plans.values()), lambda: on_progress("compile")
    )
    binding = bind(request)
    bench = _Bench(make_sets, plans, binding.problem.flops)
    sustained = partial(sustained_us, binding.problem, binding.spec)
    try:
        return successive_halving(list(plans), bench.measure, rounds, lambda: on_progress("measure"), kept, sustained)
    finally:
        bench.stream.synchronize()  # before the sets are freed: a config that failed may still run


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
    """Measures configs: a CUDA graph per config computes several sets of operands in turn."""

    def __init__(
        self, make_sets: Callable[[int], Sequence[Mapping[str, Any]]], plans: dict[Config, Any], flops: float
    ) -> None:
        """Make the sets.

        `make_sets`: as in `measure`. `plans`: the plan of each config. `flops`: of a call.
        """
        from gemmsmith.backends.cuda.cuda_graph import CudaGraph, Stream
        from gemmsmith.backends.cuda.memory import DeviceArray

        self.plans, self.flops, self.stream = plans, flops, Stream()
        self.sets = make_sets(self.stream.handle)
        self.graphs: dict[Config, tuple[CudaGraph, DeviceArray]] = {}  # each with its workspace

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
                for arguments in self.sets:
                    plan.run(**arguments, workspace=workspace)

            calls()  # loads the kernel
            self.graphs[config] = CudaGraph(calls, self.stream), workspace
        graph, _ = self.graphs[config]
        return steady_state_us(graph.time_replays, microseconds, self.flops) / len(self.sets)


def random_sets(a: Spec, b: Spec, output: DType, stream: int) -> list[dict[str, Any]]:
    """Return sets of A, B and D with random values, which exceed the L2 together, so that each GEMM reads from DRAM."""
    specs = {"a": a, "b": b, "out": Spec((a.shape[0], b.shape[1]), output)}
    size = sum(s.shape[0] * s.shape[1] * s.dtype.bytes for s in specs.values())
    return [random_device_arrays(specs, stream) for _ in range(max(2, ceil_div(2 * L2_BYTES, max(size, 1))))]


def random_device_arrays(specs: Mapping[str, Spec], stream: int) -> dict[str, Any]:
    """Return arrays on the current device with these shapes and layouts, and random values, by name."""
    return {name: _filled(s, _pattern(s.dtype), stream) for name, s in specs.items()}


@lru_cache(maxsize=8)
def _pattern(dtype: DType) -> Any:
    """Return random values of a dtype on the host, which arrays repeat."""
    rng = np.random.default_rng()
    if dtype == INT8:
        return rng.integers(-128, 128, RANDOM_PATTERN_ELEMENTS).astype(dtype.numpy)
    return rng.standard_normal(RANDOM_PATTERN_ELEMENTS, np.float32).astype(dtype.numpy)


def _filled(spec: Spec, pattern: Any, stream: int) -> Any:
    """Return a device array of the spec's shape and layout whose memory repeats the numpy array `pattern`."""
    from gemmsmith.backends.cuda.memory import DeviceArray

    itemsize = spec.dtype.bytes
    strides = spec.strides or row_major(spec.shape)
    nbytes = (sum((n - 1) * s for n, s in zip(spec.shape, strides, strict=True)) + 1) * itemsize
    array = DeviceArray(nbytes, spec.shape, tuple(s * itemsize for s in strides), spec.dtype.numpy, stream)
    array.fill(pattern)
    return array
