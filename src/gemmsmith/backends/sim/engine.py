"""The scheduler of a simulated grid: chooses which lockstep group or asynchronous operation proceeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from gemmsmith.backends.sim.execute.counters import Counters
from gemmsmith.backends.sim.execute.interpreter import CompiledStatement, Interpreter
from gemmsmith.backends.sim.exit_checks import check_grid_exit
from gemmsmith.backends.sim.grid import check_launch, create_ctas
from gemmsmith.backends.sim.memory.memory import GlobalMemory
from gemmsmith.backends.sim.report.hazards import Hazard, Hazards, SimulationAborted
from gemmsmith.backends.sim.report.record import Record
from gemmsmith.backends.sim.report.verdict import TimeDependence, Verdict
from gemmsmith.backends.sim.state.cta import Cta
from gemmsmith.backends.sim.state.grid_state import GridState
from gemmsmith.backends.sim.state.lockstep_group import LockstepGroup, Wait
from gemmsmith.backends.sim.state.operations import InFlightOperation, Operations
from gemmsmith.core.arguments import TensorMap
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.location import SourceLocation
from gemmsmith.lang.statements import Block

MAX_SCHEDULER_STEPS = 5_000_000
"""Scheduler steps after which a kernel is assumed never to finish. Chosen; not measured."""


@dataclass(frozen=True)
class SimulationResult:
    """Result of simulated launches.

    `hazards`: the errors found, none for correct kernels. `cycles`: of the cost model. `time_dependences`: what depends
    on when instructions execute, so that other schedules may do other things. `records`: what happened in each launch,
    if it was recorded. `schedules`: how many were run.
    """

    hazards: list[Hazard]
    cycles: int
    time_dependences: list[TimeDependence] = field(default_factory=list)
    records: tuple[Record, ...] = ()
    schedules: int = 1

    @property
    def verdict(self) -> Verdict:
        """What the runs prove."""
        why = tuple(self.time_dependences)
        return Verdict("hazards" if self.hazards else "schedules run" if why else "every schedule", why, self.schedules)

    def followed_by(self, other: SimulationResult) -> SimulationResult:
        """Return the result of these schedules, which had no hazards, and of `other`, which was run after them."""
        dependences = [*dict.fromkeys([*self.time_dependences, *other.time_dependences])]
        return replace(other, time_dependences=dependences, schedules=self.schedules + other.schedules)


Argument = int | float | TensorMap | tuple[int, ...]


def simulate(
    kernel: Kernel, grid: int, arguments: Mapping[str, Argument], memory: GlobalMemory, *,
    seed: int = 0, max_hazards: int = 20, is_dependent_launch: bool = False,
    on_mma_cycles: Callable[[float], None] = lambda cycles: None, counters: Counters | None = None,
    record: bool = False,
) -> SimulationResult:  # fmt: skip
    """Execute `grid` CTAs on the bytes of `memory`, all concurrently.

    A CTA that spins for one that may not be resident at the same time is reported.

    Seed 0 follows the cost model; other seeds choose a random interleaving that the hardware permits. Errors of the
    kernel are returned as hazards, at most `max_hazards`, not raised; an invalid launch raises ArgumentError or
    KernelError.

    `is_dependent_launch`: the prerequisite grids may still be running (programmatic dependent launch), so that
    griddepcontrol.wait must precede accesses to global memory. `on_mma_cycles` is called with the tensor-core cycles of
    every completed wgmma.
    """
    check_launch(kernel, grid, arguments)
    for buffer in memory.buffers:
        buffer.shadow.begin_launch()
    state = GridState(
        kernel, memory, seed, Hazards(max_hazards, kernel), dict(arguments), grid, Operations(on_mma_cycles)
    )
    records = (state.observe(),) if record else ()
    by_cta = create_ctas(state, is_dependent_launch=is_dependent_launch)
    groups = [group for cta_groups in by_cta.values() for group in cta_groups]
    with suppress(SimulationAborted):
        _run(state, groups, counters or (Counters() if record else None))
        check_grid_exit(state, by_cta)
    _break_reference_cycles(state, by_cta)
    for observed in records:
        observed.end()
    cycles = max((group.time for group in groups), default=0)
    return SimulationResult(state.hazards.reported, cycles, list(state.time_dependences), records)


def _break_reference_cycles(state: GridState, ctas: Iterable[Cta]) -> None:
    """Drop references that form cycles, so that memory is freed without waiting for the garbage collector."""
    for cta in ctas:
        cta.cluster.ctas.clear()
        cta.mbarriers.clear()
    for in_flight in state.operations.all:
        del in_flight.operation


def _run(state: GridState, groups: list[LockstepGroup], counters: Counters | None) -> None:
    """Execute until all groups have finished. Each step runs one group until it waits, or completes one operation.

    Raises SimulationAborted for a deadlock, or after too many steps.
    """
    operations = state.operations
    compiled: dict[Block, list[CompiledStatement]] = {}
    programs = {group: Interpreter(group, compiled, counters).run() for group in groups}
    # What each unfinished group waits for; None if it can proceed.
    blocked: dict[LockstepGroup, Wait | None] = dict.fromkeys(groups)
    for _ in range(MAX_SCHEDULER_STEPS):
        if not blocked:
            while operations.in_flight:
                operations.complete(operations.completable()[0])
            return
        ready = [u for u, wait in blocked.items() if wait is None or wait.ready()]
        completable = operations.completable()
        if not ready and not completable:
            raise _deadlock(state, blocked)
        selected = _choose(state, ready, completable)
        if isinstance(selected, InFlightOperation):
            operations.complete(selected)
            continue
        try:
            blocked[selected] = wait = next(programs[selected])
        except StopIteration:
            if state.observer is not None:
                state.observer.exit(selected)
            del blocked[selected]
        else:
            if wait and state.observer is not None:
                state.observer.block(selected, wait.name, wait.phase, wait.pending)
    state.hazards.report(
        "deadlock", f"not finished after {MAX_SCHEDULER_STEPS} scheduler steps", SourceLocation("?", 0)
    )
    raise SimulationAborted


def _choose(
    state: GridState, ready: list[LockstepGroup], completable: list[InFlightOperation]
) -> LockstepGroup | InFlightOperation:
    """Return which ready group, or which completable operation, proceeds next.

    Seed 0 takes the earliest time of the cost model, an operation before a group of the same time; other seeds any.
    """
    candidates: list[LockstepGroup | InFlightOperation] = [*ready, *completable]
    if state.seed:
        return state.random.choice(candidates)
    return min(candidates, key=lambda x: (x.end, 0) if isinstance(x, InFlightOperation) else (x.time, 1))


def _deadlock(state: GridState, blocked: dict[LockstepGroup, Wait | None]) -> SimulationAborted:
    """Report that no group can proceed, and what each of them waits for; return the exception to raise."""
    waits = [(u, w.describe()) for u, w in blocked.items() if w]
    message = "; ".join(f"{u.title} ({u.location}) waits for {reason}" for u, reason in waits)
    first, *others = (u.location.accessed(f"wait for {reason.partition(':')[0]}", "threads") for u, reason in waits)
    state.hazards.report("deadlock", message, first, others=tuple(others))
    return SimulationAborted(message)
