"""Ordinary accesses to shared and global memory by the active threads, strong ones, and atomics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gemmsmith.backends.sim.checked_memory import CheckedMemory
from gemmsmith.backends.sim.clocks import EXECUTED
from gemmsmith.backends.sim.cta import Cta
from gemmsmith.backends.sim.events import Event, Lanes
from gemmsmith.backends.sim.scopes import Scope, scope_of
from gemmsmith.backends.sim.unit import Part, Unit, Wait
from gemmsmith.backends.sim.words import reach
from gemmsmith.lang.machine import Access, Blocking, Space


class Accesses:
    """The instructions that load, store, update and poll."""

    def __init__(self, unit: Unit, memory: CheckedMemory) -> None:
        self.unit, self.memory = unit, memory

    def load(
        self, space: Space, address: Any, nbytes: int, *, rank: Any = None, order: str = "weak", scope: str = "gpu",
        mask: Any = None,
    ) -> np.ndarray:  # fmt: skip
        result = np.zeros((len(self.unit.threads), nbytes), np.uint8)
        self.unit.time += self.unit.state.chip.memory_instruction
        strong = None if order == "weak" else scope_of(scope)
        for part, rows, cta, addresses in self._accesses(address, rank, mask):
            self.memory.check_aligned(addresses, nbytes)
            self._touch(part, rows, cta, space, addresses, nbytes, "read", strong)
            if strong is not None:
                self._observe_words(part, addresses, strong, acquires=order == "acquire")
            result[rows] = self.memory.read(space, cta, addresses, nbytes)
        return result

    def store(
        self, space: Space, address: Any, data: np.ndarray, *, rank: Any = None, order: str = "weak",
        scope: str = "gpu", mask: Any = None,
    ) -> None:  # fmt: skip
        self.unit.time += self.unit.state.chip.memory_instruction
        strong = None if order == "weak" else scope_of(scope)
        for part, rows, cta, addresses in self._accesses(address, rank, mask):
            self.memory.check_aligned(addresses, data.shape[1])
            event = self._touch(part, rows, cta, space, addresses, data.shape[1], "write", strong)
            if strong is not None:
                self._write_words(part, addresses, event, order, strong, atomic=False)
            self.memory.write(space, cta, addresses, data[rows])

    def atomic(
        self, space: Space, address: Any, dtype: Any, update: Callable[[Any, Any], Any], operand: np.ndarray, *,
        order: str = "relaxed", scope: str = "gpu", returns: bool = True,
    ) -> np.ndarray:  # fmt: skip
        kind = np.dtype(dtype)
        old = np.zeros(len(self.unit.threads), kind)
        self.unit.time += self.unit.state.chip.memory_instruction
        strong = scope_of(scope)
        for part, rows, cta, addresses in self._accesses(address, None, None):
            self.memory.check_aligned(addresses, kind.itemsize)
            event = self._touch(part, rows, cta, space, addresses, kind.itemsize, "atomic", strong)
            if returns:
                self._observe_words(part, addresses, strong, acquires=order in ("acquire", "acq_rel"))
            self._write_words(part, addresses, event, order, strong, atomic=True)
            for row, at in zip(rows, addresses.reshape(-1, 1), strict=True):
                old[row] = self.memory.read(space, cta, at, kind.itemsize).view(kind)[0, 0]
                new = np.asarray(update(old[row], kind.type(operand[row])), kind).reshape(1, 1)
                self.memory.write(space, cta, at, new.view(np.uint8))
        return old if old.dtype == np.float32 else old.astype(np.int64)

    def wait_word(
        self, address: Any, ready: Callable[[int], bool], what: str, order: str, scope: str = "gpu"
    ) -> Blocking:
        unit, address = self.unit, int(address)
        at = np.array([address])

        def word() -> int:
            return int(self.memory.read("global", unit.cta, at, 4).view(np.uint32)[0, 0])

        self.memory.check_aligned(at, 4)
        began = unit.time
        if not ready(word()):
            buffer = unit.state.memory.find(address)
            name = buffer.name if buffer else "a word"
            yield Wait(lambda: ready(word()), lambda: f"{name}: a word is {word()}, {what}")
        unit.time = max(unit.time, unit.state.words[address].written_at)
        self.load("global", address, 4, order=order, scope=scope)
        unit.time += unit.state.chip.barrier
        unit.waited(began, "another CTA")
        return word()

    def _accesses(self, address: Any, rank: Any, mask: Any) -> Iterator[tuple[Part, np.ndarray, Cta, np.ndarray]]:
        """(part, rows, CTA, addresses) of the active threads, by warp and target CTA."""
        unit = self.unit
        addresses = unit.each(address)
        for part in unit.parts if mask is None else unit.parts_of(np.asarray(mask)):
            if rank is None:
                yield part, part.rows, unit.cta, addresses[part.rows]
                continue
            ranks = unit.each(rank)[part.rows]
            for r in np.unique(ranks):
                rows = part.rows[ranks == r]
                yield part, rows, unit.peer(int(r)), addresses[rows]

    def _touch(
        self, part: Part, rows: np.ndarray, cta: Cta, space: Space, addresses: np.ndarray, width: int, what: str,
        scope: Scope | None,
    ) -> Event:  # fmt: skip
        """Enters an access of some of a part's lanes: ordinary, or strong, as far as a scope."""
        unit, agent = self.unit, part.enter()
        lanes = Lanes(self.memory.offsets(space, addresses), width, rows % 32)
        strong = None if scope is None else (scope, unit.cta)
        event = Event(agent.number, agent.count, 0, what, unit.title, unit.where, warp=part.warp, lanes=lanes,
                      strong=strong, only_reads=what == "read")  # fmt: skip
        access = Access(space, addresses, width)
        self.memory.record(access, cta, what != "read", event, agent.clock, is_async=False)
        if cta is not unit.cta:
            cta.remote.append(event)
            if not any(agent.clock.vector[EXECUTED, warp.first] for warp in cta.warps):
                unit.hazard("barrier", f"shared memory of CTA {cta.index}, which may not have started: "
                            "a cluster barrier must come first")  # fmt: skip
        return event

    def _observe_words(self, part: Part, addresses: np.ndarray, scope: Scope, *, acquires: bool) -> None:
        """A strong read: what the words' writers tell is known at once to one that acquires, else after a fence."""
        agent = part.enter()
        for x in np.unique(addresses):
            for message in self.unit.state.words[int(x)].read(agent.number):
                clock = message[2]
                least = reach(self.unit.cta, scope, message)
                if least is not None and acquires:
                    agent.clock.join(clock)
                    continue
                agent.clock.follow(clock)
                if least is not None:
                    agent.pending.append((least, clock))

    def _write_words(
        self, part: Part, addresses: np.ndarray, event: Event, order: str, scope: Scope, *, atomic: bool
    ) -> None:
        """A strong write: others learn all with release, else what came before a fence."""
        unit, agent = self.unit, part.enter()
        if order in ("release", "acq_rel"):
            fenced, clock = Scope.GPU, part.release()
        else:
            fenced, clock = part.warp.release_relaxed(part.lanes)
        message = min(scope, fenced), unit.cta, clock
        for x in np.unique(addresses):
            word = unit.state.words[int(x)]
            overtaken = word.write(event, message, atomic=atomic, ordered=lambda e: e.known(agent.clock))
            if overtaken:
                unit.hazard("race", f"{event} of a word is not ordered after {overtaken}", overtaken.where)
            word.written_at = unit.time + unit.state.chip.store_latency
