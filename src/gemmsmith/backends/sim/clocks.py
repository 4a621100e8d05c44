"""Happens-before: vector clocks over agents, and a bit for every asynchronous operation known to be complete."""

from __future__ import annotations

import numpy as np

STARTED = 1
ASYNC_PROXY, MBARRIER_INIT = 1, 2
"""What a fence is of: the row of `Clock.vector` that it brings up to date."""


class Clock:
    """What an agent knows: `vector[0, a]`, agent a's events up to that count; of these, `vector[1, a]`, the ordinary
    writes that a proxy fence has made visible to the async proxy, and `vector[2, a]`, the mbarrier inits that a fence
    has made visible to the cluster; `done`, the completed asynchronous operations. An agent's events count from
    STARTED + 1."""

    __slots__ = ("done", "vector")

    def __init__(self, agents: int) -> None:
        self.vector = np.zeros((3, agents), np.int64)
        self.done = 0

    def copy(self) -> Clock:
        clock = Clock.__new__(Clock)
        clock.vector, clock.done = self.vector.copy(), self.done
        return clock

    def join(self, other: Clock) -> None:
        np.maximum(self.vector, other.vector, out=self.vector)
        self.done |= other.done


class Warp:
    """The two agents of a warp: all its lanes together, and the part of them that acts alone (an elected lane).

    The part knows what the whole warp knows, but of the warp's own ordinary accesses only those before the last
    warp_sync: they are other lanes'. The whole learns what the part knows at the next warp_sync.
    """

    def __init__(self, index: int, agents: int) -> None:
        self.whole, self.part = 2 * index, 2 * index + 1
        self.clock, self.part_clock = Clock(agents), Clock(agents)
        self.clock.vector[0, self.whole] = self.part_clock.vector[0, self.part] = STARTED + 1
        self.synced = 0

    def enter(self, partial: bool) -> tuple[int, Clock]:
        """The agent that acts now, and its clock."""
        if not partial:
            return self.whole, self.clock
        known = self.clock.vector.copy()
        known[:, self.whole] = np.minimum(known[:, self.whole], self.synced)
        np.maximum(self.part_clock.vector, known, out=self.part_clock.vector)
        self.part_clock.done |= self.clock.done
        return self.part, self.part_clock

    def sync(self) -> None:
        """All lanes order their accesses among themselves."""
        self.clock.join(self.part_clock)
        self.synced = int(self.clock.vector[0, self.whole])
        self.clock.vector[0, self.whole] += 1
        self.part_clock.vector[0, self.part] += 1

    def release(self, partial: bool) -> Clock:
        """A copy of what the acting agent knows, with which its later events are not confused."""
        agent, clock = self.enter(partial)
        copy = clock.copy()
        if not partial:
            copy.join(self.part_clock)
            self.part_clock.vector[0, self.part] += 1
        clock.vector[0, agent] += 1
        return copy

    def release_relaxed(self) -> Clock:
        """What others learn of the warp without a release: that it has started, and its fenced mbarrier inits."""
        copy = Clock(self.clock.vector.shape[1])
        for agent, clock in ((self.whole, self.clock), (self.part, self.part_clock)):
            copy.vector[0, agent], copy.vector[MBARRIER_INIT, agent] = STARTED, clock.vector[MBARRIER_INIT, agent]
        return copy

    def acquire(self, partial: bool, clock: Clock) -> None:
        self.enter(partial)[1].join(clock)

    def fence(self, row: int, partial: bool) -> None:
        """The acting agent's ordinary writes, or mbarrier inits, so far become visible where others are not."""
        agent, clock = self.enter(partial)
        clock.vector[row, agent] = clock.vector[0, agent]
        clock.vector[0, agent] += 1
        if not partial:  # the lanes that acted alone execute the fence too
            clock.vector[row, self.part] = self.part_clock.vector[0, self.part]
            self.part_clock.vector[0, self.part] += 1
