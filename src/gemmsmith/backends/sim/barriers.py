"""Barriers: mbarriers with phases and bytes, named barriers, cluster barriers. Each carries clocks and times."""

from __future__ import annotations

from dataclasses import dataclass, field

from gemmsmith.backends.sim.clocks import EXECUTED, Agent, Clock
from gemmsmith.backends.sim.hazards import Hazards
from gemmsmith.lang.statements import Where


class Reach:
    """What those who wait learn: `near` with the scope of the CTA, `far` besides with that of the cluster."""

    def __init__(self, agents: int) -> None:
        self.near, self.far = Clock(agents), Clock(agents)

    def join(self, other: Reach) -> None:
        self.near.join(other.near)
        self.far.join(other.far)


@dataclass(frozen=True)
class Observation:
    """A wait for a phase that is over: by an agent at its count."""

    phase: int
    agent: int
    count: int
    who: str
    where: Where

    def known(self, clock: Clock) -> bool:
        """Whether it is known to have been executed."""
        return clock.vector.item(EXECUTED, self.agent) >= self.count


@dataclass(eq=False)
class Mbarrier:
    """An mbarrier. `phase` counts completed phases; the one in progress has its parity.

    `initializer` is (agent, count) of its init.
    `observed` is the last phase each unit has waited for, `observations` the last of each agent. A wait by parity is
    sound only if the phase after the awaited one completes after the wait, however late that comes; one for which
    nothing ensures that is reported.
    """

    name: str
    count: int
    initializer: tuple[int, int]
    where: Where
    agents: int
    hazards: Hazards
    phase: int = 0
    pending: int = 0
    tx: int = 0
    delivered: bool = False
    time: int = 0
    completed_at: int = 0
    arriving: Reach = field(init=False)
    completed: Reach = field(init=False)
    observed: dict[object, int] = field(default_factory=dict)
    observations: dict[int, Observation] = field(default_factory=dict)
    filled: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pending = self.count
        self.arriving, self.completed = Reach(self.agents), Reach(self.agents)

    def arrive(self, count: int, expect: int, clock: Clock, time: int, *, near: bool, far: bool) -> bool:
        """`near`, `far`: whether the arrival releases the clock to waits of the CTA's scope, of the cluster's. False
        where more arrive than the phase takes."""
        if near:
            self.arriving.near.join(clock)
        else:  # wgmma and TMA that the arriving thread has waited for are over, whatever the scope
            self.arriving.near.follow(clock)
            self.arriving.near.done |= clock.done
        if far:
            self.arriving.far.join(clock)
        self.pending -= count
        self.tx += expect
        self.time = max(self.time, time)
        if self.pending < 0:
            return False
        self._advance()
        return True

    def complete(self, nbytes: int, clock: Clock, bits: int, time: int, *, near: bool, arrivals: int = 0) -> None:
        """Bytes of an operation have landed, started by one who knew `clock`; they may do so before anybody expects
        them. `near`: waits of the CTA's scope see them, else only those of the cluster's. `arrivals` come with them."""
        reached = self.arriving.near if near else self.arriving.far
        reached.done |= bits
        self.arriving.near.follow(clock)
        self.tx -= nbytes
        self.pending -= arrivals
        if self.pending < 0:
            over = f"{self.name} phase {self.phase} takes {self.count} arrivals, {self.count - self.pending} came"
            self.hazards.report("over-arrival", over, self.where, self.buffer)
        self.delivered = True
        self.time = max(self.time, time)
        self._advance()

    def _advance(self) -> None:
        if self.pending or self.tx:
            return
        if self.delivered:
            self.filled.append(self.phase)
        for seen in self.observations.values():
            if seen.phase == self.phase - 1 and not seen.known(self.arriving.near):
                self._report_overrun(seen)
        self.completed.join(self.arriving)
        self.completed_at = self.time
        self.phase, self.pending, self.delivered = self.phase + 1, self.count, False

    def _report_overrun(self, seen: Observation) -> None:
        self.hazards.report(
            "phase aliasing",
            f"a wait for phase {seen.phase} of {self.name} by {seen.who} is not ordered before the completion of phase "
            f"{self.phase}: where it comes later, the parity has changed under it", seen.where, self.buffer,
        )  # fmt: skip

    @property
    def buffer(self) -> str:
        """The shared buffer it is in: its name without the slot."""
        return self.name.partition("[")[0]

    def observe(self, unit: object, agent: Agent, phase: int, who: str, where: Where) -> None:
        """An agent's wait for a phase is over."""
        self.observed[unit] = phase
        self.observations[agent.number] = Observation(phase, agent.number, agent.count, who, where)

    def awaited(self, unit: object, clock: Clock, parity: int) -> int:
        """The phase that this waiter's wait for a parity means: the next one of that parity after those that it has
        waited for, or that it knows others to have waited for in its stead; -1 is before the first."""
        known = (seen.phase for seen in self.observations.values() if seen.known(clock))
        last = max(self.observed.get(unit, -2), max(known, default=-2))
        return last + 1 if (last + 1) % 2 == parity else last + 2

    def done(self, parity: int) -> bool:
        """What the hardware tests: whether the phase in progress has the other parity."""
        return self.phase % 2 != parity


@dataclass(eq=False)
class ThreadBarrier:
    """A named barrier, or a cluster's: opens when `expected` threads have arrived, then begins again.

    `arrivals` are of the round in progress, `before` of the last one, as (agent, count). An arrival that does not know
    all of these to have come may be counted among them: threads of two rounds then mix.
    """

    name: str
    expected: int
    arrived: int = 0
    generation: int = 0
    time: int = 0
    opened_at: int = 0
    clock: Clock | None = None
    opened: Clock | None = None
    arrivals: list[tuple[int, int]] = field(default_factory=list)
    before: list[tuple[int, int]] = field(default_factory=list)

    def mixes(self, clock: Clock) -> bool:
        """Whether one who knows that clock may arrive in the last round instead of this one."""
        return any(clock.vector.item(EXECUTED, agent) < count for agent, count in self.before)

    def arrive(self, threads: int, clock: Clock, arrivals: list[tuple[int, int]], time: int) -> bool:
        """False where more arrive than it takes."""
        if self.clock is None:
            self.clock = clock
        else:
            self.clock.join(clock)
        self.arrived += threads
        self.arrivals += arrivals
        fits = self.arrived <= self.expected
        self.time = max(self.time, time)
        if self.arrived >= self.expected:
            self.opened, self.clock, self.arrived = self.clock, None, self.arrived - self.expected
            self.before, self.arrivals = self.arrivals, []
            self.opened_at = self.time
            self.generation += 1
        return fits
