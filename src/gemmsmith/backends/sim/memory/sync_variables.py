"""Words of global memory through which threads synchronize by strong accesses: relaxed, acquire, release."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from gemmsmith.backends.sim.memory.clocks import HasClusterRank, ScopeLevel, VectorClock, narrowest_common_scope
from gemmsmith.backends.sim.memory.events import Event


class ReleasedClock(NamedTuple):
    """The clock that a strong write by a thread of `cta` publishes, to readers within `scope`."""

    scope: ScopeLevel
    cta: HasClusterRank
    clock: VectorClock


@dataclass(eq=False)
class SyncVariable:
    """A word of global memory that strong accesses read and write.

    Attributes:
        released_clocks: Clocks published by the last store and the atomics after it (a release sequence; PTX ISA,
            "observation order").
        writes: (number, event) of that store and these atomics; the first write of the word is number 1.
        last_observed_write: The number of the last write that each agent (see clocks.py) has observed.
        visible_at: Time at which the last write becomes visible to polling threads.
        spins: (agent, event count) of spins on the word that have ended.
        previous: The word before the last write.
    """

    released_clocks: list[ReleasedClock] = field(default_factory=list)
    writes: list[tuple[int, Event]] = field(default_factory=list)
    write_count: int = 0
    last_observed_write: dict[int, int] = field(default_factory=dict)
    visible_at: int = 0
    spins: list[tuple[int, int]] = field(default_factory=list)
    previous: int | None = None

    def read(self, agent: int) -> list[ReleasedClock]:
        """Record that an agent reads the word; return the clocks that it observes."""
        self.last_observed_write[agent] = self.write_count
        return self.released_clocks

    def is_spin_free(self, clock: VectorClock) -> bool:
        """Return whether all spins on the word have ended before the events at `clock`, in every schedule.

        Otherwise a write at `clock` may replace a word that a spin has not seen yet.
        """
        return all(clock.has_executed(agent, count) for agent, count in self.spins)

    def write(self, event: Event, released_clock: ReleasedClock, clock: VectorClock) -> Event | None:
        """Record a store or an atomic, `event`, by an agent at `clock`; it publishes `released_clock`.

        Returns an earlier write that races with a store: neither ordered before it nor observed by its agent. Else
        None.
        """
        unordered_write = None
        if not event.is_atomic:
            observed = self.last_observed_write.get(event.agent, 0)
            unordered_write = next((e for i, e in self.writes if i > observed and not e.happens_before(clock)), None)
            self.released_clocks, self.writes = [], []
        self.write_count += 1
        self.released_clocks = [*self.released_clocks, released_clock]
        self.writes.append((self.write_count, event))
        return unordered_write


def synchronizing_scope(reader: HasClusterRank, scope: ScopeLevel, released_clock: ReleasedClock) -> ScopeLevel | None:
    """Return the narrowest scope that contains a reader and the writer of a clock; None if they do not synchronize.

    They do not if either access, the read at `scope` or the write, has a narrower scope.
    """
    needed = narrowest_common_scope(reader, released_clock.cta)
    return needed if min(scope, released_clock.scope) >= needed else None
