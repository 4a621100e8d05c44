"""Ordinary accesses to shared and global memory, atomics, and the raw bytes that asynchronous operations move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmsmith.backends.sim.clocks import Clock
from gemmsmith.backends.sim.memory import OFFSET_MASK, SHARED_BASE, gather, scatter
from gemmsmith.backends.sim.shadow import Event
from gemmsmith.backends.sim.state import Cta
from gemmsmith.backends.sim.unit import Part, Unit
from gemmsmith.lang.machine import Access


class Accessing(Unit):
    """A unit that reads and writes memory."""

    def load(
        self, space: str, address: Any, nbytes: int, *, rank: Any = None, order: str = "weak", mask: Any = None
    ) -> np.ndarray:
        result = np.zeros((len(self.threads), nbytes), np.uint8)
        self.time += self.state.chip.memory_instruction
        for part, rows, cta, addresses in self._accesses(address, rank, mask):
            if order == "acquire":
                for x in addresses:
                    if int(x) in self.state.releases:
                        part.warp.acquire(part.partial, self.state.releases[int(x)])
            else:
                self._touch(part, cta, space, addresses, nbytes, write=False)
            result[rows] = self._gather(space, cta, addresses, nbytes)
        return result

    def store(
        self, space: str, address: Any, data: np.ndarray, *, rank: Any = None, order: str = "weak", mask: Any = None
    ) -> None:
        self.time += self.state.chip.memory_instruction
        for part, rows, cta, addresses in self._accesses(address, rank, mask):
            if order == "release":
                clock = part.warp.release(part.partial)
                for x in addresses:
                    self.state.releases.setdefault(int(x), Clock(self.state.agents)).join(clock)
            else:
                self._touch(part, cta, space, addresses, data.shape[1], write=True)
            target, offsets = self._raw(space, cta, addresses, data.shape[1])
            if target is not None:
                scatter(target, offsets, data[rows])

    def atomic(
        self, space: str, address: Any, dtype: Any, update: Callable[[Any, Any], Any], operand: np.ndarray
    ) -> np.ndarray:
        old = np.zeros(len(self.threads), np.dtype(dtype))
        self.time += self.state.chip.memory_instruction
        size = old.itemsize
        for _, rows, cta, addresses in self._accesses(address, None, None):
            for row, place in zip(rows, addresses, strict=True):
                target, offsets = self._raw(space, cta, np.array([place]), size)
                if target is None:
                    continue
                old[row] = target[offsets[0] : offsets[0] + size].view(dtype)[0]
                new = np.asarray(update(old[row], np.dtype(dtype).type(operand[row])), dtype).reshape(1)
                target[offsets[0] : offsets[0] + size] = new.view(np.uint8)
        return old if old.dtype == np.float32 else old.astype(np.int64)

    def peek(self, access: Access) -> np.ndarray:
        cta = self.cta if access.rank is None else self.cta.cluster[access.rank]
        return self._gather(access.space, cta, access.addresses, access.width)

    def poke(self, access: Access, data: np.ndarray) -> None:
        cta = self.cta if access.rank is None else self.cta.cluster[access.rank]
        target, offsets = self._raw(access.space, cta, access.addresses, access.width)
        if target is not None:
            scatter(target, offsets, data)

    def _accesses(self, address: Any, rank: Any, mask: Any) -> Any:
        """(part, rows, CTA, addresses) of the active threads, by warp and target CTA."""
        addresses = np.broadcast_to(np.asarray(address, np.int64), len(self.threads))
        for part in self.parts if mask is None else self._parts(np.asarray(mask)):
            if rank is None:
                yield part, part.rows, self.cta, addresses[part.rows]
                continue
            ranks = np.broadcast_to(np.asarray(rank), len(self.threads))[part.rows]
            for r in np.unique(ranks):
                rows = part.rows[ranks == r]
                yield part, rows, self.cta.cluster[int(r)], addresses[rows]

    def _raw(self, space: str, cta: Cta, addresses: np.ndarray, width: int) -> tuple[np.ndarray | None, np.ndarray]:
        """The bytes of a memory and offsets into them; None (and a hazard) where an access is outside."""
        if not len(addresses) or not width:
            return None, addresses
        if space == "shared":
            data, offsets, name = cta.shared, addresses & OFFSET_MASK, "shared memory"
        else:
            buffer = self.state.memory.find(int(addresses[0]))
            if buffer is None:
                self.hazard("out of bounds", f"global address {int(addresses[0]):#x} is in no buffer")
                return None, addresses
            data, offsets, name = buffer.data, addresses - buffer.address, buffer.name
        low, high = int(offsets.min()), int(offsets.max()) + width
        if low < (SHARED_BASE if space == "shared" else 0) or high > len(data):
            self.hazard("out of bounds", f"bytes {low}..{high} of {name}, which has {len(data)}")
            return None, offsets
        return data, offsets

    def _gather(self, space: str, cta: Cta, addresses: np.ndarray, width: int) -> np.ndarray:
        data, offsets = self._raw(space, cta, addresses, width)
        return np.zeros((len(addresses), width), np.uint8) if data is None else gather(data, offsets, width)

    def _touch(self, part: Part, cta: Cta, space: Any, addresses: np.ndarray, width: int, write: bool) -> None:
        agent, clock = part.warp.enter(part.partial)
        event = Event(agent, int(clock.vector[0, agent]), 0, "write" if write else "read", self.name, self.where)
        self._shadow(Access(space, addresses, width), cta, write, event, clock, is_async=False)

    def _shadow(self, access: Access, cta: Cta, write: bool, event: Event, clock: Clock, is_async: bool) -> None:
        if not len(access.addresses) or not access.width:
            return
        data, offsets = self._raw(access.space, cta, access.addresses, access.width)
        if data is None:
            return
        if access.space == "shared":
            shadow, name = cta.shadow, self.state.place(int(access.addresses[0]))[0]
        else:
            buffer = self.state.memory.find(int(access.addresses[0]))
            assert buffer is not None
            if write and not buffer.writable:
                self.hazard("out of bounds", f"write to {buffer.name}, which is an input")
            if not buffer.writable:
                return
            shadow, name = self.state.global_shadow(buffer), buffer.name
        number = self.state.events.add(event)
        shadow.access(offsets, access.width, write, number, clock, is_async and access.space == "shared", name)
