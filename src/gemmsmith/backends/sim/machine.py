"""The Machine that instructions execute on, put together from a unit's parts."""

from __future__ import annotations

import numpy as np

from gemmsmith.backends.sim.accesses import Accesses
from gemmsmith.backends.sim.checked_memory import CheckedMemory
from gemmsmith.backends.sim.clocks import ASYNC_PROXY, GRID_BEFORE, MBARRIER_INIT
from gemmsmith.backends.sim.groups import Groups
from gemmsmith.backends.sim.issue import Issue
from gemmsmith.backends.sim.mbarriers import Mbarriers
from gemmsmith.backends.sim.registers import RegisterFile
from gemmsmith.backends.sim.scopes import scope_of
from gemmsmith.backends.sim.thread_barriers import ThreadBarriers
from gemmsmith.backends.sim.unit import Unit
from gemmsmith.backends.sim.values import Values
from gemmsmith.lang.values import RegisterPart, Registers, SelectedRow


class UnitMachine:
    """See `lang/machine.py`. What a part does by itself is that part's method; what takes several is written here."""

    def __init__(self, unit: Unit, values: Values, registers: RegisterFile) -> None:
        memory, mbarriers, barriers = CheckedMemory(unit), Mbarriers(unit), ThreadBarriers(unit)
        accesses, groups = Accesses(unit, memory), Groups(unit, registers)
        self._unit, self._registers = unit, registers

        self.threads, self.report, self.converged = unit.threads, unit.hazard, unit.converged
        self.block, self.grid = unit.cta.index, unit.state.grid
        self.rank, self.cluster_size = unit.cta.rank, len(unit.cta.cluster.ctas)
        self.elected = unit.state.random.randrange(32) if unit.state.seed else 0

        self.value, self.column, self.uniform = values.value, values.column, values.uniform
        self.fragment, self.seed = registers.fragment, unit.state.seed
        self.compiler_fence, self.set_register_budget = registers.compiler_fence, registers.set_budget

        self.load, self.store, self.atomic = accesses.load, accesses.store, accesses.atomic
        self.wait_word, self.peek, self.poke = accesses.wait_word, memory.peek, memory.poke

        self.mbarrier_init, self.mbarrier_arrive = mbarriers.init, mbarriers.arrive
        self.mbarrier_expect_tx = mbarriers.expect_tx
        self.mbarrier_test, self.mbarrier_wait = mbarriers.test, mbarriers.wait
        self.barrier_sync, self.barrier_arrive, self.warp_sync = barriers.sync, barriers.arrive, barriers.warp_sync
        self.cluster_arrive, self.cluster_wait = barriers.cluster_arrive, barriers.cluster_wait

        self.start = Issue(unit, registers, memory, mbarriers, groups).start
        self.commit_group, self.wait_group = groups.commit, groups.wait

    def registers(self, x: Registers, write: bool = False) -> np.ndarray:
        if not isinstance(x, RegisterPart):
            return self._registers.access(x, write)
        array, first = x.array, int(self.value(x.first))
        row = array.array.rows[int(self.value(array.row))] if isinstance(array, SelectedRow) else array
        return self._registers.access(row, write, slice(first, first + x.count))

    @property
    def active(self) -> np.ndarray:
        return self._unit.active

    @active.setter
    def active(self, active: np.ndarray) -> None:
        self._unit.set_active(active)

    def fence(self, kind: str, scope: str = "gpu") -> None:
        self._unit.time += self._unit.state.chip.instruction
        if kind == "wgmma":
            self._unit.converged("wgmma.fence")
            self._registers.fence()
            return
        for part in self._unit.parts:
            if kind == "acq_rel":
                part.warp.fence(scope_of(scope), part.lanes)
            else:
                part.warp.fence_proxy({"proxy.async": ASYNC_PROXY, "mbarrier_init": MBARRIER_INIT}[kind], part.lanes)

    def grid_dependency_wait(self) -> None:
        for part in self._unit.parts:
            part.enter().clock.done |= GRID_BEFORE
