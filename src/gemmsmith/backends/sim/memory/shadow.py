"""Shadow memory: per cell, the last write and the accesses since, which later accesses must be ordered after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gemmsmith.backends.sim.memory.clocks import VectorClock
from gemmsmith.backends.sim.memory.events import Event
from gemmsmith.backends.sim.report.hazards import Hazards
from gemmsmith.core.integers import ceil_div

MAX_ACCESS_BYTES = 16
"""Most bytes that one thread loads or stores in one instruction."""
MBARRIER_BYTES = 8
"""Size and alignment of an mbarrier object in bytes. PTX ISA, "mbarrier"."""


class CellState(NamedTuple):
    """State of a cell: the last ordinary write, and the ordinary reads and the strong accesses since.

    `initialized`: the cell may be read without a write by the kernel; `barriers`: offsets of the mbarriers in it.
    """

    writer: Event | None = None
    readers: tuple[Event, ...] = ()
    strong: tuple[Event, ...] = ()
    initialized: bool = False
    barriers: tuple[int, ...] = ()


class Shadow:
    """Shadow of one memory of `size` bytes; `initialized`: it holds data before the kernel.

    A cell has `granule` bytes, the width of the narrowest access so far, and holds the id of its state.
    """

    def __init__(self, size: int, *, initialized: bool) -> None:
        self.size, self.granule = size, MAX_ACCESS_BYTES
        self._set_initialized(np.full(ceil_div(size, MAX_ACCESS_BYTES), initialized))

    def begin_launch(self) -> None:
        """Forget all accesses, which are ordered before those of the next launch; what was written is initialized."""
        self._set_initialized(self.initialized_cells())

    def initialized_cells(self) -> np.ndarray:
        """Return whether each cell held data before the kernels, or has been written."""
        return np.array([x.initialized or x.writer is not None for x in self.states])[self.cells]

    def _set_initialized(self, initialized: np.ndarray) -> None:
        self.states = [CellState(), CellState(initialized=True)]
        self.state_ids = {state: i for i, state in enumerate(self.states)}
        self.cells = initialized.astype(np.int32)

    def access(
        self, offsets: np.ndarray, width: int, aligned: int, write: bool, event: Event, clock: VectorClock,
        fenced_row: int | None, describe: Callable[[], str], hazards: Hazards,
    ) -> None:  # fmt: skip
        """Check and record an event that accesses `width` bytes at each of `offsets`, all multiples of `aligned`.

        `fenced_row`: the row of `clock` that counts fenced accesses, if this one is through the async proxy; else None.
        `describe` returns the memory's name for messages.
        """
        if aligned % self.granule:
            self._refine_cells(aligned)
        cells = offsets // self.granule
        if width > self.granule:
            cells = (cells[:, None] + np.arange(width // self.granule)).reshape(-1)
        check = _Check(self, event, offsets, width, write, clock, fenced_row, describe, hazards)
        for state, own in _cells_by_state(self.cells[cells], cells):
            self.cells[own] = self._intern(check.check(self.states[state], own))

    def allow_uninitialized_reads(self, first: int, nbytes: int) -> None:
        """Allow reads of these bytes, which have not been accessed yet, without a write before."""
        self._refine_cells(first | nbytes)
        self.cells[first // self.granule : (first + nbytes) // self.granule] = self._intern(CellState(initialized=True))

    def add_barrier(self, first: int) -> None:
        """Record an mbarrier at offset `first`, which no other access may overlap."""
        for cell in {first // self.granule, (first + MBARRIER_BYTES - 1) // self.granule}:
            state = self.states[self.cells[cell]]
            self.cells[cell] = self._intern(state._replace(barriers=(*state.barriers, first)))

    def _intern(self, state: CellState) -> int:
        state_id = self.state_ids.setdefault(state, len(self.states))
        if state_id == len(self.states):
            self.states.append(state)
        return state_id

    def _refine_cells(self, multiple: int) -> None:
        """Split the cells until their size divides `multiple`."""
        while multiple % self.granule:
            self.granule //= 2
            self.cells = np.repeat(self.cells, 2)[: ceil_div(self.size, self.granule)]


@dataclass(slots=True)
class _Check:
    """Check of one access, `event`, against the earlier ones."""

    shadow: Shadow
    event: Event
    offsets: np.ndarray
    width: int
    write: bool
    clock: VectorClock
    fenced_row: int | None
    describe: Callable[[], str]
    hazards: Hazards

    @property
    def name(self) -> str:
        return self.describe()

    def check(self, state: CellState, cells: np.ndarray) -> CellState:
        """Check the access against cells of one state; return their next state."""
        for first in state.barriers:
            if ((self.offsets < first + MBARRIER_BYTES) & (self.offsets + self.width > first)).any():
                message = f"{self.event} overlaps the mbarrier {self.name}"
                self.hazards.report("barrier", message, self.event.place)
        if not (self.write and self._check_readers(state, cells)):
            self._check_writer(state, cells)
        if state.strong:
            self._check_strong(state, cells)
        writer, readers, strong, initialized, barriers = state
        if self.event.strong is not None:
            return CellState(writer, readers, self._append_event(strong, cells), initialized or self.write, barriers)
        if self.write:
            return CellState(self.event, (), (), initialized, barriers)
        return CellState(writer, self._append_event(readers, cells), strong, initialized, barriers)

    def _check_readers(self, state: CellState, cells: np.ndarray) -> bool:
        """Check write-after-read. Returns True if an ordered read was asynchronous.

        The last write then needs no further check, since that read was checked against it.
        """
        superseded = False
        for reader in state.readers:
            if self._check_ordered(reader, cells, "write after read") and reader.agent < 0:
                superseded = True
        return superseded

    def _check_writer(self, state: CellState, cells: np.ndarray) -> None:
        report = self.hazards.report
        writer = state.writer
        if writer is None:
            if (not self.write or self.event.is_atomic) and not state.initialized:
                message = f"{self.event} of uninitialized memory in {self.name}"
                report("uninitialized read", message, self.event.place)
            return
        self._check_ordered(writer, cells, "write after write" if self.write else "read after write")

    def _check_strong(self, state: CellState, cells: np.ndarray) -> None:
        """Check against atomics and other strong accesses."""
        for earlier in state.strong:
            if earlier.morally_strong_with(self.event) or (earlier.is_read and not self.write):
                continue
            kind = f"{'write' if self.write else 'read'} after {'read' if earlier.is_read else 'write'}"
            self._check_ordered(earlier, cells, kind)

    def _check_ordered(self, earlier: Event, cells: np.ndarray, kind: str) -> bool:
        event = self.event
        if earlier.ordered_before(event, self.clock, cells, self.shadow.granule):
            if self.fenced_row is not None and not earlier.visible_to_async_proxy(self.clock, self.fenced_row):
                message = f"{kind} of {self.name}: {event} is not separated from {earlier} by fence.proxy.async"
                self.hazards.report("missing proxy fence", message, event.place, others=(earlier.place,))
            return True
        message = f"{kind} of {self.name}: {event} is not ordered after {earlier}"
        self.hazards.report("race", message, event.place, others=(earlier.place,))
        return False

    def _append_event(self, others: tuple[Event, ...], cells: np.ndarray) -> tuple[Event, ...]:
        """Append the event and drop those ordered before it."""
        if not others:
            return (self.event,)
        granule = self.shadow.granule
        unordered = (x for x in others if not x.ordered_before(self.event, self.clock, cells, granule))
        return *unordered, self.event


def _cells_by_state(state_ids: np.ndarray, cells: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Return (state id, cells) for each distinct id."""
    as_bytes = state_ids.tobytes()  # numpy takes longer to compare few elements
    if as_bytes == as_bytes[: state_ids.itemsize] * len(state_ids):
        return [(state_ids.item(0), cells)]
    order = state_ids.argsort()
    state_ids, cells = state_ids[order], cells[order]
    begins = [0, *((state_ids[1:] != state_ids[:-1]).nonzero()[0] + 1).tolist()]
    ends = [*begins[1:], len(cells)]
    return [(state_ids.item(begin), cells[begin:end]) for begin, end in zip(begins, ends, strict=True)]
