"""Execution of launches in the simulator, on arrays on the CPU."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from gemmsmith.arrays import ArrayInfo, byte_range
from gemmsmith.backends.sim.engine import SimulationResult, simulate
from gemmsmith.backends.sim.execute.counters import Counters
from gemmsmith.backends.sim.memory.memory import GlobalMemory
from gemmsmith.backends.sim.report.hazards import Hazard
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.scalars import round_up
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.launch import Launch, Launches
from gemmsmith.lang.location import SourceLocation

GUARD_BYTES = 256
"""The second of two arrays in one buffer begins at a multiple of this."""
MAX_RESIDENT_CTAS = 4
"""Resident CTAs of a persistent kernel, few so that small problems exercise its tile loop. Chosen; not measured."""


def run(
    launches: Launches, arguments: Mapping[str, ArrayInfo | float], seed: int,
    progress: Callable[[float], None] | None, counters: Counters | None = None, *, record: bool = False,
    schedules: int = 1, dependent: bool = True,
) -> SimulationResult:  # fmt: skip
    """Execute the launches one after the other; return their hazards and cycles.

    `arguments`: arrays on the CPU, to which results are written, and numbers, by their Pointers' names. `seed`: the
    first schedule; 0 follows the cost model. At most `schedules` seeds are run, fewer if one has hazards, or proves
    that every schedule does the same; results and cycles are those of the last one. `progress` is called with the
    completed fraction of a schedule's tensor-core cycles. `dependent`: the first kernel may start before the stream's
    previous one has finished.
    """
    arrays = [x for x in arguments.values() if isinstance(x, ArrayInfo)]
    writable = [_bytes_of(x)[1] for x in arrays if x.writable and 0 not in x.shape and x.device == "cpu"]
    before = [x.copy() for x in writable] if schedules > 1 else []
    result = _run_schedule(launches, arguments, seed, progress, counters, record, dependent)
    while result.verdict.scope == "schedules run" and result.schedules < schedules:
        for x, saved in zip(writable, before, strict=True):
            x[...] = saved
        other = _run_schedule(launches, arguments, seed + result.schedules, progress, counters, record, dependent)
        result = result.followed_by(other)
    return result


def _run_schedule(
    launches: Launches, arguments: Mapping[str, ArrayInfo | float], seed: int,
    progress: Callable[[float], None] | None, counters: Counters | None, record: bool, dependent: bool,
) -> SimulationResult:  # fmt: skip
    """Execute the launches with one seed, and check that results are written and flags reset.

    The simulated global memory holds the arrays, the workspace and the flags.
    """
    if launches.swapped:  # the kernels compute D^T = B^T A^T
        arguments = {**arguments, "a": arguments["b"], "b": arguments["a"]}
    memory, are_whole = GlobalMemory(), _are_written_whole(launches.spec)
    addresses: dict[str, int | float] = {}
    interleave_strides: dict[str, int] = {}
    for name, x in arguments.items():
        if isinstance(x, ArrayInfo) and x.device != "cpu":
            raise ArgumentError(f"{name}: the simulator runs on the CPU; got an array on {x.device_name}")
        title = {"a": "A", "b": "B"}.get(name, name.removeprefix("in_").removeprefix("out_"))
        if isinstance(x, ArrayInfo) and x.interleave_stride and 0 not in x.shape:
            addresses[name], interleave_strides[name] = _address_of_copies(memory, x, title)
        else:
            addresses[name] = _address(memory, x, title, are_whole) if isinstance(x, ArrayInfo) else x
    if launches.workspace_bytes:
        space = np.full(launches.workspace_bytes, 0xFF, np.uint8)
        addresses["workspace"] = memory.add_buffer(space, "workspace", uninitialized=True)
    flags = np.zeros(max(launches.flag_bytes, 4) // 4, np.uint32)
    addresses["flags"] = memory.add_buffer(flags, "flags")
    done_cycles = 0.0
    total = (sum(_tensor_cycles(launches.spec, launch) for launch in launches.all) if launches.spec else 0) or 1

    def on_mma_cycles(cycles: float) -> None:
        nonlocal done_cycles
        done_cycles += cycles
        if progress:
            progress(done_cycles / total)

    results = []
    for i, launch in enumerate(launches.all):
        size = launch.kernel.cluster[0]
        max_clusters = max(1, MAX_RESIDENT_CTAS // size) if launch.kernel.persistent else launch.work_clusters
        grid = size * min(launch.work_clusters, max_clusters)
        overlaps = (dependent or i > 0) and launch.kernel.chip.supports("sm_90")  # programmatic dependent launch
        with np.errstate(all="ignore"):  # infinities and NaN are results like others
            result = simulate(
                launch.kernel, grid, launch.resolve(addresses, interleave_strides), memory, seed=seed,
                is_dependent_launch=overlaps, on_mma_cycles=on_mma_cycles, counters=counters, record=record,
            )  # fmt: skip
        results.append(result)
    hazards = [hazard for result in results for hazard in result.hazards]
    if flags.any():
        message = f"{np.count_nonzero(flags)} flag words are nonzero after the last kernel"
        hazards.append(Hazard("flags not reset", message, SourceLocation("?", 0)))
    if not hazards and are_whole:  # a kernel that was aborted leaves results unwritten
        written = ((x, addresses[name]) for name, x in arguments.items() if isinstance(x, ArrayInfo) and x.writable)
        hazards = [hazard for x, address in written for hazard in _unwritten(memory, x, address)]
    records = tuple(x for result in results for x in result.records)
    dependences = dict.fromkeys(x for result in results for x in result.time_dependences)
    return SimulationResult(hazards, sum(result.cycles for result in results), list(dependences), records)


def _tensor_cycles(spec: KernelSpec, launch: Launch) -> int:
    """Return the tensor-core cycles of all wgmmas of a launch; 0 if it multiplies nothing.

    An m64nNk16 takes N / 2 cycles, so a product of m x n x k takes m * n * k / (64 * 16 * 2).
    """
    tiles, k_tiles = launch.arguments.get("cluster_tiles", 0), launch.arguments.get("k_tiles", 0)
    assert isinstance(tiles, int)
    assert isinstance(k_tiles, int)
    # A tile of a cluster is one tile of each of `multicast_size` CTAs.
    return tiles * spec.multicast_size * k_tiles * math.prod(spec.config.tile) // (64 * 16 * 2)


def _address(memory: GlobalMemory, info: ArrayInfo, name: str, is_written_whole: bool) -> int:
    """Add an array's bytes to `memory` with the same alignment; return the address of its first element.

    `is_written_whole`: kernels write all of a result; reads of it before are then reported.
    """
    if 0 in info.shape:
        return int(memory.add_buffer(np.zeros(16, np.uint8), name, writable=info.writable))
    first, raw = _bytes_of(info)
    address = memory.add_buffer(
        raw, name, alignment_offset=first % 16, writable=info.writable,
        uninitialized=info.writable and is_written_whole,
    )  # fmt: skip
    return int(address) + info.address - first


def _are_written_whole(spec: KernelSpec | None) -> bool:
    """Return whether kernels write all of their results: those of a GEMM, unless its grouping leaves out rows."""
    if spec is None:
        return False
    grouping = spec.grouping
    return not grouping or (not grouping.is_masked and grouping.zero_fill and not grouping.scatters)


def _unwritten(memory: GlobalMemory, info: ArrayInfo, address: float) -> list[Hazard]:
    buffer = memory.buffer_at(int(address))
    if buffer is None or 0 in info.shape:
        return []
    # One bool per byte from the first element on; the shadow has one per cell of `granule` bytes.
    written = np.repeat(buffer.shadow.initialized_cells(), buffer.shadow.granule)[int(address) - buffer.address :]
    strides = (*(stride * info.itemsize for stride in info.strides), 1)
    elements = as_strided(written, (*info.shape, info.itemsize), strides).all(axis=-1)
    if elements.all():
        return []
    message = f"{elements.size - np.count_nonzero(elements)} of {elements.size} elements of {buffer.name} are unwritten"
    return [Hazard("unwritten result", message, SourceLocation("?", 0), subject=buffer.name)]


def _address_of_copies(memory: GlobalMemory, info: ArrayInfo, name: str) -> tuple[int, int]:
    """Add copies of two arrays whose columns alternate to one buffer, since one instruction may access both.

    Returns the address of the array at the lower address, and the distance in bytes to the other one.
    """
    (first, lower), (_, higher) = map(_bytes_of, sorted(info.parts, key=lambda part: part.address))
    distance = round_up(len(lower), GUARD_BYTES)
    both = np.zeros(distance + len(higher), np.uint8)
    both[: len(lower)], both[distance:] = lower, higher
    return int(memory.add_buffer(both, name, writable=False)) + info.address - first, distance


def _bytes_of(info: ArrayInfo) -> tuple[int, Any]:
    """Return the address and the bytes of a nonempty array in memory."""
    first, end = byte_range(info)
    return first, np.ctypeslib.as_array((ctypes.c_uint8 * (end - first)).from_address(first))
