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
    """A piece's elements of one node: four registers a chunk, as (half, neighbour); `stride` chunks apart from
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
    """exp(x - max) over its sum, for the k largest of a row, the first ones among equals; 0 for the others."""

    neutral = -math.inf

    def __init__(self, node: Node, held: HeldRows) -> None:
        self.k = node.value
        self.held = held

    def settle(self) -> None:
        """Takes the largest of what is left, k times; a taken element is marked by NaN in `rest`."""
        b, held = current(), self.held
        self.rest = HeldRows(held.chunks)
        with b.unroll(held.chunks, name="chunk") as chunk:
            for half in range(2):
                for i, x in enumerate(held.get(chunk, half)):
                    self.rest.values[self.rest.cell(chunk, half, i)] = x
        self.largest, self.totals = [], []
        for half in range(2):
            total = b.registers(F32, 1, "total")
            total[0] = 0.0
            for rank in range(self.k):
                best = self.rest.fold(half, -math.inf, b.maximum).named("best")  # skips NaN
                if rank == 0:
                    self.largest.append(best)
                total[0] = total[0] + fast_exp(best - self.largest[half])
                first = self._first(half, best)
                with b.unroll(held.chunks, name="chunk") as chunk:
                    for i, x in enumerate(self.rest.get(chunk, half)):
                        taken = self._column(chunk, i) == first
                        self.rest.values[self.rest.cell(chunk, half, i)] = b.select(taken, math.nan, x)
            self.totals.append(hw.approximate("rcp.approx.ftz", total[0]))

    def _column(self, chunk: ValueLike, i: int) -> Value:
        """An element's column in the row, as fp32: exact."""
        column: Value = as_value(chunk, I32) * CHUNK + fragment_column(current().lane) + i
        return column.to(F32)

    def _first(self, half: int, best: Value) -> Value:
        """The first column that holds `best`."""
        b = current()
        first = b.registers(F32, 1, "first")
        first[0] = math.inf
        with b.unroll(self.held.chunks, name="chunk") as chunk:
            for i, x in enumerate(self.rest.get(chunk, half)):
                found = x == best
                first[0] = b.minimum(first[0], b.select(found, self._column(chunk, i), math.inf))
        return across_quad(first[0], lambda x, y: b.minimum(x, y)).named("first_column")

    def pair(self, chunk: ValueLike, half: int) -> tuple[Value, Value]:
        result = []
        for x, rest in zip(self.held.get(chunk, half), self.rest.get(chunk, half), strict=True):
            share = fast_exp(x - self.largest[half]) * self.totals[half]
            result.append(current().select(rest == rest, 0.0, share))  # NaN, which differs from itself: taken
        return result[0], result[1]


WHOLE_ROWS: dict[str, type[Quantized] | type[TopKSoftmax]] = {"quantize": Quantized, "top_k_softmax": TopKSoftmax}
