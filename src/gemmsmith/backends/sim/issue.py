"""Asynchronous operations as a unit starts them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gemmsmith.backends.sim.checked_memory import CheckedMemory
from gemmsmith.backends.sim.clocks import MBARRIER_INIT, Clock
from gemmsmith.backends.sim.events import Event, Lanes
from gemmsmith.backends.sim.groups import Groups
from gemmsmith.backends.sim.mbarriers import Mbarriers
from gemmsmith.backends.sim.memory import OFFSET_MASK
from gemmsmith.backends.sim.operations import Running
from gemmsmith.backends.sim.registers import RegisterFile
from gemmsmith.backends.sim.timeline import Span
from gemmsmith.backends.sim.unit import Part, Unit
from gemmsmith.lang.machine import Access, AsyncOperation

ENGINE_ROWS = {"tma": "TMA", "tensor": "tensor core", "copy": "copy"}


class Issue:
    """Starts TMA copies, wgmmas and cp.asyncs: checks them, enters their accesses, and gives them time on an engine."""

    def __init__(
        self, unit: Unit, registers: RegisterFile, memory: CheckedMemory, mbarriers: Mbarriers, groups: Groups
    ) -> None:
        self.unit, self.registers, self.memory, self.mbarriers, self.groups = unit, registers, memory, mbarriers, groups
        self.last_wgmma: Running | None = None
        self.copies: list[tuple[np.ndarray, Running]] = []

    def start(self, operation: AsyncOperation) -> None:
        unit, operations = self.unit, self.unit.state.operations
        self._check_threads(operation)
        clock = self._common_clock()
        end = self._schedule(operation)
        running = Running(operation, unit.cta, clock, operations.next_bits(), end, unit.where)
        for rank, address, _ in operation.completes:
            self.mbarriers.at(unit.peer(rank), address, clock, copies=True)
        if operation.engine == "copy":  # a thread's bytes lie at a multiple of their number, at both ends
            for access in (*operation.writes, *operation.reads):
                self.memory.check_aligned(access, operation.writes[0].width)
        for access in operation.reads:
            self._enter(running, access, write=False)
        if operation.group == "cp.async":
            self._enter_copies(running)
        else:
            for access in operation.writes:
                self._enter(running, access, write=True)
        if operation.engine == "tensor":
            self.registers.give(running)
            running.after = (self.last_wgmma,) if self.last_wgmma else ()
            self.last_wgmma = running
        if operation.arrives:
            self.mbarriers.at(unit.cta, operation.arrives[0], clock)
            running.after = self._copied_by(unit.active)
        if operation.group == "cp.async":
            self.copies.append((unit.active.copy(), running))
        operations.add(running)
        if operation.group:
            self.groups.add(operation.group, running)

    def _copied_by(self, threads: np.ndarray) -> tuple[Running, ...]:
        """The copies by these threads alone since they last arrived for their copies."""
        covered = [bool((~copied | threads).all()) for copied, _ in self.copies]
        found = tuple(running for (_, running), own in zip(self.copies, covered, strict=True) if own)
        self.copies = [copy for copy, own in zip(self.copies, covered, strict=True) if not own]
        return found

    def _check_threads(self, operation: AsyncOperation) -> None:
        threads = int(self.unit.active.sum())
        if operation.engine == "tma" and threads != 1:
            self.unit.hazard("duplicate issue", f"{operation.what} by {threads} threads, each of which copies")
        if operation.engine == "tensor" and threads != 128:
            raise self.unit.stop(
                "barrier", f"{operation.what} by {threads} threads; a warpgroup's 128 must, outside of warp roles"
            )

    def _common_clock(self) -> Clock:
        """What all active threads know is ordered before; what each has executed has been."""
        first, *others = self.unit.parts
        clock = first.enter().clock.copy()
        for part in others:
            other = part.enter().clock
            np.minimum(clock.vector[:MBARRIER_INIT], other.vector[:MBARRIER_INIT], out=clock.vector[:MBARRIER_INIT])
            clock.follow(other)
            clock.done &= other.done
        return clock

    def _enter(self, running: Running, access: Access, write: bool, part: Part | None = None) -> Event:
        """The operation's access as an event: who knows its bit knows that it is over. `part`: whose lanes make it."""
        unit, operation = self.unit, running.operation
        cta = unit.peer(access.rank)
        what = f"{'write' if write else 'read'} of {operation.what}"
        event = Event(-1, 0, running.bits[write], what, unit.title, unit.where)
        if part:
            event.warp = part.warp
            event.lanes = Lanes(access.addresses & OFFSET_MASK, access.width, part.rows)
        if cta is not unit.cta:
            cta.remote.append(event)
        found = self.memory.find(access)
        if found:
            self.memory.record(found, write, event, running.clock, is_async=operation.proxy == "async")
        return event

    def _enter_copies(self, running: Running) -> None:
        """cp.async: each warp's copies apart, for a wait makes known only what the waiting thread itself copied."""
        (access,) = running.operation.writes
        first = 0
        for part in self.unit.parts:
            addresses = access.addresses[first : first + len(part.rows)]
            running.writes[part.warp] = self._enter(
                running, replace(access, addresses=addresses), write=True, part=part
            )
            first += len(part.rows)

    def _schedule(self, operation: AsyncOperation) -> int:
        """When the operation ends; its engine is taken until then, or until its data is on the way."""
        unit, state, engines = self.unit, self.unit.state, self.unit.cta.engines
        unit.time += state.chip.instruction
        row = "TMA store" if operation.group == "bulk" else ENGINE_ROWS[operation.engine]
        begin = max(unit.time, engines.get(row, 0))
        if operation.engine == "tensor":
            duration, latency = int(operation.work), 0
        else:
            duration = int(operation.work / state.chip.tma_bytes_per_cycle)
            latency = state.chip.store_latency if operation.group == "bulk" else state.chip.tma_latency
        engines[row] = begin + duration
        kind = "mma" if operation.engine == "tensor" else "store" if operation.group == "bulk" else "load"
        seen = operation.completes[0][1] if operation.completes else None
        if seen is None and operation.engine == "tensor":
            seen = int(operation.reads[-1].addresses[0])
        stage = state.place(seen)[1] if seen is not None else None
        start, end = begin + latency, begin + latency + duration
        state.timeline.add(Span(unit.cta.index, row, kind, start, end, operation.what, stage))
        return end
