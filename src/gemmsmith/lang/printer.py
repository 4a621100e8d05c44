"""Prints the statements of a kernel, or of a device function, as readable C++.

Pure values used once, and reads of variables, are folded into their uses; all others become named constants, in the
order they were made. A value that reads a variable is written down before the variable changes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby

from gemmsmith.lang import statements as st
from gemmsmith.lang.cpp import wrapped, wrapper
from gemmsmith.lang.instruction import Instruction, RegisterOperand, Result
from gemmsmith.lang.types import F32, I64, PRED, TENSOR_MAP, U32, U64, Type
from gemmsmith.lang.values import (
    Builtin,
    Constant,
    LateConstant,
    LoopIndex,
    Operation,
    Parameter,
    Read,
    RegisterPart,
    RegisterRead,
    RegisterRows,
    Registers,
    SelectedRow,
    Value,
    Variable,
)

_PRECEDENCE = {
    "*": 10, "/": 10, "%": 10, "+": 9, "-": 9, "<<": 8, ">>": 8, "<": 7, "<=": 7, ">": 7, ">=": 7,
    "==": 6, "!=": 6, "&": 5, "^": 4, "|": 3,
}  # fmt: skip
_ATOM, _UNARY, _TERNARY = 20, 15, 1
_HINTS = {
    "+": "sum", "-": "difference", "*": "product", "/": "quotient", "%": "remainder", "neg": "negated",
    "min": "minimum", "max": "maximum", "select": "selected", "cast": "converted",
}  # fmt: skip
"""What an operation's result is called that has no name."""
_REGISTERS_FROM = """\
template <int count, typename T, int size>
__device__ __forceinline__ T (&registers_from(T (&all)[size], int first))[count] {
    return reinterpret_cast<T (&)[count]>(all[first]);
}"""


@dataclass
class _Pending:
    text: str
    precedence: int
    reads: set[object]
    depth: int = 0
    converted: tuple[str, int] | None = None
    """Text and precedence of what C++ would convert by itself beside an operand of this type."""


@dataclass
class Printer:
    """Prints a block: the kernel's body, or a function's."""

    threads: int
    uses: Counter[Value]
    wrappers: dict[str, None]
    """The text of those in use, in the order of their first."""
    names: dict[object, str] = field(default_factory=dict)
    taken: Counter[str] = field(default_factory=Counter)
    pending: dict[Value, _Pending] = field(default_factory=dict)
    builtins: set[str] = field(default_factory=set)
    constants: dict[str, Constant] = field(default_factory=dict)
    constant_names: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)
    last_if: tuple[Value | None, int] = None, 0
    """The condition of the last `if` without `else`, and the number of lines behind it."""
    last_call: tuple[Value | None, int, str] = None, 0, ""
    """The last instruction's result that one statement uses, the number of lines behind it, and its text."""
    depth: int = 1
    located: bool = False
    """Whether each line has a `#line` directive with that of the kernel which made it."""
    where: st.Where | None = None
    """The Python line of what is printed now."""

    # -- names and expressions ---------------------------------------------------------------------
    def name(self, thing: object, hint: str, taken: Counter[str] | None = None) -> str:
        """An identifier of its own for `thing`: the hint in ASCII, with a number where that is `taken`, as far as not
        said otherwise in this scope."""
        if thing not in self.names:
            taken = self.taken if taken is None else taken
            hint = name = re.sub(r"\W+", "_", hint, flags=re.ASCII)
            while taken[name]:
                taken[hint] += 1
                name = f"{hint}_{taken[hint]}"
            taken[name] = 1
            self.names[thing] = name
        return self.names[thing]

    def constant(self, value: Constant) -> str:
        """The name of a constant that has one: those of the same name and number are one."""
        name = self.name((value.name, value.type, value.number), value.name or "", self.constant_names)
        self.constants[name] = value
        return name

    def expression(self, value: Value) -> tuple[str, int, set[object]]:
        """Text, precedence, and the variables it reads."""
        if value in self.pending:
            done = self.pending[value]
            self.uses[value] -= 1
            if not self.uses[value]:
                del self.pending[value]
            return done.text, done.precedence, done.reads
        if value in self.names:
            return self.names[value], _ATOM, set()
        if isinstance(value, Constant) and value.name:
            return self.constant(value), _ATOM, set()
        if isinstance(value, (Constant, LateConstant)):
            return literal(value.type, value.number), _ATOM, set()
        if isinstance(value, Builtin):
            self.builtins.add(value.name or "")
            return value.name or "", _ATOM, set()
        if isinstance(value, (Parameter, LoopIndex)):
            return self.name(value, value.name or "p"), _ATOM, set()
        raise AssertionError(f"{value} used before it is made")

    def text(self, value: Value) -> str:
        return self.expression(value)[0]

    def converted(self, value: Value) -> tuple[str, int] | None:
        return self.pending[value].converted if value in self.pending else None

    def argument(self, value: Value) -> str:
        """For a parameter of the value's type."""
        converted, text = self.converted(value), self.text(value)
        return converted[0] if converted else text

    def _compose(self, value: Value) -> _Pending:
        reads: set[object] = set()

        def part(operand: Value, at_least: int, converts: bool = False) -> str:
            converted = self.converted(operand) if converts else None
            text, precedence, more = self.expression(operand)
            text, precedence = converted or (text, precedence)
            reads.update(more)
            return text if precedence >= at_least else f"({text})"

        match value:
            case Read():
                return _Pending(self.names[value.variable], _ATOM, {value.variable})
            case RegisterRead():
                text = f"{self.array(value.registers)}[{part(value.index, 0)}]"
                return _Pending(text, _ATOM, reads | {value.registers.declared})
            case Result():
                return _Pending(self.call(value.instruction), _ATOM, reads)
            case Operation(op="select"):
                c, a, b = (part(v, _TERNARY + 1) for v in value.operands)
                return _Pending(f"{c} ? {a} : {b}", _TERNARY, reads)
            case Operation(op="cast", operands=(operand,)):
                text, precedence, reads = self.expression(operand)
                inner = text if precedence >= _UNARY else f"({text})"
                converted = (text, precedence) if _widens(operand.type, value.type) else None
                return _Pending(f"({value.type.cpp}){inner}", _UNARY, reads, converted=converted)
            case Operation(op="min" | "max"):
                a, b = (part(v, 0) for v in value.operands)
                return _Pending(f"{value.op}({a}, {b})", _ATOM, reads)
            case Operation(operands=(only,)):
                sign = {"neg": "-"}.get(value.op, value.op)
                return _Pending(f"{sign}{part(only, _UNARY + 1)}", _UNARY, reads)
            case Operation(operands=(left, right)):
                own = _PRECEDENCE[value.op]
                # Beyond + and * readers (and compilers' warnings) want the parentheses.
                floor = own if own >= 9 else 9
                converts = value.op in ("+", "-", "*")  # the one operand to the other's type
                a = part(left, floor, converts and not self.converted(right))
                b = part(right, max(floor, own + 1), converts)
                op = value.op * (2 if value.type == PRED and value.op in ("&", "|") else 1)
                return _Pending(f"{a} {op} {b}", own, reads)
        raise AssertionError(value)

    def array(self, x: Registers) -> str:
        """A register array, or a row of one."""
        return f"{self.names[x.array]}[{self.text(x.row)}]" if isinstance(x, SelectedRow) else self.names[x]

    def whole(self, x: Registers) -> str:
        """A register array as an instruction's operand: all of it, or a part."""
        if not isinstance(x, RegisterPart):
            return self.names[x]
        self.wrappers[_REGISTERS_FROM] = None
        return f"registers_from<{x.count}>({self.array(x.array)}, {self.text(x.first)})"

    def call(self, instruction: Instruction) -> str:
        arguments = []
        for name, kind in instruction.operand_types.items():
            given = getattr(instruction, name)
            if isinstance(kind, RegisterOperand):
                arguments.append(self.whole(given))
            else:
                text = self.text(given) if instruction.cuda else self.argument(given)
                arguments.append("&" * (kind == TENSOR_MAP) + text)
        if instruction.cuda:
            places = dict(zip(instruction.operand_types, arguments, strict=True))
            return re.sub(r"\{(\w+)\}", lambda m: places.get(m[1], str(getattr(instruction, m[1], m[0]))),
                          instruction.cuda)  # fmt: skip
        # By text, not name: the same name with other operand counts is an overload.
        self.wrappers[wrapper(instruction)] = None
        return f"{instruction.wrapper_name}({', '.join(arguments)})"

    # -- statements ----------------------------------------------------------------------------------
    def line(self, text: str) -> None:
        text = wrapped(text, "    " * self.depth)
        if self.located and self.where:
            file = self.where.file.replace("\\", "/")
            text = "\n".join(f'#line {self.where.line} "{file}"\n{part}' for part in text.split("\n"))
        self.lines.append(text)

    def flush(self, changes: list[object] | None = None) -> None:
        """Writes down pending values: those of this block, or those that read what is about to change."""
        for value, done in list(self.pending.items()):
            if done.depth == self.depth if changes is None else not done.reads.isdisjoint(changes):
                text = self.pending.pop(value).text
                self.line(f"const {value.type.cpp} {self.name(value, name_of(value))} = {text};")

    def bind(self, value: Value) -> None:
        pure = is_pure(value)
        if pure and not self.uses[value]:
            return
        self._give(value, self._compose(value), pure)

    def _give(self, value: Value, done: _Pending, pure: bool) -> None:
        if pure and not value.name and (self.uses[value] == 1 or isinstance(value, Read)):
            self.pending[value] = replace(done, depth=self.depth)
            return
        if not self.uses[value]:
            self.line(f"{done.text};")
        else:
            self.line(f"const {value.type.cpp} {self.name(value, name_of(value))} = {done.text};")
            if self.uses[value] == 1 and not value.name:
                self.last_call = value, len(self.lines), done.text

    def block(self, block: st.Block) -> None:
        for unit, group in groupby(block.statements, lambda s: s.unit if isinstance(s, st.Role) else None):
            if unit is None:
                for statement in group:
                    self.statement(statement)
            else:
                self._roles([role for role in group if isinstance(role, st.Role)])

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Names made inside may be taken again behind it."""
        taken, self.taken = self.taken, self.taken.copy()
        yield
        self.taken = taken

    def nested(self, block: st.Block) -> None:
        with self.scope():
            self.depth += 1
            self.block(block)
            self.depth -= 1

    def statement(self, statement: st.Statement) -> None:
        self.where = statement.where
        match statement:
            case st.Comment(text=text):
                self.flush()
                self.line(f"// {text}")
            case st.Bind(value=value):
                self.flush(st.changes(statement))
                self.bind(value)
            case st.Execute(instruction=instruction):
                text = self.call(instruction)
                self.flush(st.changes(statement))
                self.line(f"{text};")
            case st.Declare(variable=variable, initial=initial):
                text = self.text(initial)
                self.line(f"{variable.type.cpp} {self.name(variable, variable.name)} = {text};")
            case st.Assign(variable=variable, value=value):
                text = self.text(value)
                self.flush(st.changes(statement))
                self.line(_assignment(self.names[variable], variable, value, text))
            case st.DeclareRegisters(registers=array):
                name = self.name(array, array.name)
                rows = list(array) if isinstance(array, RegisterRows) else []
                self.names.update((row, f"{name}[{i}]" if len(rows) > 1 else name) for i, row in enumerate(rows))
                self.line(f"{array.type.cpp} {name}{f'[{len(rows)}]' * (len(rows) > 1)}[{array.count}];")
            case st.AssignRegister(registers=registers, index=index, value=value):
                text, element = self.text(value), f"{self.array(registers)}[{self.text(index)}]"
                self.flush(st.changes(statement))
                self.line(f"{element} = {text};")
            case st.Call():
                self._call(statement)
            case st.Loop():
                self._loop(statement)
            case st.If():
                condition = self.text(statement.condition)
                self.flush(st.changes(statement))
                if self.last_call[0] is statement.condition and self.last_call[1] == len(self.lines):
                    self.lines.pop()
                    condition = self.last_call[2]
                if self.last_if[0] is statement.condition and self.last_if[1] == len(self.lines):
                    self.lines.pop()  # of the same condition, just before: values never change
                else:
                    self.line(f"if ({condition}) {{")
                self.nested(statement.then)
                if statement.otherwise:
                    self.line("} else {")
                    self.nested(statement.otherwise)
                self.line("}")
                if not statement.otherwise:
                    self.last_if = statement.condition, len(self.lines)

    def _call(self, call: st.Call) -> None:
        if not any(self.uses[r] for r in call.results):
            return
        done = [self.expression(v) for v in st.uses(call)]
        text = f"{call.function.name}({', '.join(text for text, *_ in done)})"
        if len(call.results) == 1:
            reads = set().union(*(reads for *_, reads in done))
            self._give(call.results[0], _Pending(text, _ATOM, reads), pure=True)
        else:
            names = [self.name(r, r.name or "value") for r in call.results]
            self.line(f"const auto [{', '.join(names)}] = {text};")

    def _loop(self, loop: st.Loop) -> None:
        start, stop, by = (self._bound(x) for x in (loop.start, loop.stop, loop.step))
        self.flush(st.changes(loop) if loop.index.unrolled else None)
        self.line("#pragma unroll" if loop.index.unrolled else "#pragma unroll 1")
        with self.scope():
            name = self.name(loop.index, loop.index.name or "i")
            step = f"++{name}" if by == "1" else f"{name} += {by}"
            self.line(f"for (int {name} = {start}; {name} < {stop}; {step}) {{")
            self.nested(loop.body)
        self.line("}")

    def _bound(self, value: Value) -> str:
        """A loop's bound is taken once: one that is computed gets a name first."""
        text, _, reads = self.expression(value)
        if not reads and re.fullmatch(r"\w+", text):
            return text
        self.line(f"const int {self.name(value, value.name or 'bound')} = {text};")
        return self.names[value]

    def _roles(self, roles: list[st.Role]) -> None:
        """Roles in a row are one if/else chain, which setmaxnreg needs; the last is `else` where all are covered."""
        self.flush()
        self.builtins.add(roles[0].unit)
        limit = self.threads // 128 if roles[0].unit == "warpgroup" else 4
        whole = sum(role.count for role in roles) == limit
        for role in roles:
            self.where = role.where
            opening = "if" if role is roles[0] else "} else if"
            last = role is roles[-1] and whole and len(roles) > 1
            self.line("} else {" if last else f"{opening} ({self._test(role, limit)}) {{")
            if role.name:
                self.line(f"    // {role.name} {role.unit}{'s' * (role.count > 1)}")
            self.nested(role.body)
        self.line("}")

    def _test(self, role: st.Role, limit: int) -> str:
        who = "warpgroup" if role.unit == "warpgroup" else "warp % 4"
        first, stop = role.first, role.first + role.count
        if role.count == 1:
            return f"{who} == {first}"
        if first == 0:
            return f"{who} < {stop}"
        return f"{who} >= {first}" + (f" && {who} < {stop}" if stop < limit else "")


def _assignment(name: str, variable: Variable, value: Value, text: str) -> str:
    """`variable = text`; shorter where the value is an operation on what the variable holds."""
    match value:
        case Operation(op="+" | "-" | "^" | "|" | "&" as op, operands=(Read(variable=read), _)) if read is variable:
            opening = f"{name} {op} "
            if text.startswith(opening):
                return f"{name} {op}= {text[len(opening) :]};"
    return f"{name} = {text};"


def literal(type: Type, number: object) -> str:
    if type == PRED:
        return "true" if number else "false"
    if type == F32:
        return _float(float(number))  # type: ignore[arg-type]
    suffix = {"u32": "u", "u64": "ull", "i64": "ll"}.get(type.name, "")
    if type.bits == 64 and isinstance(number, int) and number >= 1 << 16:
        return f"{number:#x}{suffix}"
    return f"{number}{suffix}"


def _float(x: float) -> str:
    if x != x or x in (float("inf"), float("-inf")):
        bits = {"nan": "0x7fffffff", "inf": "0x7f800000", "-inf": "0xff800000"}[str(x)]
        return f"__int_as_float({bits})"
    text = repr(x)
    return (text if "." in text or "e" in text else text + ".0") + "f"


def name_of(value: Value) -> str:
    """What a value is called: its name, if it has one, else what it is."""
    if value.name:
        return value.name
    match value:
        case Read():
            return f"{value.variable.name}_now"
        case Result():
            return value.instruction.mnemonic + "_result"
        case RegisterRead():
            return f"{value.registers.name}_value"
        case Operation(op=op):
            return _HINTS.get(op, "value" if value.type != PRED else "condition")
        case _:
            return "value"


def _widens(of: Type, to: Type) -> bool:
    """Whether C++ converts `of` to `to` where an operand or a parameter has that type."""
    return of.is_integer and to in (U32, I64, U64) and of.bits <= to.bits and not (to == I64 and of == U64)


def is_pure(value: Value) -> bool:
    return not isinstance(value, Result) or value.instruction.pure
