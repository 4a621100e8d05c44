"""Block scales of A and B, as the math warpgroups use them: the factors of a thread's elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from math import gcd

from gemmsmith import hw
from gemmsmith.collective.accumulator import Factor, Factors, Index
from gemmsmith.collective.pipeline import PipelineState, PipelineTmaAsync
from gemmsmith.collective.staged_scales import WARP, BoxedScales, CopiedScales, LoadedScales, StagedScales, staged
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.mma import CHUNK, HALF_ROWS, QUAD, WGMMA_M, fragment_column, fragment_row
from gemmsmith.core.problem import SCALE_BLOCK
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import F32
from gemmsmith.lang.values import Registers, Value
from gemmsmith.schedule.tiles import WorkTile


class BlockScales:
    """Those of both operands: the copies are one warp's work, the other methods are the math warpgroups'."""

    def __init__(self, spec: KernelSpec, readers: int = 1) -> None:
        """`readers`: as of the Mainloop."""
        self._halves, self._n = 2 * spec.warpgroup_rows // WGMMA_M, spec.config.tile[1]
        self.sides = staged(spec, readers)
        self.a, self.b = (next((side for side in self.sides if side.index == i), None) for i in range(2))
        self.loaded = [side for side in self.sides if isinstance(side, LoadedScales)]
        self.copied = [side for side in self.sides if isinstance(side, CopiedScales)]
        self._lanes = min(WARP, max((side.count for side in self.copied), default=0))

    @property
    def pipelines(self) -> list[PipelineTmaAsync]:
        """What has barriers to initialize."""
        return [side.pipe for side in self.sides if isinstance(side, BoxedScales)]

    def lanes(self) -> AbstractContextManager[None]:
        """Those of a warp that copy: each waits for stages, and arrives."""
        k = current()
        return k.when(k.lane < self._lanes) if self._lanes < WARP else nullcontext()

    def begin_copies(self, tile: WorkTile) -> None:
        """Before those for a tile. Recorded in the lanes that copy."""
        for side in self.copied:
            side.begin(tile.operands[side.index], tile)

    def copy(self, pipe: PipelineTmaAsync, write: PipelineState) -> None:
        """Starts the copies for the tile's next k-block into an acquired stage, which they complete."""
        for side in self.copied:
            side.bring(write.index)
        formats = {side.scale.dtype == FP32 for side in self.copied}
        pipe.beside_commit(write, self._lanes, copied=True in formats, stored=False in formats)

    def start(self) -> None:
        """Before the first tile."""
        for side in self.sides:
            side.start()

    def skip(self, k_tiles: Value, tiles: Value | int) -> None:
        """So many tiles of so many k-tiles, which are another warpgroup's."""
        for side in self.sides:
            side.skip(k_tiles, tiles)

    def begin(self, tile: WorkTile, first_row: Value | int) -> None:
        """Before a tile, of which the warpgroup's rows are those from `first_row` on."""
        k, (at_a, at_b) = current(), tile.operands
        for side in self.sides:
            side.begin_tile(tile)
        if self.a and self.a.scale.rows == 1:
            self._row = (first_row + fragment_row(k.warp_index % 4, k.lane)).named("row_of_thread")
        else:
            self._row = (at_a.row % SCALE_BLOCK + first_row).named("row_behind_border")
        self._behind = (at_b.row % SCALE_BLOCK).named("columns_behind_border")

    def read(self, stage: Value) -> ScalesOfThread:
        """Those of this thread's elements, from a stage that is full."""
        for side in self.sides:
            side.wait()
        rows: list[Factor] = self._read_rows(self.a, stage) if self.a else [None] * self._halves
        each, blocks = None, list[Value]()
        if self.b and self.b.scale.rows == 1:
            each = self._read_each(self.b, stage)
        elif self.b:
            blocks = [self.b.read(stage, i)[0] for i in range(self.b.count)]
        if self.sides:
            hw.sync_warp()  # one lane hands the stage back for all
        for side in self.sides:
            side.release()
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
