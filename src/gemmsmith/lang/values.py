"""SSA values of a kernel. An operation is emitted where Python creates it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Union

from gemmsmith.core.errors import KernelError
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import F32, I32, PRED, U32, ScalarType

COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
ValueLike = Union["Value", int, float, bool]
Operator = Callable[["Value", ValueLike], "Value"]


def _operator_methods(op: str) -> tuple[Operator, Operator]:
    """Return the Python methods (direct and reflected) for a C operator."""
    return lambda self, other: arithmetic(op, self, other), lambda self, other: arithmetic(op, other, self)


class Value:
    """A typed value of the kernel. Python operators on it record operations in the current builder."""

    def __init__(self, scalar_type: ScalarType, name: str | None = None) -> None:
        self.type = scalar_type
        self.name = name
        self.name_hint: str | None = None

    def __bool__(self) -> bool:
        raise KernelError(
            "a kernel value has no truth value while the kernel is built: use k.when(...), k.select(...), & and |"
        )

    __hash__ = object.__hash__

    def named(self, name: str) -> Value:
        """Name the value in the generated code, and return it.

        Values that have a name, and literals, are not changed.
        """
        if not self.name and not isinstance(self, Constant):
            self.name = name
        return self

    def with_name_hint(self, name: str) -> Value:
        """Let the value have this name if it is printed as a constant of its own, and return it.

        It may still be inlined.
        """
        self.name_hint = self.name_hint or name
        return self

    def to(self, scalar_type: ScalarType) -> Value:
        """Return the value converted to `scalar_type`."""
        if scalar_type == self.type:
            return self
        return operation("cast", scalar_type, self)

    def __getitem__(self, index: object, value: object = None) -> NoReturn:
        """Raise KernelError: an address has no elements."""
        raise KernelError(
            "a value has no elements: load with hw.load_global_word(address + offset, ...), "
            "store with hw.store_global_word; the offset is in bytes (u64)"
        )

    __setitem__ = __getitem__
    __add__, __radd__ = _operator_methods("+")
    __sub__, __rsub__ = _operator_methods("-")
    __mul__, __rmul__ = _operator_methods("*")
    __floordiv__, __rfloordiv__ = _operator_methods("/")
    __mod__, _ = _operator_methods("%")
    __lshift__, _ = _operator_methods("<<")
    __rshift__, _ = _operator_methods(">>")
    __and__, _ = _operator_methods("&")
    __or__, _ = _operator_methods("|")
    __xor__, __rxor__ = _operator_methods("^")
    __lt__, _ = _operator_methods("<")
    __le__, _ = _operator_methods("<=")
    __gt__, _ = _operator_methods(">")
    __ge__, _ = _operator_methods(">=")

    def __eq__(self, other: ValueLike) -> Value:  # type: ignore[override]
        return arithmetic("==", self, other)

    def __ne__(self, other: ValueLike) -> Value:  # type: ignore[override]
        return arithmetic("!=", self, other)

    def __truediv__(self, other: ValueLike) -> Value:
        return arithmetic("/", self._fp32(), other)

    def __rtruediv__(self, other: ValueLike) -> Value:
        return arithmetic("/", other, self._fp32())

    def _fp32(self) -> Value:
        if self.type != F32:
            raise KernelError("true division of integers is not supported; use //")
        return self

    def __neg__(self) -> Value:
        return operation("neg", self.type, self)

    def __invert__(self) -> Value:
        return operation("!" if self.type == PRED else "~", self.type, self)


class Constant(Value):
    """A value known at build time. A named constant is printed as a `constexpr`, and operations on it are not folded.

    The number `value` is None if it is set later during recording, before `Builder.finish`, such as a barrier's arrival
    count.
    """

    def __init__(self, scalar_type: ScalarType, value: Any, name: str | None = None) -> None:
        super().__init__(scalar_type, name)
        self.value = value


ArgumentFn = Callable[[Any], Any]
"""Computes a kernel argument from the problem being launched. Both are opaque to `lang`."""


class Parameter(Value):
    """A kernel parameter. `compute` computes its argument at launch; without it the caller passes the argument."""

    def __init__(self, scalar_type: ScalarType, name: str, compute: ArgumentFn | None = None) -> None:
        super().__init__(scalar_type, name)
        self.compute = compute


class Builtin(Value):
    """A value that each thread has from the start, such as the thread, lane, warp or warpgroup index.

    `initializer`: the C++ expression by which it is computed at the start of the kernel; "" for those that the printer
    knows.
    """

    def __init__(self, scalar_type: ScalarType, name: str, initializer: str = "") -> None:
        super().__init__(scalar_type, name)
        self.initializer = initializer


class LoopIndex(Value):
    """The index of a loop. The index of an `unrolled` loop may index register arrays."""

    def __init__(self, name: str, unrolled: bool) -> None:
        super().__init__(I32, name)
        self.unrolled = unrolled


class Operation(Value):
    """A pure operation on values.

    `op`: a C operator, "neg", "select", "cast", "min", "max", or "slot" (see `shared_slot`).
    """

    def __init__(self, op: str, scalar_type: ScalarType, operands: tuple[Value, ...]) -> None:
        super().__init__(scalar_type)
        self.op, self.operands = op, operands


class VariableRead(Value):
    """Value of a variable at the point of the read."""

    def __init__(self, variable: Variable) -> None:
        super().__init__(variable.type)
        self.variable = variable


class RegisterRead(Value):
    """Value of register `index` of an array at the point of the read."""

    def __init__(self, registers: RegisterArray, index: Value) -> None:
        super().__init__(registers.type)
        self.registers, self.index = registers, index


class Variable:
    """A mutable scalar. `get()` emits a read, `set()` an assignment."""

    def __init__(self, scalar_type: ScalarType, name: str) -> None:
        self.type, self.name = scalar_type, name

    def get(self) -> Value:
        """Emit a read of the variable and return its current value."""
        return define(VariableRead(self))

    def set(self, value: ValueLike) -> None:
        """Emit an assignment to the variable."""
        current_builder().assign(self, as_value(value, self.type))


class RegisterArray:
    """A register array. Indices must be compile-time constants or indices of unrolled loops.

    `count`: its registers. `declaration`: the array in the C++ declaration: this one, or the two-dimensional array of
    which it is a row.
    """

    def __init__(
        self, scalar_type: ScalarType, count: int, name: str, declaration: RegisterArray | RegisterArray2D | None = None
    ) -> None:
        self.type, self.count, self.name = scalar_type, count, name
        self.declaration: RegisterArray | RegisterArray2D = self if declaration is None else declaration

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: ValueLike) -> Value:
        return define(RegisterRead(self, self._index(index)))

    def __setitem__(self, index: ValueLike, value: ValueLike) -> None:
        current_builder().assign_register(self, self._index(index), as_value(value, self.type))

    def slice(self, start: ValueLike, count: int) -> RegisterSlice:
        """Return `count` registers from `start` (a constant or an unrolled index), as an instruction operand."""
        return RegisterSlice(self, self._index(start), count)

    def _index(self, index: ValueLike) -> Value:
        return _register_index(self.name, index, self.count)


class RegisterSlice(RegisterArray):
    """The registers of `array` from `start` on, `count` of them, as an instruction operand."""

    def __init__(self, array: RegisterArray, start: Value, count: int) -> None:
        super().__init__(array.type, count, array.name, array.declaration)
        self.array, self.start = array, start


class RegisterArray2D:
    """A two-dimensional register array. `[i]` is a row: an array of `count` registers."""

    def __init__(self, scalar_type: ScalarType, rows: int, count: int, name: str) -> None:
        self.type, self.count, self.name = scalar_type, count, name
        names = [name] if rows == 1 else [f"{name}[{i}]" for i in range(rows)]
        self.rows = [RegisterArray(scalar_type, count, x, self) for x in names]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[RegisterArray]:
        return iter(self.rows)

    def __getitem__(self, index: ValueLike) -> RegisterArray:
        value = _register_index(self.name, index, len(self.rows))
        return self.rows[value.value] if isinstance(value, Constant) else LoopIndexedRow(self, value)


class LoopIndexedRow(RegisterArray):
    """A row selected by the index of an unrolled loop.

    Its registers can be read and written, but it cannot be an instruction operand.
    """

    def __init__(self, array: RegisterArray2D, row: Value) -> None:
        super().__init__(array.type, array.count, array.name, array)
        self.array, self.row = array, row


def _register_index(name: str, index: ValueLike, count: int) -> Value:
    """Return `index` as a value. Raises KernelError unless it is known at build time and less than `count`."""
    value = as_value(index, I32)
    if isinstance(value, Constant):
        if not 0 <= value.value < count:
            raise KernelError(f"register array {name}[{value.value}]: it has {count} elements")
    elif not _is_build_time(value):
        raise KernelError(
            f"register array {name} indexed by a run-time value, which would move it to local memory: "
            "use Python integers or the index of k.unroll"
        )
    elif count == 1:  # printed as a scalar, without the index
        return Constant(I32, 0)
    return value


def _is_build_time(value: Value) -> bool:
    """Return whether a value is made of constants and indices of unrolled loops."""
    if isinstance(value, Constant):
        return True
    if isinstance(value, LoopIndex):
        return value.unrolled
    return isinstance(value, Operation) and all(_is_build_time(v) for v in value.operands)


def as_value(x: ValueLike, scalar_type: ScalarType) -> Value:
    """Return `x` as a value of `scalar_type`: Python numbers become constants.

    Raises KernelError for a value of another type, and for a number that the type does not have.
    """
    if isinstance(x, Value):
        if x.type != scalar_type:
            conversion = f".to({scalar_type.name.upper()})"
            raise KernelError(f"expected a {scalar_type} value, got {x.type}; convert the {x.type} with {conversion}")
        return x
    if isinstance(x, Variable):
        raise KernelError(f"variable {x.name} used as a value: read it with .get()")
    if not hasattr(x, "__float__"):
        raise KernelError(f"expected a {scalar_type} value or a number, got {x!r}")
    if scalar_type.is_integer:
        if isinstance(x, bool) or int(x) != x:
            raise KernelError(f"{x!r} is not a valid {scalar_type}")
        if int(x) not in scalar_type.range:
            raise KernelError(f"{x} is out of range for {scalar_type}")
        return Constant(scalar_type, int(x))
    return Constant(scalar_type, bool(x) if scalar_type == PRED else float(x))


def define(value: Value) -> Value:
    """Emit the definition of `value` and return it."""
    current_builder().define(value)
    return value


def arithmetic(op: str, left: ValueLike, right: ValueLike) -> Value:
    """Emit the binary operation `left op right`, and return its result.

    A Python number takes the type of the other side.
    """
    scalar_type = left.type if isinstance(left, Value) else right.type  # type: ignore[union-attr]
    if isinstance(right, Value) and right.type.bits > scalar_type.bits and op not in ("<<", ">>"):
        scalar_type = right.type  # to convert an address would truncate it
    a = as_value(left, scalar_type)
    shift_type = right.type if isinstance(right, Value) else I32  # a shift count need not have the left side's type
    b = as_value(right, shift_type if op in ("<<", ">>") else scalar_type)
    if scalar_type == PRED and op not in ("&", "|", "^", "==", "!="):
        raise KernelError(f"operator {op} is not defined for predicates; use &, |, ^, == or !=")
    return operation(op, PRED if op in COMPARISONS else scalar_type, a, b)


_NEUTRAL = {"+": 0, "|": 0, "^": 0, "*": 1}
"""Constants that leave the other operand as it is, by operator."""
_NEUTRAL_ON_THE_RIGHT = _NEUTRAL | {"-": 0, "<<": 0, ">>": 0, "/": 1}


def operation(op: str, scalar_type: ScalarType, *operands: Value) -> Value:
    """Emit an operation and return its result.

    It is folded, without being emitted, if its operands are known at build time, or one of them leaves the other as it
    is.
    """
    known = [x.value if isinstance(x, Constant) and not x.name else None for x in operands]
    if None not in known:
        return Constant(scalar_type, evaluate(op, scalar_type, *known))
    if op == "select" and known[0] is not None:
        return operands[1 if known[0] else 2]
    if len(operands) == 2:
        left, right = known
        if right is not None and right == _NEUTRAL_ON_THE_RIGHT.get(op):
            return operands[0]
        if left is not None and left == _NEUTRAL.get(op):
            return operands[1]
        if (op == "%" and right == 1) or (op == "*" and 0 in known and scalar_type.is_integer):
            return Constant(scalar_type, 0)
    return define(Operation(op, scalar_type, operands))


def shared_slot(smem: Value, slot: Value, slot_bytes: int, offset: Constant, nbytes: Value | None = None) -> Value:
    """Emit the address (u32) of a slot of a shared buffer, or of byte `nbytes` in it.

    It prints as `buffer[slot]` or `buffer.at(slot, nbytes)`. `smem`: the base of shared memory. `offset`: the buffer's.
    """
    operands = (smem, slot, Constant(U32, slot_bytes), offset)
    return define(Operation("slot", U32, operands if nbytes is None else (*operands, nbytes)))


OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv, "%": operator.mod,
    "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "min": min, "max": max, "neg": operator.neg, "!": operator.not_, "~": operator.invert,
    "select": lambda c, a, b: a if c else b, "cast": lambda a: a,
}  # fmt: skip
"""The operations on Python numbers. "/" is integer division."""


def evaluate(op: str, scalar_type: ScalarType, *x: Any) -> Any:
    """Return an operation on the Python numbers `x`, in the range of `scalar_type`.

    u32 and u64 wrap. Raises KernelError if i32 or i64 overflows, and for a division whose result differs between C and
    Python.
    """
    if not scalar_type.is_integer:
        return operator.truediv(*x) if op == "/" else OPERATIONS[op](*x)
    if op in ("/", "%") and (x[0] < 0 or x[1] <= 0):
        kind = "division" if op == "/" else "remainder"
        raise KernelError(f"integer {kind} {x[0]} {op} {x[1]}: needs a >= 0 and b > 0")
    exact = int(OPERATIONS[op](*x))
    result = scalar_type.wrap(exact)
    if result != exact and scalar_type.signed and op != "cast":
        raise KernelError(f"{scalar_type} overflow in {op}: {x}")
    return result
