"""Values: what a kernel computes. Every operation is bound where it is made and never changes (SSA)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, Union

from gemmsmith.core.errors import KernelError
from gemmsmith.lang.recording import recorder
from gemmsmith.lang.types import F32, I32, PRED, Type

COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
ValueLike = Union["Value", int, float, bool]
Operator = Callable[["Value", ValueLike], "Value"]


def _methods(op: str) -> tuple[Operator, Operator]:
    """The methods of an operator of C and of its reflected form."""
    return lambda self, other: arithmetic(op, self, other), lambda self, other: arithmetic(op, other, self)


class Value:
    """A typed value of the kernel. Python operators on it record operations in the current builder."""

    def __init__(self, type: Type, name: str | None = None) -> None:
        self.type = type
        self.name = name

    def __bool__(self) -> bool:
        raise KernelError(
            "a kernel value has no truth value while the kernel is built: use k.when(...), k.select(...), & and |"
        )

    __hash__ = object.__hash__

    def named(self, name: str) -> Value:
        """Prints this value as a constant of that name; what has a name already keeps it, and a number stays one."""
        if not self.name and not isinstance(self, Constant):
            self.name = name
        return self

    def to(self, type: Type) -> Value:
        """Converts to another type."""
        if type == self.type:
            return self
        return operation("cast", type, self)

    __add__, __radd__ = _methods("+")
    __sub__, __rsub__ = _methods("-")
    __mul__, __rmul__ = _methods("*")
    __floordiv__, __rfloordiv__ = _methods("/")
    __mod__, _ = _methods("%")
    __lshift__, _ = _methods("<<")
    __rshift__, _ = _methods(">>")
    __and__, _ = _methods("&")
    __or__, _ = _methods("|")
    __xor__, __rxor__ = _methods("^")
    __lt__, _ = _methods("<")
    __le__, _ = _methods("<=")
    __gt__, _ = _methods(">")
    __ge__, _ = _methods(">=")
    __eq__, _ = _methods("==")  # type: ignore[assignment]
    __ne__, _ = _methods("!=")  # type: ignore[assignment]

    def __truediv__(self, other: ValueLike) -> Value:
        return arithmetic("/", self._fp32(), other)

    def __rtruediv__(self, other: ValueLike) -> Value:
        return arithmetic("/", other, self._fp32())

    def _fp32(self) -> Value:
        if self.type != F32:
            raise KernelError("use // between integers")
        return self

    def __neg__(self) -> Value:
        return operation("neg", self.type, self)

    def __invert__(self) -> Value:
        return operation("!" if self.type == PRED else "~", self.type, self)


class Constant(Value):
    """A number known while the kernel is built. One with a name prints as a `constexpr`, and is not folded."""

    def __init__(self, type: Type, number: Any, name: str | None = None) -> None:
        super().__init__(type, name)
        self.number = number


class LateConstant(Value):
    """A number that the rest of the kernel decides (a barrier's arrivals); known when the building ends."""

    def __init__(self, type: Type, name: str) -> None:
        super().__init__(type, name)
        self.number: int | None = None


Bind = Callable[[Any], Any]
"""What computes an argument from the problem that a kernel is launched for; the language does not look into either."""


class Parameter(Value):
    """An argument of the kernel. `bind` gives it; without one whoever launches the kernel does."""

    def __init__(self, type: Type, name: str, bind: Bind | None = None) -> None:
        super().__init__(type, name)
        self.bind = bind


class Builtin(Value):
    """Where this thread stands: thread, lane, warp, warpgroup; and the address of shared memory."""


class LoopIndex(Value):
    """The index of a loop; `unrolled` loops may index register arrays with it."""

    def __init__(self, name: str, unrolled: bool) -> None:
        super().__init__(I32, name)
        self.unrolled = unrolled


class Operation(Value):
    """A pure operation on values: an operator of C, "neg", "select", "cast", "min" or "max"."""

    def __init__(self, op: str, type: Type, operands: tuple[Value, ...]) -> None:
        super().__init__(type)
        self.op, self.operands = op, operands


class Read(Value):
    """What a variable held where it was read."""

    def __init__(self, variable: Variable) -> None:
        super().__init__(variable.type)
        self.variable = variable


class RegisterRead(Value):
    """What element `index` of a register array held where it was read."""

    def __init__(self, registers: Registers, index: Value) -> None:
        super().__init__(registers.type)
        self.registers, self.index = registers, index


class Variable:
    """The one thing that is assigned to: `get()` binds what it holds now, `set()` changes it."""

    def __init__(self, type: Type, name: str) -> None:
        self.type, self.name = type, name

    def get(self) -> Value:
        return bind(Read(self))

    def set(self, value: ValueLike) -> None:
        recorder().assign(self, as_value(value, self.type))


class Registers:
    """An array that lives in registers, so its indices are known at build time or unrolled. `declared`: what it is
    declared as, itself or the two-dimensional array whose row it is."""

    def __init__(self, type: Type, count: int, name: str, declared: Registers | RegisterRows | None = None) -> None:
        self.type, self.count, self.name = type, count, name
        self.declared: Registers | RegisterRows = self if declared is None else declared

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: ValueLike) -> Value:
        return bind(RegisterRead(self, self._index(index)))

    def __setitem__(self, index: ValueLike, value: ValueLike) -> None:
        recorder().assign_register(self, self._index(index), as_value(value, self.type))

    def part(self, first: ValueLike, count: int) -> RegisterPart:
        """`count` of them from `first` on, which is known at build time or unrolled: an operand of an instruction."""
        return RegisterPart(self, self._index(first), count)

    def _index(self, index: ValueLike) -> Value:
        return _register_index(self.name, index, self.count)


class RegisterPart(Registers):
    """Some neighbors of a register array, as an instruction's operand."""

    def __init__(self, array: Registers, first: Value, count: int) -> None:
        super().__init__(array.type, count, array.name, array.declared)
        self.array, self.first = array, first


class RegisterRows:
    """A two-dimensional array in registers: `[i]` is a row, an array of `count` registers."""

    def __init__(self, type: Type, rows: int, count: int, name: str) -> None:
        self.type, self.count, self.name = type, count, name
        names = [name] if rows == 1 else [f"{name}[{i}]" for i in range(rows)]
        self.rows = [Registers(type, count, x, self) for x in names]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Registers]:
        return iter(self.rows)

    def __getitem__(self, index: ValueLike) -> Registers:
        value = _register_index(self.name, index, len(self.rows))
        return self.rows[value.number] if isinstance(value, Constant) else SelectedRow(self, value)


class SelectedRow(Registers):
    """The row that an unrolled index selects: its registers can be read and assigned to."""

    def __init__(self, array: RegisterRows, row: Value) -> None:
        super().__init__(array.type, array.count, array.name, array)
        self.array, self.row = array, row


def _register_index(name: str, index: ValueLike, count: int) -> Value:
    value = as_value(index, I32)
    if isinstance(value, Constant):
        if not 0 <= value.number < count:
            raise KernelError(f"register array {name}[{value.number}]: it has {count} elements")
    elif not _is_build_time(value):
        raise KernelError(
            f"register array {name} indexed by a run-time value, which would move it to local memory: "
            "use Python integers or the index of k.unroll"
        )
    return value


def _is_build_time(value: Value) -> bool:
    if isinstance(value, Constant):
        return True
    if isinstance(value, LoopIndex):
        return value.unrolled
    return isinstance(value, Operation) and all(_is_build_time(v) for v in value.operands)


def as_value(x: ValueLike, type: Type) -> Value:
    """`x` as a value of `type`; Python numbers become constants, values must already have the type."""
    if isinstance(x, Value):
        if x.type != type:
            raise KernelError(f"a {x.type} value where {type} is needed: convert it with .to({type.name.upper()})")
        return x
    if isinstance(x, Variable):
        raise KernelError(f"variable {x.name} used as a value: read it with .get()")
    if type.is_integer:
        if isinstance(x, bool) or int(x) != x:
            raise KernelError(f"{x!r} is no {type}")
        low, high = (-(2 ** (type.bits - 1)), 2 ** (type.bits - 1)) if type.signed else (0, 2**type.bits)
        if not low <= x < high:
            raise KernelError(f"{x} does not fit {type}")
        return Constant(type, int(x))
    return Constant(type, bool(x) if type == PRED else float(x))


def bind(value: Value) -> Value:
    recorder().bind(value)
    return value


def arithmetic(op: str, left: ValueLike, right: ValueLike) -> Value:
    """A binary operation; a Python number takes the type of the other side."""
    type = left.type if isinstance(left, Value) else right.type  # type: ignore[union-attr]
    a = as_value(left, type)
    amount = right.type if isinstance(right, Value) else I32  # a shift's amount has a type of its own
    b = as_value(right, amount if op in ("<<", ">>") else type)
    if type == PRED and op not in ("&", "|", "^", "==", "!="):
        raise KernelError(f"{op} between predicates")
    return operation(op, PRED if op in COMPARISONS else type, a, b)


def operation(op: str, type: Type, *operands: Value) -> Value:
    """Binds an operation, folding what is known at build time."""
    if all(_is_number(v) for v in operands):
        return Constant(type, evaluate(op, type, *(v.number for v in operands)))  # type: ignore[attr-defined]
    if op == "select" and _is_number(operands[0]):
        return operands[1 if operands[0].number else 2]  # type: ignore[attr-defined]
    if len(operands) == 2:
        a, b = operands
        for x, y, commutes in ((a, b, True), (b, a, False)):
            if isinstance(y, Constant) and not y.name:
                if y.number == 0 and (op in ("+", "|", "^") or (commutes and op in ("-", "<<", ">>"))):
                    return x
                if y.number == 1 and (op == "*" or (commutes and op == "/")):
                    return x
                if y.number == 1 and commutes and op == "%":
                    return Constant(type, 0)
                if y.number == 0 and op == "*" and type.is_integer:
                    return y
    return bind(Operation(op, type, operands))


def _is_number(value: Value) -> bool:
    return isinstance(value, Constant) and not value.name


def _quotient(a: int, b: int) -> int:
    if a < 0 or b <= 0:
        raise KernelError(f"integer division {a} / {b}: operands must be positive")
    return a // b


def _remainder(a: int, b: int) -> int:
    if a < 0 or b <= 0:
        raise KernelError(f"integer remainder {a} % {b}: operands must be positive")
    return a % b


_MEANINGS: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": _quotient, "%": _remainder, "<<": operator.lshift,
    ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "^": operator.xor, "<": operator.lt,
    "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne, "min": min,
    "max": max, "neg": operator.neg, "!": operator.not_, "~": operator.invert, "select": lambda c, a, b: a if c else b,
    "cast": lambda a: a,
}  # fmt: skip
"""Of operations, on Python numbers; "/" of integers."""


def evaluate(op: str, type: Type, *x: Any) -> Any:
    """An operation's meaning on Python numbers; integers wrap (u32, u64) or raise on overflow (i32, i64)."""
    if not type.is_integer:
        return operator.truediv(*x) if op == "/" else _MEANINGS[op](*x)
    result = int(_MEANINGS[op](*x))
    if not type.signed:
        return result % 2**type.bits
    if op == "cast":
        return (result + 2 ** (type.bits - 1)) % 2**type.bits - 2 ** (type.bits - 1)
    if not -(2 ** (type.bits - 1)) <= result < 2 ** (type.bits - 1):
        raise KernelError(f"{type} overflow in {op}: {x}")
    return result
