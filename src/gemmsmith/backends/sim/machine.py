"""The `Machine` of a lockstep group, which instructions execute on."""

from __future__ import annotations

import numpy as np

from gemmsmith.backends.sim.async_groups import AsyncGroups
from gemmsmith.backends.sim.async_issue import AsyncIssuer
from gemmsmith.backends.sim.checked_memory import CheckedMemory
from gemmsmith.backends.sim.clocks import ASYNC_PROXY_FENCED, MBARRIER_INIT_FENCED, PREREQUISITE_GRIDS_BIT
from gemmsmith.backends.sim.lockstep_group import LockstepGroup
from gemmsmith.backends.sim.mbarriers import Mbarriers
from gemmsmith.backends.sim.memory_instructions import MemoryInstructions
from gemmsmith.backends.sim.registers import RegisterFile
from gemmsmith.backends.sim.scopes import scope_of
from gemmsmith.backends.sim.thread_barriers import ThreadBarriers
from gemmsmith.backends.sim.values import Values
from gemmsmith.lang.values import LoopIndexedRow, RegisterArray, RegisterSlice


class LockstepMachine:
    """Implements `machine.Machine` for a lockstep group.

    Methods that one component implements are bound to it in the constructor (without the cost of another call);
    methods that need several are defined here.
    """

    def __init__(self, group: LockstepGroup, values: Values, registers: RegisterFile) -> None:
        memory, mbarriers, barriers = CheckedMemory(group), Mbarriers(group), ThreadBarriers(group)
        memory_instructions, async_groups = MemoryInstructions(group, memory), AsyncGroups(group, registers)
        self._group, self._registers = group, registers

        self.threads, self.report, self.require_converged = group.threads, group.report, group.require_converged
        self.block_index, self.grid_size = group.cta.index, group.state.grid
        self.rank, self.cluster_size = group.cta.rank, len(group.cta.cluster.ctas)
        self.elected = group.state.random.randrange(32) if group.state.seed else 0

        self.value, self.per_thread, self.uniform = values.value, values.per_thread, values.uniform
        self.registers_unchecked, self.seed = registers.registers_unchecked, group.state.seed
        self.fence_operand, self.set_register_budget = registers.fence_operand, registers.set_budget

        self.load, self.store, self.atomic = (
            memory_instructions.load, memory_instructions.store, memory_instructions.atomic,
        )  # fmt: skip
        self.spin_wait, self.peek, self.poke = memory_instructions.spin_wait, memory.peek, memory.poke

        self.mbarrier_init, self.mbarrier_arrive = mbarriers.init, mbarriers.arrive
        self.mbarrier_expect_tx = mbarriers.expect_tx
        self.mbarrier_test, self.mbarrier_wait = mbarriers.test, mbarriers.wait
        self.barrier_sync, self.barrier_arrive, self.warp_sync = barriers.sync, barriers.arrive, barriers.warp_sync
        self.cluster_arrive, self.cluster_wait = barriers.cluster_arrive, barriers.cluster_wait

        self.start = AsyncIssuer(group, registers, memory, mbarriers, async_groups).start
        self.commit_group, self.wait_group = async_groups.commit, async_groups.wait

    def registers(self, x: RegisterArray, write: bool = False) -> np.ndarray:
        """Return a live view (threads, count) of a register array or a slice of one."""
        if not isinstance(x, RegisterSlice):
            return self._registers.access(x, write)
        sliced, start = x.array, int(self.value(x.start))
        array = sliced.array.rows[int(self.value(sliced.row))] if isinstance(sliced, LoopIndexedRow) else sliced
        return self._registers.access(array, write, slice(start, start + x.count))

    @property
    def active(self) -> np.ndarray:
        """The active threads, as a bool per thread."""
        return self._group.active

    @active.setter
    def active(self, active: np.ndarray) -> None:
        self._group.set_active(active)

    def fence(self, kind: str, scope: str = "gpu") -> None:
        """Execute a memory, proxy, mbarrier-init or wgmma fence."""
        self._group.time += self._group.state.cost_model.instruction
        if kind == "wgmma":
            self._group.require_converged("wgmma.fence")
            self._registers.fence()
            return
        for lanes in self._group.active_lanes:
            if kind == "acq_rel":
                lanes.warp.fence(scope_of(scope), lanes.mask)
            else:
                lanes.warp.fence_proxy(
                    {"proxy.async": ASYNC_PROXY_FENCED, "mbarrier_init": MBARRIER_INIT_FENCED}[kind], lanes.mask
                )

    def grid_dependency_wait(self) -> None:
        """Execute griddepcontrol.wait."""
        for lanes in self._group.active_lanes:
            lanes.agent().clock.completed_bits |= PREREQUISITE_GRIDS_BIT
