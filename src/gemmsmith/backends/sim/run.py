"""Running launches in the simulator, over arrays on the CPU."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gemmsmith.arrays import ArrayInfo, byte_range
from gemmsmith.backends.sim.counters import Counters
from gemmsmith.backends.sim.engine import SimulationResult, simulate
from gemmsmith.backends.sim.hazards import Hazard
from gemmsmith.backends.sim.memory import GlobalMemory
from gemmsmith.backends.sim.timeline import Timeline
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.launch import Launch, Launches
from gemmsmith.lang.statements import Where

RESIDENT_CTAS = 4
"""CTAs that the simulator holds at once, so that small problems are persistent too."""


def run(
    launches: Launches, arguments: Mapping[str, ArrayInfo | float], seed: int,
    progress: Callable[[float], None] | None, counters: Counters | None = None,
) -> SimulationResult:  # fmt: skip
    """Executes the launches, events in the order of the seed: the hazards of all, the timeline of the longest, and the
    cycles in all. `arguments`: arrays on the CPU and numbers, by the names of their Pointers. `progress` is told the
    fraction of the product's tensor-core cycles that is done, now and then; `counters` count if given."""
    if launches.swapped:
        arguments = {**arguments, "a": arguments["b"], "b": arguments["a"]}
    memory = GlobalMemory()
    addresses: dict[str, int | float] = {}
    for name, x in arguments.items():
        if isinstance(x, ArrayInfo) and x.device != "cpu":
            raise ArgumentError(f"{name}: the simulator runs on the CPU; got an array on {x.device_name}")
        title = {"a": "A", "b": "B"}.get(name, name.removeprefix("in_").removeprefix("out_"))
        addresses[name] = _address(memory, x, title) if isinstance(x, ArrayInfo) else x
    if launches.workspace_bytes:
        space = np.zeros(launches.workspace_bytes, np.uint8)
        addresses["workspace"] = memory.place(space, "workspace", unwritten=True)
    words = np.zeros(max(launches.flag_bytes, 4) // 4, np.uint32)
    addresses["flags"] = memory.place(words, "flags")
    spec, worked = launches.spec, 0.0
    total = sum(_tensor_cycles(spec, launch) for launch in launches.all) if spec else 1

    def work(done: float) -> None:
        nonlocal worked
        worked += done
        if progress:
            progress(worked / total)

    results = []
    for launch in launches.all:
        size = launch.kernel.cluster[0]
        most = max(1, RESIDENT_CTAS // size) if launch.kernel.persistent else launch.clusters
        grid = size * min(launch.clusters, most)
        early = launch.kernel.chip.has("sm_90")  # it may start while those before it run
        with np.errstate(all="ignore"):  # infinities and NaN are results like others
            done = simulate(launch.kernel, grid, launch.at(addresses), memory, seed=seed, dependent=early, worked=work,
                            counters=counters)  # fmt: skip
        results.append(done)
    hazards = [hazard for done in results for hazard in done.hazards]
    if words.any():
        hazards.append(Hazard("semaphore", f"{np.count_nonzero(words)} flags are left raised", Where("?", 0)))
    longest = max(reversed(results), key=lambda done: done.cycles, default=None)
    timeline = longest.timeline if longest else Timeline()
    return SimulationResult(hazards, timeline, sum(done.cycles for done in results))


def _tensor_cycles(spec: KernelSpec, launch: Launch) -> int:
    """Of all the wgmmas of a launch: those of m64nNk16 take N / 2 each; 0 where it multiplies nothing."""
    tiles, k_tiles = launch.arguments.get("tiles", 0), launch.arguments.get("k_tiles", 0)
    assert isinstance(tiles, int)
    assert isinstance(k_tiles, int)
    return tiles * spec.multicast_size * k_tiles * math.prod(spec.config.tile) // (64 * 16 * 2)


def _address(memory: GlobalMemory, info: ArrayInfo, name: str) -> int:
    """An array's bytes at a simulated address with the same alignment; gives where its first element is."""
    if 0 in info.shape:
        return int(memory.place(np.zeros(16, np.uint8), name, writable=info.writable))
    first, end = byte_range(info)
    raw: Any = np.ctypeslib.as_array((ctypes.c_uint8 * (end - first)).from_address(first))
    address = memory.place(raw, name, alignment_offset=first % 16, writable=info.writable)
    return int(address) + info.address - first
