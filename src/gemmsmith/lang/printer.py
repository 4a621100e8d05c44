"""Prints the statements of a kernel, or of a device function, as readable C++.

Pure values with one use, and reads of variables, are inlined; other values become named constants in creation order.
A value that reads a variable is emitted before the variable changes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby

from gemmsmith.lang import statements as st
from gemmsmith.lang.cpp import instruction_wrapper, wrap_line
from gemmsmith.lang.instruction import Instruction, Result
from gemmsmith.lang.location import SourceLocation
from gemmsmith.lang.merge import is_inlined, is_pure
from gemmsmith.lang.types import F32, I64, PRED, U32, U64, ScalarType
from gemmsmith.lang.values import (
    Builtin,
    Constant,
    LoopIndex,
    LoopIndexedRow,
    Operation,
    Parameter,
    RegisterArray,
    RegisterArray2D,
    RegisterRead,
    RegisterSlice,
    Value,
    Variable,
    VariableRead,
)

_PRECEDENCE = {
    "*": 10, "/": 10, "%": 10, "+": 9, "-": 9, "<<": 8, ">>": 8, "<": 7, "<=": 7, ">": 7, ">=": 7,
    "==": 6, "!=": 6, "&": 5, "^": 4, "|": 3,
}  # fmt: skip
_ATOM, _UNARY, _TERNARY = 20, 15, 1
_REGISTERS_FROM = """\
template <int count, typename T, int size>
__device__ __forceinline__ T (&registers_from(T (&all)[size], int first))[count] {
    return reinterpret_cast<T (&)[count]>(all[first]);
}"""


@dataclass
class _Expression:
    """A C++ expression of a value.

    Attributes:
        text: The C++.
        precedence: Of its outermost operator; the higher, the tighter it binds.
        reads: The variables and register arrays that it reads.
        implicit_form: (text, precedence) without its cast, for places where C++ converts implicitly, or None.
        depth, location: Where the value is defined, if its expression is inlined at a use instead.
    """

    text: str
    precedence: int = _ATOM
    reads: Set[object] = frozenset()
    implicit_form: tuple[str, int] | None = None
    depth: int = 0
    location: SourceLocation | None = None


@dataclass
class Printer:
    """Prints a block: the body of a kernel or of a device function."""

    threads: int
    uses: Counter[Value]
    wrappers: dict[str, None]
    """Sources of the instruction wrappers in use, in order of first use (an ordered set)."""
    names: dict[object, str] = field(default_factory=dict)
    used_names: Counter[str] = field(default_factory=Counter)
    inlinable: dict[Value, _Expression] = field(default_factory=dict)
    """Values whose definitions are not printed: their expressions are inlined where they are used."""
    builtins: set[str] = field(default_factory=set)
    constants: dict[str, Constant] = field(default_factory=dict)
    constant_names: Counter[str] = field(default_factory=Counter)
    shared_arrays: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Shared buffers that are indexed by a slot: the name of the offset's constant, and the bytes of a slot."""
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    merged_depth: int = 0
    """Levels of `if` around the current line that were merged into another `if`. Lines are wrapped as if they were
    indented by these levels, too."""
    line_directives: bool = False
    """Precedes each line by a `#line` directive that names the Python line it comes from."""
    location: SourceLocation | None = None
    """Source location of the statement being printed."""
    first_lines: dict[int, int] = field(default_factory=dict)
    """The first line of each statement that has lines of its own, from 0, by its number."""

    # -- names and expressions ---------------------------------------------------------------------
    def name(self, thing: object, hint: str, used_names: Counter[str] | None = None) -> str:
        """Return a unique identifier for `thing`, which keeps it: `hint`, with a number appended if it is in use.

        Temporaries, whose hint is empty, are t0, t1 and so on. `used_names`: the names in use; by default those of the
        current scope.
        """
        if thing not in self.names:
            used_names = self.used_names if used_names is None else used_names
            hint = name = re.sub(r"\W+", "_", hint, flags=re.ASCII)
            while used_names[name] or not name:
                used_names[hint] += 1
                name = f"{hint}_{used_names[hint]}" if hint else f"t{used_names[hint] - 1}"
            used_names[name] = 1
            self.names[thing] = name
        return self.names[thing]

    def constant(self, value: Constant) -> str:
        """Return the identifier of a named constant. Constants with equal name, type and value share one."""
        name = self.name((value.name, value.type, value.value), value.name or "", self.constant_names)
        self.constants[name] = value
        return name

    def shared_array(self, offset: Constant) -> str:
        """Return the identifier of a shared buffer's array of slots, such as `a_smem` or `mainloop_full_barrier`.

        `offset`: the constant that is the buffer's offset, by whose name the buffer is named.
        """
        buffer = (offset.name or "").removesuffix("_OFFSET").lower()
        hint = buffer if buffer.endswith("barrier") else f"{buffer}_smem"
        return self.name(("slots", offset.name, offset.value), hint)

    def expression(self, value: Value) -> _Expression:
        """Return the expression of a value at one of its uses: the inlined definition, a name, or a literal.

        After its last use, an inlined value is forgotten.
        """
        if value in self.inlinable:
            inlinable = self.inlinable[value]
            self.uses[value] -= 1
            if not self.uses[value]:
                del self.inlinable[value]
            return inlinable
        if value in self.names:
            return _Expression(self.names[value])
        if isinstance(value, Constant) and value.name:
            return _Expression(self.constant(value))
        if isinstance(value, Constant):
            return _Expression(literal(value.type, value.value))
        if isinstance(value, Builtin):
            self.builtins.add(value.name or "")
            return _Expression(value.name or "")
        if isinstance(value, (Parameter, LoopIndex)):
            return _Expression(self.name(value, value.name or "p"))
        return self._compose(value)  # the condition of a merged `if`, which has no definition

    def text(self, value: Value) -> str:
        return self.expression(value).text

    def _compose(self, value: Value) -> _Expression:
        """Return the expression that defines a value, from those of its operands.

        Parentheses are added where precedence needs them, and casts are left out where C++ converts implicitly.
        """
        reads: set[object] = set()

        def operand_text(operand: Value, min_precedence: int, converts: bool = False) -> str:
            """Return the text of an operand, in parentheses if it binds less. `converts`: C++ may convert it."""
            x = self.expression(operand)
            text, precedence = (converts and x.implicit_form) or (x.text, x.precedence)
            reads.update(x.reads)
            return text if precedence >= min_precedence else f"({text})"

        match value:
            case VariableRead():
                return _Expression(self.names[value.variable], reads={value.variable})
            case RegisterRead():
                text = self.register(value.registers, operand_text(value.index, 0))
                return _Expression(text, reads=reads | {value.registers.declaration})
            case Result():
                return _Expression(self.call(value.instruction))
            case Operation(op="select"):
                c, a, b = (operand_text(v, _TERNARY + 1) for v in value.operands)
                return _Expression(f"{c} ? {a} : {b}", _TERNARY, reads)
            case Operation(op="cast", operands=(operand,)):
                x = self.expression(operand)
                inner = x.text if x.precedence >= _UNARY else f"({x.text})"
                implicit_form = (x.text, x.precedence) if _converts_implicitly(operand.type, value.type) else None
                return _Expression(f"({value.type.cpp}){inner}", _UNARY, x.reads, implicit_form)
            case Operation(op="slot", operands=(smem, slot, Constant() as slot_bytes, Constant() as offset, *nbytes)):
                self.expression(smem)
                array = self.shared_array(offset)
                self.shared_arrays[array] = self.constant(offset), slot_bytes.value
                index = operand_text(slot, 0)
                text = f"{array}.at({index}, {operand_text(nbytes[0], 0, True)})" if nbytes else f"{array}[{index}]"
                return _Expression(text, reads=reads)
            case Operation(op="min" | "max"):
                a, b = (operand_text(v, 0) for v in value.operands)
                return _Expression(f"{value.op}({a}, {b})", reads=reads)
            case Operation(operands=(only,)):
                sign = {"neg": "-"}.get(value.op, value.op)
                return _Expression(f"{sign}{operand_text(only, _UNARY + 1)}", _UNARY, reads)
            case Operation(operands=(left, right)):
                precedence = _PRECEDENCE[value.op]
                # Operators other than + - * / % get parentheses, for readers and against compiler warnings.
                min_precedence = precedence if precedence >= 9 else 9
                converts = value.op in ("+", "-", "*")  # C++ converts one operand to the type of the other
                right_converts = right in self.inlinable and self.inlinable[right].implicit_form is not None
                a = operand_text(left, min_precedence, converts and not right_converts)
                b = operand_text(right, max(min_precedence, precedence + 1), converts)
                op = value.op * (2 if value.type == PRED and value.op in ("&", "|") else 1)
                return _Expression(f"{a} {op} {b}", precedence, reads)
        raise AssertionError(value)

    def array(self, x: RegisterArray) -> str:
        """Return the text of a register array, or of a row of one that a loop index selects."""
        return f"{self.names[x.array]}[{self.text(x.row)}]" if isinstance(x, LoopIndexedRow) else self.names[x]

    def register(self, x: RegisterArray, index: str) -> str:
        """Return the text of a register. An array of one register is a scalar in CUDA."""
        return self.array(x) if x.count == 1 else f"{self.array(x)}[{index}]"

    def operand_array(self, x: RegisterArray) -> str:
        """Return the text of a register array as an instruction operand.

        A slice is passed as a reference to the array's part, by the helper `registers_from`.
        """
        if not isinstance(x, RegisterSlice):
            return self.names[x]
        if x.count == 1:
            return self.register(x.array, self.text(x.start))
        self.wrappers[_REGISTERS_FROM] = None
        return f"registers_from<{x.count}>({self.array(x.array)}, {self.text(x.start)})"

    def call(self, instruction: Instruction) -> str:
        """Return the C++ of an instruction: its expression, or a call of its wrapper, which is added to `wrappers`."""
        arguments = []
        for operand in instruction.operands.values():
            if isinstance(operand, RegisterArray):
                arguments.append(self.operand_array(operand))
            elif instruction.cuda:
                arguments.append(self.text(operand))
            else:
                x = self.expression(operand)
                text, _ = x.implicit_form or (x.text, _ATOM)
                address = f"&{text}" if x.precedence == _ATOM else f"&({text})"
                arguments.append(address if operand.type.struct else text)
        if instruction.cuda:
            placeholders = dict(zip(instruction.operand_types, arguments, strict=True))
            return re.sub(r"\{(\w+)\}", lambda m: placeholders.get(m[1], str(getattr(instruction, m[1], m[0]))),
                          instruction.cuda)  # fmt: skip
        # Keyed by text: wrappers of one name with different operand counts are overloads.
        self.wrappers[instruction_wrapper(instruction)] = None
        return f"{instruction.wrapper_name}({', '.join(arguments)})"

    # -- statements ----------------------------------------------------------------------------------
    def line(self, text: str) -> None:
        """Append a line of code to `lines`: indented, wrapped and, with `line_directives`, after a `#line` directive.

        It belongs to the statement at `self.location`.
        """
        margin = "    " * self.merged_depth
        lines = [x[len(margin) :] for x in wrap_line(text, "    " * self.depth + margin).split("\n")]
        if self.location:
            self.first_lines.setdefault(self.location.number, len(self.lines))
            if self.line_directives:
                directive = f'#line {self.location.line} "{self.location.file}"'.replace("\\", "/")
                lines = [x for line in lines for x in (directive, line)]
        self.lines += lines

    def flush(self, changes: list[object] | None = None) -> None:
        """Print values that wait to be inlined as named constants now, since what they read is about to change.

        `changes`: the variables and register arrays that change, see `statements.defs`; None prints all values of this
        block.
        """
        for value, inlinable in list(self.inlinable.items()):
            if inlinable.depth == self.depth if changes is None else not inlinable.reads.isdisjoint(changes):
                text, current = self.inlinable.pop(value).text, self.location
                self.location = inlinable.location
                self.line(f"{value.type.constant} {self.name(value, identifier_hint(value))} = {text};")
                self.location = current

    def define(self, value: Value) -> None:
        """Print the definition of a value, or keep its expression to inline it at its use.

        An unused pure value is dropped.
        """
        pure = is_pure(value)
        if pure and not self.uses[value]:
            return
        self._fold_or_emit(value, self._compose(value), pure)

    def _fold_or_emit(self, value: Value, inlinable: _Expression, pure: bool) -> None:
        """Keep a value's expression, to inline it where it is used, or print its definition.

        It is inlined if it is `pure` and `merge.is_inlined` says so. Without uses, only its expression is printed.
        """
        if pure and is_inlined(value, self.uses):
            self.inlinable[value] = replace(inlinable, depth=self.depth, location=self.location)
            return
        if not self.uses[value]:
            self.line(f"{inlinable.text};")
        else:
            self.line(f"{value.type.constant} {self.name(value, identifier_hint(value))} = {inlinable.text};")

    def block(self, block: st.Block) -> None:
        """Print the statements of a block; consecutive roles of one unit become one chain of branches."""
        for unit, group in groupby(block.statements, lambda s: s.unit if isinstance(s, st.Role) else None):
            if unit is None:
                for statement in group:
                    self.statement(statement)
            else:
                self._roles([role for role in group if isinstance(role, st.Role)])

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Open a scope within the `with` statement. Names that are declared inside may be used again after it."""
        used_names, self.used_names = self.used_names, self.used_names.copy()
        yield
        self.used_names = used_names

    def nested(self, block: st.Block) -> None:
        """Print a block indented, in a scope of its own."""
        with self.scope():
            self.depth += 1
            self.block(block)
            self.depth -= 1

    def statement(self, statement: st.Statement) -> None:
        """Print a statement.

        Its operands become text first, so values inlined in it are done. Then `flush` prints the other waiting values
        that read what the statement assigns to (`statements.defs`), since they must be computed before it. A
        declaration assigns to nothing that exists already.
        """
        self.location = statement.location
        match statement:
            case st.Comment(text=text):
                self.flush()
                self.line(f"// {text}")
            case st.Define(value=value):
                self.flush(st.defs(statement))
                self.define(value)
            case st.IssueInstruction(instruction=instruction):
                text = self.call(instruction)
                self.flush(st.defs(statement))
                self.line(f"{text};")
            case st.Declare(variable=variable, initial=initial):
                text = self.text(initial)
                self.line(f"{variable.type.cpp} {self.name(variable, variable.name)} = {text};")
            case st.Assign(variable=variable, value=value):
                text = self.text(value)
                self.flush(st.defs(statement))
                self.line(_assignment(self.names[variable], variable, value, text))
            case st.DeclareRegisters(registers=array, initial=initial):
                initial_text = "" if initial is None else f" = {self.text(initial)}"
                name = self.name(array, array.name)
                rows = list(array) if isinstance(array, RegisterArray2D) else []
                self.names.update((row, f"{name}[{i}]" if len(rows) > 1 else name) for i, row in enumerate(rows))
                sizes = [len(rows)] * (len(rows) > 1) + [array.count] * (array.count > 1)
                self.line(f"{array.type.cpp} {name}{''.join(f'[{size}]' for size in sizes)}{initial_text};")
            case st.AssignRegister(registers=registers, index=index, value=value):
                text, element = self.text(value), self.register(registers, self.text(index))
                self.flush(st.defs(statement))
                self.line(f"{element} = {text};")
            case st.Call():
                self._call(statement)
            case st.Loop():
                self._loop(statement)
            case st.If():
                condition = self.text(statement.condition)
                self.flush(st.defs(statement))
                self.line(f"if ({condition}) {{")
                self.merged_depth += statement.merged
                self.nested(statement.then)
                self.merged_depth -= statement.merged
                if statement.otherwise:
                    self.line("} else {")
                    self.nested(statement.otherwise)
                self.line("}")

    def _call(self, call: st.Call) -> None:
        """Print the call of a device function, or keep it to inline it at the use of its result.

        Several results are bound by a structured binding. A call without used results is dropped.
        """
        if not any(self.uses[r] for r in call.results):
            return
        arguments = [self.expression(v) for v in st.uses(call)]
        text = f"{call.function.name}({', '.join(x.text for x in arguments)})"
        if len(call.results) == 1:
            reads = frozenset().union(*(x.reads for x in arguments))
            self._fold_or_emit(call.results[0], _Expression(text, reads=reads), pure=True)
        else:
            names = [self.name(r, r.name or "value") for r in call.results]
            self.line(f"const auto [{', '.join(names)}] = {text};")

    def _loop(self, loop: st.Loop) -> None:
        """Print a loop, after the constants that hold its computed bounds."""
        index = loop.index.name or "i"
        start, stop, step = (
            self._bound(x, f"{index}_{name}")
            for name, x in (("start", loop.start), ("stop", loop.stop), ("step", loop.step))
        )
        self.flush(st.defs(loop) if loop.index.unrolled else None)
        self.line("#pragma unroll" if loop.index.unrolled else "#pragma unroll 1")
        with self.scope():
            name = self.name(loop.index, loop.index.name or "i")
            increment = f"++{name}" if step == "1" else f"{name} += {step}"
            self.line(f"for (int {name} = {start}; {name} < {stop}; {increment}) {{")
            self.nested(loop.body)
        self.line("}")

    def _bound(self, value: Value, hint: str) -> str:
        """Return the text of a loop bound.

        It is evaluated once, so a computed one is stored in a constant before the loop.
        """
        x = self.expression(value)
        if not x.reads and re.fullmatch(r"\w+", x.text):
            return x.text
        self.line(f"const int {self.name(value, value.name or hint)} = {x.text};")
        return self.names[value]

    def _roles(self, roles: list[st.Role]) -> None:
        """Print consecutive roles as one if/else chain. If they cover all units, the last one is the `else`."""
        # ptxas requires a chain of roles that change their register budgets.
        self.flush()
        self.builtins.add(roles[0].unit)
        unit_count = self.threads // 128 if roles[0].unit == "warpgroup" else 4
        covers_all = sum(role.count for role in roles) == unit_count
        for role in roles:
            self.location = role.location
            opening = "if" if role is roles[0] else "} else if"
            last = role is roles[-1] and covers_all and len(roles) > 1
            self.line("} else {" if last else f"{opening} ({self._role_condition(role, unit_count)}) {{")
            if role.name:
                self.line(f"    // {role.name} {role.unit}{'s' * (role.count > 1)}")
            self.nested(role.body)
        self.line("}")

    def _role_condition(self, role: st.Role, unit_count: int) -> str:
        """Return the C++ condition for the warps or warpgroups of a role; `unit_count`: how many there are in all."""
        index = "warpgroup" if role.unit == "warpgroup" else "warp % 4"
        first, stop = role.first, role.first + role.count
        if role.count == 1:
            return f"{index} == {first}"
        if first == 0:
            return f"{index} < {stop}"
        return f"{index} >= {first}" + (f" && {index} < {stop}" if stop < unit_count else "")


def _assignment(name: str, variable: Variable, value: Value, text: str) -> str:
    """Return the assignment of `text` to a variable; `name = name + x` becomes `name += x`."""
    match value:
        case Operation(op="+" | "-" | "^" | "|" | "&" as op, operands=(VariableRead(variable=read), _)) if (
            read is variable
        ):
            opening = f"{name} {op} "
            if text.startswith(opening):
                return f"{name} {op}= {text[len(opening) :]};"
    return f"{name} = {text};"


def literal(scalar_type: ScalarType, value: object) -> str:
    """Return the C++ literal of a constant, with the suffix of its type; large 64-bit numbers are hexadecimal."""
    if scalar_type == PRED:
        return "true" if value else "false"
    if scalar_type == F32:
        return _float(float(value))  # type: ignore[arg-type]
    suffix = {"u32": "u", "u64": "ull", "i64": "ll"}.get(scalar_type.name, "")
    if scalar_type.bits == 64 and isinstance(value, int) and value >= 1 << 16:
        return f"{value:#x}{suffix}"
    return f"{value}{suffix}"


def _float(x: float) -> str:
    """Return the C++ literal of a float. NaN and infinities, which have none, are given by their bits."""
    if x != x or x in (float("inf"), float("-inf")):
        bits = {"nan": "0x7fffffff", "inf": "0x7f800000", "-inf": "0xff800000"}[str(x)]
        return f"__int_as_float({bits})"
    text = repr(x)
    return (text if "." in text or "e" in text else text + ".0") + "f"


def identifier_hint(value: Value) -> str:
    """Return the name that a value gets in the printed code, before it is made unique; empty for a temporary.

    It is the value's own name or, without one, a default by its kind.
    """
    if hint := value.name or value.name_hint:
        return hint
    match value:
        case VariableRead():
            return f"{value.variable.name}_now"
        case Result():
            return value.instruction.result_name
        case RegisterRead():
            # With a suffix, since a user's operand may be named as a C++ keyword or function. U32: packed elements.
            declaration = value.registers.declaration
            return declaration.name.removesuffix("_frag") + ("_word" if declaration.type == U32 else "_value")
        case _:
            return ""


def _converts_implicitly(source: ScalarType, target: ScalarType) -> bool:
    """Return whether C++ converts `source` to `target` without a cast, as an operand or an argument, to the same value.

    Only integers are converted so, and not to a narrower type.
    """
    if not source.is_integer or target not in (U32, I64, U64) or source.bits > target.bits:
        return False
    return not (target == I64 and source == U64)
