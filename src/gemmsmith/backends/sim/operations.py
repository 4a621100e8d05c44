"""Asynchronous operations as a unit starts, groups and waits for them."""

from __future__ import annotations

import numpy as np

from gemmsmith.backends.sim.shadow import Event
from gemmsmith.backends.sim.state import Running
from gemmsmith.backends.sim.synchronisation import Synchronising
from gemmsmith.backends.sim.timeline import Span
from gemmsmith.backends.sim.unit import Wait
from gemmsmith.lang.machine import AsyncOperation, Blocking

ENGINE_ROWS = {"tma": "TMA", "tensor": "tensor core", "copy": "copy"}


class Issuing(Synchronising):
    """A unit that starts TMA copies, wgmmas and cp.asyncs. With it, all of the Machine is there."""

    def start(self, operation: AsyncOperation) -> None:
        state, first = self.state, self.parts[0]
        threads = int(self.active.sum())
        if operation.engine == "tma" and threads != 1:
            self.hazard("duplicate issue", f"{operation.what} by {threads} threads, each of which copies")
        if operation.engine == "tensor" and threads != 128:
            raise state.stop("barrier", f"{operation.what} by {threads} threads; a warpgroup's 128 must", self.where)
        clock = first.warp.enter(first.partial)[1].copy()
        for part in self.parts[1:]:
            other = part.warp.enter(part.partial)[1]
            clock.vector, clock.done = np.minimum(clock.vector, other.vector), clock.done & other.done
        bits = 1 << 2 * state.started, 2 << 2 * state.started
        state.started += 1
        running = Running(operation, self, clock, bits, self._schedule(operation), self.where)
        for accesses, write, bit in ((operation.reads, False, bits[0]), (operation.writes, True, bits[1])):
            for access in accesses:
                cta = self.cta if access.rank is None else self.cta.cluster[access.rank]
                what = f"{'write' if write else 'read'} of {operation.what}"
                event = Event(-1, 0, bit, what, self.name, self.where)
                self._shadow(access, cta, write, event, clock, operation.proxy == "async")
                if cta is not self.cta:
                    cta.remote.append(event)
        if operation.engine == "tensor":
            self._own(running)
        state.running.append(running)
        state.all_operations.append(running)
        if operation.group:
            self.open.setdefault(self._group(operation.group), []).append(running)

    def _own(self, running: Running) -> None:
        for registers in running.operation.owns:
            if registers in self.dirty:
                self.hazard(
                    "accumulator", f"{registers.name} was accessed and no wgmma.fence orders that before the wgmma"
                )
            self.owned[registers] = running
        running.after, self.last_tensor = self.last_tensor, running

    def _schedule(self, operation: AsyncOperation) -> int:
        """When the operation ends; its engine is taken until then, or until its data is on the way."""
        chip, engines = self.state.chip, self.cta.engines
        self.time += chip.instruction
        row = "TMA store" if operation.group == "bulk" else ENGINE_ROWS[operation.engine]
        begin = max(self.time, engines.get(row, 0))
        if operation.engine == "tensor":
            duration, latency = int(operation.work), 0
        else:
            duration = int(operation.work / chip.tma_bytes_per_cycle)
            latency = chip.store_latency if operation.group == "bulk" else chip.tma_latency
        engines[row] = begin + duration
        kind = "mma" if operation.engine == "tensor" else "store" if operation.group == "bulk" else "load"
        seen = operation.completes[0][1] if operation.completes else None
        if seen is None and operation.engine == "tensor":
            seen = int(operation.reads[-1].addresses[0])
        stage = self.state.place(seen)[1] if seen is not None else None
        self.state.timeline.add(
            Span(self.block, row, kind, begin + latency, begin + latency + duration, operation.what, stage)
        )
        return begin + duration + latency

    def _group(self, group: str) -> object:
        return (group, int(self.parts[0].rows[0])) if group == "bulk" else group

    def commit_group(self, group: str) -> None:
        key = self._group(group)
        self.groups.setdefault(key, []).append(self.open.pop(key, []))

    def wait_group(self, group: str, pending: int, *, read: bool = False) -> Blocking:
        groups = self.groups.setdefault(self._group(group), [])
        waited = groups[: max(0, len(groups) - pending)]
        operations = [running for members in waited for running in members]
        if not all(running.finished for running in operations):
            yield Wait(
                lambda: all(running.finished for running in operations),
                lambda: f"{sum(not r.finished for r in operations)} operations of {group} groups",
            )
        began = self.time
        bits = 0
        for running in operations:
            bits |= running.bits[0] if read else running.bits[0] | running.bits[1]
            self.time = max(self.time, running.end)
            for registers in running.operation.owns:
                if self.owned.get(registers) is running:
                    del self.owned[registers]
        for part in self.parts:
            part.warp.enter(part.partial)[1].done |= bits
        if not read:
            del groups[: len(waited)]
        self.time += self.state.chip.instruction
        self.waited(began, f"{group} group")

    def complete(self, running: Running) -> None:
        """One of its operations ends: its data moves, and its mbarriers are told."""
        running.operation.perform()
        running.finished = True
        self.state.running.remove(running)
        clock = running.clock.copy()
        clock.done |= running.bits[0] | running.bits[1]
        for rank, address, nbytes in running.operation.completes:
            cta = self.cta if rank is None else self.cta.cluster[rank]
            self.mbarrier(cta, address, running.clock, remote=True).complete(nbytes, clock, running.end)
