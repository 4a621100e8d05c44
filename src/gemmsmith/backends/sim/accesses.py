"""Ordinary accesses to shared and global memory, atomics, and the raw bytes that asynchronous operations move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmsmith.backends.sim.clocks import EXECUTED, GRID_BEFORE, Clock
from gemmsmith.backends.sim.memory import OFFSET_MASK, SHARED_BASE, gather, scatter
from gemmsmith.backends.sim.scopes import Scope, scope_of
from gemmsmith.backends.sim.shadow import Event, Lanes
from gemmsmith.backends.sim.state import Cta
from gemmsmith.backends.sim.unit import Part, Unit
from gemmsmith.backends.sim.words import Word, reach
from gemmsmith.lang.machine import Access


class Accessing(Unit):
    """A unit that reads and writes memory."""

    def load(
        self, space: str, address: Any, nbytes: int, *, rank: Any = None, order: str = "weak", scope: str = "gpu",
        mask: Any = None,
    ) -> np.ndarray:  # fmt: skip
        result = np.zeros((len(self.threads), nbytes), np.uint8)
        self.time += self.state.chip.memory_instruction
        for part, rows, cta, addresses in self._accesses(address, rank, mask):
            self.check_aligned(addresses, nbytes)
            strong = None if order == "weak" else scope_of(scope)
            self._touch(part, rows, cta, space, addresses, nbytes, "read", strong)
            if strong is not None:
                for x in np.unique(addresses):
                    self.observe_word(part, int(x), order, strong)
            result[rows] = self._gather(space, cta, addresses, nbytes)
        return result

    def store(
        self, space: str, address: Any, data: np.ndarray, *, rank: Any = None, order: str = "weak", scope: str = "gpu",
        mask: Any = None,
    ) -> None:  # fmt: skip
        self.time += self.state.chip.memory_instruction
        for part, rows, cta, addresses in self._accesses(address, rank, mask):
            self.check_aligned(addresses, data.shape[1])
            strong = None if order == "weak" else scope_of(scope)
            event = self._touch(part, rows, cta, space, addresses, data.shape[1], "write", strong)
            if strong is not None:
                self._write_words(part, addresses, event, order, strong, atomic=False)
            target, offsets = self._raw(space, cta, addresses, data.shape[1])
            if target is not None:
                scatter(target, offsets, data[rows])

    def atomic(
        self, space: str, address: Any, dtype: Any, update: Callable[[Any, Any], Any], operand: np.ndarray, *,
        order: str = "relaxed", scope: str = "gpu", returns: bool = True,
    ) -> np.ndarray:  # fmt: skip
        old = np.zeros(len(self.threads), np.dtype(dtype))
        self.time += self.state.chip.memory_instruction
        size, strong = old.itemsize, scope_of(scope)
        for part, rows, cta, addresses in self._accesses(address, None, None):
            self.check_aligned(addresses, size)
            event = self._touch(part, rows, cta, space, addresses, size, "atomic", strong)
            for x in np.unique(addresses) if returns else ():
                self.observe_word(part, int(x), "acquire" if order in ("acquire", "acq_rel") else "relaxed", strong)
            self._write_words(part, addresses, event, order, strong, atomic=True)
            for row, place in zip(rows, addresses, strict=True):
                target, offsets = self._raw(space, cta, np.array([place]), size)
                if target is None:
                    continue
                old[row] = target[offsets[0] : offsets[0] + size].view(dtype)[0]
                new = np.asarray(update(old[row], np.dtype(dtype).type(operand[row])), dtype).reshape(1)
                target[offsets[0] : offsets[0] + size] = new.view(np.uint8)
        return old if old.dtype == np.float32 else old.astype(np.int64)

    def observe_word(self, part: Part, address: int, order: str, scope: Scope) -> None:
        """A strong read: what the word's writers tell is known at once with acquire, else after a fence."""
        agent = part.enter()
        word = self.state.words.setdefault(address, Word())
        for message in word.read(agent.number):
            clock = message[2]
            least = reach(self.cta, scope, message)
            if least is not None and order == "acquire":
                agent.clock.join(clock)
                continue
            agent.clock.follow(clock)
            if least is not None:
                agent.pending.append((least, clock))

    def _write_words(
        self, part: Part, addresses: np.ndarray, event: Event, order: str, scope: Scope, *, atomic: bool
    ) -> None:
        """A strong write: others learn all with release, else what came before a fence."""
        agent = part.enter()
        if order in ("release", "acq_rel"):
            fenced, clock = Scope.GPU, part.release()
        else:
            fenced, clock = part.warp.release_relaxed(part.lanes)
        for x in np.unique(addresses):
            word = self.state.words.setdefault(int(x), Word())
            message = min(scope, fenced), self.cta, clock
            overtaken = word.write(event, message, atomic=atomic, ordered=lambda e: e.known(agent.clock))
            if overtaken:
                self.hazard("race", f"{event} of a word is not ordered after {overtaken}", overtaken.where)
            self.state.released_at[int(x)] = self.time + self.state.chip.store_latency

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

    def _touch(
        self, part: Part, rows: np.ndarray, cta: Cta, space: Any, addresses: np.ndarray, width: int, what: str,
        scope: Scope | None,
    ) -> Event:  # fmt: skip
        """Enters an access of some of a part's lanes: ordinary, or strong, as far as a scope."""
        agent = part.enter()
        lanes = Lanes(self._offsets(space, addresses), width, rows % 32)
        strong = None if scope is None else (scope, self.cta)
        event = Event(agent.number, agent.count, 0, what, self.title, self.where, warp=part.warp, lanes=lanes,
                      strong=strong, only_reads=what == "read")  # fmt: skip
        self.record(Access(space, addresses, width), cta, what != "read", event, agent.clock, is_async=False)
        if cta is not self.cta:
            cta.remote.append(event)
            if not any(agent.clock.vector[EXECUTED, warp.first] for warp in cta.warps):
                self.hazard("barrier", f"shared memory of CTA {cta.index}, which may not have started: "
                            "a cluster barrier must come first")  # fmt: skip
        return event

    def _offsets(self, space: str, addresses: np.ndarray) -> np.ndarray:
        """As the memory's shadow counts."""
        if space == "shared":
            return addresses & OFFSET_MASK
        buffer = self.state.memory.find(int(addresses[0])) if len(addresses) else None
        return addresses - buffer.address if buffer else addresses

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
            if not clock.done & GRID_BEFORE:
                self.hazard("race", f"{event} of {buffer.name} is not ordered after the grids that this one "
                            "depends on: griddepcontrol.wait must come first")  # fmt: skip
            if write and not buffer.writable:
                self.hazard("out of bounds", f"write to {buffer.name}, which is an input")
            if not buffer.writable:
                return None
            shadow, name = self.state.global_shadow(buffer), buffer.name
        number = self.state.events.add(event)
        shadow.access(offsets, access.width, write, number, clock, is_async and access.space == "shared", name)
        return number
