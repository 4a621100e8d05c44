"""Executes a kernel's statements on a unit: a generator that yields where the unit blocks."""

from __future__ import annotations

import inspect
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

    def run(self) -> Blocking:
        """The whole kernel."""
        yield from self._block(self.unit.state.kernel.body)

    def _block(self, block: st.Block) -> Blocking:
        unit, values, random = self.unit, self.values, self.unit.state.random
        for statement in block.statements:
            unit.where = statement.where
            if isinstance(statement, st.Bind):
                value = statement.value
                if isinstance(value, Result):
                    done = value.instruction.simulate(self.machine)
                    values.bound[value] = (yield from done) if inspect.isgenerator(done) else done
                else:
                    values.bound[value] = self._compute(value)
            elif isinstance(statement, st.Execute):
                done = statement.instruction.simulate(self.machine)
                if inspect.isgenerator(done):
                    yield from done
                if unit.state.seed and random.random() < PREEMPTION:
                    yield None
            elif isinstance(statement, st.AssignRegister):
                self._assign_register(statement)
            elif isinstance(statement, st.Assign):
                values.assign(statement.variable, statement.value)
            elif isinstance(statement, st.Declare):
                values.declare(statement.variable, statement.initial)
            elif isinstance(statement, st.If):
                yield from self._if(statement)
            elif isinstance(statement, st.Loop):
                yield from self._loop(statement)
            elif isinstance(statement, st.Role):
                if self._in_role(statement):
                    yield from self._block(statement.body)
            elif isinstance(statement, st.Call):
                function, bound = statement.function, values.bound
                bound.update(zip(function.parameters, map(values.value, statement.arguments), strict=True))
                yield from self._block(function.body)
                bound.update(zip(statement.results, map(values.value, function.results), strict=True))
            elif isinstance(statement, st.DeclareRegisters):
                declared = statement.registers
                for array in declared if isinstance(declared, RegisterRows) else [declared]:
                    self.registers.declare(array)

    def _compute(self, value: Value) -> Any:
        """An operation or a read."""
        if isinstance(value, Operation):
            return self.arithmetic.compute(value, [self.values.value(x) for x in value.operands])
        if isinstance(value, RegisterRead):
            return self.registers.read(self._row(value.registers), int(self.values.value(value.index)))
        assert isinstance(value, Read)
        return self.values.variables[value.variable]

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
