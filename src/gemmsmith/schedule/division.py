"""Division by a number that the host knows: a multiplication and a shift, where the division itself takes a hundred
cycles. Granlund and Montgomery, "Division by Invariant Integers using Multiplication", 1994."""

from __future__ import annotations

from functools import lru_cache

from gemmsmith.lang.builder import current
from gemmsmith.lang.types import I32, U32, U64
from gemmsmith.lang.values import Bind, Value


class Divisor:
    """A positive divisor of numbers in 0 .. 2^31 - 1, which `bind` computes from the problem. Kernel arguments:
    `name`_multiplier, `name`_shift."""

    def __init__(self, name: str, bind: Bind) -> None:
        k = current()
        self.multiplier = k.parameter(f"{name}_multiplier", U32, lambda p: factors(bind(p))[0])
        self.shift = k.parameter(f"{name}_shift", U32, lambda p: factors(bind(p))[1])

    def quotient(self, x: Value) -> Value:
        """x divided by it, rounded down."""
        takes = "x", "multiplier", "shift"
        return current().call("fast_divide", _fast_divide, x, self.multiplier, self.shift, takes=takes)[0]


def _fast_divide(x: Value, multiplier: Value, shift: Value) -> list[Value]:
    return [(x.to(U32).to(U64) * multiplier.to(U64) >> shift).to(I32)]


@lru_cache(maxsize=1024)
def factors(divisor: int) -> tuple[int, int]:
    """(multiplier, shift)."""
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift
