"""Shared and global memory as a unit sees it: addresses become bytes, and every access is checked."""

from __future__ import annotations

import numpy as np

from gemmsmith.backends.sim.clocks import GRID_BEFORE, Clock
from gemmsmith.backends.sim.cta import Cta
from gemmsmith.backends.sim.events import Event
from gemmsmith.backends.sim.memory import OFFSET_MASK, SHARED_BASE, gather, scatter
from gemmsmith.backends.sim.unit import Unit
from gemmsmith.lang.machine import Access, Space


class CheckedMemory:
    """Reports accesses that are misaligned, out of bounds, or in a race."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def peek(self, access: Access) -> np.ndarray:
        return self.read(access.space, self.unit.peer(access.rank), access.addresses, access.width)

    def poke(self, access: Access, data: np.ndarray) -> None:
        self.write(access.space, self.unit.peer(access.rank), access.addresses, data)

    def read(self, space: Space, cta: Cta, addresses: np.ndarray, width: int) -> np.ndarray:
        """(len(addresses), width) bytes, zeros where that is out of bounds."""
        data, offsets = self._bytes(space, cta, addresses, width)
        return np.zeros((len(addresses), width), np.uint8) if data is None else gather(data, offsets, width)

    def write(self, space: Space, cta: Cta, addresses: np.ndarray, values: np.ndarray) -> None:
        data, offsets = self._bytes(space, cta, addresses, values.shape[1])
        if data is not None:
            scatter(data, offsets, values)

    def offsets(self, space: Space, addresses: np.ndarray) -> np.ndarray:
        """From where the memory begins: as its shadow counts."""
        if space == "shared":
            return addresses & OFFSET_MASK
        buffer = self.unit.state.memory.find(int(addresses[0])) if len(addresses) else None
        return addresses - buffer.address if buffer else addresses

    def check_aligned(self, addresses: np.ndarray, width: int) -> None:
        """Reports an access that is not at a multiple of its width: the hardware traps."""
        if len(addresses) and int(np.bitwise_or.reduce(addresses)) % width:
            self.unit.hazard("alignment", f"an access of {width} bytes at an address that is no multiple of {width}")

    def record(self, access: Access, cta: Cta, write: bool, event: Event, clock: Clock, is_async: bool) -> int | None:
        """Checks an access against the memory's shadow and enters it there; the number of its event."""
        if not len(access.addresses) or not access.width:
            return None
        state, hazard = self.unit.state, self.unit.hazard
        data, offsets = self._bytes(access.space, cta, access.addresses, access.width)
        if data is None:
            return None
        if access.space == "shared":
            shadow, name = cta.shadow, state.place(int(access.addresses[0]))[0]
        else:
            buffer = state.memory.find(int(access.addresses[0]))
            assert buffer is not None
            if not clock.done & GRID_BEFORE:
                hazard("race", f"{event} of {buffer.name} is not ordered after the grids that this one "
                       "depends on: griddepcontrol.wait must come first")  # fmt: skip
            if write and not buffer.writable:
                hazard("out of bounds", f"write to {buffer.name}, which is an input")
            if not buffer.writable:
                return None
            shadow, name = state.global_shadow(buffer), buffer.name
        number = state.events.add(event)
        shadow.access(offsets, access.width, write, number, clock, is_async and access.space == "shared", name)
        return number

    def _bytes(self, space: Space, cta: Cta, addresses: np.ndarray, width: int) -> tuple[np.ndarray | None, np.ndarray]:
        """The bytes of a memory and offsets into them; None (and a hazard) where an access is outside."""
        if not len(addresses) or not width:
            return None, addresses
        if space == "shared":
            data, offsets, name = cta.shared, addresses & OFFSET_MASK, "shared memory"
        else:
            buffer = self.unit.state.memory.find(int(addresses[0]))
            if buffer is None:
                self.unit.hazard("out of bounds", f"global address {int(addresses[0]):#x} is in no buffer")
                return None, addresses
            data, offsets, name = buffer.data, addresses - buffer.address, buffer.name
        low, high = int(offsets.min()), int(offsets.max()) + width
        if low < (SHARED_BASE if space == "shared" else 0) or high > len(data):
            self.unit.hazard("out of bounds", f"bytes {low}..{high} of {name}, which has {len(data)}")
            return None, offsets
        return data, offsets
