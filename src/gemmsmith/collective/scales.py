"""Block scales of A and B: one number for 1 or 128 rows (of M or N) and 128 of K.

A warp of its own brings them into the mainloop's stages beside A and B, element by element, so that they may lie in any
layout, and as early as A and B. Each CTA brings its own, also where A and B are multicast: so those who read them hand
them back to their own CTA only, which takes no wider scope. A row beyond the operand's gets the last one's scale: what
that multiplies is never stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from math import gcd

from gemmsmith import hw
from gemmsmith.collective.accumulator import Factor, Factors, Index
from gemmsmith.collective.pipeline import PipelineState, PipelineTmaAsync
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.mma import CHUNK, HALF_ROWS, QUAD, WGMMA_M, fragment_column, fragment_row
from gemmsmith.core.pointer import Pointer
from gemmsmith.core.problem import SCALE_BLOCK, BoundProblem, Scale
from gemmsmith.core.spec import KernelSpec, ScaleSpec
from gemmsmith.lang.builder import current
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import F32, I32, I64, U32, U64, Type
from gemmsmith.lang.values import Constant, Registers, Value
from gemmsmith.schedule.tiles import WorkTile

WARP = 32


class StagedScales:
    """The scales of the operand number `index` for a tile of so many `rows`, fp32, in each stage. Kernel arguments:
    `scale_a` or `scale_b`, where they lie, how many there are along the operand's rows, and strides."""

    def __init__(self, index: int, scale: ScaleSpec, rows: int, stages: int) -> None:
        def parameter(what: str, attribute: str, type: Type = I64) -> Value:
            return k.parameter(f"{name}_{what}", type, lambda p: getattr(_scale(p, index).matrix, attribute))

        k, self.scale, self.count, name = current(), scale, scale.count(rows), f"scale_{'ab'[index]}"
        self._address = k.pointer(name, lambda p: Pointer(_scale(p, index).name))
        self._rows = parameter("rows", "rows", I32)
        self._row_stride = parameter("row_stride", "row_stride")
        self._k_stride = parameter("k_stride", "col_stride")
        self._batch_stride = parameter("batch_stride", "batch_stride")
        self.stages = k.shared(4 * self.count, stages=stages, name=f"scales of {'ab'[index]}")

    @staticmethod
    def of(spec: KernelSpec) -> list[StagedScales | None]:
        """Of A and of B; None for an operand without block scales."""
        sides = enumerate(zip(spec.scales, spec.config.tile[:2], strict=True))
        return [StagedScales(i, scale, rows, spec.config.stages) if scale else None for i, (scale, rows) in sides]

    def begin(self, first: Value, batch: Value, tile: WorkTile) -> None:
        """Before the copies for a tile, whose part of the operand begins at row `first`. Recorded in a warp."""
        k, nbytes = current(), self.scale.dtype.bytes
        row, block = first // self.scale.rows + k.lane, tile.k_tile(Constant(I32, 0))
        start = batch.to(I64) * self._batch_stride + row.to(I64) * self._row_stride + block.to(I64) * self._k_stride
        self._left = (self._rows - row).named("rows_left")
        self._at = k.var(I64, self._address.to(I64) + start * nbytes, "scale_at")
        step = self._k_stride * nbytes
        self._step = step if tile.backwards is None else k.select(tile.backwards, -step, step).named("step")

    def bring(self, stage: Value) -> None:
        """Starts the copies of the next k-block into a stage."""
        k, at = current(), self._at.get()
        with k.unroll(0, self.count, WARP, name="first") as first:
            source = (at + first.to(I64) * self._row_stride * self.scale.dtype.bytes).to(U64)
            with k.when(first + k.lane < self.count):
                self._copy(self.stages[stage].at(first + k.lane, 4), source, first < self._left)
        self._at.set(at + self._step)

    def _copy(self, to: SharedView, source: Value, exists: Value) -> None:
        k = current()
        if self.scale.dtype == FP32:
            hw.cp_async_copy(to.address, source, k.select(exists, 4, 0).to(U32), 4)
        else:
            one = k.registers(F32, 1, "scale")
            one[0] = hw.unpack_ue8m0(hw.load_global_narrow(source, exists, 8).to(U32))
            hw.store_shared(one, to.address)

    def read(self, stage: Value, number: Value | int, count: int = 1) -> Registers:
        """Loads `count` of them from the `number`-th on."""
        held = current().registers(F32, count, "scale")
        hw.load_shared(held, self.stages[stage].at(number, 4).address)
        return held


class BlockScales:
    """Those of both operands: the copies are one warp's work, the other methods are the math warpgroups'."""

    def __init__(self, spec: KernelSpec) -> None:
        self._halves, self._n = 2 * spec.warpgroup_rows // WGMMA_M, spec.config.tile[1]
        self.a, self.b = StagedScales.of(spec)

    @property
    def sides(self) -> list[StagedScales]:
        return [side for side in (self.a, self.b) if side]

    def begin_copies(self, tile: WorkTile) -> None:
        """Before those for a tile. Recorded in a warp."""
        for side, at in zip((self.a, self.b), tile.operands, strict=True):
            if side:
                side.begin(at.row, at.batch, tile)

    def copy(self, pipe: PipelineTmaAsync, write: PipelineState) -> None:
        """Starts the copies for the tile's next k-block into an acquired stage, which they complete."""
        for side in self.sides:
            side.bring(write.index)
        formats = {side.scale.dtype == FP32 for side in self.sides}
        pipe.beside_commit(write, copied=True in formats, stored=False in formats)

    def begin(self, tile: WorkTile, first_row: Value) -> None:
        """Before a tile, of which the warpgroup's rows are those from `first_row` on."""
        k, (at_a, at_b) = current(), tile.operands
        if self.a and self.a.scale.rows == 1:
            self._row = (first_row + fragment_row(k.warp_index % 4, k.lane)).named("row_of_thread")
        else:
            self._row = (at_a.row % SCALE_BLOCK + first_row).named("row_behind_border")
        self._behind = (at_b.row % SCALE_BLOCK).named("columns_behind_border")

    def read(self, stage: Value) -> ScalesOfThread:
        """Those of this thread's elements, from a stage that is full."""
        rows: list[Factor] = self._read_rows(self.a, stage) if self.a else [None] * self._halves
        each, blocks = None, list[Value]()
        if self.b and self.b.scale.rows == 1:
            each = self._read_each(self.b, stage)
        elif self.b:
            blocks = [self.b.read(stage, i)[0] for i in range(self.b.count)]
        if self.sides:
            hw.sync_warp()  # one lane hands the stage back for all
        return ScalesOfThread(rows, each, blocks, gcd(self._n, SCALE_BLOCK), self._behind)

    def _read_rows(self, side: StagedScales, stage: Value) -> list[Factor]:
        """Of each half of a block of 64 rows the thread's row."""
        if side.scale.rows == 1:
            numbers = [self._row + (i // 2 * WGMMA_M + i % 2 * HALF_ROWS) for i in range(self._halves)]
            return [side.read(stage, number)[0] for number in numbers]
        numbers = [(self._row + block * WGMMA_M) // SCALE_BLOCK for block in range(self._halves // 2)]
        return [x for number in numbers for x in [side.read(stage, number)[0]] * 2]

    def _read_each(self, side: StagedScales, stage: Value) -> Registers:
        """Of a chunk of 8 columns those of a thread's two."""
        k = current()
        held = k.registers(F32, self._n // QUAD, "column_scales")
        with k.unroll(self._n // CHUNK, name="chunk") as chunk:
            two = side.read(stage, chunk * CHUNK + fragment_column(k.lane), 2)
            for i in range(2):
                held[chunk * 2 + i] = two[i]
        return held


class ScalesOfThread:
    """Scales of a k-tile for a thread's elements: of its rows, and of `each` of its columns, or of `blocks` of 128. A
    tile begins `behind` a border of those, a multiple of `width`."""

    def __init__(
        self, rows: list[Factor], each: Registers | None, blocks: list[Value], width: int, behind: Value
    ) -> None:  # fmt: skip
        self._rows, self._each, self._width, self._behind = rows, each, width, behind
        self._factors = [[_product(row, block) for block in blocks] for row in rows]

    def of_part(self, block: int, column: int, columns: int) -> Iterator[Factors]:
        """Of a block of 64 rows, and of `columns` columns from `column` on."""
        halves = slice(2 * block, 2 * block + 2)
        if self._each:
            yield 0, columns // CHUNK, _of_each(self._rows[halves], self._each, column // CHUNK)
        elif not self._factors[0]:
            yield 0, columns // CHUNK, _alike(self._rows[halves])
        else:
            chunks = range(column, column + columns, CHUNK)
            for first, alike in groupby(chunks, lambda x: x // self._width * self._width):
                own = list(alike)
                rows = [self.at_column(row, first) for row in self._factors[halves]]
                yield (own[0] - column) // CHUNK, len(own), _alike(rows)

    def at_column(self, factors: list[Value], column: int) -> Value:
        """The factor of a column. A tile of n columns begins at any multiple of n: of gcd(n, 128) columns all have the
        same one, that of the last block of 128 that can be theirs, or of the one before."""
        near, far = column // SCALE_BLOCK, (column + SCALE_BLOCK - self._width) // SCALE_BLOCK
        if near == far:
            return factors[near]
        return current().select(self._behind + column >= far * SCALE_BLOCK, factors[far], factors[near])


def _scale(p: BoundProblem, index: int) -> Scale:
    found = p.scales[index]
    assert found
    return found


def _alike(rows: Sequence[Factor]) -> Callable[[Index, int], tuple[Factor, Factor]]:
    """The same factor for all columns of a half."""
    return lambda chunk, half: (rows[half], rows[half])


def _of_each(rows: Sequence[Factor], each: Registers, first: int) -> Callable[[Index, int], tuple[Value, Value]]:
    """Of each column its own."""

    def pair(chunk: Index, half: int) -> tuple[Value, Value]:
        left, right = (each[(chunk + first) * 2 + i] for i in range(2))
        return _product(rows[half], left), _product(rows[half], right)

    return pair


def _product(x: Factor, y: Value) -> Value:
    return y if x is None else x * y
