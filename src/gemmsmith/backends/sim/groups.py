"""Groups of asynchronous operations: wgmma, cp.async and bulk stores, as a unit commits and waits for them."""

from __future__ import annotations

from gemmsmith.backends.sim.operations import Running
from gemmsmith.backends.sim.registers import RegisterFile
from gemmsmith.backends.sim.unit import Unit, Wait
from gemmsmith.lang.machine import Blocking, Group

Key = Group | tuple[Group, int]
"""A list of groups: the unit has one; of bulk stores each thread has its own, by its row."""


class Groups:
    """`open`: operations that are not yet in a group; `committed`: groups that may still be waited for."""

    def __init__(self, unit: Unit, registers: RegisterFile) -> None:
        self.unit, self.registers = unit, registers
        self.open: dict[Key, list[Running]] = {}
        self.committed: dict[Key, list[list[Running]]] = {}

    def add(self, group: Group, running: Running) -> None:
        key: Key = (group, int(self.unit.parts[0].rows[0])) if group == "bulk" else group
        self.open.setdefault(key, []).append(running)

    def commit(self, group: Group) -> None:
        if group == "wgmma":
            self.unit.converged("wgmma.commit_group")
        for key in self._keys(group):
            self.committed.setdefault(key, []).append(self.open.pop(key, []))

    def wait(self, group: Group, pending: int, *, read: bool = False) -> Blocking:
        unit = self.unit
        if group == "wgmma":
            unit.converged("wgmma.wait_group")
        waited = {
            key: held[: max(0, len(held) - pending)]
            for key in self._keys(group)
            if (held := self.committed.get(key, []))
        }
        members = {key: [running for one in groups for running in one] for key, groups in waited.items()}
        operations = [running for each in members.values() for running in each]
        if not all(running.finished for running in operations):
            yield Wait(
                lambda: all(running.finished for running in operations),
                lambda: f"{sum(not r.finished for r in operations)} operations of {group} groups",
            )
        began = unit.time
        for running in operations:
            unit.time = max(unit.time, running.end)
            self.registers.take_back(running)
        for key, each in members.items():
            self._learn(key, each, read)
            if not read and not any(running.writes for running in each):
                del self.committed[key][: len(waited[key])]
        unit.time += unit.state.chip.instruction
        unit.waited(began, f"{group} group")

    def _keys(self, group: Group) -> list[Key]:
        """The lists of groups that the active threads have."""
        if group != "bulk":
            return [group]
        held = dict.fromkeys(key for key in (*self.open, *self.committed) if isinstance(key, tuple))
        return [key for key in held if self.unit.active[key[1]]]

    def _learn(self, key: Key, operations: list[Running], read: bool) -> None:
        """What a wait makes known, and to whom."""
        unit, bits = self.unit, 0
        for running in operations:
            bits |= running.bits[0] if read else running.bits[0] | running.bits[1]
        if isinstance(key, tuple):  # of bulk stores, to the one thread that issued them
            unit.warps[key[1] // 32].enter(1 << key[1] % 32).clock.done |= bits
            return
        for part in unit.parts:
            agent = part.enter()
            agent.clock.done |= bits
            for running in operations:
                if part.warp in running.writes:  # from here on a cp.async is like a store of this warp
                    event = running.writes.pop(part.warp)
                    event.agent, event.count = agent.number, agent.count
