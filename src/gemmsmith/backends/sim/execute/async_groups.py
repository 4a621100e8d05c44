"""Groups of asynchronous operations (wgmma, cp.async, bulk stores) that a lockstep group commits and waits for."""

from __future__ import annotations

from gemmsmith.backends.sim.execute.registers import RegisterFile
from gemmsmith.backends.sim.state.lockstep_group import LockstepGroup, Wait
from gemmsmith.backends.sim.state.operations import InFlightOperation
from gemmsmith.machine import AsyncGroupKind, Blocking

Key = AsyncGroupKind | tuple[AsyncGroupKind, int]
"""Key of a list of groups: one per lockstep group for wgmma and cp.async, one per thread (its row) for bulk stores."""


class AsyncGroups:
    """The lockstep group's asynchronous groups.

    `uncommitted`: operations that no commit_group has put into a group yet; `committed`: groups that a wait_group may
    still wait for, oldest first.
    """

    def __init__(self, lockstep_group: LockstepGroup, registers: RegisterFile) -> None:
        self.lockstep_group, self.registers = lockstep_group, registers
        self.uncommitted: dict[Key, list[InFlightOperation]] = {}
        self.committed: dict[Key, list[list[InFlightOperation]]] = {}

    def add(self, kind: AsyncGroupKind, operation: InFlightOperation) -> None:
        """Add an operation that has been issued to the uncommitted ones."""
        key: Key = (kind, int(self.lockstep_group.active_lanes[0].thread_indices[0])) if kind == "bulk" else kind
        self.uncommitted.setdefault(key, []).append(operation)

    def commit(self, kind: AsyncGroupKind) -> None:
        if kind == "wgmma":
            self.lockstep_group.require_converged("wgmma.commit_group")
        lockstep = self.lockstep_group
        for key in self._keys_of_active_threads(kind):
            group = self.uncommitted.pop(key, [])
            self.committed.setdefault(key, []).append(group)
            if lockstep.state.observer is not None:
                operations = [x.operation for x in group]
                lockstep.state.observer.commit(lockstep, f"{kind} group", operations)

    def wait(self, kind: AsyncGroupKind, pending: int, *, read: bool = False) -> Blocking:
        lockstep = self.lockstep_group
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
        lockstep.time += lockstep.state.cost_model.instruction
        lockstep.record_wait(start, f"{kind} group", pending=pending, operations=[x.operation for x in operations])

    def _keys_of_active_threads(self, kind: AsyncGroupKind) -> list[Key]:
        """Return the keys of the active threads' lists of groups."""
        if kind != "bulk":
            return [kind]
        keys = dict.fromkeys(key for key in (*self.uncommitted, *self.committed) if isinstance(key, tuple))
        return [key for key in keys if self.lockstep_group.active[key[1]]]

    def _join_completion(self, key: Key, operations: list[InFlightOperation], read: bool) -> None:
        """Set the operations' completion bits in the clocks of the threads that waited for them."""
        lockstep, bits = self.lockstep_group, 0
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
