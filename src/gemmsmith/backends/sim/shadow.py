"""Shadow memory: for every granule the last write and the reads since, each an event that others must know of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gemmsmith.backends.sim.clocks import ASYNC_PROXY, Clock
from gemmsmith.backends.sim.hazards import Hazards
from gemmsmith.lang.statements import Where

GRANULE = 2
"""Bytes: the narrowest access to shared memory, and to global memory of 16-bit elements."""


@dataclass(frozen=True)
class Event:
    """An access: by an agent at its count, or (agent -1) by an asynchronous operation whose `bits` say it is done."""

    agent: int
    count: int
    bits: int
    what: str
    who: str
    where: Where

    def known(self, clock: Clock) -> bool:
        """Whether it happened before what `clock` stands for."""
        if self.agent < 0:
            return clock.done & self.bits == self.bits
        return bool(clock.vector[0, self.agent] >= self.count)

    def visible_to_async(self, clock: Clock) -> bool:
        """Whether an ordinary write was fenced for the async proxy."""
        return self.agent < 0 or bool(clock.vector[ASYNC_PROXY, self.agent] >= self.count)

    def __str__(self) -> str:
        return f"{self.what} by {self.who} ({self.where})"


class Events:
    """All events by number (0 is none), and all sets of readers by number (0 is empty)."""

    def __init__(self) -> None:
        self.list: list[Event | None] = [None]
        self.sets: list[tuple[int, ...]] = [()]
        self._numbers: dict[tuple[int, ...], int] = {(): 0}

    def add(self, event: Event) -> int:
        self.list.append(event)
        return len(self.list) - 1

    def number(self, readers: tuple[int, ...]) -> int:
        if readers not in self._numbers:
            self._numbers[readers] = len(self.sets)
            self.sets.append(readers)
        return self._numbers[readers]


class Shadow:
    """The shadow of one memory of `size` bytes; `written` says that it held data before the kernel."""

    def __init__(self, size: int, events: Events, hazards: Hazards, written: bool, granule: int = GRANULE) -> None:
        count, self.granule = -(-size // granule), granule
        self.writer, self.readers = np.zeros(count, np.int32), np.zeros(count, np.int32)
        self.events, self.hazards = events, hazards
        self.readable = np.full(count, written)
        self.barriers = np.zeros(count, bool)

    def access(
        self, offsets: np.ndarray, width: int, write: bool, number: int, clock: Clock, is_async: bool, name: str
    ) -> None:
        """Checks and records event `number`, which touches `width` bytes from each of `offsets`."""
        cells = (offsets[:, None] // self.granule + np.arange(max(1, width // self.granule))).reshape(-1)
        event = self.events.list[number]
        assert event is not None
        if self.barriers[cells].any():
            self.hazards.report("barrier", f"{event} touches the mbarrier {name}", event.where)
        for last in _distinct(self.writer[cells]):
            if last:
                self._against_writer(last, event, write, clock, is_async, name)
            elif not write and not self.readable[cells[self.writer[cells] == 0]].all():
                self.hazards.report("uninitialised read", f"{event} of {name}, which nobody wrote", event.where)
        readers = self.readers[cells]
        if write:
            for group in _distinct(readers):
                for reader in self.events.sets[group]:
                    self._against(self.events.list[reader], event, clock, "write after read", name)
            self.writer[cells], self.readers[cells] = number, 0
            return
        groups = _distinct(readers)
        for group in groups:
            kept = tuple(r for r in self.events.sets[group] if not self.events.list[r].known(clock))  # type: ignore[union-attr]
            replacement = self.events.number((*kept, number))
            if len(groups) == 1:
                self.readers[cells] = replacement
            else:
                self.readers[cells[readers == group]] = replacement

    def allow_unwritten(self, first: int, nbytes: int) -> None:
        """These bytes may be read although nobody wrote them."""
        self.readable[first // self.granule : -(-(first + nbytes) // self.granule)] = True

    def _against_writer(self, last: int, event: Event, write: bool, clock: Clock, is_async: bool, name: str) -> None:
        writer = self.events.list[last]
        kind = "write after write" if write else "read after write"
        if self._against(writer, event, clock, kind, name) and is_async:
            assert writer is not None
            if not writer.visible_to_async(clock):
                self.hazards.report(
                    "missing proxy fence",
                    f"{event} of {name} after {writer} without fence.proxy.async by the writer", event.where,
                    writer.where,
                )  # fmt: skip

    def _against(self, earlier: Event | None, event: Event, clock: Clock, kind: str, name: str) -> bool:
        assert earlier is not None
        if earlier.known(clock):
            return True
        self.hazards.report(
            "race", f"{kind} of {name}: {event} is not ordered after {earlier}", event.where, (kind, earlier.where)
        )
        return False


def _distinct(numbers: np.ndarray) -> list[int]:
    if not len(numbers):
        return []
    first = numbers[0]
    if (numbers == first).all():
        return [int(first)]
    return [int(x) for x in np.unique(numbers)]
