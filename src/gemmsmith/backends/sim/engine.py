"""Runs a grid: chooses which unit or asynchronous operation goes on, and what is wrong at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from gemmsmith.backends.sim.chip import H200, Chip
from gemmsmith.backends.sim.clocks import AGENTS, GRID_BEFORE, Clock, Warp
from gemmsmith.backends.sim.hazards import Hazard, Hazards, Stop
from gemmsmith.backends.sim.interpreter import Interpreter
from gemmsmith.backends.sim.memory import SHARED_BASE, GlobalMemory
from gemmsmith.backends.sim.shadow import Shadow
from gemmsmith.backends.sim.state import Cta, Running, State
from gemmsmith.backends.sim.timeline import Timeline
from gemmsmith.backends.sim.unit import Wait
from gemmsmith.core.errors import ArgumentError, KernelError
from gemmsmith.core.tensor_map import TensorMap
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.statements import Block, Role, Where, children

STEPS = 5_000_000
"""Scheduling steps after which a kernel is taken to go on for ever."""


@dataclass(frozen=True)
class SimulationResult:
    """Hazards (none in a right kernel), the timeline, and the cycles of the cost model."""

    hazards: list[Hazard]
    timeline: Timeline
    cycles: int


Argument = int | float | TensorMap | tuple[int, ...]


def simulate(
    kernel: Kernel, grid: int, arguments: Mapping[str, Argument], memory: GlobalMemory, *,
    seed: int = 0, chip: Chip = H200, max_hazards: int = 20, dependent: bool = False,
    worked: Callable[[float], None] = lambda cycles: None,
) -> SimulationResult:  # fmt: skip
    """Executes `grid` CTAs, all resident at once, on the bytes of `memory`.

    seed 0 takes what the cost model says comes first; other seeds interleave units and complete asynchronous
    operations in a random order that the hardware may choose too. A wrong kernel is reported, it raises nothing; a
    launch that no driver takes (a missing argument, a ragged cluster) is an ArgumentError or KernelError.
    `dependent`: the grid may have been started while those before it run (programmatic dependent launch), so
    griddepcontrol.wait must precede its accesses to global memory. `worked` is told the tensor-core cycles of every
    wgmma that is done.
    """
    _check_launch(kernel, grid, arguments)
    size = kernel.cluster[0]
    per_cta = kernel.threads // 32
    agents = AGENTS * grid * per_cta
    state = State(kernel, memory, chip, seed, Hazards(max_hazards), dict(arguments), grid, agents, worked)
    for index in range(grid):
        shared = np.full(SHARED_BASE + -(-kernel.shared_bytes // 16) * 16, 0xFF, np.uint8)
        shadow = Shadow(len(shared), state.events, state.hazards, written=False)
        for slots in (b for b in kernel.buffers if b.partly):
            shadow.allow_unwritten(SHARED_BASE + slots.offset, slots.bytes)
        warps = [Warp(index * per_cta + i, agents) for i in range(per_cta)]
        for warp in warps:
            warp.all.clock.done = 0 if dependent else GRID_BEFORE
        state.ctas.append(Cta(index, index % size, [], shared, shadow, warps))
    for cta in state.ctas:
        first = cta.index - cta.rank
        cta.cluster = state.ctas[first : first + size]
        cta.units = [Interpreter(state, cta, *where) for where in _units(kernel)]
    done = _run(state)
    if done:
        _check_end(state)
    for buffer in memory.buffers:
        buffer.unwritten = False  # the next kernel reads what this one wrote
    cycles = max((unit.time for cta in state.ctas for unit in cta.units), default=0)
    return SimulationResult(state.hazards.found, state.timeline, cycles)


def _check_launch(kernel: Kernel, grid: int, arguments: Mapping[str, Argument]) -> None:
    """What a driver would refuse."""
    if kernel.cluster[1:] != (1, 1):
        raise KernelError(f"{kernel.name}: cluster {kernel.cluster}; the simulator takes clusters along x only")
    if grid % kernel.cluster[0]:
        raise ArgumentError(f"grid: got {grid} CTAs; use a multiple of the cluster's {kernel.cluster[0]}")
    missing = [p.name for p in kernel.parameters if p.name not in arguments]
    if missing:
        raise ArgumentError(f"arguments: {', '.join(map(str, missing))} missing; {kernel.name} takes them")


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


def _run(state: State) -> bool:
    """Until all units have ended; False where the kernel stopped on the way."""
    blocked: dict[Interpreter, Wait | None] = {}
    for cta in state.ctas:
        for unit in cta.units:
            assert isinstance(unit, Interpreter)
            unit.generator = unit.run()
            blocked[unit] = None
    try:
        for _ in range(STEPS):
            if not blocked:
                while state.running:
                    last = _completable(state)[0]
                    last.unit.complete(last)
                return True
            ready = [u for u, wait in blocked.items() if wait is None or wait.ready()]
            operations = _completable(state)
            if not ready and not operations:
                return _deadlock(state, blocked)
            chosen = _choose(state, ready, operations)
            if isinstance(chosen, Running):
                chosen.unit.complete(chosen)
                continue
            try:
                blocked[chosen] = next(chosen.generator)
            except StopIteration:
                chosen.waited(chosen.time, "")
                del blocked[chosen]
        state.hazards.report("deadlock", f"no end after {STEPS} steps", Where("?", 0))
    except Stop:
        pass
    return False


def _completable(state: State) -> list[Running]:
    return [r for r in state.running if r.after is None or r.after.finished]


def _choose(state: State, ready: list[Interpreter], operations: list[Running]) -> Interpreter | Running:
    if state.seed:
        index = state.random.randrange(len(ready) + len(operations))
        return ready[index] if index < len(ready) else operations[index - len(ready)]
    unit = min(ready, key=lambda u: u.time, default=None)
    operation = min(operations, key=lambda r: r.end, default=None)
    if unit is None or (operation is not None and operation.end <= unit.time):
        assert operation is not None
        return operation
    return unit


def _deadlock(state: State, blocked: dict[Interpreter, Wait | None]) -> bool:
    waits = [f"{u.title} ({u.where}) waits for {w.describe()}" for u, w in blocked.items() if w]
    where = next(iter(blocked)).where
    state.hazards.report("deadlock", "; ".join(waits), where)
    return False


def _check_end(state: State) -> None:
    """What must hold once all threads have ended."""
    report = state.hazards.report
    for cta in state.ctas:
        known = Clock(state.agents)
        for warp in cta.warps:
            for agent in (warp.all, *warp.sets.values()):
                known.join(agent.clock)
        _check_registers(state, cta)
        for event in cta.remote:
            if not event.known(known):
                report("exited CTA", f"CTA {cta.index} may have ended before {event} reached it", event.where)
        for running in state.all_operations:
            if running.unit.cta is not cta:
                continue
            stores = running.operation.group == "bulk"
            need = running.bits[0] if stores else running.bits[1]
            if known.done & need != need:
                report(
                    "group" if stores else "exited CTA",
                    f"{running.operation.what} may be under way when CTA {cta.index} ends: nobody waits for it",
                    running.where,
                )  # fmt: skip
        for barrier in cta.mbarriers.values():
            if barrier.pending != barrier.count or barrier.tx:
                report(
                    "barrier",
                    f"{barrier.name} ends in the middle of phase {barrier.phase}: {barrier.pending} of {barrier.count} "
                    f"arrivals and {barrier.tx} bytes missing", barrier.where, barrier.name.partition("[")[0],
                )  # fmt: skip
            seen = max(barrier.observed.values(), default=-1)
            unread = [phase for phase in barrier.filled if phase > seen]
            if unread:
                report(
                    "unread phase", f"{barrier.name}: nobody waited for phase {unread[0]}, which brought data",
                    barrier.where, barrier.name.partition("[")[0],
                )  # fmt: skip


def _check_registers(state: State, cta: Cta) -> None:
    """setmaxnreg is for all warps of a warpgroup."""
    budgets: dict[int, set[int]] = {}
    for unit in cta.units:
        budgets.setdefault(int(unit.threads[0]) // 128, set()).add(unit.budget)
    for warpgroup, found in budgets.items():
        if len(found) > 1:
            message = f"setmaxnreg by some warps of warpgroup {warpgroup}, which have {sorted(found)} registers"
            state.hazards.report("registers", message, state.kernel.body.statements[0].where)
