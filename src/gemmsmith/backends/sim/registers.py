"""The register arrays of a unit, which wgmmas own for a time, and its share of the register pool."""

from __future__ import annotations

import numpy as np

from gemmsmith.backends.sim.operations import Running
from gemmsmith.backends.sim.unit import Unit, Wait
from gemmsmith.lang.machine import Blocking
from gemmsmith.lang.types import F32
from gemmsmith.lang.values import Registers

POISON = 0x7FC1_7FC1
"""What uninitialized registers hold: bits of an fp32 NaN that no 16-bit NaN widens to."""
POISON_INTEGER = (1 << 40) | POISON
"""The same in integer registers, which are kept in 64 bits, so that no 32-bit value is taken for it."""


class RegisterFile:
    """Register arrays as (threads, count). `owner`: the wgmma that has an array until it is waited for; `unfenced`:
    waited for, but the compiler may still move accesses above the wait; `dirty`: accessed since the last wgmma.fence.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.arrays: dict[Registers, np.ndarray] = {}
        self.owner: dict[Registers, Running] = {}
        self.unfenced: set[Registers] = set()
        self.dirty: set[Registers] = set()

    def declare(self, x: Registers) -> None:
        """Registers nobody has written: using them gives wrong answers, reading them is reported."""
        shape = len(self.unit.threads), x.count
        held = np.full(shape, POISON, np.uint32).view(np.float32) if x.type == F32 else np.full(shape, POISON_INTEGER)
        self.arrays[x] = held
        self.access(x, write=True)

    def access(self, x: Registers, write: bool = False, part: slice = slice(None)) -> np.ndarray:
        if x in self.owner:
            self.unit.hazard("accumulator", f"{x.name} touched while {self.owner[x].operation.what} owns it")
        elif x in self.unfenced:
            self.unit.hazard("accumulator", f"{x.name} touched after a wait for wgmma without compiler_fence: "
                             "the compiler may move that above the wait")  # fmt: skip
        self.dirty.add(x)
        held = self.arrays[x][:, part]
        if not write:
            self._check_initialized(x, held)
        return held

    def read(self, x: Registers, index: int) -> np.ndarray:
        """A copy of one register of each thread."""
        held = self.access(x, write=True)[:, index].copy()
        self._check_initialized(x, held)
        return held

    def _check_initialized(self, x: Registers, held: np.ndarray) -> None:
        """Reports poison among the rows of the active threads in (some elements of) a register array."""
        bits, poison = (held.view(np.uint32), POISON) if held.dtype == np.float32 else (held, POISON_INTEGER)
        poisoned = bits == poison
        if np.count_nonzero(poisoned) and poisoned[self.unit.active].any():
            self.unit.hazard("uninitialized read", f"register {x.name} is read, which nobody wrote")

    def fragment(self, x: Registers) -> np.ndarray:
        return self.arrays[x]

    # -- wgmma -------------------------------------------------------------------------------------
    def fence(self) -> None:
        """wgmma.fence: orders the accesses so far before the wgmmas that follow."""
        self.dirty.clear()

    def give(self, running: Running) -> None:
        """A wgmma starts, and owns its registers."""
        for x in running.operation.owns:
            if x in self.dirty:
                self.unit.hazard(
                    "accumulator", f"{x.name} was accessed and no wgmma.fence orders that before the wgmma"
                )
            self.owner[x] = running
            self.unfenced.discard(x)

    def take_back(self, running: Running) -> None:
        """It has been waited for."""
        for x in running.operation.owns:
            if self.owner.get(x) is running:
                del self.owner[x]
                self.unfenced.add(x)

    def compiler_fence(self, registers: Registers) -> None:
        self.unfenced.discard(registers)

    # -- setmaxnreg --------------------------------------------------------------------------------
    def set_budget(self, registers: int, action: str) -> Blocking:
        unit, cta = self.unit, self.unit.cta
        unit.converged("setmaxnreg")
        warps, change = len(unit.warps), registers - unit.budget
        if (action == "inc") != (change > 0) and change:
            unit.hazard("registers", f"setmaxnreg.{action} to {registers} from {unit.budget} registers a thread")
        unit.budget = registers
        if change > 0 and cta.free_registers < change * warps:
            yield Wait(
                lambda: cta.free_registers >= change * warps,
                lambda: f"{change} more registers a thread: the pool has {cta.free_registers // warps}",
            )
        cta.free_registers -= change * warps
