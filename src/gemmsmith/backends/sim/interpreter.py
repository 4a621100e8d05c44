"""Executes a kernel's statements on a unit: a generator that yields where the unit blocks."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmsmith.backends.sim.operations import Issuing
from gemmsmith.backends.sim.unit import uninitialised
from gemmsmith.lang import statements as st
from gemmsmith.lang.instruction import Instruction, Result
from gemmsmith.lang.machine import Blocking
from gemmsmith.lang.types import F32, PRED, Type
from gemmsmith.lang.values import Operation, Read, RegisterRead, Value, Variable

PREEMPTION = 0.2
"""With a seed, how often a unit is interrupted at an instruction that others can see."""


def _divide(a: Any, b: Any) -> Any:
    return a / b if isinstance(a, (float, np.floating)) or getattr(a, "dtype", None) == np.float32 else a // b


def _select(c: Any, a: Any, b: Any) -> Any:
    return np.where(c, a, b) if isinstance(c, np.ndarray) else a if c else b


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": _divide, "%": operator.mod,
    "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "neg": operator.neg, "~": operator.invert, "!": np.logical_not, "select": _select,
    "min": np.fmin, "max": np.fmax, "cast": lambda a: a,
}  # fmt: skip


def _cast(x: np.ndarray, type: Type) -> np.ndarray:
    """Conversion as in C: towards zero from floats, modulo 2^bits between integers."""
    if type == F32:
        return x.astype(np.float32)
    x = x.astype(np.int64)
    if type.bits == 64:
        return x
    wrapped = x & ((1 << type.bits) - 1)
    return np.where(wrapped >> (type.bits - 1), wrapped - (1 << type.bits), wrapped) if type.signed else wrapped


class Interpreter(Issuing):
    """A unit that runs the kernel from its first statement to its last."""

    def run(self) -> Blocking:
        """The whole kernel."""
        self.variables: dict[Variable, Any] = {}
        self.declared: dict[Variable, np.ndarray] = {}  # by which threads
        yield from self.block_of(self.state.kernel.body)

    def block_of(self, block: st.Block) -> Blocking:
        for statement in block.statements:
            self.where = statement.where
            kind = type(statement)
            if kind is st.Bind:
                value = statement.value  # type: ignore[attr-defined]
                if isinstance(value, Result):
                    done = self.execute(value.instruction)
                    self.environment[value] = (yield from done) if inspect.isgenerator(done) else done
                else:
                    self.environment[value] = self.compute(value)
            elif kind is st.Execute:
                done = self.execute(statement.instruction)  # type: ignore[attr-defined]
                if inspect.isgenerator(done):
                    yield from done
                if self.state.seed and self.state.random.random() < PREEMPTION:
                    yield None
            elif kind is st.Assign:
                self.assign(statement.variable, self.value(statement.value))  # type: ignore[attr-defined]
            elif kind is st.Declare:
                self.variables[statement.variable] = self.value(statement.initial)  # type: ignore[attr-defined]
                self.declared[statement.variable] = self.active  # type: ignore[attr-defined]
            elif kind is st.If:
                yield from self.branch(statement)  # type: ignore[arg-type]
            elif kind is st.Loop:
                yield from self.loop(statement)  # type: ignore[arg-type]
            elif kind is st.AssignRegister:
                index = int(self.value(statement.index))  # type: ignore[attr-defined]
                array = self.registers(statement.registers, write=True)  # type: ignore[attr-defined]
                new = self.value(statement.value)  # type: ignore[attr-defined]
                array[self.active, index] = new[self.active] if isinstance(new, np.ndarray) else new
            elif kind is st.Role:
                if self.in_role(statement):  # type: ignore[arg-type]
                    yield from self.block_of(statement.body)  # type: ignore[attr-defined]
            elif kind is st.DeclareRegisters:
                registers = statement.registers  # type: ignore[attr-defined]
                self.arrays[registers] = uninitialised(registers.type, (len(self.threads), registers.count))
                self.registers(registers, write=True)

    def execute(self, instruction: Instruction) -> Any:
        return instruction.simulate(self)

    def compute(self, value: Value) -> Any:
        """An operation or a read."""
        if isinstance(value, Read):
            return self.variables[value.variable]
        if isinstance(value, RegisterRead):
            held = self.registers(value.registers, write=True)[:, int(self.value(value.index))].copy()
            self.check_initialised(value.registers, held)
            return held
        assert isinstance(value, Operation)
        operands = [self.value(v) for v in value.operands]
        if value.op in ("/", "%") and value.type != F32:
            operands[1] = self._divisor(operands)
        result = _OPERATIONS[value.op](*operands)
        if value.op == "cast" and isinstance(result, np.ndarray):
            return _cast(result, value.type)
        return self._wrapped(result, value.type, value.op)

    def _divisor(self, operands: list[Any]) -> Any:
        numerator, divisor = operands
        if np.any(np.asarray(divisor) <= 0) or np.any(np.asarray(numerator) < 0):
            active = self.active
            low = np.broadcast_to(np.asarray(divisor), active.shape)[active]
            top = np.broadcast_to(np.asarray(numerator), active.shape)[active]
            if (low <= 0).any() or (top < 0).any():
                self.hazard("overflow", "integer division of a negative number, or by one that is not positive")
            return np.maximum(divisor, 1)
        return divisor

    def _wrapped(self, result: Any, type: Type, op: str) -> Any:
        if type == PRED:
            return result if isinstance(result, np.ndarray) else bool(result)
        if type == F32:
            return result if isinstance(result, np.ndarray) else np.float32(result)
        if isinstance(result, np.ndarray):
            if result.dtype == bool:
                result = result.astype(np.int64)
            if type.bits == 64:
                return result
            return self._within(result, type, op) if type.signed else result & ((1 << type.bits) - 1)
        result = int(result)
        if not type.signed:
            return result & ((1 << type.bits) - 1)
        limit = 1 << (type.bits - 1)
        if -limit <= result < limit:
            return result
        if op != "cast":
            self.hazard("overflow", f"{op} gives {result}, which is no {type}")
        return (result + limit) % (2 * limit) - limit

    def _within(self, result: np.ndarray, type: Type, op: str) -> np.ndarray:
        """Signed integers of the threads, which must not overflow where they are active."""
        shift, limit = type.bits, 1 << (type.bits - 1)
        outside = (result + limit) >> shift != 0
        if not outside.any():
            return result
        if outside[self.active].any():
            value = int(result[self.active & outside][0])
            self.hazard("overflow", f"{op} gives {value}, which is no {type}")
        return np.asarray(_cast(result, type))

    def assign(self, variable: Variable, new: Any) -> None:
        if (self.declared[variable] & ~self.active).any():
            new = np.where(self.active, new, self.variables[variable])
        self.variables[variable] = new

    def branch(self, branch: st.If) -> Blocking:
        condition = self.value(branch.condition)
        if not isinstance(condition, np.ndarray):
            if condition:
                yield from self.block_of(branch.then)
            elif branch.otherwise:
                yield from self.block_of(branch.otherwise)
            return
        before = self.active
        for block, chosen in ((branch.then, condition), (branch.otherwise, ~condition)):
            active = before & chosen
            if block is not None and active.any():
                self.set_active(active)
                yield from self.block_of(block)
        self.set_active(before)

    def loop(self, loop: st.Loop) -> Blocking:
        for i in range(*(int(self.uniform(x)) for x in (loop.start, loop.stop, loop.step))):
            self.environment[loop.index] = i
            yield from self.block_of(loop.body)

    def in_role(self, role: st.Role) -> bool:
        size = 128 if role.unit == "warpgroup" else 32
        index = int(self.threads[0]) // size
        if role.unit == "warp":
            index %= 4
        return role.first <= index < role.first + role.count
