"""Tuning on a GPU: the configs that the model ranks first are compiled, timed, and the fastest is kept."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np

from gemmsmith.arrays import Spec, row_major
from gemmsmith.binding import Binding
from gemmsmith.core.chip import HOPPER, Chip
from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import FP32, INT8, DType
from gemmsmith.core.errors import DeviceError, GemmsmithError
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import EpilogueSpec
from gemmsmith.tuning.choose import ranked
from gemmsmith.tuning.gpus import gpu_at
from gemmsmith.tuning.measure import Measured, compile_all, halving, settled
from gemmsmith.tuning.multistage import ranked_multistage
from gemmsmith.tuning.table import keep

L2_BYTES = 60 * 2**20
PATTERN = 1 << 22
"""Length of the pattern of random data that operands repeat, in elements."""


def tune(
    a: Spec, b: Spec, product: Binding, plan_with: Callable[[Config], Any], most: int, step: Callable[[str], None]
) -> list[Measured]:
    """As `gemmsmith.tune`; `plan_with` gives the Plan for a and b, whose product is bound, with a config. The data
    exceed the L2."""
    from gemmsmith.backends.cuda import driver, launcher

    chip, problem = require_gpu(), product.problem
    plans: dict[Config, Any] = {}
    for config in _promising(problem, chip, most):
        try:
            plans[config] = plan_with(config)
        except GemmsmithError:  # it does not suit these layouts
            continue
    kernels = ((p.source, p.kernel.name, chip.target) for p in plans.values())
    compile_all(kernels, lambda: step("compile"))
    with launcher.device_guard(0):
        bench = _Bench(a, b, product.output, plans)
        found = halving(list(plans), bench.measure, step=lambda: step("measure"))
    if found:
        keep(problem, found[0].config, found[0].us, driver.attributes(0).name)
    return found


def _promising(problem: Problem, chip: Chip, most: int) -> list[Config]:
    if chip == HOPPER and problem.a.dtype != FP32:
        return ranked(problem, most=most, gpu=gpu_at(0))
    return list(islice(ranked_multistage(problem, EpilogueSpec.bare(problem.d), chip), most))


def require_gpu() -> Chip:
    """The chip of the GPU to measure on. Raises DeviceError where there is none."""
    from gemmsmith.backends.cuda import driver

    if not driver.available():
        raise DeviceError(
            "tune: this machine has no GPU to measure on; use one with a GPU of 8.0 or later. "
            "What is not tuned has the model's choice, which needs none"
        )
    return driver.chip_at(0)


class _Bench:
    """Operands in so many copies that they exceed the L2, and a CUDA graph for each config."""

    def __init__(self, a: Spec, b: Spec, output: DType, plans: dict[Config, Any]) -> None:
        from gemmsmith.backends.cuda.graphs import Graph, Stream
        from gemmsmith.backends.cuda.memory import DeviceArray

        self.plans, self.stream = plans, Stream()
        self.graphs: dict[Config, tuple[Graph, DeviceArray]] = {}  # each with its workspace
        self.flops = 2 * a.shape[0] * a.shape[1] * b.shape[1]
        d = Spec((a.shape[0], b.shape[1]), output)
        size = sum(s.shape[0] * s.shape[1] * s.dtype.bytes for s in (a, b, d))
        rng = np.random.default_rng()
        pattern = rng.integers(-128, 128, PATTERN) if a.dtype == INT8 else rng.standard_normal(PATTERN, np.float32)
        count = max(2, -(-2 * L2_BYTES // max(size, 1)))
        patterns = [pattern.astype(s.dtype.numpy) for s in (a, b, d)]
        self.sets = [
            tuple(_filled(s, x, self.stream.handle) for s, x in zip((a, b, d), patterns, strict=True))
            for _ in range(count)
        ]

    def measure(self, config: Config, microseconds: float) -> float:
        """Microseconds of a call, measured over replays that take about `microseconds`."""
        from gemmsmith.backends.cuda.graphs import Graph
        from gemmsmith.backends.cuda.memory import DeviceArray

        if config not in self.graphs:
            plan = self.plans[config]
            space = DeviceArray.of_bytes(plan.workspace_bytes)

            def calls() -> None:
                for a, b, d in self.sets:
                    plan.run(a, b, d, workspace=space)

            calls()  # loads it
            self.graphs[config] = Graph(calls, self.stream), space
        graph, _ = self.graphs[config]
        return settled(graph.replay, microseconds, self.flops) / len(self.sets)


def _filled(spec: Spec, pattern: Any, stream: int) -> Any:
    """A device array like the stand-in, full of the pattern."""
    from gemmsmith.backends.cuda.memory import DeviceArray

    itemsize = spec.dtype.bytes
    strides = spec.strides or row_major(spec.shape)
    nbytes = (sum((n - 1) * s for n, s in zip(spec.shape, strides, strict=True)) + 1) * itemsize
    made = DeviceArray(nbytes, spec.shape, tuple(s * itemsize for s in strides), spec.dtype.numpy, stream)
    made.fill(pattern)
    return made
