"""Shadow memory: for every few bytes the last write and the accesses since, each an event that others must know of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gemmsmith.backends.sim.clocks import Clock
from gemmsmith.backends.sim.events import Event
from gemmsmith.backends.sim.hazards import Hazards
from gemmsmith.backends.sim.memory import WIDEST

MBARRIER_BYTES = 8


class State(NamedTuple):
    """Of a cell: the last ordinary write, the ordinary reads since, and the strong accesses since. `readable`: it may
    be read though nobody wrote it; `barriers`: where mbarriers are, if in it."""

    writer: Event | None = None
    readers: tuple[Event, ...] = ()
    strong: tuple[Event, ...] = ()
    readable: bool = False
    barriers: tuple[int, ...] = ()


class Shadow:
    """The shadow of one memory of `size` bytes; `written` says that it held data before the kernel. A cell has as many
    bytes as the narrowest access so far, and holds the number of its state."""

    def __init__(self, size: int, hazards: Hazards, written: bool) -> None:
        self.size, self.granule = size, WIDEST
        self.hazards = hazards
        self.states = [State(readable=written)]
        self.numbers = {self.states[0]: 0}
        self.cells = np.zeros(-(-size // WIDEST), np.int32)

    def access(
        self, offsets: np.ndarray, width: int, aligned: int, write: bool, event: Event, clock: Clock, is_async: bool,
        name: str,
    ) -> None:  # fmt: skip
        """Checks and records an event, which touches `width` bytes from each of `offsets`, multiples of `aligned` all
        of them."""
        self._split(aligned)
        cells = offsets // self.granule
        if width > self.granule:
            cells = (cells[:, None] + np.arange(width // self.granule)).reshape(-1)
        check = _Check(self, event, offsets, width, write, clock, is_async, name)
        for state, own in _groups(self.cells[cells], cells):
            self.cells[own] = self._number(check.against(self.states[state], own))

    def allow_unwritten(self, first: int, nbytes: int) -> None:
        """These bytes, which nobody has touched, may be read although nobody wrote them."""
        self._split(first | nbytes)
        self.cells[first // self.granule : (first + nbytes) // self.granule] = self._number(State(readable=True))

    def add_barrier(self, first: int) -> None:
        """An mbarrier is there: nobody may touch it."""
        for cell in {first // self.granule, (first + MBARRIER_BYTES - 1) // self.granule}:
            state = self.states[self.cells[cell]]
            self.cells[cell] = self._number(state._replace(barriers=(*state.barriers, first)))

    def _number(self, state: State) -> int:
        number = self.numbers.setdefault(state, len(self.states))
        if number == len(self.states):
            self.states.append(state)
        return number

    def _split(self, multiple: int) -> None:
        """Makes the cells as small as accesses at such a multiple need."""
        while multiple % self.granule:
            self.granule //= 2
            self.cells = np.repeat(self.cells, 2)[: -(-self.size // self.granule)]


@dataclass(slots=True)
class _Check:
    """One access, `event`, against those before it."""

    shadow: Shadow
    event: Event
    offsets: np.ndarray
    width: int
    write: bool
    clock: Clock
    is_async: bool
    name: str

    def against(self, state: State, cells: np.ndarray) -> State:
        """Cells of one state; gives their next one."""
        for first in state.barriers:
            if ((self.offsets < first + MBARRIER_BYTES) & (self.offsets + self.width > first)).any():
                message = f"{self.event} touches the mbarrier {self.name}"
                self.shadow.hazards.report("barrier", message, self.event.where)
        if not (self.write and self._readers(state, cells)):
            self._writer(state, cells)
        if state.strong:
            self._strong(state, cells)
        writer, readers, strong, readable, barriers = state
        if self.event.strong is not None:
            return State(writer, readers, self._with(strong, cells), readable or self.write, barriers)
        if self.write:
            return State(self.event, (), (), readable, barriers)
        return State(writer, self._with(readers, cells), strong, readable, barriers)

    def _readers(self, state: State, cells: np.ndarray) -> bool:
        """A write after reads. Whether an asynchronous one is among those that are ordered before: then so is the write
        that this one saw, which its own check found to be ordered and fenced."""
        superseded = False
        for reader in state.readers:
            if self._ordered(reader, cells, "write after read") and reader.agent < 0:
                superseded = True
        return superseded

    def _writer(self, state: State, cells: np.ndarray) -> None:
        report = self.shadow.hazards.report
        writer = state.writer
        if writer is None:
            if not self.write and not state.readable:
                message = f"{self.event} of {self.name}, which nobody wrote"
                report("uninitialized read", message, self.event.where)
            return
        kind = "write after write" if self.write else "read after write"
        if self._ordered(writer, cells, kind) and self.is_async and not writer.visible_to_async(self.clock):
            message = f"{self.event} of {self.name} after {writer} without fence.proxy.async by the writer"
            report("missing proxy fence", message, self.event.where, writer.where)

    def _strong(self, state: State, cells: np.ndarray) -> None:
        """Against atomics and other strong accesses."""
        for earlier in state.strong:
            if earlier.together_with(self.event) or (earlier.only_reads and not self.write):
                continue
            kind = f"{'write' if self.write else 'read'} after {'read' if earlier.only_reads else 'write'}"
            self._ordered(earlier, cells, kind)

    def _ordered(self, earlier: Event, cells: np.ndarray, kind: str) -> bool:
        shadow, event = self.shadow, self.event
        if earlier.ordered_before(event, self.clock, cells, shadow.granule):
            return True
        message = f"{kind} of {self.name}: {event} is not ordered after {earlier}"
        shadow.hazards.report("race", message, event.where, (kind, earlier.where))
        return False

    def _with(self, others: tuple[Event, ...], cells: np.ndarray) -> tuple[Event, ...]:
        """The event beside those that it does not come after."""
        if not others:
            return (self.event,)
        granule = self.shadow.granule
        kept = (x for x in others if not x.ordered_before(self.event, self.clock, cells, granule))
        return *kept, self.event


def _groups(numbers: np.ndarray, cells: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Each number, and the cells that have it."""
    first = numbers[0]
    if not np.count_nonzero(numbers != first):
        return [(int(first), cells)]
    order = np.argsort(numbers)
    numbers, cells = numbers[order], cells[order]
    ends = [*(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]
    return [(int(numbers[begin]), cells[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
