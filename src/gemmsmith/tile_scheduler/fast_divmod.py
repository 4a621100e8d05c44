"""Division by an integer that the host knows, as a multiplication and a shift (CUTLASS: FastDivmod).

An integer division takes about a hundred cycles on the device. Granlund and Montgomery, "Division by Invariant Integers
using Multiplication", 1994.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from gemmsmith.core.integers import ceil_div
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.instruction import Instruction, fast_divmod, i32
from gemmsmith.lang.machine import Machine
from gemmsmith.lang.types import FAST_DIVMOD, I32
from gemmsmith.lang.values import ArgumentFn, Value


class FastDivide(Instruction):
    """x / divisor for 0 <= x < 2^31, by the FastDivmod struct of the divisor."""

    x: i32
    divmod: fast_divmod
    result = I32
    pure = True
    cuda = "{divmod}.divide({x})"

    def simulate(self, m: Machine) -> Any:
        packed = m.value(self.divmod)
        return m.value(self.x) * (packed & 0xFFFFFFFF) >> (packed >> 32)


class FastDivmod:
    """A positive divisor of integers in 0 .. 2^31 - 1, which `compute` returns for a problem on the host.

    Kernel argument: `name`, a FastDivmod struct.
    """

    def __init__(self, name: str, compute: ArgumentFn) -> None:
        self.parameter = current_builder().parameter(
            name, FAST_DIVMOD, lambda p: _pack(*fast_divmod_params(compute(p)))
        )

    def divide(self, x: Value) -> Value:
        """Return x / divisor, rounded down."""
        return FastDivide.emit(x, self.parameter)


def _pack(multiplier: int, shift: int) -> int:
    """Return the struct's eight bytes as an integer."""
    return multiplier | shift << 32


@lru_cache(maxsize=1024)
def fast_divmod_params(divisor: int) -> tuple[int, int]:
    """Return (multiplier, shift) such that x / divisor == x * multiplier >> shift for every x in 0 .. 2^31 - 1."""
    shift = 31 + (divisor - 1).bit_length()
    return ceil_div(1 << shift, divisor), shift
