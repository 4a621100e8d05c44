"""What the rungs share: the product's arguments, element by element, and matrices in shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from gemmsmith import hw
from gemmsmith.core.dtypes import DType
from gemmsmith.core.problem import Matrix
from gemmsmith.epilogue.device.addressed import Addressed
from gemmsmith.epilogue.device.outputs import store_rounded
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import F32, I32, U32, Type
from gemmsmith.lang.values import Constant, RegisterRows, Registers, Value, ValueLike

ZERO = Constant(I32, 0)
"""The batch: rungs have one."""


@dataclass(frozen=True)
class Operands:
    """What a rung is launched for: the matrices "a" (m, k), "b" (k, n) and "d" (m, n), which lie at Pointers of these
    names."""

    arrays: Mapping[str, Matrix]

    @property
    def m(self) -> int:
        return self.arrays["d"].rows

    @property
    def n(self) -> int:
        return self.arrays["d"].cols

    @property
    def k(self) -> int:
        return self.arrays["a"].cols


class Product:
    """D = A B of `dtype`, stored as `output`, in tiles of rows x columns, one a CTA. Kernel arguments: m, n, k, and of
    each matrix its address and strides. The CTA's tile begins at element (`row`, `column`)."""

    def __init__(self, dtype: DType, output: DType, rows: int, columns: int) -> None:
        k = current()
        k.grid, k.persistent = lambda p: -(-p.m // rows) * -(-p.n // columns), False
        self.m, self.n, self.k = (k.parameter(x, bind=attrgetter(x)) for x in "mnk")
        self.a, self.b = Addressed("a", "a", dtype, m=True, n=True), Addressed("b", "b", dtype, m=True, n=True)
        self.d = Addressed("d", "d", output, m=True, n=True)
        hw.grid_dependency_wait()
        self.tiles_m, self.tiles_n = (self.m + (rows - 1)) // rows, (self.n + (columns - 1)) // columns
        self._rows, self._columns = rows, columns
        self.begin(hw.block_index() // self.tiles_n, hw.block_index() % self.tiles_n)

    def begin(self, m: Value, n: Value) -> None:
        """The CTA's tile is the m-th from above and the n-th from the left."""
        self.row, self.column = (m * self._rows).named("first_row"), (n * self._columns).named("first_column")

    def in_bands(self, group: int) -> None:
        """The blocks' tiles run down bands that are `group` tiles wide: so blocks that run at the same time share rows
        of A and columns of B."""
        of_band = (self.tiles_m * group).named("of_band")
        band, within = (hw.block_index() // of_band).named("band"), (hw.block_index() % of_band).named("within")
        width = current().minimum(self.tiles_n - band * group, group).named("width")
        self.begin(within // width, band * group + within % width)

    def load_a(self, row: Value, depth: Value) -> Value:
        """Element (row, depth) of A as fp32; zero outside."""
        return self.a.load(self.a.at(ZERO, row, depth), (row < self.m) & (depth < self.k))

    def load_b(self, depth: Value, column: Value) -> Value:
        """Element (depth, column) of B as fp32; zero outside."""
        return self.b.load(self.b.at(ZERO, depth, column), (depth < self.k) & (column < self.n))

    def store(self, row: Value, column: Value, value: Value) -> None:
        """Element (row, column) of D, if there is one."""
        store_rounded(value, self.d.at(ZERO, row, column), (row < self.m) & (column < self.n), self.d.dtype)


class SharedMatrix:
    """rows x columns words in shared memory, `pitch` of them from one row to the next."""

    def __init__(self, name: str, rows: int, columns: int, pitch: int = 0, type: Type = F32, stages: int = 1) -> None:
        self._pitch, self._type = pitch or columns, type
        self._buffer = current().shared(4 * rows * self._pitch, stages=stages, name=name)
        self.stage: ValueLike = 0

    def address(self, row: ValueLike, column: ValueLike) -> Value:
        """The address of an element in shared memory."""
        offset = (row * self._pitch + column) * 4
        place = self._buffer[self.stage]
        return place.address + offset.to(U32) if isinstance(offset, Value) else place.at(offset).address

    def load(self, row: ValueLike, column: ValueLike, count: int = 1) -> Registers:
        """`count` neighbors in a row: 1, 2 or 4."""
        values = current().registers(self._type, count, "loaded")
        hw.load_shared(values, self.address(row, column))
        return values

    def store(self, row: ValueLike, column: ValueLike, values: Registers) -> None:
        """Stores `values` from an element on."""
        hw.store_shared(values, self.address(row, column))

    def put(self, row: ValueLike, column: ValueLike, value: Value) -> None:
        """Stores one element."""
        hw.store_shared_word(self.address(row, column), value, "one")


def zeros(rows: int, count: int, type: Type = F32, name: str = "results") -> RegisterRows:
    """Results of a thread."""
    k = current()
    found = k.register_rows(type, rows, count, name)
    with k.unroll(rows, name="i") as i, k.unroll(count, name="j") as j:
        found[i][j] = 0
    return found
