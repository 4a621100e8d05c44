"""Shared and global memory as a unit sees it: addresses become bytes, and every access is checked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gemmsmith.backends.sim.clocks import GRID_BEFORE, Clock
from gemmsmith.backends.sim.events import Event
from gemmsmith.backends.sim.memory import OFFSET_MASK, SHARED_BASE, Buffer, alignment, gather, scatter
from gemmsmith.backends.sim.unit import Unit
from gemmsmith.lang.machine import Access


@dataclass(slots=True)
class Found:
    """An access's bytes: `width` from each of `offsets` into the `data` of a buffer, or of a CTA's shared memory; all
    of these begin at multiples of `aligned`, at most WIDEST."""

    access: Access
    data: np.ndarray
    offsets: np.ndarray
    buffer: Buffer | None
    aligned: int

    def read(self) -> np.ndarray:
        return gather(self.data, self.offsets, self.access.width, self.aligned)

    def write(self, values: np.ndarray) -> None:
        scatter(self.data, self.offsets, values, self.aligned)


class CheckedMemory:
    """Reports accesses that are misaligned, out of bounds, or in a race."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def peek(self, access: Access) -> np.ndarray:
        """(len(access.addresses), width) bytes, zeros where that is out of bounds."""
        found = self.find(access)
        return found.read() if found else np.zeros((len(access.addresses), access.width), np.uint8)

    def poke(self, access: Access, values: np.ndarray) -> None:
        found = self.find(access)
        if found:
            found.write(values)

    def find(self, access: Access) -> Found | None:
        """None where an access is of nothing, or (and a hazard) outside."""
        if not len(access.addresses) or not access.width:
            return None
        if access.space == "shared":
            buffer, data, least, name = None, self.unit.peer(access.rank).shared, SHARED_BASE, "shared memory"
            begin = access.first & ~OFFSET_MASK
        else:
            buffer = self.unit.state.memory.find(access.first)
            if buffer is None:
                self.unit.hazard("out of bounds", f"global address {access.first:#x} is in no buffer")
                return None
            data, least, name, begin = buffer.data, 0, buffer.name, buffer.address
        low, high = access.first - begin, access.last - begin + access.width
        if low < least or high > len(data):
            self.unit.hazard("out of bounds", f"bytes {low}..{high} of {name}, which has {len(data)}")
            return None
        offsets = access.addresses - begin if begin else access.addresses
        return Found(access, data, offsets, buffer, alignment(offsets, access.width))

    def check_aligned(self, access: Access, width: int) -> None:
        """Reports an access that is not at a multiple of that many bytes: the hardware traps."""
        if len(access.addresses) and int(np.bitwise_or.reduce(access.addresses)) % width:
            self.unit.hazard("alignment", f"an access of {width} bytes at an address that is no multiple of {width}")

    def record(
        self, found: Found, write: bool, event: Event, clock: Clock, *, is_async: bool = False,
        part: slice = slice(None),
    ) -> None:  # fmt: skip
        """Checks (a part of) an access against the memory's shadow and enters it there."""
        state, hazard, access, buffer = self.unit.state, self.unit.hazard, found.access, found.buffer
        if buffer is None:
            shadow, name = self.unit.peer(access.rank).shadow, state.place(int(access.addresses[part][0]))[0]
        else:
            if not clock.done & GRID_BEFORE:
                hazard("race", f"{event} of {buffer.name} is not ordered after the grids that this one "
                       "depends on: griddepcontrol.wait must come first")  # fmt: skip
            if write and not buffer.writable:
                hazard("out of bounds", f"write to {buffer.name}, which is an input")
            if not buffer.writable:
                return
            shadow, name, is_async = state.global_shadow(buffer), buffer.name, False
        shadow.access(found.offsets[part], access.width, found.aligned, write, event, clock, is_async, name)
