"""Issue of asynchronous operations by a lockstep group, and the groups of them that it commits and waits for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gemmsmith.backends.sim.execute.checked_memory import CheckedMemory
from gemmsmith.backends.sim.execute.counters import AccessCounter
from gemmsmith.backends.sim.execute.mbarriers import Mbarriers
from gemmsmith.backends.sim.execute.registers import RegisterFile
from gemmsmith.backends.sim.memory.clocks import MBARRIER_INIT_FENCED, VectorClock
from gemmsmith.backends.sim.memory.events import Event, LaneAccesses
from gemmsmith.backends.sim.memory.memory import OFFSET_MASK
from gemmsmith.backends.sim.state.grid_state import INSTRUCTION_CYCLES, STORE_LATENCY, TMA_BYTES_PER_CYCLE, TMA_LATENCY
from gemmsmith.backends.sim.state.lockstep_group import ActiveLanes, LockstepGroup, Wait
from gemmsmith.backends.sim.state.operations import InFlightOperation
from gemmsmith.machine import Access, AsyncGroupKind, AsyncOperation, Blocking

Key = AsyncGroupKind | tuple[AsyncGroupKind, int]
"""Key of a list of groups: one per lockstep group for wgmma and cp.async, one per thread (its row) for bulk stores."""


ENGINE_ROWS = {"tma": "TMA", "tensor": "tensor core", "copy": "copy"}
"""Row of the timeline, by engine."""


class AsyncIssuer:
    """Issues a lockstep group's TMA copies, wgmmas and cp.asyncs, and waits for the groups that it commits.

    Issue checks an operation, records its accesses and schedules it on an engine. `uncommitted`: operations that no
    commit_group has put into a group yet; `committed`: groups that a wait_group may still wait for, oldest first.
    `last_wgmma`: the one issued last, which the next one follows. `copies`: (issuing threads, cp.async) of those on
    which no cp.async.mbarrier.arrive has arrived yet.
    """

    def __init__(
        self, group: LockstepGroup, registers: RegisterFile, memory: CheckedMemory, mbarriers: Mbarriers,
        counter: AccessCounter | None,
    ) -> None:  # fmt: skip
        self.group, self.registers, self.memory = group, registers, memory
        self.mbarriers, self.counter = mbarriers, counter
        self.uncommitted: dict[Key, list[InFlightOperation]] = {}
        self.committed: dict[Key, list[list[InFlightOperation]]] = {}
        self.last_wgmma: InFlightOperation | None = None
        self.copies: list[tuple[np.ndarray, InFlightOperation]] = []

    def start(self, operation: AsyncOperation) -> None:
        """Issue an operation: check it, record its accesses, and reserve its engine.

        Its data move when the scheduler completes it.
        """
        group, operations = self.group, self.group.state.operations
        if self.counter:
            self.counter.count_operation(operation)
        self._check_threads(operation)
        clock = self._common_clock()
        end = self._schedule(operation)
        in_flight = InFlightOperation(operation, group.cta, clock, operations.next_bits(), end, group.location)
        if operation.complete_tx or operation.arrive_on:
            in_flight.issuer_clocks = [lanes.agent().clock.copy() for lanes in group.active_lanes]
        for rank, address, _ in operation.complete_tx:
            self.mbarriers.at(group.peer(rank), address, clock, used_by_async_proxy=True)
        if operation.engine == "copy":  # source and destination are aligned to the copy size
            for access in (*operation.writes, *operation.reads):
                self.memory.check_aligned(access, operation.writes[0].width)
        for access in operation.reads:
            self._record(in_flight, access, write=False)
        if operation.group == "cp.async":
            self._record_copies(in_flight)
        else:
            for access in operation.writes:
                self._record(in_flight, access, write=True)
        if operation.engine == "tensor":
            self.registers.acquire_for(in_flight)
            in_flight.depends_on = (self.last_wgmma,) if self.last_wgmma else ()
            self.last_wgmma = in_flight
        if operation.arrive_on:
            self.mbarriers.at(group.cta, operation.arrive_on[0], clock)
            in_flight.depends_on = self._copies_covered_by(group.active)
        if operation.group == "cp.async":
            self.copies.append((group.active.copy(), in_flight))
        operations.add(in_flight)
        if operation.group:
            issuer = int(group.active_lanes[0].thread_indices[0])
            key: Key = (operation.group, issuer) if operation.group == "bulk" else operation.group
            self.uncommitted.setdefault(key, []).append(in_flight)

    def _copies_covered_by(self, threads: np.ndarray) -> tuple[InFlightOperation, ...]:
        """Return, and forget, the cp.asyncs for which a cp.async.mbarrier.arrive by `threads` arrives.

        They are those whose issuing threads are all among `threads`, a bool per thread.
        """
        covered = [bool((~copied | threads).all()) for copied, _ in self.copies]
        result = tuple(copy for (_, copy), is_covered in zip(self.copies, covered, strict=True) if is_covered)
        self.copies = [copy for copy, is_covered in zip(self.copies, covered, strict=True) if not is_covered]
        return result

    def _check_threads(self, operation: AsyncOperation) -> None:
        """Report a TMA copy that several threads issue.

        Raises SimulationAborted for a wgmma by less than a whole warpgroup.
        """
        threads = int(np.count_nonzero(self.group.active))
        if operation.engine == "tma" and threads != 1:
            self.group.report(
                "issued by several threads",
                f"{operation.label} issued by {threads} threads, so {threads} times; guard it with elect_one",
            )
        if operation.engine == "tensor" and threads != 128:
            raise self.group.fatal(
                "barrier",
                f"{operation.label} issued by {threads} threads; all 128 of a warpgroup must issue it, so not in a "
                "branch that only some of its warps take",
            )

    def _common_clock(self) -> VectorClock:
        """Return the clock of an operation: what happens before it for every active thread.

        That is the minimum of the threads' clocks. What one thread knows to have been executed has been executed, so of
        the last two rows it is the maximum.
        """
        first, *others = self.group.active_lanes
        clock = first.agent().clock.copy()
        for lanes in others:
            other = lanes.agent().clock
            ordered = clock.event_counts[:MBARRIER_INIT_FENCED]
            np.minimum(ordered, other.event_counts[:MBARRIER_INIT_FENCED], out=ordered)
            clock.join_executed_events(other)
            clock.completed_bits &= other.completed_bits
            clock.fenced_bits &= other.fenced_bits
        return clock

    def _record(
        self, in_flight: InFlightOperation, access: Access, write: bool, lanes: ActiveLanes | None = None
    ) -> Event:
        """Check and record an access of the operation; return its event.

        The event's clock bit is the one that says "sources read", or "results written" for a `write`.
        """
        group, operation = self.group, in_flight.operation
        cta = group.peer(access.rank)
        label = f"{'write' if write else 'read'} of {operation.label}"
        engine = operation.group if operation.group == "bulk" else operation.engine
        event = Event(
            -1, 0, in_flight.bits[write], label, group.location, engine, is_read=not write,
            proxy=operation.proxy,
        )  # fmt: skip
        if write and access.threads is not None and len(np.unique(access.addresses)) < len(access.addresses):
            group.report("race", f"threads write to one address in one instruction: {event}")
        if lanes:
            event.warp = lanes.warp
            event.lanes = LaneAccesses(access.addresses & OFFSET_MASK, access.width, lanes.thread_indices)
        if cta is not group.cta:
            cta.remote.append(event)
        resolved = self.memory.resolve(access)
        if resolved:
            self.memory.record(resolved, event, in_flight.clock)
        return event

    def _record_copies(self, in_flight: InFlightOperation) -> None:
        """Record the writes of a cp.async per warp: wait_group covers only the copies of the threads that wait."""
        (access,) = in_flight.operation.writes
        for lanes, part in self.group.active_lanes.slices:
            own = replace(access, addresses=access.addresses[part])
            in_flight.copy_writes[lanes.warp] = self._record(in_flight, own, write=True, lanes=lanes)

    def _schedule(self, operation: AsyncOperation) -> int:
        """Reserve the operation's engine and return the time at which the operation completes, in cycles.

        Each engine executes its operations one after the other; their latencies overlap.
        """
        group, state, engines = self.group, self.group.state, self.group.cta.engines
        group.time += INSTRUCTION_CYCLES
        row = "TMA store" if operation.group == "bulk" else ENGINE_ROWS[operation.engine]
        begin = max(group.time, engines.get(row, 0))
        if operation.engine == "tensor":
            duration, latency = int(operation.tensor_cycles), 0
        else:
            duration = int(operation.nbytes / TMA_BYTES_PER_CYCLE)
            latency = STORE_LATENCY if operation.group == "bulk" else TMA_LATENCY
        engines[row] = begin + duration
        start, end = begin + latency, begin + latency + duration
        if state.observer is not None:
            state.observer.issue(group, operation, row, (start, end), self._stage(operation))
        return end

    def _stage(self, operation: AsyncOperation) -> int | None:
        """Return the pipeline stage of an operation, for the timeline, or None.

        It is the slot, in its shared buffer, of the mbarrier that a copy signals, of what cp.async writes, or of the
        operand B of a wgmma.
        """
        address = operation.complete_tx[0][1] if operation.complete_tx else None
        if address is None and operation.engine == "tensor":
            address = int(operation.reads[-1].addresses[0])
        elif address is None and operation.group == "cp.async":
            address = int(operation.writes[0].addresses[0])
        return None if address is None else self.group.state.describe_address(address)[1]

    # -- groups ------------------------------------------------------------------------------------
    def commit(self, kind: AsyncGroupKind) -> None:
        """Commit the active threads' operations of a kind as one group."""
        if kind == "wgmma":
            self.group.require_converged("wgmma.commit_group")
        for key in self._keys_of_active_threads(kind):
            members = self.uncommitted.pop(key, [])
            self.committed.setdefault(key, []).append(members)
            if (observer := self.group.state.observer) is not None:
                observer.commit(self.group, f"{kind} group", [x.operation for x in members])

    def wait(self, kind: AsyncGroupKind, pending: int, *, read: bool = False) -> Blocking:
        """Wait until at most `pending` groups of a kind are pending, or with `read`, have not yet read their sources.

        The other groups' operations then happen before what the waiting threads do next.
        """
        lockstep = self.group
        if kind == "wgmma":
            lockstep.require_converged("wgmma.wait_group")
        waited = {
            key: committed[: max(0, len(committed) - pending)]
            for key in self._keys_of_active_threads(kind)
            if (committed := self.committed.get(key, []))
        }
        members = {key: [operation for group in groups for operation in group] for key, groups in waited.items()}
        operations = [operation for group in members.values() for operation in group]
        if not all(operation.finished for operation in operations):
            yield Wait(
                lambda: all(operation.finished for operation in operations),
                lambda: f"{sum(not x.finished for x in operations)} operations of {kind} groups",
                f"{kind} group", pending=pending,
            )  # fmt: skip
        start = lockstep.time
        for operation in operations:
            lockstep.time = max(lockstep.time, operation.end)
            self.registers.release_from(operation)
        for key, group in members.items():
            self._join_completion(key, group, read)
            if not read and not any(operation.copy_writes for operation in group):
                del self.committed[key][: len(waited[key])]
        lockstep.time += INSTRUCTION_CYCLES
        lockstep.record_wait(start, f"{kind} group", pending=pending, operations=[x.operation for x in operations])

    def _keys_of_active_threads(self, kind: AsyncGroupKind) -> list[Key]:
        """Return the keys of the lists of groups that the active threads commit to and wait for.

        Bulk stores have one list for each thread that has issued some; the other kinds have one in all.
        """
        if kind != "bulk":
            return [kind]
        keys = dict.fromkeys(key for key in (*self.uncommitted, *self.committed) if isinstance(key, tuple))
        return [key for key in keys if self.group.active[key[1]]]

    def _join_completion(self, key: Key, operations: list[InFlightOperation], read: bool) -> None:
        """Record in the waiting threads' clocks that operations have completed or, with `read`, read their sources."""
        lockstep, bits = self.group, 0
        for operation in operations:
            bits |= operation.bits[0] if read else operation.bits[0] | operation.bits[1]
        if isinstance(key, tuple):  # bulk stores: only the thread that issued them
            lockstep.warps[key[1] // 32].agent(1 << key[1] % 32).clock.completed_bits |= bits
            return
        for lanes in lockstep.active_lanes:
            agent = lanes.agent()
            agent.clock.completed_bits |= bits
            for operation in operations:
                if lanes.warp in operation.copy_writes:  # from here on a cp.async counts as a store of this warp
                    event = operation.copy_writes.pop(lanes.warp)
                    event.agent, event.count = agent.index, agent.next_event
