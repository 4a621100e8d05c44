"""The order of two arrays whose rows alternate in an operand's tiles, in groups of 8."""

from __future__ import annotations

from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.core.mma import N8_COLUMNS
from gemmsmith.core.product import Role
from gemmsmith.lang.current_builder import current_builder


class InterleaveOrder:
    """Which of the two arrays comes first in a tile: the one at the lower address, as a tensor map's strides are > 0.

    Kernel argument: second_array_is_first.
    """

    def __init__(self, role: Role) -> None:
        """Declare the argument. `role`: the operand whose rows alternate."""
        self._role = role
        self._is_reversed = current_builder().parameter(
            "second_array_is_first", compute=lambda p: int(p.bound_operands[role][0].interleave_stride < 0)
        )

    def restore(self, accumulator: Accumulator) -> None:
        """Exchange the sums of both arrays if the second one is first.

        They are in the same thread: A's rows r and r + 8, or the same columns of two groups of 8.
        """
        k = current_builder()
        registers = accumulator.mma.accumulator_registers(N8_COLUMNS)
        width = registers // 2 if self._role == "a" else registers
        with k.when(self._is_reversed != 0):
            for fragment in accumulator.fragments:
                for first in range(0, fragment.count, 2 * width):
                    for i in range(first, first + width):
                        x, y = fragment[i].named("first"), fragment[i + width].named("second")
                        fragment[i], fragment[i + width] = y, x
