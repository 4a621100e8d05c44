"""Registers and lanes: setmaxnreg, elect.sync, shuffles, matches, redux, opaque copies.

PTX ISA, "setmaxnreg", "match", "redux.sync".
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from gemmsmith.core.errors import KernelError
from gemmsmith.hw.arithmetic import Array, Elementwise
from gemmsmith.hw.convert import AsFloat, AsUnsigned
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.instruction import Instruction, Sm90Instruction, i32, i64, u32
from gemmsmith.lang.kernel import Kernel, max_registers_per_thread
from gemmsmith.lang.location import SourceLocation
from gemmsmith.lang.statements import Role, instructions
from gemmsmith.lang.types import I32, I64, PRED, U32
from gemmsmith.lang.values import Value
from gemmsmith.machine import Blocking, Machine


class SetMaxNReg(Instruction):
    """setmaxnreg: sets the warpgroup's registers per thread to `register_budget`.

    `action`: "dec" releases registers, "inc" waits until they are available.
    """

    required_arch = "sm_90a"
    action: Literal["inc", "dec"]
    register_budget: int
    ptx = "setmaxnreg.{action}.sync.aligned.u32 {register_budget};"

    def check(self) -> None:
        if self.register_budget % 8 or not 24 <= self.register_budget <= 256:
            raise KernelError(f"setmaxnreg: got {self.register_budget}; use a multiple of 8 from 24 to 256")

    def check_kernel(self, kernel: Kernel, location: SourceLocation) -> None:
        """Raise KernelError if the budgets of all warpgroups exceed the registers with which the CTA is launched.

        A warpgroup's budget is that of its last setmaxnreg, or the launch's. `location`: of this setmaxnreg.
        """
        total, per_thread, warpgroups = 0, kernel.max_registers_per_thread, kernel.threads // 128
        for role in kernel.body.statements:
            if isinstance(role, Role) and role.unit == "warpgroup":
                budgets = [x.register_budget for x, _ in instructions(role.body) if isinstance(x, SetMaxNReg)]
                total += role.count * [per_thread, *budgets][-1]
        if total > per_thread * warpgroups:
            raise KernelError(
                f"setmaxnreg at {location}: the warpgroups request {total} registers per thread in total, "
                f"{total - per_thread * warpgroups} more than the pool of {warpgroups} x {per_thread}"
            )

    def simulate(self, m: Machine) -> Blocking:
        yield from m.registers.set_budget(self.register_budget, self.action)


def set_registers(count: int | None) -> None:
    """Emit setmaxnreg for `count` registers per thread; None emits nothing.

    The direction, "dec" or "inc", follows from the registers with which the kernel is launched.
    """
    if count is None:
        return
    SetMaxNReg("dec" if count < max_registers_per_thread(current_builder().threads) else "inc", count).issue()


class ElectOne(Sm90Instruction):
    """elect.sync: true in exactly one lane per warp, unspecified which.

    ptxas then knows that one lane is active. Under `thread == 0` it would wrap each TMA copy in a loop over the lanes
    (30 cycles).
    """

    result = PRED
    result_name = "is_elected"
    ptx = """{
    .reg .pred p;
    elect.sync _|p, 0xffffffff;
    selp.b32 {result}, 1, 0, p;
    }"""

    def simulate(self, m: Machine) -> np.ndarray:
        m.require_converged("elect.sync")
        return np.asarray(m.threads % 32 == m.elected)


def _read_lane(m: Machine, x: np.ndarray, lane: Any) -> np.ndarray:
    """Return the value of x in another lane of each thread's warp; `lane`: its index, one for all or per thread."""
    m.require_converged("a shuffle")
    threads = np.arange(len(m.threads))
    result: np.ndarray = x[threads // 32 * 32 + lane]
    return result


class ShuffleXor(Instruction):
    """__shfl_xor_sync: returns the `value` of lane (own lane ^ `mask`), in all 32 lanes."""

    value: u32
    mask: int
    result = U32
    result_name = "shuffled"
    cuda = "__shfl_xor_sync(0xffffffff, {value}, {mask})"

    def simulate(self, m: Machine) -> np.ndarray:
        return _read_lane(m, m.per_thread(self.value), (m.threads % 32) ^ self.mask)


def shuffle_xor_fp32(x: Value, mask: int) -> Value:
    """Return `shuffle_xor` of an fp32 value."""
    return AsFloat(ShuffleXor(AsUnsigned(x).issue(), mask).issue()).issue()


class ShuffleIndex(Instruction):
    """__shfl_sync: returns the `value` of lane `lane`, in all 32 lanes."""

    value: u32
    lane: u32
    result = U32
    result_name = "shuffled"
    cuda = "__shfl_sync(0xffffffff, {value}, {lane})"

    def simulate(self, m: Machine) -> np.ndarray:
        return _read_lane(m, m.per_thread(self.value), m.per_thread(self.lane) % 32)


class MatchAny(Instruction):
    """match.any.sync: returns the lanes of the warp, as a bit mask, that have the same `value` as this one."""

    value: u32
    result = U32
    result_name = "peers"
    ptx = "match.any.sync.b32 {result}, {value}, 0xffffffff;"

    def simulate(self, m: Machine) -> np.ndarray:
        """Compare each lane's value with that of every lane of its warp, and set a bit for each that is equal."""
        m.require_converged("match.any")
        lanes = m.per_thread(self.value).reshape(-1, 32)
        is_same = lanes[:, :, None] == lanes[:, None, :]
        return np.asarray((is_same << np.arange(32)).sum(-1).reshape(-1))


class PopulationCount(Elementwise):
    """popc: the number of bits that are 1."""

    value: u32
    result = U32
    ptx = "popc.b32 {result}, {value};"

    def compute(self, value: Array) -> Array:
        return np.asarray((value[:, None] >> np.arange(32) & 1).sum(-1))


class Redux(Instruction):
    """redux.sync: returns the least or the greatest `value` of the warp's lanes (u32), in all of them."""

    value: u32
    action: Literal["min", "max"]
    result = U32
    ptx = "redux.sync.{action}.u32 {result}, {value}, 0xffffffff;"

    def simulate(self, m: Machine) -> np.ndarray:
        m.require_converged("redux")
        lanes = m.per_thread(self.value).reshape(-1, 32)
        return np.repeat({"min": np.min, "max": np.max}[self.action](lanes, 1), 32)


def sum_of_lanes_before(x: Value, add: Callable[[Value, Value], Value] = operator.add) -> Value:
    """Return, in each lane, the sum of the u32 `x` of all lanes before it in the warp; 0 in lane 0.

    `add`: an associative operation to use instead of +. Each of five shuffles doubles the number of lanes that are
    summed.
    """
    k = current_builder()
    for distance in (1, 2, 4, 8, 16):
        other = ShuffleIndex(x, (k.lane - distance).to(U32)).issue()
        x = k.select(k.lane >= distance, add(x, other), x)
    before = ShuffleIndex(x, (k.lane - 1).to(U32)).issue()
    return k.select(k.lane > 0, before, 0)


class Opaque(Instruction):
    """Returns a copy of a value, of which the compiler does not know that it is one.

    So it computes what depends on the copy after this instruction. Otherwise it may compute it before a loop, and keep
    the result in registers.
    """

    value: i32
    result = I32
    ptx = "mov.b32 {result}, {value};"

    def simulate(self, m: Machine) -> Any:
        return m.value(self.value)


class OpaqueI64(Opaque):
    """`Opaque` for 64 bits."""

    value: i64
    result = I64
    ptx = "mov.b64 {result}, {value};"


def opaque(value: Value) -> Value:
    """Return a copy of an I32 or I64 value, of which the compiler does not know that it is one (see `Opaque`)."""
    return (OpaqueI64 if value.type == I64 else Opaque)(value).issue()
