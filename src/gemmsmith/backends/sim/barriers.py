"""Barriers: mbarriers with phases and bytes, named barriers, cluster barriers. Each carries clocks and times."""

from __future__ import annotations

from dataclasses import dataclass, field

from gemmsmith.backends.sim.clocks import Clock
from gemmsmith.lang.statements import Where


@dataclass(eq=False)
class Mbarrier:
    """An mbarrier. `phase` counts completed phases; the one in progress has its parity.

    `initialiser` is (agent, count) of its init.
    `observed` is the last phase each unit has waited for, `observations` all of them as (phase, agent, count).
    """

    name: str
    count: int
    initialiser: tuple[int, int]
    where: Where
    agents: int
    phase: int = 0
    pending: int = 0
    tx: int = 0
    delivered: bool = False
    time: int = 0
    completed_at: int = 0
    arriving: Clock = field(init=False)
    completed: Clock = field(init=False)
    observed: dict[object, int] = field(default_factory=dict)
    observations: list[tuple[int, int, int]] = field(default_factory=list)
    filled: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pending = self.count
        self.arriving, self.completed = Clock(self.agents), Clock(self.agents)

    def arrive(self, count: int, expect: int, clock: Clock, time: int) -> bool:
        """False where more arrive than the phase takes."""
        self.arriving.join(clock)
        self.pending -= count
        self.tx += expect
        self.time = max(self.time, time)
        if self.pending < 0:
            return False
        self._advance()
        return True

    def complete(self, nbytes: int, clock: Clock, time: int) -> None:
        """Bytes have landed; they may do so before anybody expects them."""
        self.arriving.join(clock)
        self.tx -= nbytes
        self.delivered = True
        self.time = max(self.time, time)
        self._advance()

    def _advance(self) -> None:
        if self.pending or self.tx:
            return
        if self.delivered:
            self.filled.append(self.phase)
        self.completed.join(self.arriving)
        self.completed_at = self.time
        self.phase, self.pending, self.delivered = self.phase + 1, self.count, False

    def observe(self, unit: object, phase: int, agent: int, clock: Clock) -> None:
        """A unit's wait for a phase is over."""
        self.observed[unit] = phase
        self.observations.append((phase, agent, int(clock.vector[0, agent])))

    def awaited(self, unit: object, clock: Clock, parity: int) -> int:
        """The phase that this waiter's wait for a parity means: the next one of that parity after those that it has
        waited for, or that it knows others to have waited for in its stead; -1 is before the first."""
        known = (phase for phase, agent, count in reversed(self.observations) if clock.vector[0, agent] >= count)
        last = max(self.observed.get(unit, -2), next(known, -2))
        return last + 1 if (last + 1) % 2 == parity else last + 2

    def done(self, parity: int) -> bool:
        """What the hardware tests: whether the phase in progress has the other parity."""
        return self.phase % 2 != parity


@dataclass(eq=False)
class ThreadBarrier:
    """A named barrier, or a cluster's: opens when `expected` threads have arrived, then begins again."""

    name: str
    expected: int
    arrived: int = 0
    generation: int = 0
    time: int = 0
    opened_at: int = 0
    clock: Clock | None = None
    opened: Clock | None = None

    def arrive(self, threads: int, clock: Clock, time: int) -> bool:
        """False where more arrive than it takes."""
        if self.clock is None:
            self.clock = clock
        else:
            self.clock.join(clock)
        self.arrived += threads
        fits = self.arrived <= self.expected
        self.time = max(self.time, time)
        if self.arrived >= self.expected:
            self.opened, self.clock, self.arrived = self.clock, None, self.arrived - self.expected
            self.opened_at = self.time
            self.generation += 1
        return fits
