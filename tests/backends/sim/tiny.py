"""Tiny kernels for the simulator's tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gemmsmith import hw
from gemmsmith.backends.sim import GlobalMemory, SimulationResult, simulate
from gemmsmith.backends.sim.execute.counters import Counters
from gemmsmith.backends.sim.report.record import Record as Recorded
from gemmsmith.core.arguments import TensorMap
from gemmsmith.core.dtypes import FP32
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import RegisterArray, Value

Record = Callable[[Builder, Value], None]


def kernel(record: Record, threads: int, cluster: int = 1) -> Kernel:
    """The kernel that `record(k, out)` records; its arguments are `out`, a pointer, and `map`."""
    with Builder("k", threads=threads, cluster=(cluster, 1, 1)) as k:
        out = k.pointer("out")
        record(k, out)
        return k.finish()


def run(
    record: Record, threads: int = 128, grid: int = 1, cluster: int = 1, seed: int = 0, out: np.ndarray | None = None,
    counters: Counters | None = None, observe: bool = False,
) -> SimulationResult:  # fmt: skip
    """Executes it on `out`, 4096 bytes of zeros where not given; `map` is a box of 32 x 4 words at its start."""
    return execute(kernel(record, threads, cluster), grid, seed, out, counters, observe)


def execute(
    kernel: Kernel, grid: int, seed: int, out: np.ndarray | None = None, counters: Counters | None = None,
    observe: bool = False,
) -> SimulationResult:  # fmt: skip
    """The same for a kernel that is recorded already."""
    memory = GlobalMemory()
    address = memory.add_buffer(np.zeros(4096, np.uint8) if out is None else out, "out")
    box = TensorMap(address, FP32, (32, 4, 1), (128, 512), (32, 4, 1), 0)
    return simulate(
        kernel, grid, {"out": address, "map": box}, memory, seed=seed, counters=counters, record=observe
    )  # fmt: skip


def recorded(record: Record, threads: int = 128, grid: int = 1, cluster: int = 1, seed: int = 0) -> Recorded:
    """What happens in it."""
    (found,) = run(record, threads, grid, cluster, seed, observe=True).records
    return found


def kinds(result: SimulationResult) -> set[str]:
    return {h.kind for h in result.hazards}


def word(k: Builder, value: Value) -> RegisterArray:
    """One register that holds `value`."""
    register = k.registers(U32, 1, "word")
    register[0] = value
    return register


def wait_for_ever(k: Builder, out: Value) -> None:
    """All threads wait for a barrier, `full`, of whose three arrivals one happens."""
    barrier = k.shared(8, name="full")
    with k.when(k.thread == 0):
        hw.mbarrier_init(barrier[0], 3)
    hw.sync_threads()
    with k.when(k.thread == 0):
        hw.mbarrier_arrive(barrier[0])
    hw.mbarrier_wait(barrier[0], 0)
