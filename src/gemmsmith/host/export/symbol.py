"""Integers that remember how they were computed, so that what Python computed once can be computed in C for others.

Code that computes with Symbols runs as it is. A comparison has the outcome that it has for their values, and is noted:
for other values with the same outcomes, the results have the same expressions.
"""

from __future__ import annotations

import itertools
import math
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple


class Expression(NamedTuple):
    """An operation of OPERATIONS on integers or, without operands, the name of a variable."""

    op: str
    operands: tuple[Expression | int, ...] = ()


OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "neg": operator.neg,
    "bit_length": int.bit_length,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
"""What each operation computes. Division rounds down."""
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
_METHODS = {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "lshift": "<<", "rshift": ">>", "and": "&",
    "or": "|", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
"""The operations of Symbol's methods."""
Outcomes = dict[Expression, bool]
"""Comparisons and their outcomes, in the order in which they were made."""


@cache
def function_of(x: Expression) -> Callable[[Mapping[str, int]], Any]:
    """Return the function that computes an expression from the variables' values. It divides by 1 instead of 0."""

    def text(x: Expression | int) -> str:
        if isinstance(x, int):
            return f"({x})"
        if not x.operands:
            return f"v[{x.op!r}]"
        first, *others = map(text, x.operands)
        if not others:
            return f"(-{first})" if x.op == "neg" else f"int.bit_length({first})"
        second = f"({others[0]} or 1)" if x.op in ("//", "%") else others[0]
        return f"({first} {x.op} {second})"

    function: Callable[[Mapping[str, int]], Any] = eval(f"lambda v: {text(x)}")
    return function


@cache
def variables_of(x: Expression | int) -> frozenset[str]:
    """Return the variables of an expression."""
    if isinstance(x, int):
        return frozenset()
    return frozenset.union(*map(variables_of, x.operands)) if x.operands else frozenset([x.op])


Bounds = tuple[float, float]
"""The least and the largest value of an integer."""
UNBOUNDED = (-math.inf, math.inf)
_local = threading.local()
"""`trace`: the Trace of the thread."""
_serial = itertools.count()


class Trace:
    """The comparisons that were made, but for those whose outcomes follow from bounds that are known.

    `bounds`: those of variables at first, then also what earlier outcomes say of expressions.
    """

    def __init__(self, bounds: Mapping[str, Bounds]) -> None:
        self.outcomes: Outcomes = {}
        self._bounds = {Expression(name): x for name, x in bounds.items()}

    def note(self, comparison: Expression, outcome: bool) -> None:
        (x, y), op = comparison.operands, comparison.op
        if isinstance(x, int):
            (x, y), op = (y, x), {"<": ">", "<=": ">=", ">": "<", ">=": "<="}.get(op, op)
        if not isinstance(x, Expression) or not isinstance(y, int):
            self.outcomes.setdefault(comparison, outcome)
            return
        least, most = self.bounds_of(x)
        if OPERATIONS[op](least, y) == OPERATIONS[op](most, y) and (op not in ("==", "!=") or not least < y < most):
            return
        self.outcomes.setdefault(comparison, outcome)
        if op in ("==", "!="):
            if outcome == (op == "=="):
                least = most = y
            else:
                least, most = least + (least == y), most - (most == y)
        elif (op in ("<", "<=")) == outcome:
            most = min(most, y - (op in ("<", ">=")))
        else:
            least = max(least, y + (op in (">", "<=")))
        self._narrow(x, least, most)

    def bounds_of(self, x: Expression | int) -> Bounds:
        if isinstance(x, int):
            return x, x
        (least, most), known = self._computed_bounds(x), self._bounds.get(x, UNBOUNDED)
        return max(least, known[0]), min(most, known[1])

    def _computed_bounds(self, x: Expression) -> Bounds:
        if len(x.operands) < 2:
            least, most = self.bounds_of(x.operands[0]) if x.op == "neg" else UNBOUNDED
            return -most, -least
        first, (least, most) = self.bounds_of(x.operands[0]), self.bounds_of(x.operands[1])
        if x.op == "%" and 0 < least == most:
            return 0, most - 1
        is_monotonic = x.op in ("+", "-", "*") or (x.op == "//" and least > 0)
        if is_monotonic and all(map(math.isfinite, (*first, least, most))):
            corners = [OPERATIONS[x.op](a, b) for a in first for b in (least, most)]
            return min(corners), max(corners)
        return UNBOUNDED

    def _narrow(self, x: Expression | int, least: float, most: float) -> None:
        """Take note of an expression's bounds, and of what they say of its operand."""
        if isinstance(x, int):
            return
        self._bounds[x] = least, most
        if x.op == "neg":
            self._narrow(x.operands[0], -most, -least)
        elif len(x.operands) == 2 and isinstance(by := x.operands[1], int):
            first = self.bounds_of(x.operands[0])
            if x.op == "//" and by > 0:
                least, most = least * by, most * by + by - 1
            elif x.op == "*" and by > 0:
                least = -(-least // by) if math.isfinite(least) else least
                most = most // by if math.isfinite(most) else most
            else:
                return
            self._narrow(x.operands[0], max(least, first[0]), min(most, first[1]))


class Symbol(int):
    """An integer with the expression that it was computed by.

    Each has a hash of its own: caches that are keyed by it know nothing, since they would skip comparisons.
    """

    expression: Expression
    _hash: int

    def __new__(cls, value: int, expression: Expression) -> Symbol:
        symbol = super().__new__(cls, value)
        symbol.expression, symbol._hash = expression, hash((Symbol, next(_serial)))
        return symbol

    def __hash__(self) -> int:
        return self._hash

    def __bool__(self) -> bool:
        return self != 0

    def __rtruediv__(self, other: float) -> Inverse:
        if other != 1:
            self.__int__()
        return Inverse(self)

    def __neg__(self) -> int:
        return _result("neg", self)

    def __abs__(self) -> int:
        return self if self >= 0 else -self

    def bit_length(self) -> int:
        return _result("bit_length", self)

    def __int__(self, *_: Any) -> int:
        """Raise an error, as all methods whose results would not remember."""
        raise NotImplementedError("an operation of Python's integers that a Symbol does not remember")


class Inverse(float):
    """1 / a Symbol, its `of`."""

    of: Symbol

    def __new__(cls, of: Symbol) -> Inverse:
        inverse = super().__new__(cls, 1 / int.__int__(of))
        inverse.of = of
        return inverse


def _result(op: str, *operands: int) -> int:
    """Return the Symbol that an operation makes; of x * 1, x // 1 and -(-x) it is x."""
    if op in ("*", "//") and type(operands[1]) is int and operands[1] == 1:
        return operands[0]
    expression = _expression(op, operands)
    if op == "neg" and isinstance(x := expression.operands[0], Expression) and x.op == "neg":
        expression = x.operands[0]  # type: ignore[assignment]
    return Symbol(OPERATIONS[op](*map(int.__int__, operands)), expression)


def _outcome(op: str, *operands: int) -> bool:
    """Return the outcome of a comparison, which is noted unless it compares an expression with itself."""
    outcome, comparison = OPERATIONS[op](*map(int.__int__, operands)), _expression(op, operands)
    if comparison.operands[0] != comparison.operands[1]:
        _local.trace.note(comparison, outcome)
    return bool(outcome)


def _expression(op: str, operands: Iterable[int]) -> Expression:
    return Expression(op, tuple(x.expression if isinstance(x, Symbol) else int(x) for x in operands))


def _method(op: str, is_reflected: bool = False) -> Callable[[Symbol, Any], Any]:
    compute: Callable[..., int] = _outcome if op in COMPARISONS else _result

    def method(self: Symbol, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        return compute(op, other, self) if is_reflected else compute(op, self, other)

    return method


for _name, _op in _METHODS.items():
    setattr(Symbol, f"__{_name}__", _method(_op))
    if _op not in COMPARISONS:
        setattr(Symbol, f"__r{_name}__", _method(_op, is_reflected=True))
for _name in ("truediv", "divmod", "rdivmod", "pow", "rpow", "xor", "rxor"):
    setattr(Symbol, f"__{_name}__", Symbol.__int__)
for _name in ("float", "invert", "pos", "round", "floor", "ceil", "trunc"):
    setattr(Symbol, f"__{_name}__", Symbol.__int__)


@contextmanager
def traced(bounds: Mapping[str, Bounds]) -> Iterator[Outcomes]:
    """Yield the outcomes of the comparisons of Symbols within the block, in this thread. Blocks do not nest.

    `bounds`: of variables; comparisons whose outcomes follow from them are left out.
    """
    _local.trace = Trace(bounds)
    yield _local.trace.outcomes
