"""Execution of a kernel's statements by a lockstep group: a generator that yields when the group blocks."""

from __future__ import annotations

from collections.abc import Callable
from types import GeneratorType
from typing import Any, NamedTuple

import numpy as np

from gemmsmith.backends.sim.execute.arithmetic import compile_operation
from gemmsmith.backends.sim.execute.counters import Counters
from gemmsmith.backends.sim.execute.machine import LockstepMachine
from gemmsmith.backends.sim.execute.registers import RegisterFile
from gemmsmith.backends.sim.execute.values import Values
from gemmsmith.backends.sim.state.lockstep_group import LockstepGroup
from gemmsmith.lang import statements as st
from gemmsmith.lang.instruction import Instruction, Result
from gemmsmith.lang.location import SourceLocation
from gemmsmith.lang.values import Operation, RegisterArray2D, RegisterRead, Value, VariableRead
from gemmsmith.machine import Blocking, Machine

PREEMPTION_PROBABILITY = 0.2
"""Probability, for seeds other than 0, of switching to another group after an instruction that others can observe.
Chosen; not measured."""


class CompiledStatement(NamedTuple):
    """A statement, ready to execute by `handler(interpreter, argument)`.

    `is_preemption_point`: another group may run after it, since others can observe its effects.
    """

    location: SourceLocation
    is_preemption_point: bool
    handler: Callable[[Interpreter, Any], Blocking | None]
    argument: Any


class Interpreter:
    """Executes the kernel for one lockstep group, from its first statement to its last.

    Methods that may block return a generator, which yields a Wait when the group must wait, or None when another group
    may run. `compiled`: the compiled statements of each block that has been executed, shared by all groups of the grid.
    """

    def __init__(
        self, group: LockstepGroup, compiled: dict[st.Block, list[CompiledStatement]], counters: Counters | None
    ) -> None:
        self.group, self.compiled = group, compiled
        self.counter = counters.of(group) if counters else None
        self.values = Values(group)
        self.registers = RegisterFile(group, self.values)
        self.machine: Machine = LockstepMachine(group, self.values, self.registers, self.counter)

    def run(self) -> Blocking:
        return self._block(self.group.state.kernel.body)

    def _block(self, block: st.Block) -> Blocking:
        """Execute a block. With other seeds than 0, other groups may run between two of its statements, at random."""
        group, random, seed = self.group, self.group.state.random.random, self.group.state.seed
        statements = self.compiled.get(block)
        if statements is None:
            statements = self.compiled[block] = [
                _compile_statement(s) for s in block.statements if type(s) is not st.Comment
            ]
        for location, is_preemption_point, handler, argument in statements:
            group.line = location
            blocking = handler(self, argument)
            if blocking is not None:
                yield from blocking
            if seed and is_preemption_point and random() < PREEMPTION_PROBABILITY:
                yield None

    def simulate(self, instruction: Instruction) -> Any:
        """Execute an instruction; return its result, or a generator if it may block."""
        if self.group.state.observer is not None:
            self.group.state.observer.instruction(self.group)
        if self.counter:
            self.counter.begin(instruction)
        return instruction.simulate(self.machine)

    def execute(self, statement: st.IssueInstruction) -> Blocking | None:
        """Execute an instruction without a result; if it may block, return its generator."""
        result = self.simulate(statement.instruction)
        return result if isinstance(result, GeneratorType) else None

    def read(self, x: VariableRead) -> None:
        self.values[x] = self.values.variables[x.variable]

    def read_register(self, x: RegisterRead) -> None:
        self.values[x] = self.registers.read(self.registers.selected_row(x.registers), int(self.values[x.index]))

    def result(self, x: Result) -> Blocking | None:
        """Execute an instruction that defines a value; if it may block, return the generator that defines it."""
        result = self.simulate(x.instruction)
        if isinstance(result, GeneratorType):
            return self._define_later(x, result)
        self.values[x] = result
        return None

    def _define_later(self, x: Value, blocking: Blocking) -> Blocking:
        self.values[x] = yield from blocking

    def call(self, statement: st.Call) -> Blocking:
        """Execute a function in the caller's table of values: set its parameters, then copy its results."""
        function, value_of = statement.function, self.values.__getitem__
        self.values.update(zip(function.parameters, map(value_of, statement.arguments), strict=True))
        yield from self._block(function.body)
        self.values.update(zip(statement.results, map(value_of, function.results), strict=True))

    def declare_registers(self, statement: st.DeclareRegisters) -> None:
        """Declare a register array, or each row of a two-dimensional one."""
        declared = statement.registers
        for array in declared if isinstance(declared, RegisterArray2D) else [declared]:
            self.registers.declare(array)

    def assign_register(self, statement: st.AssignRegister) -> None:
        """Assign an element of a register array in the active threads."""
        index, selection = int(self.values[statement.index]), self.group.selection
        array = self.registers.access(self.registers.selected_row(statement.registers), write=True)
        new = self.values[statement.value]
        array[selection, index] = new[selection] if isinstance(new, np.ndarray) else new

    def branch(self, branch: st.If) -> Blocking | None:
        """Execute the branch that the condition chooses. If the threads differ, execute both, one after the other."""
        condition = self.values[branch.condition]
        if isinstance(condition, np.ndarray):
            return self._diverge(branch, condition)
        block = branch.then if condition else branch.otherwise
        return self._block(block) if block else None

    def _diverge(self, branch: st.If, condition: np.ndarray) -> Blocking:
        """Execute each branch with the threads that take it; the others are inactive meanwhile."""
        before = self.machine.active
        for block, taken in ((branch.then, condition), (branch.otherwise, ~condition)):
            active = before & taken
            if block is not None and active.any():
                self.machine.active = active
                yield from self._block(block)
        self.machine.active = before

    def loop(self, loop: st.Loop) -> Blocking:
        """Execute a loop, whose bounds all active threads share."""
        around, name = self.group.loops, loop.index.name or "i"
        for i in range(*(int(self.values.uniform(x)) for x in (loop.start, loop.stop, loop.step))):
            self.values[loop.index] = i
            self.group.loops = (*around, (name, i))
            yield from self._block(loop.body)
        self.group.loops = around

    def role(self, role: st.Role) -> Blocking | None:
        """Execute a role's body if the group is of that role.

        A warp's index is that in its warpgroup; a group of a warpgroup's 128 threads has the index of its first warp.
        """
        size = 128 if role.unit == "warpgroup" else 32
        index = int(self.group.threads[0]) // size
        if role.unit == "warp":
            index %= 4
        return self._block(role.body) if role.first <= index < role.first + role.count else None


Handler = Callable[[Interpreter, Any], Blocking | None]
_STATEMENT_HANDLERS: dict[type[st.Statement], Handler] = {
    st.IssueInstruction: Interpreter.execute, st.Declare: lambda i, x: i.values.declare(x.variable, x.initial),
    st.Assign: lambda i, x: i.values.assign(x.variable, x.value),
    st.DeclareRegisters: Interpreter.declare_registers, st.AssignRegister: Interpreter.assign_register,
    st.If: Interpreter.branch, st.Loop: Interpreter.loop, st.Role: Interpreter.role, st.Call: Interpreter.call,
}  # fmt: skip
_VALUE_HANDLERS: dict[type[Value], Handler] = {
    Result: Interpreter.result, VariableRead: Interpreter.read, RegisterRead: Interpreter.read_register,
}  # fmt: skip


def _compile_statement(statement: st.Statement) -> CompiledStatement:
    location, is_preemption_point = statement.location, isinstance(statement, st.IssueInstruction)
    if not isinstance(statement, st.Define):
        return CompiledStatement(location, is_preemption_point, _STATEMENT_HANDLERS[type(statement)], statement)
    x = statement.value
    if isinstance(x, Operation):
        return CompiledStatement(location, is_preemption_point, compile_operation(x), x)
    return CompiledStatement(location, is_preemption_point, _VALUE_HANDLERS[type(x)], x)
