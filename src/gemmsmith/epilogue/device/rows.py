"""Functions of a whole row of a piece: what an element becomes depends on the others of its row.

The row's elements are evaluated once and kept in registers; a row of a piece lies in the four lanes of a quad.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gemmsmith import hw
from gemmsmith.core.dtypes import LARGEST, LEAST_SCALE, DType
from gemmsmith.core.graph import Node
from gemmsmith.core.mma import CHUNK, OF_QUAD, fragment_column
from gemmsmith.epilogue.functions import fast_exp
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import F32, I32
from gemmsmith.lang.values import Constant, Registers, Value, ValueLike, as_value


def across_quad(x: Value, merge: Callable[[Value, Value], Value]) -> Value:
    """Combined over the lanes that share a row."""
    for mask in OF_QUAD:
        x = merge(x, hw.shuffle_xor_fp32(x, mask))
    return x


class HeldRows:
    """A piece's elements of one node: four registers a chunk, as (half, neighbor); `stride` chunks apart from
    register `first` on, where they are kept in the accumulator itself."""

    def __init__(self, chunks: int, registers: Registers | None = None, first: ValueLike = 0, stride: int = 1) -> None:
        self.chunks, self.first, self.stride = chunks, first, stride
        self.values = registers or current().registers(F32, 4 * chunks, "held")

    def cell(self, chunk: ValueLike, half: int, i: int) -> Value:
        """The register of an element."""
        return as_value(chunk, I32) * (4 * self.stride) + (self.first + 2 * half + i)

    def put(
        self, chunk: ValueLike, half: int, pair: tuple[Value, Value], inside: tuple[Value, Value], other: float
    ) -> None:
        """Keeps a pair; `other` stands for elements outside the matrix."""
        for i in range(2):
            self.values[self.cell(chunk, half, i)] = current().select(inside[i], pair[i], other)

    def get(self, chunk: ValueLike, half: int) -> tuple[Value, Value]:
        return self.values[self.cell(chunk, half, 0)], self.values[self.cell(chunk, half, 1)]

    def fold(self, half: int, start: float, step: Callable[[Value, Value], Value]) -> Value:
        """The quad's step(... step(start, x0) ..., xn) over a row."""
        total = current().registers(F32, 1, "of_row")
        total[0] = start
        with current().unroll(self.chunks, name="chunk") as chunk:
            for x in self.get(chunk, half):
                total[0] = step(total[0], x)
        return across_quad(total[0], step)


class Quantized:
    """x over its row's scale: amax over the dtype's largest value, and at least LEAST_SCALE, but 1 where amax is 0."""

    neutral = 0.0

    def __init__(self, node: Node, held: HeldRows) -> None:
        self.dtype: DType = node.value[0]
        self.held = held

    def settle(self) -> None:
        """Finds the scales, now that all elements are held."""
        k = current()
        self.scales, self.inverses = [], []
        largest = LARGEST[self.dtype]
        for half in range(2):
            amax = self.held.fold(half, 0.0, lambda a, x: hw.maximum_nan(a, hw.library("fabsf", x))).named("amax")
            bounded = hw.maximum_nan(amax, largest * LEAST_SCALE)
            self.scales.append(k.select(amax == 0.0, 1.0, bounded * (1 / largest)))
            self.inverses.append(k.select(amax == 0.0, 1.0, hw.divide_full(Constant(F32, largest), bounded)))

    def pair(self, chunk: ValueLike, half: int) -> tuple[Value, Value]:
        low, high = self.held.get(chunk, half)
        return low * self.inverses[half], high * self.inverses[half]


class TopKSoftmax:
    """exp(x - max) over its sum, for the k largest of a row, the first ones among equals; 0 for the others. NaN, in all
    of the row, where that sum is: with a NaN, with +Inf, or with nothing but -Inf."""

    neutral = -math.inf

    def __init__(self, node: Node, held: HeldRows) -> None:
        self.k = node.value
        self.held = held

    def settle(self) -> None:
        """Finds the next largest element k times: the first of those behind the last one found, in the order of values,
        largest first, and of columns. So no element is kept twice, or marked."""
        self.first = fragment_column(current().lane).to(F32).named("first_column")
        self.largest, self.inverses, self.last = [], [], []
        for half in range(2):
            largest = self.held.fold(half, -math.inf, hw.maximum_nan).named("largest")
            total = current().registers(F32, 1, "total")
            total[0], last = 0.0, None
            for _ in range(self.k):
                last = self._next(half, last)
                total[0] = total[0] + fast_exp(last[0] - largest)
            assert last
            self.largest.append(largest)
            self.inverses.append(hw.approximate("rcp.approx.ftz", total[0]).named("inverse"))
            self.last.append(last)

    def _next(self, half: int, last: tuple[Value, Value] | None) -> tuple[Value, Value]:
        """The largest element behind `last`, and its column; -Inf and Inf where there is none."""
        b = current()
        best, at = b.registers(F32, 1, "best"), b.registers(F32, 1, "column_of_best")
        best[0], at[0] = -math.inf, math.inf
        with b.unroll(self.held.chunks, name="chunk") as chunk:
            for i, x in enumerate(self.held.get(chunk, half)):
                better = x > best[0]
                if last:
                    better = better & ((x < last[0]) | ((x == last[0]) & (_number(chunk, i) > last[1] - self.first)))
                better = better.named("better")
                best[0], at[0] = b.select(better, x, best[0]), b.select(better, _number(chunk, i), at[0])
        at[0] = at[0] + self.first
        for mask in OF_QUAD:
            value, column = hw.shuffle_xor_fp32(best[0], mask), hw.shuffle_xor_fp32(at[0], mask)
            better = ((value > best[0]) | ((value == best[0]) & (column < at[0]))).named("better")
            best[0], at[0] = b.select(better, value, best[0]), b.select(better, column, at[0])
        return best[0].named("best"), at[0].named("column")

    def pair(self, chunk: ValueLike, half: int) -> tuple[Value, Value]:
        inverse, (value, column), result = self.inverses[half], self.last[half], []
        for i, x in enumerate(self.held.get(chunk, half)):
            taken = (x > value) | ((x == value) & (_number(chunk, i) <= column - self.first))
            weight = current().select(taken, fast_exp(x - self.largest[half]), 0.0)
            result.append(weight * inverse)
        return result[0], result[1]


def _number(chunk: ValueLike, i: int) -> Value:
    """An element's column in the row, but for the thread's first: constant where loops are unrolled, exact in fp32."""
    number: Value = as_value(chunk, I32) * CHUNK + i
    return number.to(F32)


WHOLE_ROWS: dict[str, type[Quantized] | type[TopKSoftmax]] = {"quantize": Quantized, "top_k_softmax": TopKSoftmax}
