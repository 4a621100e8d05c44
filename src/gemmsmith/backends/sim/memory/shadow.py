"""Shadow memory: per cell, the last write and the accesses since, which later accesses must be ordered after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gemmsmith.backends.sim.memory.clocks import VectorClock
from gemmsmith.backends.sim.memory.events import Event
from gemmsmith.backends.sim.report.hazards import Hazards
from gemmsmith.core.scalars import ceil_div

MAX_ACCESS_BYTES = 16
"""Most bytes that one thread loads or stores in one instruction."""
MBARRIER_BYTES = 8
"""Size and alignment of an mbarrier object in bytes. PTX ISA, "mbarrier"."""


class CellState(NamedTuple):
    """State of a cell of memory.

    `writer`: the last ordinary write. `readers`, `strong`: the ordinary reads, and the strong accesses, since then.
    `initialized`: it may be read without a write by the kernel. `barriers`: offsets of the mbarriers in it.
    """

    writer: Event | None = None
    readers: tuple[Event, ...] = ()
    strong: tuple[Event, ...] = ()
    initialized: bool = False
    barriers: tuple[int, ...] = ()


@dataclass(slots=True)
class CheckedAccess:
    """An access of memory, with its check against earlier ones.

    Attributes:
        offsets, width: It accesses `width` bytes at each of `offsets`.
        aligned: A number of bytes that divides all offsets and the width.
        clock: What happens before the event.
        fenced_row: The row of `clock` that counts the accesses to this memory which the async proxy sees.
        describe: Returns the memory's name.
    """

    offsets: np.ndarray
    width: int
    aligned: int
    event: Event
    clock: VectorClock
    fenced_row: int
    describe: Callable[[], str]
    hazards: Hazards

    def check(self, state: CellState, cells: np.ndarray, granule: int) -> CellState:
        """Check the access against cells that have one state, and return their next state.

        A write must come after the last write and the reads since, a read after the last write. Strong accesses with
        sufficient scopes do not race with one another. A cell has `granule` bytes.
        """
        event, (writer, readers, strong, initialized, barriers) = self.event, state
        write = not event.is_read
        for first in barriers:
            if ((self.offsets < first + MBARRIER_BYTES) & (self.offsets + self.width > first)).any():
                message = f"{event} overlaps the mbarrier {self.describe()}"
                self.hazards.report("barrier", message, event.place)
        earlier_reads = readers if write else ()
        ordered_reads = [x for x in earlier_reads if self._check_order(x, cells, granule, "write after read")]
        if writer is None:
            if (not write or event.is_atomic) and not initialized:
                message = f"{event} of uninitialized memory in {self.describe()}"
                self.hazards.report("uninitialized read", message, event.place)
        elif not any(x.agent < 0 for x in ordered_reads):  # an asynchronous read was checked against the last write
            self._check_order(writer, cells, granule, "write after write" if write else "read after write")
        for x in strong:
            if not x.morally_strong_with(event) and (write or not x.is_read):
                kind = f"{'write' if write else 'read'} after {'read' if x.is_read else 'write'}"
                self._check_order(x, cells, granule, kind)
        if event.strong is not None:
            strong = self._append_event(strong, cells, granule)
            return CellState(writer, readers, strong, initialized or write, barriers)
        if write:
            return CellState(event, (), (), initialized, barriers)
        return CellState(writer, self._append_event(readers, cells, granule), strong, initialized, barriers)

    def _check_order(self, earlier: Event, cells: np.ndarray, granule: int, kind: str) -> bool:
        """Return whether an earlier access is ordered before this one; report a race or a missing proxy fence."""
        event = self.event
        if not earlier.ordered_before(event, self.clock, cells, granule):
            message = f"{kind} of {self.describe()}: {event} is not ordered after {earlier}"
            self.hazards.report("race", message, event.place, others=(earlier.place,))
            return False
        if event.proxy == "async" and not earlier.visible_to_async_proxy(self.clock, self.fenced_row):
            message = f"{kind} of {self.describe()}: {event} is not separated from {earlier} by fence.proxy.async"
            self.hazards.report("missing proxy fence", message, event.place, others=(earlier.place,))
        return True

    def _append_event(self, others: tuple[Event, ...], cells: np.ndarray, granule: int) -> tuple[Event, ...]:
        """Return the accesses `others` and this one, without those that are ordered before it.

        What comes after this one also comes after those.
        """
        unordered = (x for x in others if not x.ordered_before(self.event, self.clock, cells, granule))
        return *unordered, self.event


class Shadow:
    """Shadow of one memory of `size` bytes; `initialized`: it holds data before the kernel.

    `granule`: bytes of a cell, the largest power of two up to 16 that divides all accesses so far. `cells`: the id of
    each cell's state, an index into `states`; many cells share a state.
    """

    def __init__(self, size: int, *, initialized: bool) -> None:
        self.size, self.granule = size, MAX_ACCESS_BYTES
        self._set_initialized(np.full(ceil_div(size, MAX_ACCESS_BYTES), initialized))

    def begin_launch(self) -> None:
        """Forget all accesses, since they are ordered before those of the next launch.

        What was written counts as initialized.
        """
        self._set_initialized(self.initialized_cells())

    def initialized_cells(self) -> np.ndarray:
        """Return whether each cell held data before the kernels, or has been written."""
        return np.array([x.initialized or x.writer is not None for x in self.states])[self.cells]

    def _set_initialized(self, initialized: np.ndarray) -> None:
        self.states = [CellState(), CellState(initialized=True)]
        self.state_ids = {state: i for i, state in enumerate(self.states)}
        self.cells = initialized.astype(np.int32)

    def access(self, access: CheckedAccess) -> None:
        """Check an access against the earlier ones, and record it."""
        if access.aligned % self.granule:
            self._refine_cells(access.aligned)
        cells = access.offsets // self.granule
        if access.width > self.granule:
            cells = (cells[:, None] + np.arange(access.width // self.granule)).reshape(-1)
        for state, own in _cells_by_state(self.cells[cells], cells):
            self.cells[own] = self._intern(access.check(self.states[state], own, self.granule))

    def allow_uninitialized_reads(self, first: int, nbytes: int) -> None:
        """Allow reads of these bytes, which have not been accessed yet, without a write before."""
        self._refine_cells(first | nbytes)
        self.cells[first // self.granule : (first + nbytes) // self.granule] = self._intern(CellState(initialized=True))

    def add_barrier(self, first: int) -> None:
        """Record an mbarrier at offset `first`, whose bytes no ordinary access may overlap."""
        for cell in {first // self.granule, (first + MBARRIER_BYTES - 1) // self.granule}:
            state = self.states[self.cells[cell]]
            self.cells[cell] = self._intern(state._replace(barriers=(*state.barriers, first)))

    def _intern(self, state: CellState) -> int:
        """Return the id of a state, a new one if no cell has had it."""
        state_id = self.state_ids.setdefault(state, len(self.states))
        if state_id == len(self.states):
            self.states.append(state)
        return state_id

    def _refine_cells(self, multiple: int) -> None:
        """Halve the cells until their size divides `multiple`, in bytes."""
        while multiple % self.granule:
            self.granule //= 2
            self.cells = np.repeat(self.cells, 2)[: ceil_div(self.size, self.granule)]


def _cells_by_state(state_ids: np.ndarray, cells: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Return (state id, cells) for each distinct state among cells."""
    as_bytes = state_ids.tobytes()  # numpy takes longer to compare few elements
    if as_bytes == as_bytes[: state_ids.itemsize] * len(state_ids):
        return [(state_ids.item(0), cells)]
    order = state_ids.argsort()
    state_ids, cells = state_ids[order], cells[order]
    begins = [0, *((state_ids[1:] != state_ids[:-1]).nonzero()[0] + 1).tolist()]
    ends = [*begins[1:], len(cells)]
    return [(state_ids.item(begin), cells[begin:end]) for begin, end in zip(begins, ends, strict=True)]
