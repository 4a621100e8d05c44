"""Memory accesses as events, and the happens-before relation between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gemmsmith.backends.sim.memory.clocks import (
    HAPPENS_BEFORE,
    HasClusterRank,
    ScopeLevel,
    VectorClock,
    Warp,
    narrowest_common_scope,
)
from gemmsmith.backends.sim.report.hazards import Place
from gemmsmith.machine import Proxy


@dataclass(slots=True)
class LaneAccesses:
    """The bytes that each lane of a warp accesses: `width` bytes at each of `offsets`.

    `rows`: for each offset, the lane's thread index in the lockstep group.
    """

    offsets: np.ndarray
    width: int
    rows: np.ndarray

    def lane_of_cells(self, cells: np.ndarray, granule: int) -> np.ndarray:
        """Return the lane that accessed each cell, -1 if none did, -2 if several did.

        A cell has `granule` bytes.
        """
        count = max(1, self.width // granule)
        own = (self.offsets[:, None] // granule + np.arange(count)).reshape(-1)
        lanes = np.repeat(self.rows % 32, count)
        order = np.argsort(own, kind="stable")
        own, lanes = own[order], lanes[order]
        first, last = np.searchsorted(own, cells), np.searchsorted(own, cells, "right") - 1
        low, high = lanes[np.minimum(first, len(own) - 1)], lanes[last]
        return np.where(last < first, -1, np.where(low == high, low, -2))


@dataclass(eq=False, slots=True)
class Event:
    """A memory access by an agent (a set of lanes, see clocks.py) or by an asynchronous operation.

    Attributes:
        agent: Index of the agent; -1 for an asynchronous operation.
        count: The event's number among the agent's.
        bits: The bits that clocks which know of the operation's completion have set.
        label: What it is, for messages.
        location: Its source line, threads and iteration.
        engine: What accesses memory (see Place).
        row: The row of a clock that orders it.
        warp, lanes: The warp, and the bytes of each lane, of an access by threads.
        strong: (scope, CTA) of a strong access: atomic, relaxed, acquire or release.
        is_read: Whether it only reads.
        is_atomic: Whether it reads and writes.
    """

    agent: int
    count: int
    bits: int
    label: str
    location: Place
    engine: str = "threads"
    row: int = HAPPENS_BEFORE
    warp: Warp | None = None
    lanes: LaneAccesses | None = None
    strong: tuple[ScopeLevel, HasClusterRank] | None = None
    is_read: bool = False
    is_atomic: bool = False
    proxy: Proxy = "generic"

    def happens_before(self, clock: VectorClock) -> bool:
        """Return whether this event happens before the events at `clock`.

        An agent's event does if the clock counts it, an asynchronous operation's if the clock knows of its completion.
        """
        if self.agent < 0:
            return clock.completed_bits & self.bits == self.bits
        return clock.event_counts.item(self.row, self.agent) >= self.count

    def ordered_before(self, later: Event, clock: VectorClock, cells: np.ndarray, granule: int) -> bool:
        """Return whether this event happens before `later`, whose agent is at `clock`.

        Accesses of one warp are ordered by __syncwarp, or if the same lane made both to each of `cells` (of `granule`
        bytes).
        """
        # Of one agent, the clock always counts the earlier event, which another lane may have made.
        if self.agent < 0 or (self.happens_before(clock) and self.agent != later.agent):
            return self.happens_before(clock)
        if self.warp is None or self.warp is not later.warp or self.lanes is None or later.lanes is None:
            return False
        if self.count <= self.warp.synced_counts.item(HAPPENS_BEFORE, self.agent - self.warp.first_agent):
            return True
        own, others = self.lanes.lane_of_cells(cells, granule), later.lanes.lane_of_cells(cells, granule)
        return bool(((own == others) & (own >= 0)).all())

    def morally_strong_with(self, other: Event) -> bool:
        """Return whether the scope of each of two strong accesses includes the other's CTA (PTX: morally strong)."""
        if self.strong is None or other.strong is None:
            return False
        (scope, cta), (other_scope, other_cta) = self.strong, other.strong
        return min(scope, other_scope) >= narrowest_common_scope(cta, other_cta)

    def visible_to_async_proxy(self, clock: VectorClock, fenced_row: int) -> bool:
        """Return whether the async proxy sees this access, which happens before `clock`.

        It sees what TMA has written at once, and what threads have accessed, or cp.async has written, after a proxy
        fence. `fenced_row`: the clock's row that counts the fenced accesses of threads to this memory.
        """
        if self.agent >= 0:
            return clock.event_counts.item(fenced_row, self.agent) >= self.count
        return self.proxy == "async" or clock.fenced_bits & self.bits == self.bits

    @property
    def place(self) -> Place:
        """Its source line, threads and iteration, for reports."""
        return self.location.accessed(self.label, self.engine)

    def __str__(self) -> str:
        return f"{self.label} by {self.location.agent} ({self.location})"
