"""Statements: what a kernel does, in order. A kernel is a block of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gemmsmith.lang.instruction import Instruction, RegisterOperand, Result
from gemmsmith.lang.values import (
    Constant,
    LoopIndex,
    Operation,
    RegisterPart,
    RegisterRead,
    RegisterRows,
    Registers,
    SelectedRow,
    Value,
    Variable,
)


class Where(NamedTuple):
    """The line of the kernel (a design, or the user's own file) that made a statement."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"


@dataclass(eq=False)
class Statement:
    where: Where = field(init=False, default=Where("?", 0))


@dataclass(eq=False)
class Block:
    statements: list[Statement] = field(default_factory=list)


@dataclass(eq=False)
class Comment(Statement):
    text: str


@dataclass(eq=False)
class Bind(Statement):
    """A value is computed here: an operation, a read, or an instruction's result."""

    value: Value


@dataclass(eq=False)
class Execute(Statement):
    """An instruction without a result."""

    instruction: Instruction


@dataclass(eq=False)
class Declare(Statement):
    variable: Variable
    initial: Value


@dataclass(eq=False)
class Assign(Statement):
    variable: Variable
    value: Value


@dataclass(eq=False)
class DeclareRegisters(Statement):
    registers: Registers | RegisterRows


@dataclass(eq=False)
class AssignRegister(Statement):
    registers: Registers
    index: Value
    value: Value


@dataclass(eq=False)
class Loop(Statement):
    """for index in start..stop by step; all three are taken before the first iteration."""

    index: LoopIndex
    start: Value
    stop: Value
    step: Value
    body: Block = field(default_factory=Block)


@dataclass(eq=False)
class If(Statement):
    condition: Value
    then: Block = field(default_factory=Block)
    otherwise: Block | None = None


@dataclass(eq=False)
class Role(Statement):
    """What `count` warpgroups from `first` on do, or `count` warps of the surrounding warpgroup."""

    unit: Literal["warpgroup", "warp"]
    first: int
    count: int
    name: str = ""
    body: Block = field(default_factory=Block)


@dataclass(eq=False)
class Function:
    """Computes `results` of `parameters` and of `captured` values of the kernel; nothing in it has an effect."""

    name: str
    parameters: list[Value]
    body: Block = field(default_factory=Block)
    results: list[Value] = field(default_factory=list)

    @property
    def captured(self) -> list[Value]:
        """What it uses of the kernel's own values."""
        made: set[Value] = {s.value for s in self.body.statements if isinstance(s, Bind)}
        made |= {v for s in self.body.statements if isinstance(s, Call) for v in s.results}
        used = [v for s in self.body.statements for v in uses(s)] + self.results
        own = made.union(self.parameters)
        return [v for v in dict.fromkeys(used) if v not in own and not (isinstance(v, Constant) and not v.name)]


@dataclass(eq=False)
class Call(Statement):
    """`results` are what a function gives for `arguments`."""

    function: Function
    arguments: list[Value]
    results: list[Value]


def uses(statement: Statement) -> list[Value]:
    """The values that a statement reads, without those of the blocks inside it."""
    match statement:
        case Bind(value=Operation(operands=operands)):
            return list(operands)
        case Bind(value=RegisterRead(registers=registers, index=index)):
            return [index, *_row(registers)]
        case Bind(value=Result(instruction=instruction)) | Execute(instruction=instruction):
            return [v for operand in instruction.operands.values() for v in _of_operand(operand)]
        case Declare(initial=value) | Assign(value=value):
            return [value]
        case AssignRegister(registers=registers, index=index, value=value):
            return [index, value, *_row(registers)]
        case Loop(start=start, stop=stop, step=step):
            return [start, stop, step]
        case If(condition=condition):
            return [condition]
        case Call(function=function, arguments=arguments):
            return [*arguments, *function.captured]
    return []


def changes(statement: Statement) -> list[object]:
    """The variables and declared register arrays that a statement, or one inside it, assigns to."""
    match statement:
        case Assign(variable=variable):
            return [variable]
        case AssignRegister(registers=registers):
            return [registers.declared]
        case Bind(value=Result(instruction=instruction)) | Execute(instruction=instruction):
            kinds = instruction.operand_types.items()
            written = [name for name, kind in kinds if isinstance(kind, RegisterOperand) and kind.access != "in"]
            return [getattr(instruction, name).declared for name in written]
    return [x for block in children(statement) for inner in block.statements for x in changes(inner)]


def _of_operand(operand: Value | Registers) -> list[Value]:
    if isinstance(operand, Value):
        return [operand]
    return [operand.first, *_row(operand.array)] if isinstance(operand, RegisterPart) else []


def _row(registers: Registers) -> list[Value]:
    return [registers.row] if isinstance(registers, SelectedRow) else []


def children(statement: Statement) -> list[Block]:
    """The blocks inside a statement."""
    if isinstance(statement, (Loop, Role)):
        return [statement.body]
    if isinstance(statement, If):
        return [statement.then] + ([statement.otherwise] if statement.otherwise else [])
    return []


def walk(block: Block) -> Iterator[Statement]:
    """Every statement below a block, outer before inner, in order."""
    for statement in block.statements:
        yield statement
        for child in children(statement):
            yield from walk(child)


def instructions(block: Block) -> Iterator[tuple[Instruction, Where]]:
    """Every instruction below a block, with its line."""
    for statement in walk(block):
        match statement:
            case Execute(instruction=instruction) | Bind(value=Result(instruction=instruction)):
                yield instruction, statement.where
