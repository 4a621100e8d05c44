"""Registers and lanes: reallocation between warpgroups, the elected lane, shuffles. PTX ISA, "setmaxnreg", "elect"."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from gemmsmith.core.errors import KernelError
from gemmsmith.hw.convert import AsFloat, AsUnsigned
from gemmsmith.lang.builder import current
from gemmsmith.lang.instruction import Instruction, i32, i64, u32
from gemmsmith.lang.kernel import register_cap
from gemmsmith.lang.machine import Blocking, Machine
from gemmsmith.lang.types import I32, I64, PRED, U32
from gemmsmith.lang.values import Value


class SetMaxNReg(Instruction):
    """Sets the warpgroup's registers a thread; `action` is dec (give back) or inc (wait for)."""

    architecture = "sm_90a"
    action: Literal["inc", "dec"]
    register_budget: int
    ptx = "setmaxnreg.{action}.sync.aligned.u32 {register_budget};"

    def check(self) -> None:
        if self.register_budget % 8 or not 24 <= self.register_budget <= 256:
            raise KernelError(f"setmaxnreg: got {self.register_budget}; use a multiple of 8 from 24 to 256")

    def simulate(self, m: Machine) -> Blocking:
        yield from m.set_register_budget(self.register_budget, self.action)


def set_registers(count: int | None) -> None:
    """Records setmaxnreg: gives registers back or asks for more than the launch's share; None keeps it."""
    if count is None:
        return
    SetMaxNReg.emit("dec" if count < register_cap(current().threads) else "inc", count)


class ElectOne(Instruction):
    """True in one lane of each warp, PTX does not say which. Behind it ptxas knows that a single lane acts; behind
    `thread == 0` it puts each TMA copy of a loop into a loop over the lanes, of 30 cycles."""

    architecture = "sm_90"
    result = PRED
    ptx = """{
    .reg .pred p;
    elect.sync _|p, 0xffffffff;
    selp.b32 {result}, 1, 0, p;
    }"""

    def simulate(self, m: Machine) -> np.ndarray:
        m.converged("elect.sync")
        return np.asarray(m.threads % 32 == m.elected)


def _from_lane(m: Machine, x: np.ndarray, lane: Any) -> np.ndarray:
    m.converged("a shuffle")
    own = np.arange(len(m.threads))
    taken: np.ndarray = x[own // 32 * 32 + lane]
    return taken


class ShuffleXor(Instruction):
    """The value in the lane whose number differs by `mask`."""

    value: u32
    mask: int
    result = U32
    cuda = "__shfl_xor_sync(0xffffffff, {value}, {mask})"

    def simulate(self, m: Machine) -> np.ndarray:
        return _from_lane(m, m.column(self.value), (m.threads % 32) ^ self.mask)


def shuffle_xor_fp32(x: Value, mask: int) -> Value:
    """`shuffle_xor` of an fp32."""
    return AsFloat.emit(ShuffleXor.emit(AsUnsigned.emit(x), mask))


class ShuffleIndex(Instruction):
    """The value in lane `lane`."""

    value: u32
    lane: u32
    result = U32
    cuda = "__shfl_sync(0xffffffff, {value}, {lane})"

    def simulate(self, m: Machine) -> np.ndarray:
        return _from_lane(m, m.column(self.value), m.column(self.lane) % 32)


class ShuffleDown(Instruction):
    """The value `delta` lanes further, its own beyond the last."""

    value: u32
    delta: int
    result = U32
    cuda = "__shfl_down_sync(0xffffffff, {value}, {delta})"

    def simulate(self, m: Machine) -> np.ndarray:
        lane = m.threads % 32
        return _from_lane(m, m.column(self.value), np.where(lane + self.delta < 32, lane + self.delta, lane))


class Opaque(Instruction):
    """A copy of a number whose value the compiler cannot know. What depends on the copy is computed after this
    instruction; otherwise the compiler may compute it once, before a loop, and hold it in registers."""

    number: i32
    result = I32
    ptx = "mov.b32 {result}, {number};"

    def simulate(self, m: Machine) -> Any:
        return m.value(self.number)


class OpaqueWide(Opaque):
    """`Opaque` for 64 bits."""

    number: i64
    result = I64
    ptx = "mov.b64 {result}, {number};"


def opaque(number: Value) -> Value:
    """A copy of an I32 or I64 whose value the compiler cannot know."""
    return (OpaqueWide if number.type == I64 else Opaque).emit(number)
