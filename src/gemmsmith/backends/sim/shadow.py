"""Shadow memory: for every granule the last write and the accesses since, each an event that others must know of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gemmsmith.backends.sim.clocks import Clock
from gemmsmith.backends.sim.events import Event, Events
from gemmsmith.backends.sim.hazards import Hazards

GRANULE = 2
"""Bytes: the narrowest access to shared memory, and to global memory of 16-bit elements."""
Index = slice | np.ndarray
"""Some of an access's cells."""


class Shadow:
    """The shadow of one memory of `size` bytes; `written` says that it held data before the kernel. By cell: the last
    ordinary write, the ordinary reads since, and the strong accesses since."""

    def __init__(self, size: int, events: Events, hazards: Hazards, written: bool, granule: int = GRANULE) -> None:
        count, self.granule = -(-size // granule), granule
        self.writer, self.readers, self.strong = (np.zeros(count, np.int32) for _ in range(3))
        self.events, self.hazards = events, hazards
        self.readable = np.full(count, written)
        self.barriers = np.zeros(count, bool)
        self.any_strong = False

    def access(
        self, offsets: np.ndarray, width: int, write: bool, number: int, clock: Clock, is_async: bool, name: str
    ) -> None:
        """Checks and records event `number`, which touches `width` bytes from each of `offsets`."""
        cells = (offsets[:, None] // self.granule + np.arange(max(1, width // self.granule))).reshape(-1)
        event = self.events[number]
        if np.count_nonzero(self.barriers[cells]):
            self.hazards.report("barrier", f"{event} touches the mbarrier {name}", event.where)
        check = _Check(self, event, write, clock, is_async, name, cells)
        superseded = check.readers() if write else np.zeros(0, bool)
        check.writers(superseded)
        if self.any_strong:
            check.strong()
        if event.strong is not None:
            self.any_strong = True
            self._add(self.strong, cells, event, number, clock)
            self.readable[cells] |= write
        elif write:
            self.writer[cells], self.readers[cells] = number, 0
            if self.any_strong:
                self.strong[cells] = 0
        else:
            self._add(self.readers, cells, event, number, clock)

    def _add(self, sets: np.ndarray, cells: np.ndarray, event: Event, number: int, clock: Clock) -> None:
        """Adds an event to the cells' sets, in place of those that it comes after."""
        for group, where in _groups(sets[cells]):
            own, members = cells[where], self.events.sets[group]
            kept = tuple(x for x in members if not self.events[x].ordered_before(event, clock, own, self.granule))
            sets[own] = self.events.number((*kept, number))

    def allow_unwritten(self, first: int, nbytes: int) -> None:
        """These bytes may be read although nobody wrote them."""
        self.readable[first // self.granule : -(-(first + nbytes) // self.granule)] = True


@dataclass
class _Check:
    """One access, `event`, against those before it."""

    shadow: Shadow
    event: Event
    write: bool
    clock: Clock
    is_async: bool
    name: str
    cells: np.ndarray

    def readers(self) -> np.ndarray:
        """A write after reads. Gives by cell whether an asynchronous read is among those that are ordered before: then
        so is the write that this one saw, which its own check found to be ordered and fenced."""
        events, superseded = self.shadow.events, np.zeros(len(self.cells), bool)
        for group, where in _groups(self.shadow.readers[self.cells]):
            for reader in events.sets[group]:
                ordered = self._against(events[reader], where, "write after read")
                if ordered and events[reader].agent < 0:
                    superseded[where] = True
        return superseded

    def writers(self, superseded: np.ndarray) -> None:
        shadow = self.shadow
        kind = "write after write" if self.write else "read after write"
        for last, where in _groups(shadow.writer[self.cells]):
            if not last:
                if not self.write and not shadow.readable[self.cells[where]].all():
                    message = f"{self.event} of {self.name}, which nobody wrote"
                    shadow.hazards.report("uninitialised read", message, self.event.where)
                continue
            if self.write and superseded[where].all():
                continue
            writer = shadow.events[last]
            if self._against(writer, where, kind) and self.is_async and not writer.visible_to_async(self.clock):
                shadow.hazards.report(
                    "missing proxy fence",
                    f"{self.event} of {self.name} after {writer} without fence.proxy.async by the writer",
                    self.event.where, writer.where,
                )  # fmt: skip

    def strong(self) -> None:
        """Against atomics and other strong accesses."""
        events = self.shadow.events
        for group, where in _groups(self.shadow.strong[self.cells]):
            for other in events.sets[group]:
                earlier = events[other]
                if earlier.together_with(self.event) or (earlier.only_reads and not self.write):
                    continue
                kind = f"{'write' if self.write else 'read'} after {'read' if earlier.only_reads else 'write'}"
                self._against(earlier, where, kind)

    def _against(self, earlier: Event, where: Index, kind: str) -> bool:
        shadow, event = self.shadow, self.event
        if earlier.ordered_before(event, self.clock, self.cells[where], shadow.granule):
            return True
        shadow.hazards.report(
            "race", f"{kind} of {self.name}: {event} is not ordered after {earlier}", event.where,
            (kind, earlier.where),
        )  # fmt: skip
        return False


def _groups(numbers: np.ndarray) -> list[tuple[int, Index]]:
    """Each number, and where it stands."""
    if not len(numbers):
        return []
    first = numbers[0]
    if not np.count_nonzero(numbers != first):
        return [(int(first), slice(None))]
    return [(int(x), numbers == x) for x in np.unique(numbers)]
