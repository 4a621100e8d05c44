"""Operations on values, as the hardware computes them; what C leaves undefined is reported."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmsmith.backends.sim.unit import Unit
from gemmsmith.lang.types import F32, I32, I64, PRED, U16, U32, U64, Type
from gemmsmith.lang.values import Operation


def _divide(a: Any, b: Any) -> Any:
    return a / b if isinstance(a, (float, np.floating)) or getattr(a, "dtype", None) == np.float32 else a // b


def _select(c: Any, a: Any, b: Any) -> Any:
    return np.where(c, a, b) if isinstance(c, np.ndarray) else a if c else b


def _any(x: Any) -> bool:
    return bool(x.any() if isinstance(x, np.ndarray) else x)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": _divide, "%": operator.mod,
    "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "neg": operator.neg, "~": operator.invert, "!": np.logical_not, "select": _select,
    "min": np.fmin, "max": np.fmax, "cast": lambda a: a,
}  # fmt: skip


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


class Arithmetic:
    """What a unit computes. Operands and results are numbers, or arrays over its threads."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def compute(self, operation: Operation, operands: list[Any]) -> Any:
        op, kind = operation.op, operation.type
        if op in ("/", "%") and kind != F32:
            operands[1] = self._divisor(operands)
        result = _OPERATIONS[op](*operands)
        if type(result) is int and result in _RANGES.get(kind, ()):
            return result  # as most are
        if op == "cast" and isinstance(result, np.ndarray):
            return _cast(result, kind)
        return self._wrapped(result, kind, op)

    def _divisor(self, operands: list[Any]) -> Any:
        numerator, divisor = operands
        if _any(divisor <= 0) or _any(numerator < 0):
            active = self.unit.active
            if (self.unit.each(divisor)[active] <= 0).any() or (self.unit.each(numerator)[active] < 0).any():
                self.unit.hazard("overflow", "integer division of a negative number, or by one that is not positive")
            return np.maximum(divisor, 1)
        return divisor

    def _wrapped(self, result: Any, type: Type, op: str) -> Any:
        if isinstance(result, np.ndarray):
            if not type.is_integer:
                return result
            if result.dtype == bool:
                result = result.astype(np.int64)
            if type.bits == 64:
                return result
            return self._within(result, type, op) if type.signed else result & ((1 << type.bits) - 1)
        if not type.is_integer:
            return bool(result) if type == PRED else np.float32(result)
        result = int(result)
        if not type.signed:
            return result & ((1 << type.bits) - 1)
        limit = 1 << (type.bits - 1)
        if -limit <= result < limit:
            return result
        if op != "cast":
            self.unit.hazard("overflow", f"{op} gives {result}, which is no {type}")
        return (result + limit) % (2 * limit) - limit

    def _within(self, result: np.ndarray, type: Type, op: str) -> np.ndarray:
        """Signed integers of the threads, which must not overflow where they are active."""
        shift, limit = type.bits, 1 << (type.bits - 1)
        outside = (result + limit) >> shift
        if not np.count_nonzero(outside):
            return result
        if outside[self.unit.active].any():
            value = int(result[self.unit.active & (outside != 0)][0])
            self.unit.hazard("overflow", f"{op} gives {value}, which is no {type}")
        return np.asarray(_cast(result, type))
