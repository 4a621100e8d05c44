"""Division by an integer that the host knows, as a multiplication and a shift (CUTLASS: FastDivmod).

An integer division takes about a hundred cycles on the device. Granlund and Montgomery, "Division by Invariant Integers
using Multiplication", 1994.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any

from gemmsmith.core.scalars import ceil_div
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.instruction import Instruction, i32
from gemmsmith.lang.types import I32, ScalarType
from gemmsmith.lang.values import ArgumentFn, Value
from gemmsmith.machine import Machine

FAST_DIVMOD = ScalarType("fast_divmod", "FastDivmod", 64, "l", struct="""\
struct FastDivmod {  // division by an integer that the host knows, for 0 <= x < 2^31
    uint32_t multiplier, shift;
    __device__ __forceinline__ int divide(int x) const { return (int)((uint64_t)(uint32_t)x * multiplier >> shift); }
};
""")  # fmt: skip
"""A divisor, passed by value as a kernel parameter: multiplier | shift << 32 on the host."""


class FastDivide(Instruction):
    """x / divisor for 0 <= x < 2^31, by the FastDivmod struct of the divisor."""

    x: i32
    divmod: Annotated[Any, FAST_DIVMOD]
    result = I32
    pure = True
    cuda = "{divmod}.divide({x})"

    def simulate(self, m: Machine) -> Any:
        packed = m.value(self.divmod)
        return m.value(self.x) * (packed & 0xFFFFFFFF) >> (packed >> 32)


class FastDivmod:
    """A positive divisor of integers in 0 .. 2^31 - 1; the host computes it for a problem by `compute`.

    Kernel argument: `name`, a FastDivmod struct.
    """

    def __init__(self, name: str, compute: ArgumentFn) -> None:
        self.parameter = current_builder().parameter(name, FAST_DIVMOD, lambda p: _pack_divisor(compute(p)))

    def divide(self, x: Value) -> Value:
        """Return x / divisor, rounded down."""
        return FastDivide(x, self.parameter).issue()


def _pack_divisor(divisor: int) -> int:
    """Return the eight bytes of a divisor's struct as an integer."""
    multiplier, shift = fast_divmod_params(divisor)
    return multiplier | shift << 32


@lru_cache(maxsize=1024)
def fast_divmod_params(divisor: int) -> tuple[int, int]:
    """Return (multiplier, shift) such that x // divisor == x * multiplier >> shift for every x in 0 .. 2^31 - 1.

    multiplier / 2^shift is 1 / divisor, rounded up. With 2^shift >= 2^31 * divisor the excess is less than
    1 / (2^31 * divisor), too little to change a quotient of such an x; the multiplier has at most 32 bits.
    """
    shift = 31 + (divisor - 1).bit_length()
    return ceil_div(1 << shift, divisor), shift
