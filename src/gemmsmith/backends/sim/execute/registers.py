"""The register arrays of a lockstep group, which in-flight wgmmas own, and its register budget."""

from __future__ import annotations

import numpy as np

from gemmsmith.backends.sim.execute.values import Values
from gemmsmith.backends.sim.report.hazards import Place
from gemmsmith.backends.sim.state.lockstep_group import LockstepGroup, Wait
from gemmsmith.backends.sim.state.operations import InFlightOperation
from gemmsmith.lang.types import F32
from gemmsmith.lang.values import Constant, LoopIndexedRow, RegisterArray, RegisterSlice
from gemmsmith.machine import Blocking

POISON = 0x7FC1_7FC1
"""Bits of uninitialized registers: an fp32 NaN that no 16-bit NaN widens to. Chosen; not measured."""
POISON_INTEGER = (1 << 40) | POISON
"""Value of uninitialized integer registers, which are stored in 64 bits: no 32-bit value equals it."""

REGISTER_HAZARD = "wgmma register hazard"
"""Kind of the hazards of registers that a wgmma uses."""


class RegisterFile:
    """Register arrays as numpy arrays (threads, count).

    `owner`: the in-flight wgmma that reads or writes an array, until it has been waited for;
    `awaiting_compiler_fence`: arrays that have been waited for, but whose accesses the compiler may still move above
    the wait, with the place of the wgmma; `accessed_since_fence`: arrays accessed since the last wgmma.fence, with the
    place of the last access.
    """

    def __init__(self, group: LockstepGroup, values: Values) -> None:
        self.group, self.values = group, values
        self.arrays: dict[RegisterArray, np.ndarray] = {}
        self.owner: dict[RegisterArray, InFlightOperation] = {}
        self.awaiting_compiler_fence: dict[RegisterArray, Place] = {}
        self.accessed_since_fence: dict[RegisterArray, Place] = {}

    def declare(self, x: RegisterArray) -> None:
        """Fill a new array with poison, a value by which reads of uninitialized registers are found."""
        shape = len(self.group.threads), x.count
        values = np.full(shape, POISON, np.uint32).view(np.float32) if x.type == F32 else np.full(shape, POISON_INTEGER)
        self.arrays[x] = values
        self.access(x, write=True)

    def view(self, x: RegisterArray, write: bool = False) -> np.ndarray:
        """Return a live view (threads, count) of an array, or of a slice of one, to read or to `write`."""
        if not isinstance(x, RegisterSlice):
            return self.access(x, write)
        start = int(self.values[x.start])
        return self.access(self.selected_row(x.array), write, slice(start, start + x.count))

    def selected_row(self, x: RegisterArray) -> RegisterArray:
        """Return the array itself. For a row that a loop index selects, return the row of this iteration."""
        return x.array.rows[int(self.values[x.row])] if isinstance(x, LoopIndexedRow) else x

    def access(self, x: RegisterArray, write: bool = False, part: slice = slice(None)) -> np.ndarray:
        """Return a live view (threads, count) of a register array; report hazards.

        They are: a wgmma is using the array; it was waited for, but no compiler fence followed; unless `write`, a
        register is uninitialized. `part`: the registers that are accessed.
        """
        if x in self.owner:
            wgmma = self.owner[x]
            self.group.report(
                REGISTER_HAZARD, f"{x.name} accessed while {wgmma.operation.label} is using it", _use(x, wgmma)
            )
        elif x in self.awaiting_compiler_fence:
            message = f"{x.name} accessed after wgmma.wait_group without a compiler fence; "
            message += "the compiler may move the access above the wait"
            self.group.report(REGISTER_HAZARD, message, self.awaiting_compiler_fence[x])
        self.accessed_since_fence[x] = self.group.location
        values = self.arrays[x][:, part]
        if not write:
            self._check_initialized(x, values)
        return values

    def read(self, x: RegisterArray, index: int) -> np.ndarray:
        """Return a copy of one register of each thread."""
        values = self.access(x, write=True)[:, index].copy()
        self._check_initialized(x, values)
        return values

    def _check_initialized(self, x: RegisterArray, values: np.ndarray) -> None:
        """Report a read of registers that hold poison in an active thread."""
        is_float = values.dtype == np.float32
        bits, poison = (values.view(np.uint32), POISON) if is_float else (values, POISON_INTEGER)
        poisoned = bits == poison
        if np.count_nonzero(poisoned) and poisoned[self.group.active].any():
            self.group.report("uninitialized read", f"read of uninitialized register {x.name}")

    def view_unchecked(self, x: RegisterArray) -> np.ndarray:
        """Return a live view of a register array, or of a slice from a constant index on."""
        start = x.start.value if isinstance(x, RegisterSlice) and isinstance(x.start, Constant) else 0
        return self.arrays[_whole(x)][:, start : start + x.count]

    # -- wgmma -------------------------------------------------------------------------------------
    def fence(self) -> None:
        """Execute wgmma.fence: order earlier register accesses before the wgmmas that follow."""
        self.accessed_since_fence.clear()

    def acquire_for(self, wgmma: InFlightOperation) -> None:
        """Make a wgmma that starts the owner of its registers.

        Reports an array that has been accessed since the last wgmma.fence.
        """
        for x in map(_whole, wgmma.operation.register_operands):
            if x in self.accessed_since_fence:
                accessed = self.accessed_since_fence[x].accessed(f"access of {x.name}", "threads")
                message = f"{x.name} was accessed, and no wgmma.fence orders that before the wgmma"
                self.group.report(REGISTER_HAZARD, message, accessed)
            self.owner[x] = wgmma
            self.awaiting_compiler_fence.pop(x, None)

    def release_from(self, wgmma: InFlightOperation) -> None:
        """Give back the registers of a wgmma that has been waited for.

        A compiler fence must follow before they are accessed.
        """
        for x in map(_whole, wgmma.operation.register_operands):
            if self.owner.get(x) is wgmma:
                del self.owner[x]
                self.awaiting_compiler_fence[x] = _use(x, wgmma)

    def fence_operand(self, x: RegisterArray) -> None:
        self.awaiting_compiler_fence.pop(x, None)

    # -- setmaxnreg --------------------------------------------------------------------------------
    def set_budget(self, registers: int, action: str) -> Blocking:
        """Execute setmaxnreg: wait until the CTA's pool has enough registers, and take them from it or return them.

        `action`: "inc" or "dec"; the other direction is reported.
        """
        group, cta = self.group, self.group.cta
        group.require_converged("setmaxnreg")
        warps, change = len(group.warps), registers - group.registers_per_thread
        if (action == "inc") != (change > 0) and change:
            group.report(
                "registers",
                f"setmaxnreg.{action} to {registers} from {group.registers_per_thread} registers per thread",
            )
        group.registers_per_thread = registers
        if change > 0 and cta.free_registers < change * warps:
            yield Wait(
                lambda: cta.free_registers >= change * warps,
                lambda: f"{change} more registers per thread: the pool has {cta.free_registers // warps}",
                "registers",
            )
        cta.free_registers -= change * warps


def _use(x: RegisterArray, wgmma: InFlightOperation) -> Place:
    """Return the place of a wgmma that uses an array."""
    return wgmma.location.accessed(f"use of {x.name} by {wgmma.operation.label}", "tensor")


def _whole(x: RegisterArray) -> RegisterArray:
    """Return the array of a slice."""
    return x.array if isinstance(x, RegisterSlice) else x
