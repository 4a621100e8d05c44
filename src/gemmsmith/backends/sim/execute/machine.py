"""The `Machine` of a lockstep group, which instructions execute on."""

from __future__ import annotations

import numpy as np

from gemmsmith import machine
from gemmsmith.backends.sim.execute.async_issue import AsyncIssuer
from gemmsmith.backends.sim.execute.counters import AccessCounter
from gemmsmith.backends.sim.execute.mbarriers import Mbarriers
from gemmsmith.backends.sim.execute.memory_instructions import MemoryInstructions
from gemmsmith.backends.sim.execute.registers import RegisterFile
from gemmsmith.backends.sim.execute.thread_barriers import ThreadBarriers
from gemmsmith.backends.sim.execute.values import Values
from gemmsmith.backends.sim.memory.clocks import (
    ASYNC_PROXY_FENCED,
    GLOBAL_PROXY_FENCED,
    MBARRIER_INIT_FENCED,
    PREREQUISITE_GRIDS_BIT,
    scope_of,
)
from gemmsmith.backends.sim.state.grid_state import INSTRUCTION_CYCLES, TENSOR_CORES
from gemmsmith.backends.sim.state.lockstep_group import LockstepGroup
from gemmsmith.core.scalars import ceil_div

FENCED_ROWS = {
    "proxy.async.shared::cta": ASYNC_PROXY_FENCED,
    "proxy.async.global": GLOBAL_PROXY_FENCED,
    "mbarrier_init": MBARRIER_INIT_FENCED,
}
"""Row of a clock that a fence advances, by its kind."""

ELECTED_LANE = 13
"""The lane that elect.sync elects in the schedule of seed 0.

No kernel singles it out otherwise: were it lane 0, `lane == 0` would be the same thread, and its program order would
hide that a barrier is missing between the two. Chosen; the hardware's choice is unspecified.
"""


class LockstepMachine:
    """Implements `machine.Machine` for a lockstep group; `counter`, if given, is told of every access to memory."""

    def __init__(
        self, group: LockstepGroup, values: Values, registers: RegisterFile, counter: AccessCounter | None
    ) -> None:
        memory, mbarriers = MemoryInstructions(group, counter), Mbarriers(group)
        self._group, self._registers = group, registers
        self.value, self.per_thread, self.uniform = values.__getitem__, values.per_thread, values.uniform
        self.report, self.require_converged = group.report, group.require_converged
        self.threads, self.seed = group.threads, group.state.seed
        self.block_index, self.grid_size = group.cta.index, group.state.grid
        self.rank, self.cluster_size = group.cta.rank, len(group.cta.cluster.ctas)
        self.elected = group.state.random.randrange(32) if group.state.seed else ELECTED_LANE
        self.registers: machine.Registers = registers
        self.memory: machine.Memory = memory
        self.mbarriers: machine.Mbarriers = mbarriers
        self.barriers: machine.Barriers = ThreadBarriers(group)
        self.async_operations: machine.AsyncOperations = AsyncIssuer(group, registers, memory, mbarriers, counter)

    @property
    def active(self) -> np.ndarray:
        """The active threads, as a bool per thread."""
        return self._group.active

    @active.setter
    def active(self, active: np.ndarray) -> None:
        self._group.set_active(active)

    def multiply(self, label: str, cycles: int) -> None:
        """See `machine.Machine.multiply`. The warps of a CTA share the tensor cores evenly."""
        group, begin = self._group, self._group.time
        group.time += cycles * ceil_div(group.state.kernel.threads, TENSOR_CORES * 32)
        if group.state.observer is not None:
            group.state.observer.multiply(group, label, begin)

    def fence(self, kind: str, scope: str = "gpu") -> None:
        """Execute a fence in the active threads. `kind`, `scope`: see `machine.Machine.fence`."""
        self._group.time += INSTRUCTION_CYCLES
        if kind == "wgmma":
            self._group.require_converged("wgmma.fence")
            self._registers.fence()
            return
        for lanes in self._group.active_lanes:
            if kind == "acq_rel":
                lanes.warp.fence(scope_of(scope), lanes.mask)
            else:
                lanes.warp.fence_proxy(FENCED_ROWS[kind], lanes.mask)

    def grid_dependency_wait(self) -> None:
        for lanes in self._group.active_lanes:
            lanes.agent().clock.completed_bits |= PREREQUISITE_GRIDS_BIT
