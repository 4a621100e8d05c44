"""CTAs and clusters, and their barriers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gemmsmith.backends.sim.memory.clocks import Agent, VectorClock, Warp
from gemmsmith.backends.sim.memory.events import Event
from gemmsmith.backends.sim.memory.shadow import Shadow
from gemmsmith.backends.sim.report.hazards import Hazards, Place
from gemmsmith.lang.location import SourceLocation


class ScopedClocks:
    """Clocks that arrivals at an mbarrier have published. A wait joins `cta` or, at cluster scope, both."""

    def __init__(self, num_agents: int) -> None:
        self.cta, self.cluster = VectorClock(num_agents), VectorClock(num_agents)

    def join(self, other: ScopedClocks) -> None:
        """Join the clocks of both scopes."""
        self.cta.join(other.cta)
        self.cluster.join(other.cluster)


@dataclass(frozen=True)
class FinishedWait:
    """A finished wait for a phase by an agent (see clocks.py), as its event number `count`, at `place`."""

    phase: int
    agent: int
    count: int
    place: Place

    def happens_before(self, clock: VectorClock) -> bool:
        """Return whether the wait was executed before the events at `clock`."""
        return clock.has_executed(self.agent, self.count)


@dataclass(eq=False)
class Contributions:
    """What completes a phase of a barrier.

    `arrivals`: (agent, event count) of each; `bits`: clock bits of the asynchronous operations. An arrival or
    complete_tx counts in the phase in progress, whichever phase its thread expects (PTX ISA, "Phase Completion of the
    mbarrier object"). So what has been executed before it must include the whole previous phase.
    """

    arrivals: list[tuple[int, int]] = field(default_factory=list)
    bits: int = 0

    def executed_before(self, clock: VectorClock) -> bool:
        """Return whether all of it has been executed before the events at `clock`."""
        return clock.completed_bits & self.bits == self.bits and all(clock.has_executed(*x) for x in self.arrivals)


@dataclass(eq=False)
class Mbarrier:
    """An mbarrier. A wait for the parity of phase p is correct only if it is ordered before phase p + 1 completes.

    Attributes:
        name: Its buffer and slot.
        count: Arrivals expected per phase.
        initializer: (agent, event count) of its init; `location` is its source line.
        num_agents: Length of vector clocks.
        phase: Completed phases, so the number of the phase in progress, whose parity is phase % 2.
        pending: Arrivals that the phase in progress still misses.
        tx_count: Bytes that it still misses.
        time: Time in cycles of its last contribution; `completed_at`: of the phase before.
        current_clocks: Clocks published by the phase in progress; `completed_clocks`: by all completed ones.
        last_waited_phase: The last phase that each lockstep group has waited for.
        last_waits: Each agent's last wait.
        data_phases: The completed phases that received data.
        current, previous: Contributions to the phase in progress and to the one before.
        expects: (agent, event count, place) of each expect_tx that no arrival in the phase in progress follows yet.
    """

    name: str
    count: int
    initializer: tuple[int, int]
    location: SourceLocation
    num_agents: int
    hazards: Hazards
    phase: int = 0
    pending: int = 0
    tx_count: int = 0
    received_data: bool = False
    time: int = 0
    completed_at: int = 0
    current_clocks: ScopedClocks = field(init=False)
    completed_clocks: ScopedClocks = field(init=False)
    last_waited_phase: dict[object, int] = field(default_factory=dict)
    last_waits: dict[int, FinishedWait] = field(default_factory=dict)
    data_phases: list[int] = field(default_factory=list)
    current: Contributions = field(default_factory=Contributions)
    previous: Contributions = field(default_factory=Contributions)
    expects: list[tuple[int, int, Place]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pending = self.count
        self.current_clocks, self.completed_clocks = ScopedClocks(self.num_agents), ScopedClocks(self.num_agents)

    def check_order(self, clock: VectorClock, label: str, place: Place) -> None:
        """Report a contribution to the phase in progress that may come early, and be counted in the previous phase."""
        if not self.previous.executed_before(clock):
            message = (
                f"{self.name}: this {label} for phase {self.phase} is not ordered after phase {self.phase - 1} and may "
                f"be counted in it [{place.agent}]"
            )
            self.hazards.report("barrier", message, place, self.buffer)

    def arrive(
        self, arrival: tuple[int, int], count: int, expect: int, clock: VectorClock, time: int, *, at_cta_scope: bool,
        at_cluster_scope: bool,
    ) -> bool:  # fmt: skip
        """Record arrivals, and complete the phase if nothing is missing. Returns False if there are too many.

        `arrival`: (agent, event count) of the event. `expect`: bytes for which the phase then waits, too. Waits at CTA
        scope see all of `clock` if `at_cta_scope`: the barrier is in the arriving threads' CTA; those at cluster scope
        if `at_cluster_scope`.
        """
        self.current.arrivals.append(arrival)
        if self.expects:
            self.expects = [x for x in self.expects if not clock.has_executed(*x[:2])]
        if at_cta_scope:
            self.current_clocks.cta.join(clock)
        else:  # wgmma and TMA that the arriving thread has waited for have completed at any scope
            self.current_clocks.cta.join_executed_events(clock)
            self.current_clocks.cta.completed_bits |= clock.completed_bits
        if at_cluster_scope:
            self.current_clocks.cluster.join(clock)
        self.pending -= count
        self.tx_count += expect
        self.time = max(self.time, time)
        if self.pending < 0:
            return False
        self._advance()
        return True

    def complete(
        self, nbytes: int, clock: VectorClock, bits: int, time: int, *, at_cta_scope: bool, arrivals: int = 0
    ) -> None:
        """Record complete_tx of `nbytes` bytes by an operation issued at `clock`. It may come before the expect_tx.

        `bits`: the operation's completion bits. `at_cta_scope`: waits at CTA scope see the data, too, not only those at
        cluster scope. `arrivals` come with the data.
        """
        clock_of_scope = self.current_clocks.cta if at_cta_scope else self.current_clocks.cluster
        clock_of_scope.completed_bits |= bits
        self.current.bits |= bits
        self.current_clocks.cta.join_executed_events(clock)
        self.tx_count -= nbytes
        self.pending -= arrivals
        if self.pending < 0:
            message = f"{self.name} phase {self.phase} expects {self.count} arrivals, got {self.count - self.pending}"
            self.hazards.report("over-arrival", message, self.location, self.buffer)
        self.received_data = True
        self.time = max(self.time, time)
        self._advance()

    def expect_tx(self, agent: Agent, nbytes: int, place: Place) -> None:
        """Record an expect_tx without an arrival."""
        self.tx_count += nbytes
        self.expects.append((agent.index, agent.next_event, place))

    def _advance(self) -> None:
        """Complete the phase if nothing is missing: check it, publish its clocks, and begin the next phase."""
        if self.pending or self.tx_count:
            return
        for _, _, place in self.expects:
            message = f"{self.name}: phase {self.phase} may complete before this expect_tx [{place.agent}]"
            self.hazards.report("barrier", message, place, self.buffer)
        if self.received_data:
            self.data_phases.append(self.phase)
        for wait in self.last_waits.values():
            if wait.phase == self.phase - 1 and not wait.happens_before(self.current_clocks.cta):
                self._report_overrun(wait)
        self.completed_clocks.join(self.current_clocks)
        self.completed_at = self.time
        self.previous, self.current, self.expects = self.current, Contributions(), []
        self.phase, self.pending, self.received_data = self.phase + 1, self.count, False

    def _report_overrun(self, wait: FinishedWait) -> None:
        """Report a wait for the previous phase that may still be polling when the phase in progress completes."""
        self.hazards.report(
            "phase aliasing",
            f"a wait for phase {wait.phase} of {self.name} by {wait.place.agent} may run after phase {self.phase} "
            "completes, when the parity has flipped back", wait.place, self.buffer,
        )  # fmt: skip

    @property
    def state(self) -> tuple[int, int, int]:
        """The phase in progress, and the arrivals and bytes that it misses."""
        return self.phase, self.pending, self.tx_count

    @property
    def buffer(self) -> str:
        """The shared buffer that holds it: its name without the slot."""
        return self.name.partition("[")[0]

    def record_wait(self, lockstep_group: object, agent: Agent, phase: int, place: Place) -> None:
        """Record that an agent's wait for a phase has finished."""
        self.last_waited_phase[lockstep_group] = phase
        self.last_waits[agent.index] = FinishedWait(phase, agent.index, agent.next_event, place)

    def resolve_phase(self, lockstep_group: object, clock: VectorClock, parity: int) -> int:
        """Return the number of the phase that a wait for `parity` means; -1 is the phase before the first.

        A wait names only a parity. It means the first phase of that parity after the last one for which
        `lockstep_group`, or a wait ordered before `clock`, has waited.
        """
        waited = (wait.phase for wait in self.last_waits.values() if wait.happens_before(clock))
        # -2 for no wait yet: the first wait may be for phase -1, which has parity 1 and is complete from the start.
        last = max(self.last_waited_phase.get(lockstep_group, -2), max(waited, default=-2))
        return last + 1 if (last + 1) % 2 == parity else last + 2

    def is_complete(self, parity: int) -> bool:
        """Return what the hardware tests: whether the phase in progress has the other parity than `parity`."""
        return self.phase % 2 != parity


@dataclass(eq=False)
class ThreadBarrier:
    """A named barrier or a cluster barrier: releases its threads when `expected` have arrived, then starts again.

    Attributes:
        arrived: Threads that have arrived in this generation (a use of the barrier).
        generation: Completed generations.
        time: Time in cycles of the last arrival; `opened_at`: of the completion of the last generation.
        clock: Joined clocks of the arrivals so far; `released_clock`: of those of the last generation.
        current, previous: Contributions to this generation and to the one before.
    """

    name: str
    expected: int
    arrived: int = 0
    generation: int = 0
    time: int = 0
    opened_at: int = 0
    clock: VectorClock | None = None
    released_clock: VectorClock | None = None
    current: Contributions = field(default_factory=Contributions)
    previous: Contributions = field(default_factory=Contributions)

    @property
    def state(self) -> tuple[int, int, int]:
        """The generation in progress, and the threads and bytes that it misses."""
        return self.generation, self.expected - self.arrived, 0

    def arrive(self, threads: int, clock: VectorClock, arrivals: list[tuple[int, int]], time: int) -> bool:
        """Record that `threads` threads arrive; return False if there are more than expected.

        `arrivals`: (agent, event count) of each warp.
        """
        if self.clock is not None:
            clock.join(self.clock)
        self.clock = clock
        self.arrived += threads
        self.current.arrivals += arrivals
        is_within_count = self.arrived <= self.expected
        self.time = max(self.time, time)
        if self.arrived >= self.expected:
            self.released_clock, self.clock, self.arrived = self.clock, None, self.arrived - self.expected
            self.previous, self.current = self.current, Contributions()
            self.opened_at = self.time
            self.generation += 1
        return is_within_count


@dataclass(eq=False)
class Cluster:
    """The CTAs of a cluster, by rank, and its barrier."""

    barrier: ThreadBarrier
    ctas: list[Cta] = field(default_factory=list)


@dataclass(eq=False)
class Cta:
    """A CTA: its shared memory, barriers, register pool and asynchronous engines.

    `index`: in the grid. `rank`: in the cluster. `shared`: the bytes of shared memory, and `shadow` their shadow.
    `mbarriers`: by offset in shared memory. `named_barriers`: by number. `engines`: the time in cycles until which each
    engine is busy. `free_registers`: the pool for setmaxnreg, in registers per thread times warps. `remote`: accesses
    to its shared memory, and arrivals at its mbarriers, by other CTAs of the cluster.
    """

    index: int
    rank: int
    cluster: Cluster
    shared: np.ndarray
    shadow: Shadow
    warps: list[Warp]
    mbarriers: dict[int, Mbarrier] = field(default_factory=dict)
    named_barriers: dict[int, ThreadBarrier] = field(default_factory=dict)
    engines: dict[str, int] = field(default_factory=dict)
    free_registers: int = 0
    remote: list[Event] = field(default_factory=list)

    def peer(self, rank: int | None) -> Cta:
        """Return the CTA of that rank in the cluster; None is this one."""
        return self if rank is None else self.cluster.ctas[rank]
