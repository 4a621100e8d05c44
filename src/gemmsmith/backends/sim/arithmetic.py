"""Operations on values, as the hardware computes them; what C leaves undefined is reported."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gemmsmith.backends.sim.unit import Unit
from gemmsmith.lang.types import F32, I32, I64, PRED, U16, U32, U64, Type
from gemmsmith.lang.values import Operation, Value


def _divide(a: Any, b: Any) -> Any:
    return a / b if isinstance(a, (float, np.floating)) or getattr(a, "dtype", None) == np.float32 else a // b


def _select(c: Any, a: Any, b: Any) -> Any:
    return np.where(c, a, b) if isinstance(c, np.ndarray) else a if c else b


def _least(x: Any) -> Any:
    return np.minimum.reduce(x) if isinstance(x, np.ndarray) else x


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": _divide, "%": operator.mod,
    "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "neg": operator.neg, "~": operator.invert, "!": np.logical_not, "select": _select,
    "min": np.fmin, "max": np.fmax, "cast": lambda a: a,
}  # fmt: skip

_IN_RANGE = ("/", "%", ">>", "&", "|", "^", "select", "min", "max")
"""Integers of a type, by these, give integers of that type."""


_RANGES = {
    type: range(-(1 << type.bits - 1), 1 << type.bits - 1) if type.signed else range(1 << type.bits)
    for type in (U16, I32, U32, I64, U64)
}
"""The numbers of each integer type."""


def _cast(x: np.ndarray, type: Type) -> np.ndarray:
    """Conversion as in C: towards zero from floats, modulo 2^bits between integers."""
    if type == F32:
        return x.astype(np.float32)
    x = x.astype(np.int64)
    if type.bits == 64:
        return x
    wrapped = x & ((1 << type.bits) - 1)
    return np.where(wrapped >> (type.bits - 1), wrapped - (1 << type.bits), wrapped) if type.signed else wrapped


def function_of(operation: Operation) -> Callable[[Unit, Mapping[Value, Any]], Any]:
    """What an operation computes, of the unit and what its operands hold. They and the result are numbers, or arrays
    over the unit's threads."""
    op, kind, operands = operation.op, operation.type, operation.operands
    meaning, numbers = _OPERATIONS[op], _RANGES.get(kind, range(0))
    low, high, stays = numbers.start, numbers.stop, op in _IN_RANGE or not kind.is_integer or kind.bits == 64

    def finished(unit: Unit, result: Any) -> Any:
        if type(result) is int and low <= result < high:
            return result  # as most are
        if isinstance(result, np.ndarray):
            return result if stays and op != "cast" else _of_threads(unit, result, kind, op)
        return _number(unit, result, kind, op)

    def of_two(unit: Unit, held: Mapping[Value, Any]) -> Any:
        return finished(unit, meaning(held[first], held[second]))

    def of_any(unit: Unit, held: Mapping[Value, Any]) -> Any:
        return finished(unit, meaning(*[held[x] for x in operands]))

    def divided(unit: Unit, held: Mapping[Value, Any]) -> Any:
        return finished(unit, meaning(held[first], _divisor(unit, held[first], held[second])))

    if len(operands) != 2:
        return of_any
    first, second = operands
    return divided if op in ("/", "%") and kind != F32 else of_two


def _divisor(unit: Unit, numerator: Any, divisor: Any) -> Any:
    if _least(divisor) <= 0 or _least(numerator) < 0:
        active = unit.active
        if (unit.each(divisor)[active] <= 0).any() or (unit.each(numerator)[active] < 0).any():
            unit.hazard("overflow", "integer division of a negative number, or by one that is not positive")
        return np.maximum(divisor, 1)
    return divisor


def _of_threads(unit: Unit, result: np.ndarray, type: Type, op: str) -> np.ndarray:
    if op == "cast":
        return _cast(result, type)
    return _within(unit, result, type, op) if type.signed else result & ((1 << type.bits) - 1)


def _number(unit: Unit, result: Any, type: Type, op: str) -> Any:
    if not type.is_integer:
        return bool(result) if type == PRED else np.float32(result)
    result = int(result)
    if not type.signed:
        return result & ((1 << type.bits) - 1)
    limit = 1 << (type.bits - 1)
    if -limit <= result < limit:
        return result
    if op != "cast":
        unit.hazard("overflow", f"{op} gives {result}, which is no {type}")
    return (result + limit) % (2 * limit) - limit


def _within(unit: Unit, result: np.ndarray, type: Type, op: str) -> np.ndarray:
    """Signed integers of the threads, which must not overflow where they are active."""
    shift, limit = type.bits, 1 << (type.bits - 1)
    outside = (result + limit) >> shift
    if not np.count_nonzero(outside):
        return result
    if outside[unit.active].any():
        value = int(result[unit.active & (outside != 0)][0])
        unit.hazard("overflow", f"{op} gives {value}, which is no {type}")
    return np.asarray(_cast(result, type))
