"""Operations on values, as the hardware computes them; undefined behavior of C is reported."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from gemmsmith.backends.sim.execute.values import ValueTable
from gemmsmith.backends.sim.state.lockstep_group import LockstepGroup
from gemmsmith.lang.types import F32, I32, I64, PRED, U16, U32, U64, ScalarType
from gemmsmith.lang.values import Operation


def _select(c: Any, a: Any, b: Any) -> Any:
    return np.where(c, a, b) if isinstance(c, np.ndarray) else a if c else b


def _minimum(x: Any) -> Any:
    return np.minimum.reduce(x) if isinstance(x, np.ndarray) else x


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv, "%": operator.mod,
    "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "neg": operator.neg, "~": operator.invert, "!": np.logical_not, "select": _select,
    "min": np.fmin, "max": np.fmax, "cast": lambda a: a,
    "slot": lambda smem, slot, slot_bytes, offset, nbytes=0: smem + slot * slot_bytes + nbytes + offset,
}  # fmt: skip

_CLOSED_OPERATIONS = ("/", "%", ">>", "&", "|", "^", "select", "min", "max")
"""Operations whose result is in the range of the operands' integer type."""


_RANGES = {
    type: range(-(1 << type.bits - 1), 1 << type.bits - 1) if type.signed else range(1 << type.bits)
    for type in (U16, I32, U32, I64, U64)
}
"""Range of each integer type."""


def _cast(x: np.ndarray, type: ScalarType) -> np.ndarray:
    """Convert as C does: towards zero from floats, modulo 2^bits between integers, true unless zero."""
    if not type.is_integer:
        return x.astype(bool if type == PRED else np.float32)
    x = x.astype(np.int64)
    if type.bits == 64:
        return x
    wrapped = x & ((1 << type.bits) - 1)
    return np.where(wrapped >> (type.bits - 1), wrapped - (1 << type.bits), wrapped) if type.signed else wrapped


class Context(Protocol):
    """A lockstep group with the table of its values: Python numbers, or arrays over the group's threads."""

    group: LockstepGroup
    value_of: ValueTable


def compile_operation(operation: Operation) -> Callable[[Context, Operation], None]:
    """Return the function that computes an operation and stores the result in the table of values."""
    op, kind, operands = operation.op, operation.type, operation.operands
    evaluate = operator.truediv if op == "/" and kind == F32 else _OPERATIONS[op]
    valid = _RANGES.get(kind, range(0))
    low, high, is_closed = valid.start, valid.stop, op in _CLOSED_OPERATIONS or not kind.is_integer or kind.bits == 64

    def store(context: Context, x: Operation, result: Any) -> None:
        if type(result) is not int or not low <= result < high:
            if not isinstance(result, np.ndarray):
                result = _wrap_scalar(context.group, result, kind, op)
            elif not is_closed or op == "cast":
                result = _wrap_array(context.group, result, kind, op)
        context.value_of[x] = result

    def evaluate_binary(context: Context, x: Operation) -> None:
        value_of = context.value_of
        result = evaluate(value_of[first], value_of[second])
        if type(result) is int and low <= result < high:
            value_of[x] = result  # the common case
        else:
            store(context, x, result)

    def evaluate_any(context: Context, x: Operation) -> None:
        value_of = context.value_of
        store(context, x, evaluate(*[value_of[operand] for operand in operands]))

    def evaluate_division(context: Context, x: Operation) -> None:
        numerator, divisor = context.value_of[first], context.value_of[second]
        store(context, x, evaluate(numerator, _check_divisor(context.group, numerator, divisor)))

    if len(operands) != 2:
        return evaluate_any
    first, second = operands
    return evaluate_division if op in ("/", "%") and kind != F32 else evaluate_binary


def _check_divisor(group: LockstepGroup, numerator: Any, divisor: Any) -> Any:
    if _minimum(divisor) <= 0 or _minimum(numerator) < 0:
        active = group.active
        if (group.broadcast(divisor)[active] <= 0).any() or (group.broadcast(numerator)[active] < 0).any():
            group.report("overflow", "integer division with negative numerator or non-positive divisor")
        return np.maximum(divisor, 1)
    return divisor


def _wrap_array(group: LockstepGroup, result: np.ndarray, type: ScalarType, op: str) -> np.ndarray:
    if op == "cast":
        return _cast(result, type)
    return _check_overflow(group, result, type, op) if type.signed else result & ((1 << type.bits) - 1)


def _wrap_scalar(group: LockstepGroup, result: Any, type: ScalarType, op: str) -> Any:
    if not type.is_integer:
        return bool(result) if type == PRED else np.float32(result)
    result = int(result)
    if not type.signed:
        return result & ((1 << type.bits) - 1)
    limit = 1 << (type.bits - 1)
    if -limit <= result < limit:
        return result
    if op != "cast":
        group.report("overflow", f"{op}: {result} overflows {type}")
    return (result + limit) % (2 * limit) - limit


def _check_overflow(group: LockstepGroup, result: np.ndarray, type: ScalarType, op: str) -> np.ndarray:
    """Wrap signed integers of the threads; report an overflow in an active thread."""
    shift, limit = type.bits, 1 << (type.bits - 1)
    outside = (result + limit) >> shift
    if not np.count_nonzero(outside):
        return result
    if outside[group.active].any():
        value = int(result[group.active & (outside != 0)][0])
        group.report("overflow", f"{op}: {value} overflows {type}")
    return np.asarray(_cast(result, type))
