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
            self.check_aligned(addresses, nbytes)
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
            self.check_aligned(addresses, data.shape[1])
            if order == "release":
                clock = part.warp.release(part.partial)
                for x in addresses:
                    self.state.releases.setdefault(int(x), Clock(self.state.agents)).join(clock)
                    self.state.released_at[int(x)] = self.time + self.state.chip.store_latency
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
            self.check_aligned(addresses, size)
            for row, place in zip(rows, addresses, strict=True):
                target, offsets = self._raw(space, cta, np.array([place]), size)
                if target is None:
                    continue
                old[row] = target[offsets[0] : offsets[0] + size].view(dtype)[0]
                new = np.asarray(update(old[row], np.dtype(dtype).type(operand[row])), dtype).reshape(1)
                target[offsets[0] : offsets[0] + size] = new.view(np.uint8)
        return old if old.dtype == np.float32 else old.astype(np.int64)

    def peek(self, access: Access) -> np.ndarray:
        return self._gather(access.space, self.peer(access.rank), access.addresses, access.width)

    def poke(self, access: Access, data: np.ndarray) -> None:
        target, offsets = self._raw(access.space, self.peer(access.rank), access.addresses, access.width)
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
                yield part, rows, self.peer(int(r)), addresses[rows]

    def peer(self, rank: int | None) -> Cta:
        """The CTA of that rank in the cluster; None is the unit's own."""
        if rank is None:
            return self.cta
        if not 0 <= rank < self.cluster_size:
            raise self.state.stop("out of bounds", f"CTA {rank} of a cluster of {self.cluster_size}", self.where)
        return self.cta.cluster[rank]

    def check_aligned(self, addresses: np.ndarray, width: int) -> None:
        """Reports an access that is not at a multiple of its width: the hardware traps."""
        if len(addresses) and int(np.bitwise_or.reduce(addresses)) % width:
            self.hazard("alignment", f"an access of {width} bytes at an address that is no multiple of {width}")

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
        event = Event(agent, int(clock.vector[0, agent]), 0, "write" if write else "read", self.title, self.where)
        self.record(Access(space, addresses, width), cta, write, event, clock, is_async=False)
        if cta is not self.cta:
            cta.remote.append(event)
            if not any(clock.vector[0, warp.whole] for warp in cta.warps):
                self.hazard("barrier", f"shared memory of CTA {cta.index}, which may not have started: "
                            "a cluster barrier must come first")  # fmt: skip

    def record(self, access: Access, cta: Cta, write: bool, event: Event, clock: Clock, is_async: bool) -> int | None:
        """Checks an access against the memory's shadow and enters it there; the number of its event."""
        if not len(access.addresses) or not access.width:
            return None
        data, offsets = self._raw(access.space, cta, access.addresses, access.width)
        if data is None:
            return None
        if access.space == "shared":
            shadow, name = cta.shadow, self.state.place(int(access.addresses[0]))[0]
        else:
            buffer = self.state.memory.find(int(access.addresses[0]))
            assert buffer is not None
            if write and not buffer.writable:
                self.hazard("out of bounds", f"write to {buffer.name}, which is an input")
            if not buffer.writable:
                return None
            shadow, name = self.state.global_shadow(buffer), buffer.name
        number = self.state.events.add(event)
        shadow.access(offsets, access.width, write, number, clock, is_async and access.space == "shared", name)
        return number
