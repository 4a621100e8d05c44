"""A grid as it starts: CTAs with their shared memory, and the units that their threads form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from gemmsmith.backends.sim.barriers import ThreadBarrier
from gemmsmith.backends.sim.clocks import GRID_BEFORE, Warp
from gemmsmith.backends.sim.cta import Cluster, Cta
from gemmsmith.backends.sim.memory import SHARED_BASE
from gemmsmith.backends.sim.shadow import Shadow
from gemmsmith.backends.sim.state import State
from gemmsmith.backends.sim.unit import Unit
from gemmsmith.core.errors import ArgumentError, KernelError
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.statements import Block, Role, children


def check(kernel: Kernel, grid: int, arguments: Mapping[str, object]) -> None:
    """What a driver would refuse."""
    if kernel.cluster[1:] != (1, 1):
        raise KernelError(f"{kernel.name}: cluster {kernel.cluster}; the simulator takes clusters along x only")
    if grid % kernel.cluster[0]:
        raise ArgumentError(f"grid: got {grid} CTAs; use a multiple of the cluster's {kernel.cluster[0]}")
    missing = [p.name for p in kernel.parameters if p.name not in arguments]
    if missing:
        raise ArgumentError(f"arguments: {', '.join(map(str, missing))} missing; {kernel.name} takes them")


def start(state: State, *, dependent: bool) -> dict[Cta, list[Unit]]:
    """All CTAs, by index, and their units. `dependent`: the grids before this one may still run."""
    kernel, size = state.kernel, state.kernel.cluster[0]
    threads = _units(kernel)
    units: dict[Cta, list[Unit]] = {}
    for first in range(0, state.grid, size):
        cluster = Cluster(ThreadBarrier("cluster barrier", size * kernel.threads))
        cluster.ctas += [_cta(state, cluster, first + rank, rank, dependent) for rank in range(size)]
        for cta in cluster.ctas:
            units[cta] = [Unit(state, cta, *where) for where in threads]
    return units


def _cta(state: State, cluster: Cluster, index: int, rank: int, dependent: bool) -> Cta:
    kernel = state.kernel
    shared = np.full(SHARED_BASE + -(-kernel.shared_bytes // 16) * 16, 0xFF, np.uint8)
    shadow = Shadow(len(shared), state.hazards, written=False)
    for slots in (b for b in kernel.buffers if b.partial_writes):
        shadow.allow_unwritten(SHARED_BASE + slots.offset, slots.bytes)
    count = kernel.threads // 32
    warps = [Warp(index * count + i, state.agents) for i in range(count)]
    for warp in warps:
        warp.all.clock.done = 0 if dependent else GRID_BEFORE
    return Cta(index, rank, cluster, shared, shadow, warps)


def _units(kernel: Kernel) -> list[tuple[int, int, str]]:
    """(first thread, threads, name): a warpgroup each, or its four warps where its code has warp roles."""
    units = []
    for first in range(0, kernel.threads, 128):
        roles = list(_roles(kernel.body, first // 128))
        role = next((r for r in roles if r.unit == "warpgroup"), None)
        warps = [r for r in roles if r.unit == "warp"]
        if warps or kernel.threads - first < 128:
            named = {s.first: s.name for s in warps if s.name}
            for warp in range(min(4, (kernel.threads - first) // 32)):
                name = f"{named[warp]} warp" if warp in named else f"warpgroup {first // 128} warp {warp}"
                units.append((first + 32 * warp, 32, name))
        else:
            name = f"{role.name} " if role else ""
            units.append((first, 128, f"{name}warpgroup {first // 128 - (role.first if role and role.name else 0)}"))
    return units


def _roles(block: Block, warpgroup: int) -> Iterator[Role]:
    """All roles, at any depth, that a warpgroup or its warps take."""
    for statement in block.statements:
        if isinstance(statement, Role):
            if statement.unit == "warpgroup" and not 0 <= warpgroup - statement.first < statement.count:
                continue
            yield statement
        for child in children(statement):
            yield from _roles(child, warpgroup)
