"""Executes a kernel's statements on a unit: a generator that yields where the unit blocks."""

from __future__ import annotations

from collections.abc import Callable
from types import GeneratorType
from typing import Any

import numpy as np

from gemmsmith.backends.sim.arithmetic import function_of
from gemmsmith.backends.sim.machine import UnitMachine
from gemmsmith.backends.sim.registers import RegisterFile
from gemmsmith.backends.sim.unit import Unit
from gemmsmith.backends.sim.values import Values
from gemmsmith.lang import statements as st
from gemmsmith.lang.instruction import Instruction, Result
from gemmsmith.lang.machine import Blocking, Machine
from gemmsmith.lang.values import Operation, Read, RegisterRead, RegisterRows, Registers, SelectedRow, Value

PREEMPTION = 0.2
"""With a seed, how often a unit is interrupted at an instruction that others can see."""

Step = tuple[st.Where, bool, Callable[["Interpreter", Any], Blocking | None], Any]
"""A statement: where it is, whether others see what it does, what executes it, and with what beside the interpreter."""


class Interpreter:
    """Runs the kernel from its first statement to its last. `steps`, of the blocks that some unit has executed, serve
    all units of the grid."""

    def __init__(self, unit: Unit, steps: dict[st.Block, list[Step]]) -> None:
        self.unit, self.steps = unit, steps
        self.values, self.registers = Values(unit), RegisterFile(unit)
        self.bound = self.values.bound
        machine, watch = UnitMachine(unit, self.values, self.registers), unit.state.watch
        self.machine: Machine = machine
        self.watched = watch(unit, machine) if watch else None

    def run(self) -> Blocking:
        """The whole kernel."""
        return self._block(self.unit.state.kernel.body)

    def _block(self, block: st.Block) -> Blocking:
        unit, random, seed = self.unit, self.unit.state.random.random, self.unit.state.seed
        steps = self.steps.get(block)
        if steps is None:
            steps = self.steps[block] = [_step(s) for s in block.statements if type(s) is not st.Comment]
        for where, visible, execute, what in steps:
            unit.where = where
            blocking = execute(self, what)
            if blocking is not None:
                yield from blocking
            if seed and visible and random() < PREEMPTION:
                yield None

    def simulate(self, instruction: Instruction) -> Any:
        return self.watched(instruction) if self.watched else instruction.simulate(self.machine)

    def execute(self, statement: st.Execute) -> Blocking | None:
        done = self.simulate(statement.instruction)
        return done if isinstance(done, GeneratorType) else None

    def operate(self, what: tuple[Operation, Callable[..., Any]]) -> None:
        x, function = what
        bound = self.bound
        bound[x] = function(self.unit, bound)

    def read(self, x: Read) -> None:
        self.bound[x] = self.values.variables[x.variable]

    def read_register(self, x: RegisterRead) -> None:
        self.bound[x] = self.registers.read(self._row(x.registers), int(self.bound[x.index]))

    def result(self, x: Result) -> Blocking | None:
        held = self.simulate(x.instruction)
        if isinstance(held, GeneratorType):
            return self._later(x, held)
        self.bound[x] = held
        return None

    def _later(self, x: Value, done: Blocking) -> Blocking:
        self.bound[x] = yield from done

    def call(self, statement: st.Call) -> Blocking:
        function, bound = statement.function, self.bound
        bound.update(zip(function.parameters, map(self.values.value, statement.arguments), strict=True))
        yield from self._block(function.body)
        bound.update(zip(statement.results, map(self.values.value, function.results), strict=True))

    def declare(self, statement: st.Declare) -> None:
        self.values.declare(statement.variable, statement.initial)

    def assign(self, statement: st.Assign) -> None:
        self.values.assign(statement.variable, statement.value)

    def declare_registers(self, statement: st.DeclareRegisters) -> None:
        declared = statement.registers
        for array in declared if isinstance(declared, RegisterRows) else [declared]:
            self.registers.declare(array)

    def assign_register(self, statement: st.AssignRegister) -> None:
        index, active = int(self.bound[statement.index]), self.unit.active
        array = self.registers.access(self._row(statement.registers), write=True)
        new = self.bound[statement.value]
        array[active, index] = new[active] if isinstance(new, np.ndarray) else new

    def _row(self, x: Registers) -> Registers:
        return x.array.rows[int(self.bound[x.row])] if isinstance(x, SelectedRow) else x

    def branch(self, branch: st.If) -> Blocking | None:
        condition = self.bound[branch.condition]
        if isinstance(condition, np.ndarray):
            return self._diverge(branch, condition)
        block = branch.then if condition else branch.otherwise
        return self._block(block) if block else None

    def _diverge(self, branch: st.If, condition: np.ndarray) -> Blocking:
        before = self.machine.active
        for block, chosen in ((branch.then, condition), (branch.otherwise, ~condition)):
            active = before & chosen
            if block is not None and active.any():
                self.machine.active = active
                yield from self._block(block)
        self.machine.active = before

    def loop(self, loop: st.Loop) -> Blocking:
        for i in range(*(int(self.values.uniform(x)) for x in (loop.start, loop.stop, loop.step))):
            self.bound[loop.index] = i
            yield from self._block(loop.body)

    def role(self, role: st.Role) -> Blocking | None:
        size = 128 if role.unit == "warpgroup" else 32
        index = int(self.unit.threads[0]) // size
        if role.unit == "warp":
            index %= 4
        return self._block(role.body) if role.first <= index < role.first + role.count else None


Execution = Callable[[Interpreter, Any], Blocking | None]
_OF_STATEMENTS: dict[type[st.Statement], Execution] = {
    st.Execute: Interpreter.execute, st.Declare: Interpreter.declare, st.Assign: Interpreter.assign,
    st.DeclareRegisters: Interpreter.declare_registers, st.AssignRegister: Interpreter.assign_register,
    st.If: Interpreter.branch, st.Loop: Interpreter.loop, st.Role: Interpreter.role, st.Call: Interpreter.call,
}  # fmt: skip
_OF_VALUES: dict[type[Value], Execution] = {
    Result: Interpreter.result, Read: Interpreter.read, RegisterRead: Interpreter.read_register,
}  # fmt: skip


def _step(statement: st.Statement) -> Step:
    where, visible = statement.where, isinstance(statement, st.Execute)
    if not isinstance(statement, st.Bind):
        return where, visible, _OF_STATEMENTS[type(statement)], statement
    x = statement.value
    if isinstance(x, Operation):
        return where, visible, Interpreter.operate, (x, function_of(x))
    return where, visible, _OF_VALUES[type(x)], x
