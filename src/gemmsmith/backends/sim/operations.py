"""Asynchronous operations as a unit starts, groups and waits for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gemmsmith.backends.sim.clocks import MBARRIER_INIT
from gemmsmith.backends.sim.memory import OFFSET_MASK
from gemmsmith.backends.sim.shadow import Event, Lanes
from gemmsmith.backends.sim.state import Running
from gemmsmith.backends.sim.synchronisation import Synchronising
from gemmsmith.backends.sim.timeline import Span
from gemmsmith.backends.sim.unit import Part, Wait
from gemmsmith.lang.machine import Access, AsyncOperation, Blocking

ENGINE_ROWS = {"tma": "TMA", "tensor": "tensor core", "copy": "copy"}


class Issuing(Synchronising):
    """A unit that starts TMA copies, wgmmas and cp.asyncs. With it, all of the Machine is there."""

    def start(self, operation: AsyncOperation) -> None:
        state, first = self.state, self.parts[0]
        threads = int(self.active.sum())
        if operation.engine == "tma" and threads != 1:
            self.hazard("duplicate issue", f"{operation.what} by {threads} threads, each of which copies")
        if operation.engine == "tensor" and threads != 128:
            raise state.stop(
                "barrier",
                f"{operation.what} by {threads} threads; a warpgroup's 128 must, outside of warp roles",
                self.where,
            )
        clock = first.enter().clock.copy()
        for part in self.parts[1:]:  # what all know is ordered before; what each has executed has been
            other = part.enter().clock
            np.minimum(clock.vector[:MBARRIER_INIT], other.vector[:MBARRIER_INIT], out=clock.vector[:MBARRIER_INIT])
            clock.follow(other)
            clock.done &= other.done
        bits = 1 << 2 * state.started, 2 << 2 * state.started
        state.started += 1
        running = Running(operation, self, clock, bits, self._schedule(operation), self.where)
        for rank, address, _ in operation.completes:
            self.mbarrier(self.peer(rank), address, clock, remote=self.peer(rank) is not self.cta, copies=True)
        if operation.engine == "copy":
            self._check_copy(operation)
        for access in operation.reads:
            self._enter(running, access, write=False)
        if operation.group == "cp.async":
            self._enter_copies(running)
        else:
            for access in operation.writes:
                self._enter(running, access, write=True)
        if operation.engine == "tensor":
            self._own(running)
        state.running.append(running)
        state.all_operations.append(running)
        if operation.group:
            key = ("bulk", int(first.rows[0])) if operation.group == "bulk" else operation.group
            self.open.setdefault(key, []).append(running)

    def _enter(self, running: Running, access: Access, write: bool, part: Part | None = None) -> int | None:
        """The operation's access as an event: who knows its bit knows that it is over. `part`: whose lanes make it."""
        cta, operation = self.peer(access.rank), running.operation
        what = f"{'write' if write else 'read'} of {operation.what}"
        event = Event(-1, 0, running.bits[write], what, self.title, self.where)
        if part:
            lanes = Lanes(access.addresses & OFFSET_MASK, access.width, part.rows % 32)
            event = replace(event, warp=part.warp, lanes=lanes)
        if cta is not self.cta:
            cta.remote.append(event)
        return self.record(access, cta, write, event, running.clock, operation.proxy == "async")

    def _check_copy(self, operation: AsyncOperation) -> None:
        """A thread's bytes lie at a multiple of their number, at both ends."""
        (access,) = operation.writes
        for either in (access, *operation.reads):
            self.check_aligned(either.addresses, access.width)

    def _enter_copies(self, running: Running) -> None:
        """cp.async: each warp's copies apart, for a wait makes known only what the waiting thread itself copied."""
        (access,) = running.operation.writes
        first = 0
        for part in self.parts:
            addresses = access.addresses[first : first + len(part.rows)]
            number = self._enter(running, replace(access, addresses=addresses), write=True, part=part)
            if number is not None:
                running.writes[part.warp] = number
            first += len(part.rows)

    def _own(self, running: Running) -> None:
        for registers in running.operation.owns:
            if registers in self.dirty:
                self.hazard(
                    "accumulator", f"{registers.name} was accessed and no wgmma.fence orders that before the wgmma"
                )
            self.owned[registers] = running
            self.unfenced.discard(registers)
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

    def _group(self, group: str) -> list[object]:
        """The lists of groups that the active threads have: of bulk stores each thread has its own."""
        if group != "bulk":
            return [group]
        held = {key: None for key in (*self.open, *self.groups) if isinstance(key, tuple)}
        return [key for key in held if self.active[key[1]]]

    def commit_group(self, group: str) -> None:
        if group == "wgmma":
            self.converged("wgmma.commit_group")
        for key in self._group(group):
            self.groups.setdefault(key, []).append(self.open.pop(key, []))

    def wait_group(self, group: str, pending: int, *, read: bool = False) -> Blocking:
        if group == "wgmma":
            self.converged("wgmma.wait_group")
        keys = self._group(group)
        waited = {key: held[: max(0, len(held) - pending)] for key in keys if (held := self.groups.get(key, []))}
        operations = [running for groups in waited.values() for members in groups for running in members]
        if not all(running.finished for running in operations):
            yield Wait(
                lambda: all(running.finished for running in operations),
                lambda: f"{sum(not r.finished for r in operations)} operations of {group} groups",
            )
        began = self.time
        for running in operations:
            self.time = max(self.time, running.end)
            for registers in running.operation.owns:
                if self.owned.get(registers) is running:
                    del self.owned[registers]
                    self.unfenced.add(registers)
        for key, groups in waited.items():
            self._learn(key, [running for members in groups for running in members], read)
            if not read and not any(running.writes for members in groups for running in members):
                del self.groups[key][: len(groups)]
        self.time += self.state.chip.instruction
        self.waited(began, f"{group} group")

    def _learn(self, key: object, operations: list[Running], read: bool) -> None:
        """What a wait makes known, and to whom."""
        bits = 0
        for running in operations:
            bits |= running.bits[0] if read else running.bits[0] | running.bits[1]
        if isinstance(key, tuple):  # of bulk stores, to the one thread that issued them
            self.warps[key[1] // 32].enter(1 << key[1] % 32).clock.done |= bits
            return
        for part in self.parts:
            agent = part.enter()
            agent.clock.done |= bits
            for running in operations:
                if part.warp in running.writes:  # from here on a cp.async is like a store of this warp
                    number = running.writes.pop(part.warp)
                    event = self.state.events[number]
                    self.state.events.list[number] = replace(event, agent=agent.number, count=agent.count)

    def complete(self, running: Running) -> None:
        """One of its operations ends: its data moves, and its mbarriers are told."""
        running.operation.perform()
        running.finished = True
        self.state.running.remove(running)
        if running.operation.engine == "tensor":
            self.state.worked(running.operation.work)
        bits = running.bits[0] | running.bits[1]
        for rank, address, nbytes in running.operation.completes:
            cta = self.peer(rank)
            near = running.operation.proxy == "async" or cta is self.cta
            cta.mbarriers[address & OFFSET_MASK].complete(nbytes, running.clock, bits, running.end, near=near)
