"""Creation of a grid: its CTAs with shared memory, and the lockstep groups of their threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from gemmsmith.backends.sim.memory.clocks import PREREQUISITE_GRIDS_BIT, Warp
from gemmsmith.backends.sim.memory.memory import SHARED_BASE
from gemmsmith.backends.sim.memory.shadow import Shadow
from gemmsmith.backends.sim.state.cta import Cluster, Cta, ThreadBarrier
from gemmsmith.backends.sim.state.grid_state import GridState
from gemmsmith.backends.sim.state.lockstep_group import LockstepGroup
from gemmsmith.core.errors import ArgumentError, KernelError
from gemmsmith.core.scalars import round_up
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.statements import Block, If, Role, Statement, children, instructions
from gemmsmith.lang.values import Builtin, Operation, Value


def check_launch(kernel: Kernel, grid: int, arguments: Mapping[str, object]) -> None:
    """Raise KernelError or ArgumentError for a launch that the driver would refuse or the simulator cannot execute."""
    if kernel.cluster[1:] != (1, 1):
        raise KernelError(f"{kernel.name}: cluster {kernel.cluster}; the simulator takes clusters along x only")
    if grid % kernel.cluster[0]:
        raise ArgumentError(f"grid: got {grid} CTAs; use a multiple of the cluster's {kernel.cluster[0]}")
    missing = [p.name for p in kernel.parameters if p.name not in arguments]
    if missing:
        raise ArgumentError(f"arguments: {', '.join(map(str, missing))} missing; {kernel.name} takes them")


def create_ctas(state: GridState, *, is_dependent_launch: bool) -> dict[Cta, list[LockstepGroup]]:
    """Return all CTAs, in order, with their lockstep groups."""
    kernel, size = state.kernel, state.kernel.cluster[0]
    group_arguments = _lockstep_groups(kernel)
    groups: dict[Cta, list[LockstepGroup]] = {}
    for first in range(0, state.grid, size):
        cluster = Cluster(ThreadBarrier("cluster barrier", size * kernel.threads))
        cluster.ctas += [_create_cta(state, cluster, first + rank, rank, is_dependent_launch) for rank in range(size)]
        for cta in cluster.ctas:
            groups[cta] = [LockstepGroup(state, cta, *arguments) for arguments in group_arguments]
    return groups


def _create_cta(state: GridState, cluster: Cluster, index: int, rank: int, is_dependent_launch: bool) -> Cta:
    """Return a CTA at its start: its shared memory is uninitialized, and no warp has executed anything."""
    kernel = state.kernel
    shared = np.full(SHARED_BASE + round_up(kernel.shared_bytes, 16), 0xFF, np.uint8)
    shadow = Shadow(len(shared), initialized=False)
    for buffer in kernel.buffers:
        if buffer.allow_uninitialized_reads:
            shadow.allow_uninitialized_reads(SHARED_BASE + buffer.offset, buffer.bytes)
    count = kernel.threads // 32
    warps = [Warp(index * count + i, state.num_agents) for i in range(count)]
    for warp in warps:
        warp.all_lanes.clock.completed_bits = 0 if is_dependent_launch else PREREQUISITE_GRIDS_BIT
    return Cta(index, rank, cluster, shared, shadow, warps)


def _lockstep_groups(kernel: Kernel) -> list[tuple[int, int, str]]:
    """Return (first thread, threads, name) of each lockstep group: a warpgroup, or a single warp.

    A warpgroup is split into warps if its warps may wait at different places: if its code has warp roles, or branches
    on the thread's index in which threads wait. It is not split if all its warps execute wgmma, which they do together.
    """
    groups = []
    for first in range(0, kernel.threads, 128):
        statements = list(_statements(kernel.body, first // 128))
        roles = [x for x in statements if isinstance(x, Role)]
        role = next((r for r in roles if r.unit == "warpgroup"), None)
        warps = [r for r in roles if r.unit == "warp"]
        if warps or kernel.threads - first < 128 or _waits_in_branches(statements):
            named = {s.first: s.name for s in warps if s.name}
            for warp in range(min(4, (kernel.threads - first) // 32)):
                name = f"{named[warp]} warp" if warp in named else f"warpgroup {first // 128} warp {warp}"
                groups.append((first + 32 * warp, 32, name))
        else:
            name = f"{role.name} " if role and role.name else ""
            groups.append((first, 128, f"{name}warpgroup {first // 128 - (role.first if role and role.name else 0)}"))
    return groups


def _waits_in_branches(statements: list[Statement]) -> bool:
    """Return whether a warpgroup's warps must run apart: some wait for other threads in a branch on the thread's index.

    Not if the warpgroup executes wgmma, or another instruction for all of it, outside of branches.
    """
    unconditional = instructions(Block([x for x in statements if not children(x)]))
    branches = [x for x in statements if isinstance(x, If) and _depends_on_thread(x.condition)]
    in_branches = (x for branch in branches for block in children(branch) for x, _ in instructions(block))
    return any(x.waits_for_threads for x in in_branches) and not any(x.warpgroup_wide for x, _ in unconditional)


def _depends_on_thread(x: Value) -> bool:
    if isinstance(x, Operation):
        return any(map(_depends_on_thread, x.operands))
    return isinstance(x, Builtin) and x.name in ("thread", "warp", "lane")


def _statements(block: Block, warpgroup: int) -> Iterator[Statement]:
    """Yield all statements of a block, at any depth, that a warpgroup executes. `warpgroup`: its index in the CTA."""
    for x in block.statements:
        if not (isinstance(x, Role) and x.unit == "warpgroup") or x.first <= warpgroup < x.first + x.count:
            yield x
            for child in children(x):
                yield from _statements(child, warpgroup)
