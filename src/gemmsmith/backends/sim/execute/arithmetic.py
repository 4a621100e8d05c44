"""Operations on values, as the hardware computes them; undefined behavior of C is reported."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from gemmsmith.backends.sim.execute.values import Values
from gemmsmith.backends.sim.state.lockstep_group import LockstepGroup
from gemmsmith.lang.types import F32, PRED, ScalarType
from gemmsmith.lang.values import OPERATIONS, Operation


def _select(c: Any, a: Any, b: Any) -> Any:
    return np.where(c, a, b) if isinstance(c, np.ndarray) else a if c else b


def _minimum(x: Any) -> Any:
    return np.minimum.reduce(x) if isinstance(x, np.ndarray) else x


_OPERATIONS: dict[str, Callable[..., Any]] = OPERATIONS | {
    "!": np.logical_not, "select": _select, "min": np.fmin, "max": np.fmax,
    "slot": lambda smem, slot, slot_bytes, offset, nbytes=0: smem + slot * slot_bytes + nbytes + offset,
}  # fmt: skip
"""The operations on numbers and on arrays."""
_CLOSED_OPERATIONS = ("/", "%", ">>", "&", "|", "^", "select", "min", "max")
"""Operations whose result is in the range of the operands' integer type."""


def _cast(x: np.ndarray, type: ScalarType) -> np.ndarray:
    """Return x converted to `type` as C does it.

    Floats are rounded toward zero, integers wrap modulo 2^bits, and a predicate is true unless x is zero.
    """
    if not type.is_integer:
        return x.astype(bool if type == PRED else np.float32)
    x = x.astype(np.int64)
    return x if type.bits == 64 else np.asarray(type.wrap(x))


class Context(Protocol):
    """A lockstep group with the table of its values: Python numbers, or arrays over the group's threads."""

    group: LockstepGroup
    values: Values


def compile_operation(operation: Operation) -> Callable[[Context, Operation], None]:
    """Return a function `(context, operation)` that computes the operation and stores the result in `context.values`.

    What does not change between executions is computed here. An integer result is wrapped to its type; a signed
    overflow is reported.
    """
    op, kind, operands = operation.op, operation.type, operation.operands
    evaluate = operator.truediv if op == "/" and kind == F32 else _OPERATIONS[op]
    valid = kind.range if kind.is_integer else range(0)
    low, high, is_closed = valid.start, valid.stop, op in _CLOSED_OPERATIONS or not kind.is_integer or kind.bits == 64

    def store(context: Context, x: Operation, result: Any) -> None:
        """Store a result that may be out of the type's range, wrapped to it."""
        if type(result) is not int or not low <= result < high:
            if not isinstance(result, np.ndarray):
                result = _wrap_scalar(context.group, result, kind, op)
            elif not is_closed or op == "cast":
                result = _wrap_array(context.group, result, kind, op)
        context.values[x] = result

    def evaluate_binary(context: Context, x: Operation) -> None:
        """Compute an operation of two operands; a Python int in range, the common case, needs no `store`."""
        values = context.values
        result = evaluate(values[first], values[second])
        if type(result) is int and low <= result < high:
            values[x] = result  # the common case
        else:
            store(context, x, result)

    def evaluate_any(context: Context, x: Operation) -> None:
        values = context.values
        store(context, x, evaluate(*[values[operand] for operand in operands]))

    def evaluate_division(context: Context, x: Operation) -> None:
        numerator, divisor = context.values[first], context.values[second]
        store(context, x, evaluate(numerator, _check_divisor(context.group, numerator, divisor)))

    if len(operands) != 2:
        return evaluate_any
    first, second = operands
    return evaluate_division if op in ("/", "%") and kind != F32 else evaluate_binary


def _check_divisor(group: LockstepGroup, numerator: Any, divisor: Any) -> Any:
    """Return the divisor of an integer division, but at least 1.

    Reports a negative numerator and a divisor below 1 in an active thread: C rounds toward zero, Python down.
    """
    if _minimum(divisor) <= 0 or _minimum(numerator) < 0:
        active = group.active
        if (group.broadcast(divisor)[active] <= 0).any() or (group.broadcast(numerator)[active] < 0).any():
            group.report("overflow", "integer division with negative numerator or non-positive divisor")
        return np.maximum(divisor, 1)  # an inactive thread may have 0
    return divisor


def _wrap_array(group: LockstepGroup, result: np.ndarray, type: ScalarType, op: str) -> np.ndarray:
    """Return integers, one per thread, wrapped to `type`; report a signed overflow in an active thread.

    If `op` is a cast, it may change the value.
    """
    if op == "cast":
        return _cast(result, type)
    # Nonzero if the result is out of range: the range has 2^bits numbers.
    outside = (result - type.range.start) >> type.bits
    if type.signed and np.count_nonzero(outside) and outside[group.active].any():
        value = int(result[group.active & (outside != 0)][0])
        group.report("overflow", f"{op}: {value} overflows {type}")
    return np.asarray(type.wrap(result))


def _wrap_scalar(group: LockstepGroup, result: Any, type: ScalarType, op: str) -> Any:
    """Return a number in the range of `type`; report a signed overflow.

    If `op` is a cast, it may change the value.
    """
    if type.struct:
        return result
    if not type.is_integer:
        return bool(result) if type == PRED else np.float32(result)
    exact = int(result)
    if type.signed and op != "cast" and exact not in type.range:
        group.report("overflow", f"{op}: {exact} overflows {type}")
    return type.wrap(exact)
