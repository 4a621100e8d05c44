"""Executes a kernel's statements on a unit: a generator that yields where the unit blocks."""

from __future__ import annotations

from collections.abc import Callable
from types import GeneratorType
from typing import Any

import numpy as np

from gemmsmith.backends.sim.arithmetic import Arithmetic
from gemmsmith.backends.sim.machine import UnitMachine
from gemmsmith.backends.sim.registers import RegisterFile
from gemmsmith.backends.sim.unit import Unit
from gemmsmith.backends.sim.values import Values
from gemmsmith.lang import statements as st
from gemmsmith.lang.instruction import Result
from gemmsmith.lang.machine import Blocking, Machine
from gemmsmith.lang.values import Operation, Read, RegisterRead, RegisterRows, Registers, SelectedRow, Value

PREEMPTION = 0.2
"""With a seed, how often a unit is interrupted at an instruction that others can see."""


class Interpreter:
    """Runs the kernel from its first statement to its last."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.values, self.registers, self.arithmetic = Values(unit), RegisterFile(unit), Arithmetic(unit)
        self.machine: Machine = UnitMachine(unit, self.values, self.registers)
        self.execute: dict[type[st.Statement], Callable[[Any], Blocking | None]] = {
            st.Comment: lambda comment: None,
            st.Bind: self._bind,
            st.Execute: self._execute,
            st.Declare: lambda s: self.values.declare(s.variable, s.initial),
            st.Assign: lambda s: self.values.assign(s.variable, s.value),
            st.DeclareRegisters: self._declare_registers,
            st.AssignRegister: self._assign_register,
            st.If: self._if,
            st.Loop: self._loop,
            st.Role: lambda role: self._block(role.body) if self._in_role(role) else None,
            st.Call: self._call,
        }

    def run(self) -> Blocking:
        """The whole kernel."""
        yield from self._block(self.unit.state.kernel.body)

    def _block(self, block: st.Block) -> Blocking:
        unit, execute, random = self.unit, self.execute, self.unit.state.random.random
        for statement in block.statements:
            unit.where = statement.where
            blocking = execute[type(statement)](statement)
            if blocking is not None:
                yield from blocking
            if unit.state.seed and type(statement) is st.Execute and random() < PREEMPTION:
                yield None

    def _execute(self, statement: st.Execute) -> Blocking | None:
        done = statement.instruction.simulate(self.machine)
        return done if isinstance(done, GeneratorType) else None

    def _bind(self, statement: st.Bind) -> Blocking | None:
        value, values = statement.value, self.values
        if isinstance(value, Operation):
            held = self.arithmetic.compute(value, [*map(values.value, value.operands)])
        elif isinstance(value, Result):
            held = value.instruction.simulate(self.machine)
            if isinstance(held, GeneratorType):
                return self._bind_later(value, held)
        elif isinstance(value, RegisterRead):
            held = self.registers.read(self._row(value.registers), int(values.value(value.index)))
        else:
            assert isinstance(value, Read)
            held = values.variables[value.variable]
        values.bound[value] = held
        return None

    def _bind_later(self, value: Value, done: Blocking) -> Blocking:
        self.values.bound[value] = yield from done

    def _call(self, statement: st.Call) -> Blocking:
        function, bound = statement.function, self.values.bound
        bound.update(zip(function.parameters, map(self.values.value, statement.arguments), strict=True))
        yield from self._block(function.body)
        bound.update(zip(statement.results, map(self.values.value, function.results), strict=True))

    def _declare_registers(self, statement: st.DeclareRegisters) -> None:
        declared = statement.registers
        for array in declared if isinstance(declared, RegisterRows) else [declared]:
            self.registers.declare(array)

    def _assign_register(self, statement: st.AssignRegister) -> None:
        index, active = int(self.values.value(statement.index)), self.unit.active
        array = self.registers.access(self._row(statement.registers), write=True)
        new = self.values.value(statement.value)
        array[active, index] = new[active] if isinstance(new, np.ndarray) else new

    def _row(self, x: Registers) -> Registers:
        return x.array.rows[int(self.values.value(x.row))] if isinstance(x, SelectedRow) else x

    def _if(self, branch: st.If) -> Blocking:
        condition = self.values.value(branch.condition)
        if not isinstance(condition, np.ndarray):
            if condition:
                yield from self._block(branch.then)
            elif branch.otherwise:
                yield from self._block(branch.otherwise)
            return
        before = self.machine.active
        for block, chosen in ((branch.then, condition), (branch.otherwise, ~condition)):
            active = before & chosen
            if block is not None and active.any():
                self.machine.active = active
                yield from self._block(block)
        self.machine.active = before

    def _loop(self, loop: st.Loop) -> Blocking:
        for i in range(*(int(self.values.uniform(x)) for x in (loop.start, loop.stop, loop.step))):
            self.values.bound[loop.index] = i
            yield from self._block(loop.body)

    def _in_role(self, role: st.Role) -> bool:
        size = 128 if role.unit == "warpgroup" else 32
        index = int(self.unit.threads[0]) // size
        if role.unit == "warp":
            index %= 4
        return role.first <= index < role.first + role.count
