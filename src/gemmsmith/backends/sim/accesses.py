"""Ordinary accesses to shared and global memory by the active threads, strong ones, and atomics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from gemmsmith.backends.sim.checked_memory import CheckedMemory, Found
from gemmsmith.backends.sim.clocks import EXECUTED
from gemmsmith.backends.sim.events import Event, Lanes
from gemmsmith.backends.sim.scopes import Scope, scope_of
from gemmsmith.backends.sim.unit import Part, Unit, Wait
from gemmsmith.backends.sim.words import reach
from gemmsmith.lang.machine import Access, Blocking, Space

STEPS_OF_A_READ = (-6, 8)
"""Where a wait ends after some reads, the simulator's steps in the time of one: a power of 2 in this range, as the seed
says, for other units may be held up for long, or come at once."""


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
        for access, rows, parts in self._accesses(space, address, nbytes, rank, mask):
            found = self.memory.find(access)
            for part, own in parts:
                self._touch(access, rows, part, own, found, "read", strong)
                if strong is not None:
                    self._observe_words(part, access.addresses[own], strong, acquires=order == "acquire")
            if found:
                result[rows] = found.read()
        return result

    def store(
        self, space: Space, address: Any, data: np.ndarray, *, rank: Any = None, order: str = "weak",
        scope: str = "gpu", mask: Any = None,
    ) -> None:  # fmt: skip
        self.unit.time += self.unit.state.chip.memory_instruction
        strong = None if order == "weak" else scope_of(scope)
        for access, rows, parts in self._accesses(space, address, data.shape[1], rank, mask):
            found = self.memory.find(access)
            for part, own in parts:
                event = self._touch(access, rows, part, own, found, "write", strong)
                if strong is not None:
                    self._write_words(part, access.addresses[own], event, order, strong, atomic=False)
            if found:
                found.write(data[rows])

    def atomic(
        self, space: Space, address: Any, dtype: Any, update: Callable[[Any, Any], Any], operand: np.ndarray, *,
        order: str = "relaxed", scope: str = "gpu", returns: bool = True,
    ) -> np.ndarray:  # fmt: skip
        kind = np.dtype(dtype)
        old = np.zeros(len(self.unit.threads), kind)
        self.unit.time += self.unit.state.chip.memory_instruction
        strong = scope_of(scope)
        for access, rows, parts in self._accesses(space, address, kind.itemsize, None, None):
            found = self.memory.find(access)
            for part, own in parts:
                event = self._touch(access, rows, part, own, found, "atomic", strong)
                if returns:
                    acquires = order in ("acquire", "acq_rel")
                    self._observe_words(part, access.addresses[own], strong, acquires=acquires)
                self._write_words(part, access.addresses[own], event, order, strong, atomic=True)
            for row, at in zip(rows, access.addresses.reshape(-1, 1), strict=True):
                one = replace(access, addresses=at)
                old[row] = self.memory.peek(one).view(kind)[0, 0]
                new = np.asarray(update(old[row], kind.type(operand[row])), kind).reshape(1, 1)
                self.memory.poke(one, new.view(np.uint8))
        return old if old.dtype == np.float32 else old.astype(np.int64)

    def wait_word(
        self, address: Any, ready: Callable[[int], bool], what: str, order: str, scope: str = "gpu",
        reads: int | None = None,
    ) -> Blocking:  # fmt: skip
        unit, address = self.unit, int(address)
        left: float = math.inf
        if reads is not None and unit.state.seed:  # the cost model's schedule waits
            left = reads * 2 ** unit.state.random.uniform(*STEPS_OF_A_READ)
        access = Access("global", np.array([address]), 4)

        def word() -> int:
            return int(self.memory.peek(access).view(np.uint32)[0, 0])

        def done() -> bool:
            nonlocal left
            left -= 1
            return ready(word()) or left < 0

        self.memory.check_aligned(access, 4)
        began = unit.time
        if not done():
            buffer = unit.state.memory.find(address)
            name = buffer.name if buffer else "a word"
            yield Wait(done, lambda: f"{name}: a word is {word()}, {what}")
        unit.time = max(unit.time, unit.state.words[address].written_at)
        self.load("global", address, 4, order=order, scope=scope)
        unit.time += unit.state.chip.barrier
        unit.waited(began, "another CTA")
        return word()

    def _accesses(
        self, space: Space, address: Any, width: int, rank: Any, mask: Any
    ) -> Iterator[tuple[Access, np.ndarray, list[tuple[Part, slice]]]]:
        """(access, rows, parts) of the active threads, by target: a CTA, or a buffer if warps have several. `parts`:
        which of the access's addresses are of which warp."""
        unit, addresses = self.unit, self.unit.each(address)
        parts = [(part, part.rows) for part in (unit.parts if mask is None else unit.parts_of(np.asarray(mask)))]
        if not parts:
            return
        if rank is not None:
            ranks = unit.each(rank)
            for r in np.unique(np.concatenate([ranks[rows] for _, rows in parts])):
                there = [(part, rows[ranks[rows] == r]) for part, rows in parts]
                yield self._access(space, addresses, width, [(part, rows) for part, rows in there if len(rows)], int(r))
            return
        together = self._access(space, addresses, width, parts)
        find = unit.state.memory.find
        if space == "shared" or find(together[0].first) is find(together[0].last):
            yield together
        else:
            yield from (self._access(space, addresses, width, [part]) for part in parts)

    def _access(
        self, space: Space, addresses: np.ndarray, width: int, parts: list[tuple[Part, np.ndarray]],
        rank: int | None = None,
    ) -> tuple[Access, np.ndarray, list[tuple[Part, slice]]]:  # fmt: skip
        rows = parts[0][1] if len(parts) == 1 else np.concatenate([rows for _, rows in parts])
        access = Access(space, addresses[rows], width, rank)
        self.memory.check_aligned(access, width)
        ends = [*accumulate((len(rows) for _, rows in parts), initial=0)]
        return access, rows, [(part, slice(*own)) for (part, _), own in zip(parts, pairwise(ends), strict=True)]

    def _touch(
        self, access: Access, rows: np.ndarray, part: Part, own: slice, found: Found | None, what: str,
        scope: Scope | None,
    ) -> Event:  # fmt: skip
        """Enters a part's own of an access, which is ordinary, or strong, as far as a scope."""
        unit, agent, cta = self.unit, part.enter(), self.unit.peer(access.rank)
        offsets = found.offsets if found else access.addresses
        lanes = Lanes(offsets[own], access.width, rows[own])
        strong = None if scope is None else (scope, unit.cta)
        event = Event(agent.number, agent.count, 0, what, unit.title, unit.where, warp=part.warp, lanes=lanes,
                      strong=strong, only_reads=what == "read")  # fmt: skip
        if found:
            self.memory.record(found, what != "read", event, agent.clock, part=own)
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
