"""Runs a grid: chooses which unit or asynchronous operation goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from gemmsmith.backends.sim import launch
from gemmsmith.backends.sim.chip import H200, Chip
from gemmsmith.backends.sim.counters import Counters
from gemmsmith.backends.sim.cta import Cta
from gemmsmith.backends.sim.ending import check_end
from gemmsmith.backends.sim.hazards import Hazard, Hazards, Stop
from gemmsmith.backends.sim.interpreter import Interpreter, Step
from gemmsmith.backends.sim.memory import GlobalMemory
from gemmsmith.backends.sim.operations import Operations, Running
from gemmsmith.backends.sim.state import State
from gemmsmith.backends.sim.timeline import Timeline
from gemmsmith.backends.sim.unit import Unit, Wait
from gemmsmith.core.tensor_map import TensorMap
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.statements import Block, Where

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
    worked: Callable[[float], None] = lambda cycles: None, counters: Counters | None = None,
) -> SimulationResult:  # fmt: skip
    """Executes `grid` CTAs, all resident at once, on the bytes of `memory`.

    seed 0 takes what the cost model says comes first; other seeds interleave units and complete asynchronous
    operations in a random order that the hardware may choose too. A wrong kernel is reported, it raises nothing; a
    launch that no driver takes (a missing argument, a ragged cluster) is an ArgumentError or KernelError.
    `dependent`: the grid may have been started while those before it run (programmatic dependent launch), so
    griddepcontrol.wait must precede its accesses to global memory. `worked` is told the tensor-core cycles of every
    wgmma that is done; `counters` count if given. With the last of `max_hazards` the kernel stops.
    """
    launch.check(kernel, grid, arguments)
    watch = counters.watch if counters else None
    state = State(kernel, memory, chip, seed, Hazards(max_hazards), dict(arguments), grid, Operations(worked), watch)
    by_cta = launch.start(state, dependent=dependent)
    units = [unit for each in by_cta.values() for unit in each]
    with suppress(Stop):
        _run(state, units)
        check_end(state, by_cta)
    _let_go(state, by_cta)
    for buffer in memory.buffers:
        buffer.unwritten = False  # the next kernel reads what this one wrote
    cycles = max((unit.time for unit in units), default=0)
    return SimulationResult(state.hazards.found, state.timeline, cycles)


def _let_go(state: State, ctas: Iterable[Cta]) -> None:
    """Opens the circles in which what has been simulated refers to itself: it is freed at once, without a search."""
    for cta in ctas:
        cta.cluster.ctas.clear()
        cta.mbarriers.clear()
    for running in state.operations.all:
        del running.operation


def _run(state: State, units: list[Unit]) -> None:
    """Until all units have ended."""
    operations = state.operations
    steps: dict[Block, list[Step]] = {}
    programs = {unit: Interpreter(unit, steps).run() for unit in units}
    blocked: dict[Unit, Wait | None] = dict.fromkeys(units)
    for _ in range(STEPS):
        if not blocked:
            while operations.running:
                operations.complete(operations.completable()[0])
            return
        ready = [u for u, wait in blocked.items() if wait is None or wait.ready()]
        completable = operations.completable()
        if not ready and not completable:
            raise _deadlock(state, blocked)
        chosen = _choose(state, ready, completable)
        if isinstance(chosen, Running):
            operations.complete(chosen)
            continue
        try:
            blocked[chosen] = next(programs[chosen])
        except StopIteration:
            chosen.waited(chosen.time, "")
            del blocked[chosen]
    state.hazards.report("deadlock", f"no end after {STEPS} steps", Where("?", 0))
    raise Stop


def _choose(state: State, ready: list[Unit], completable: list[Running]) -> Unit | Running:
    if state.seed:
        index = state.random.randrange(len(ready) + len(completable))
        return ready[index] if index < len(ready) else completable[index - len(ready)]
    unit = min(ready, key=lambda u: u.time, default=None)
    operation = min(completable, key=lambda r: r.end, default=None)
    if unit is None or (operation is not None and operation.end <= unit.time):
        assert operation is not None
        return operation
    return unit


def _deadlock(state: State, blocked: dict[Unit, Wait | None]) -> Stop:
    waits = [f"{u.title} ({u.where}) waits for {w.describe()}" for u, w in blocked.items() if w]
    return next(iter(blocked)).stop("deadlock", "; ".join(waits))
