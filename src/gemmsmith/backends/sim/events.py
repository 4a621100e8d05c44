"""Accesses to memory as events: by whom, and what orders them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gemmsmith.backends.sim.clocks import ASYNC_PROXY, MEMORY, Clock, Warp
from gemmsmith.backends.sim.scopes import Placed, Scope, between
from gemmsmith.lang.statements import Where


@dataclass(slots=True)
class Lanes:
    """Which lane of a warp accessed which of `width` bytes from each of `offsets`; `rows`: the lanes' positions in the
    unit."""

    offsets: np.ndarray
    width: int
    rows: np.ndarray

    def at(self, cells: np.ndarray, granule: int) -> np.ndarray:
        """The lane that accessed each cell; -1 where none did, -2 where several did."""
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
    """An access: by an agent at its count, or (agent -1) by an asynchronous operation whose `bits` say it is done.

    `row` of a clock says whether it is known. An ordinary access is of a `warp`, by `lanes`; a strong one (atomic,
    relaxed, acquire, release) has a scope, of the CTA it is of, and may only read.
    """

    agent: int
    count: int
    bits: int
    what: str
    who: str
    where: Where
    row: int = MEMORY
    warp: Warp | None = None
    lanes: Lanes | None = None
    strong: tuple[Scope, Placed] | None = None
    only_reads: bool = False

    def known(self, clock: Clock) -> bool:
        """Whether it happened before what `clock` stands for."""
        if self.agent < 0:
            return clock.done & self.bits == self.bits
        return clock.vector.item(self.row, self.agent) >= self.count

    def ordered_before(self, later: Event, clock: Clock, cells: np.ndarray, granule: int) -> bool:
        """The same for an event whose agent knows `clock`. Accesses of one warp are ordered where the lanes have met
        since, or where the same lane made both, to each of the cells."""
        if self.agent < 0 or (self.known(clock) and self.agent != later.agent):
            return self.known(clock)
        if self.warp is None or self.warp is not later.warp or self.lanes is None or later.lanes is None:
            return False
        if self.count <= self.warp.synced[self.agent - self.warp.first]:
            return True
        own, others = self.lanes.at(cells, granule), later.lanes.at(cells, granule)
        return bool(((own == others) & (own >= 0)).all())

    def together_with(self, other: Event) -> bool:
        """Whether both are strong, as far as each other's CTA: no race, whatever their order."""
        if self.strong is None or other.strong is None:
            return False
        (scope, cta), (other_scope, other_cta) = self.strong, other.strong
        return min(scope, other_scope) >= between(cta, other_cta)

    def visible_to_async(self, clock: Clock) -> bool:
        """Whether an ordinary write was fenced for the async proxy."""
        return self.agent < 0 or clock.vector.item(ASYNC_PROXY, self.agent) >= self.count

    def __str__(self) -> str:
        return f"{self.what} by {self.who} ({self.where})"
