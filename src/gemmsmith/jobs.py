"""One run of a route over given arrays: on a GPU, in the simulator, or by the reference."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmsmith.arrays import ArrayInfo, as_numpy, byte_range, describe
from gemmsmith.core.errors import ArgumentError
from gemmsmith.epilogue.device.outputs import is_result
from gemmsmith.launches import Launch, Route

if TYPE_CHECKING:
    from gemmsmith.backends.sim.hazards import Hazard
    from gemmsmith.backends.sim.timeline import Timeline
    from gemmsmith.epilogues import Bound

Progress = Callable[[float], None]
RESIDENT_CTAS = 4
"""CTAs that the simulator holds at once, so that small problems are persistent too."""


@dataclass(frozen=True)
class Simulation:
    """What a simulated product gave: D, hazards (none, in a right kernel), the timeline, and cycles of the model."""

    result: Any
    hazards: list[Hazard]
    timeline: Timeline
    cycles: int


@dataclass(frozen=True)
class Job:
    """A route, the arrays and numbers its launches point to, by their Pointers' names, and what the caller gets.

    `results` are by the names that the epilogue gives them.
    """

    route: Route
    arrays: Mapping[str, ArrayInfo | float]
    bound: Bound | None
    results: Mapping[str, Any]
    value: Any
    swapped: bool

    @property
    def places(self) -> dict[str, Any]:
        """The arrays' addresses, and the numbers."""
        return {name: x.address if isinstance(x, ArrayInfo) else x for name, x in self.arrays.items()}


def expect_values(bound: Bound, shape: tuple[int, ...]) -> None:
    """Nothing has no largest element."""
    for r in bound.graph.results:
        node = bound.graph.nodes[r.node]
        extreme = node.op == "reduce" and node.value[0] in ("max", "min")
        if extreme and 0 not in describe(bound.results[r.name], r.name).shape:
            raise ArgumentError(f"a, b: the product is empty, {shape}; {r.name}, a {node.value[0]}, has no value")


def reference(a: Any, b: Any, job: Job) -> None:
    """The results in float64, rounded as they are stored. Arrays on the CPU."""
    from gemmsmith.backends.reference.product import exact, rounded

    product = exact(as_numpy(a, "a"), as_numpy(b, "b"))
    if job.bound is None:
        values = {"out": product}
    else:
        from gemmsmith.backends.reference.epilogue import execute

        operands = {o.name: job.bound.operands[o.name] for o in job.bound.graph.operands}
        numbers = {n: float(x) if isinstance(x, Real) else as_numpy(x, n) for n, x in operands.items()}
        values = execute(job.bound.written, product, numbers)
    for name, out in job.results.items():
        as_numpy(out, name)[...] = rounded(values[name], describe(out, name).dtype)


def simulate(job: Job, seed: int, progress: Progress | None = None) -> Simulation:
    """Executes the launches on the CPU, events in the order of the seed. Arrays on the CPU. `progress` is told the
    fraction of the product's tensor-core cycles that is done, now and then."""
    from gemmsmith.backends.sim import GlobalMemory, Timeline
    from gemmsmith.backends.sim import simulate as execute
    from gemmsmith.backends.sim.hazards import Hazard
    from gemmsmith.lang.statements import Where

    memory = GlobalMemory()
    addresses: dict[str, int | float] = {}
    for name, x in job.arrays.items():
        if isinstance(x, ArrayInfo) and x.device != "cpu":
            raise ArgumentError(f"{name}: the simulator runs on the CPU; got an array on {x.place}")
        title = {"a": "A", "b": "B"}.get(name, name.removeprefix("in_").removeprefix("out_"))
        addresses[name] = _place(memory, x, title, writable=is_result(name)) if isinstance(x, ArrayInfo) else x
    if job.route.workspace_bytes:
        space = np.zeros(job.route.workspace_bytes, np.uint8)
        addresses["workspace"] = memory.place(space, "workspace", unwritten=True)
    hazards: list[Hazard] = []
    timeline, cycles = Timeline(), 0
    longest = 0
    total, worked = sum(_tensor_cycles(job.route, launch) for launch in job.route.launches), 0.0

    def work(done: float) -> None:
        nonlocal worked
        worked += done
        if progress:
            progress(worked / total)

    words = np.zeros(max(job.route.flag_bytes, 4) // 4, np.uint32)
    addresses["flags"] = memory.place(words, "flags", granule=4)
    for launch in job.route.launches:
        size = launch.kernel.cluster[0]
        clusters = min(launch.clusters, max(1, RESIDENT_CTAS // size))
        done = execute(
            launch.kernel, clusters * size, launch.at(addresses), memory, seed=seed, dependent=True, worked=work
        )
        hazards += done.hazards
        if done.cycles >= longest:  # the product's, not a packing's or a second step's
            timeline, longest = done.timeline, done.cycles
        cycles += done.cycles
    if words.any():
        hazards.append(Hazard("semaphore", f"{np.count_nonzero(words)} flags are left raised", Where("?", 0)))
    return Simulation(job.value, hazards, timeline, cycles)


def _tensor_cycles(route: Route, launch: Launch) -> int:
    """Of all the wgmmas of a launch: those of m64nNk16 take N / 2 each; 0 where it multiplies nothing."""
    tiles, k_tiles = launch.arguments.get("tiles", 0), launch.arguments.get("k_tiles", 0)
    assert isinstance(tiles, int)
    assert isinstance(k_tiles, int)
    return tiles * route.spec.multicast_size * k_tiles * math.prod(route.spec.config.tile) // (64 * 16 * 2)


def _place(memory: Any, info: ArrayInfo, name: str, *, writable: bool) -> int:
    """An array's bytes at a simulated address with the same alignment; gives where its first element is."""
    if 0 in info.shape:
        return int(memory.place(np.zeros(16, np.uint8), name, writable=writable))
    first, end = byte_range(info)
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * (end - first)).from_address(first))
    place = memory.place(raw, name, alignment_offset=first % 16, writable=writable, granule=min(2, info.itemsize))
    return int(place) + info.address - first
