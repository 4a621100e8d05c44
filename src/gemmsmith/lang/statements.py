"""Statements of a kernel. A kernel is a block of statements, in program order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gemmsmith.lang.instruction import Instruction, RegisterOperand, Result
from gemmsmith.lang.location import SourceLocation
from gemmsmith.lang.values import (
    Constant,
    LoopIndex,
    LoopIndexedRow,
    Operation,
    RegisterArray,
    RegisterArray2D,
    RegisterRead,
    RegisterSlice,
    Value,
    Variable,
    VariableRead,
)


@dataclass(eq=False)
class Statement:
    """Base class of statements."""

    location: SourceLocation = field(init=False, default=SourceLocation("?", 0))


@dataclass(eq=False)
class Block:
    """A sequence of statements."""

    statements: list[Statement] = field(default_factory=list)


@dataclass(eq=False)
class Comment(Statement):
    """A comment of the generated code."""

    text: str


@dataclass(eq=False)
class Define(Statement):
    """Definition of a value: an operation, a read, or the result of an instruction."""

    value: Value


@dataclass(eq=False)
class IssueInstruction(Statement):
    """Issue of an instruction without a result."""

    instruction: Instruction


@dataclass(eq=False)
class Declare(Statement):
    """Declaration of a variable with its initial value."""

    variable: Variable
    initial: Value


@dataclass(eq=False)
class Assign(Statement):
    """Assignment to a variable."""

    variable: Variable
    value: Value


@dataclass(eq=False)
class DeclareRegisters(Statement):
    """Declaration of a register array, one- or two-dimensional. `initial`: its value, if it is a single register."""

    registers: RegisterArray | RegisterArray2D
    initial: Value | None = None

    def is_scalar(self, registers: RegisterArray) -> bool:
        """Return whether this declares a single register, and `registers` is its array."""
        rows = len(self.registers) if isinstance(self.registers, RegisterArray2D) else 1
        return registers.declaration is self.registers and rows == registers.count == 1


@dataclass(eq=False)
class AssignRegister(Statement):
    """Assignment to a register of an array."""

    registers: RegisterArray
    index: Value
    value: Value


@dataclass(eq=False)
class Loop(Statement):
    """A loop over start..stop by step. All three are evaluated once, before the first iteration."""

    index: LoopIndex
    start: Value
    stop: Value
    step: Value
    body: Block = field(default_factory=Block)


@dataclass(eq=False)
class If(Statement):
    """A branch on a condition that may differ between threads.

    `merged`: how many branches around it have been merged into it by the printer; its condition includes theirs.
    """

    condition: Value
    then: Block = field(default_factory=Block)
    otherwise: Block | None = None
    merged: int = 0


@dataclass(eq=False)
class Role(Statement):
    """Code that only some threads of the CTA execute.

    `unit`: "warpgroup": `count` warpgroups from `first` on; "warp": `count` warps of the surrounding warpgroup.
    """

    unit: Literal["warpgroup", "warp"]
    first: int
    count: int
    name: str = ""
    body: Block = field(default_factory=Block)


@dataclass(eq=False)
class Function:
    """A device function without side effects, from `parameters` to `results`. It may also use values of the kernel."""

    name: str
    parameters: list[Value]
    body: Block = field(default_factory=Block)
    results: list[Value] = field(default_factory=list)

    @property
    def captured(self) -> list[Value]:
        """The values of the kernel that the function uses, which are passed as further parameters."""
        defined: set[Value] = {s.value for s in self.body.statements if isinstance(s, Define)}
        defined |= {v for s in self.body.statements if isinstance(s, Call) for v in s.results}
        used = [v for s in self.body.statements for v in uses(s)] + self.results
        local = defined.union(self.parameters)
        return [v for v in dict.fromkeys(used) if v not in local and not (isinstance(v, Constant) and not v.name)]


@dataclass(eq=False)
class Call(Statement):
    """A call of a function: `results` are its results for `arguments`."""

    function: Function
    arguments: list[Value]
    results: list[Value]


def uses(statement: Statement) -> list[Value]:
    """Return the values that a statement reads: its operands, not those of statements in blocks inside it."""
    match statement:
        case Define(value=Operation(operands=operands)):
            return list(operands)
        case Define(value=RegisterRead(registers=registers, index=index)):
            return [index, *_row_index(registers)]
        case Define(value=Result(instruction=instruction)) | IssueInstruction(instruction=instruction):
            return [v for operand in instruction.operands.values() for v in _operand_uses(operand)]
        case Declare(initial=value) | Assign(value=value):
            return [value]
        case AssignRegister(registers=registers, index=index, value=value):
            return [index, value, *_row_index(registers)]
        case Loop(start=start, stop=stop, step=step):
            return [start, stop, step]
        case If(condition=condition):
            return [condition]
        case Call(function=function, arguments=arguments):
            return [*arguments, *function.captured]
    return []


def storage(statement: Statement) -> list[object]:
    """Return the variables and declared register arrays that a statement reads or writes, like `uses`."""
    match statement:
        case Assign(variable=variable) | Define(value=VariableRead(variable=variable)):
            return [variable]
        case AssignRegister(registers=registers) | Define(value=RegisterRead(registers=registers)):
            return [registers.declaration]
        case Define(value=Result(instruction=instruction)) | IssueInstruction(instruction=instruction):
            return [x.declaration for x in instruction.operands.values() if isinstance(x, RegisterArray)]
    return []


def definitions(statement: Statement) -> Sequence[object]:
    """Return the values, variables and register arrays that exist from a statement to the end of its block."""
    match statement:
        case Define(value=x) | Declare(variable=x) | DeclareRegisters(registers=x):
            return [x]
        case Call(results=results):
            return results
    return []


def defs(statement: Statement) -> list[object]:
    """Return the variables and declared register arrays to which a statement, or one inside it, assigns."""
    match statement:
        case Assign(variable=variable):
            return [variable]
        case AssignRegister(registers=registers):
            return [registers.declaration]
        case Define(value=Result(instruction=instruction)) | IssueInstruction(instruction=instruction):
            types = instruction.operand_types.items()
            written = [name for name, t in types if isinstance(t, RegisterOperand) and t.access != "in"]
            return [getattr(instruction, name).declaration for name in written]
    return [x for block in children(statement) for inner in block.statements for x in defs(inner)]


def _operand_uses(operand: Value | RegisterArray) -> list[Value]:
    if isinstance(operand, Value):
        return [operand]
    return [operand.start, *_row_index(operand.array)] if isinstance(operand, RegisterSlice) else []


def _row_index(registers: RegisterArray) -> list[Value]:
    return [registers.row] if isinstance(registers, LoopIndexedRow) else []


def children(statement: Statement) -> list[Block]:
    """Return the blocks inside a statement."""
    if isinstance(statement, (Loop, Role)):
        return [statement.body]
    if isinstance(statement, If):
        return [statement.then] + ([statement.otherwise] if statement.otherwise else [])
    return []


def walk(block: Block) -> Iterator[Statement]:
    """Yield every statement of a block and of the blocks inside it, in program order."""
    for statement in block.statements:
        yield statement
        for child in children(statement):
            yield from walk(child)


def instructions(block: Block) -> Iterator[tuple[Instruction, SourceLocation]]:
    """Yield every instruction of a block and of the blocks inside it, with its source location."""
    for statement in walk(block):
        match statement:
            case IssueInstruction(instruction=instruction) | Define(value=Result(instruction=instruction)):
                yield instruction, statement.location
