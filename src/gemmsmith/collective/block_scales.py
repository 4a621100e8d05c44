"""Block scales of A and B as the consumer warpgroups use them: the scales of a thread's accumulator elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import gcd

from gemmsmith import hw
from gemmsmith.collective.accumulator import ColumnScales, RegisterIndex, ScaleFactor
from gemmsmith.collective.pipeline import PipelineState, PipelineTmaAsync
from gemmsmith.collective.staged_scales import (
    LaneCopiedScales,
    LaneCopies,
    TmaKMajorScales,
    TmaScales,
    make_staged_scales,
)
from gemmsmith.core.mma import (
    FRAGMENT_HALF_ROWS,
    LANES_PER_QUAD,
    N8_COLUMNS,
    WARP_THREADS,
    WGMMA_M,
    fragment_column,
    fragment_row,
)
from gemmsmith.core.problem import SCALE_BLOCK
from gemmsmith.core.product import ROLES
from gemmsmith.core.scale_spec import ScaleSpec
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import F32, I32
from gemmsmith.lang.values import Constant, RegisterArray, Value
from gemmsmith.tile_scheduler.tiles import WorkTile


class BlockScales:
    """The block scales of both operands, in stages of shared memory.

    TMA loads `tma_scales`. One warp copies `lane_copied_scales`, as `start_copies` records. WarpgroupScales reads both.
    """

    def __init__(self, spec: KernelSpec, consumer_groups: int = 1) -> None:
        """Allocate the stages. `consumer_groups`: consumer warpgroups that take stages in turn (pingpong), else 1."""
        self.row_halves, self.n = 2 * spec.warpgroup_rows // WGMMA_M, spec.config.tile[1]
        self.scaled_operands = make_staged_scales(spec, consumer_groups)
        self.tma_scales = [x for x in self.scaled_operands if isinstance(x, TmaScales)]
        self.lane_copied_scales = [x for x in self.scaled_operands if isinstance(x, LaneCopiedScales)]
        self.num_copying_lanes = min(WARP_THREADS, max((x.num_scales for x in self.lane_copied_scales), default=0))

    @property
    def pipelines(self) -> list[PipelineTmaAsync]:
        return [x.pipeline for x in self.scaled_operands if isinstance(x, TmaKMajorScales)]

    def copying_lanes(self) -> AbstractContextManager[None]:
        """Enter a branch of those lanes of the scale warp that have scales to copy; only they wait and arrive."""
        k = current_builder()
        return k.when(k.lane < self.num_copying_lanes) if self.num_copying_lanes < WARP_THREADS else nullcontext()

    def start_copies(self, tile: WorkTile) -> Callable[[PipelineTmaAsync, PipelineState], None]:
        """Start the copies of a tile's scales, and return the function that copies those of the next k-tile.

        The function takes a pipeline and a state of it at an acquired stage, and arrives on the stage's full barrier.
        The copying lanes execute both.
        """
        copied = [LaneCopies(x, tile) for x in self.lane_copied_scales]
        cp_async, st_shared = (any(x.uses_cp_async == y for x in self.lane_copied_scales) for y in (True, False))

        def copy_next(pipeline: PipelineTmaAsync, write: PipelineState) -> None:
            """Copy the scales of the tile's next k-tile into the stage of `write`."""
            for x in copied:
                x.copy_next(write.index)
            pipeline.non_tma_producer_commit(
                write, self.num_copying_lanes, cp_async=cp_async, st_shared=st_shared, of="scales"
            )

        return copy_next


ReadScales = Callable[[Value, RegisterArray, Value, int], None]
"""(first, registers, index, count): load `count` scales of a k-tile, from `first` on, into registers from `index`."""


class WarpgroupScales:
    """Reads the block scales of both operands, in a consumer warpgroup.

    For each tile call `begin_tile`, and for each of its k-tiles `read` and then `release`, or `skip`.
    """

    def __init__(self, scales: BlockScales, warpgroup_row: Value | int) -> None:
        """Declare the warpgroup's state. `warpgroup_row`: its first row in the CTA's tile."""
        self._scales, self._warpgroup_row = scales, warpgroup_row
        self._readers = [(x, x.start_reader()) for x in scales.scaled_operands]

    def skip_tiles(self, k_tiles: Value, tiles: Value | int) -> None:
        """Skip `tiles` tiles of `k_tiles` k-tiles, which are another warpgroup's."""
        for _, reader in self._readers:
            reader.skip(k_tiles, tiles)

    def begin_tile(self, tile: WorkTile) -> None:
        """Begin a tile, each of whose k-tiles is then read (`read`, `release`) or skipped (`skip`).

        Locate the thread's row and the tile's columns: among the tile's rows if each row has a scale, else from the
        begin of the tile's first scale block on.
        """
        k, self._tile = current_builder(), tile
        for _, reader in self._readers:
            reader.begin_tile()
        row_period, column_period = (
            max([SCALE_BLOCK, *(x.scale.period for x, _ in self._readers if x.role == role)]) for role in ROLES
        )
        if any(x.role == "a" and x.scale.granularity == 1 for x, _ in self._readers):
            self._row = (self._warpgroup_row + fragment_row(k.warp_index % 4, k.lane)).named("thread_row")
        else:
            self._row = (tile.a.mn % row_period + self._warpgroup_row).named("row_in_scale_block")
        offset = (tile.b.mn % column_period).named("column_in_scale_block")
        self._columns = ColumnBlocks(column_period, gcd(self._scales.n, column_period), offset)

    def read(self, stage: Value) -> ThreadScales:
        """Load the scales of this thread's elements of the next k-tile; call `release` after it.

        `stage` is full.
        """
        for _, reader in self._readers:
            reader.wait(self._tile)
        rows = columns = blocks = None
        for x, reader in self._readers:
            read: ReadScales = partial(reader.read, stage)
            if x.role == "a":
                rows = self._read_rows(x.scale, read)
            elif x.scale.granularity == 1:
                columns = self._read_columns(read)
            else:
                blocks = self._read_blocks(x.num_scales, read)
        return ThreadScales(self._scales.row_halves, rows, columns, blocks, self._columns)

    def release(self) -> None:
        """Release the scales that `read` has loaded; the mainloop's stage may be released after it."""
        if any(isinstance(x, TmaScales) for x, _ in self._readers):
            hw.fence_proxy_async()  # orders the reads before TMA writes the next scales
        if self._readers:
            current_builder().comment("wait until all lanes have read the stage that is released next")
            hw.sync_warp()
        for _, reader in self._readers:
            reader.release(self._tile)

    def skip(self) -> None:
        """Wait for and release the scales of the next k-tile, which this warpgroup does not need."""
        for _, reader in self._readers:
            reader.wait(self._tile)
        hw.sync_warp()  # all lanes have waited
        for _, reader in self._readers:
            reader.release(self._tile)

    def _read_rows(self, scale: ScaleSpec, read: ReadScales) -> RegisterArray:
        """Return the thread's scales of A, of which it has two rows (halves) in every 64.

        There is a register for each half, or for both halves of 64 rows if they share a scale.
        """
        k, per_row, row_halves = current_builder(), scale.granularity == 1, self._scales.row_halves
        per_half = per_row or scale.interleaved  # rows of a half are in groups of 8, of one matrix each
        registers = k.registers(F32, row_halves if per_half else row_halves // 2, "scale_a_frag")
        with k.unroll(len(registers), name="row_half" if per_half else "mma_m") as i:
            mma_m, half = (i // 2, i % 2) if per_half else (i, Constant(I32, 0))
            row = self._row + mma_m * WGMMA_M
            index = row + half * FRAGMENT_HALF_ROWS if per_row else row // scale.period * scale.matrices + half
            read(index, registers, i, 1)
        return registers

    def _read_columns(self, read: ReadScales) -> RegisterArray:
        """Return the scales of the thread's two columns in every 8, in their order. `read` loads scales."""
        k = current_builder()
        registers = k.registers(F32, self._scales.n // LANES_PER_QUAD, "scale_b_frag")
        with k.unroll(self._scales.n // N8_COLUMNS, name="n8") as n8:
            read(n8 * N8_COLUMNS + fragment_column(k.lane), registers, n8 * 2, 2)
        return registers

    def _read_blocks(self, count: int, read: ReadScales) -> RegisterArray:
        """Return the scales of the tile's `count` blocks of 128 columns. `read` loads scales."""
        k = current_builder()
        registers = k.registers(F32, count, "scale_b_frag")
        with k.unroll(count, name="block") as block:
            read(block, registers, block, 1)
        return registers


@dataclass(frozen=True)
class ColumnBlocks:
    """The blocks of 128 columns that have one scale, in a tile.

    Attributes:
        period: Columns after which a matrix's next block begins: 128, or 256 if the columns of two matrices alternate
            in groups of 8.
        width: Columns, a divisor of the period, of which a tile's offset in its first period is a multiple.
        offset: The tile's offset in its first period.
    """

    period: int
    width: int
    offset: Value

    def at_column(self, scales: RegisterArray, first: Value, column: int, n8: Value) -> Value:
        """Return the scale of the `n8`-th 8 columns of the tile, which are among the `width` columns from `column` on.

        A tile starts at a multiple of `width` within a period, so these are in one period. Its number is known at build
        time, or it is one of two numbers, depending on the tile's `offset`. `n8` says which of two alternating matrices
        the columns belong to.
        """
        matrices, first_period = self.period // SCALE_BLOCK, column // self.period
        first, last_period = first + n8 % matrices, (column + self.period - self.width) // self.period
        if first_period == last_period:
            return scales[first + first_period * matrices]
        is_in_last = self.offset + column >= last_period * self.period
        return current_builder().select(
            is_in_last, scales[first + last_period * matrices], scales[first + first_period * matrices]
        )


class ThreadScales:
    """A thread's scales for one k-tile: per row, and per column or per 128-column scale block."""

    def __init__(
        self, row_halves: int, rows: RegisterArray | None, columns: RegisterArray | None, blocks: RegisterArray | None,
        column_blocks: ColumnBlocks,
    ) -> None:  # fmt: skip
        """Keep the scales; if there are `rows` and `blocks`, multiply each pair once.

        `row_halves`: halves of 64 rows in the warpgroup's tile; the thread has a row in each. `rows`: scales of A: of
        the thread's row in each half, or of both its rows of each 64; None: A has none. `columns`, `blocks`: the scales
        of the thread's columns, or of the tile's blocks of 128 columns, if B has such; else None.
        """
        self._row_halves, self._rows, self._columns, self._blocks = row_halves, rows, columns, blocks
        self._column_blocks = column_blocks
        if rows and blocks:
            k = current_builder()
            self._scale_ab = k.registers(F32, row_halves * len(blocks), "scale_ab")
            with k.unroll(row_halves, name="row_half") as row_half, k.unroll(len(blocks), name="block") as block:
                self._scale_ab[row_half * len(blocks) + block] = _multiply(self._row(row_half), blocks[block])

    def subtile_scales(self, mma_m: int, column: int, columns: int) -> Iterator[ColumnScales]:
        """Yield the scales of a subtile: for each range of its columns, a function that returns an element's scale.

        There are several ranges if 128-column blocks of scales can begin within the subtile.
        """
        groups, first_n8 = columns // N8_COLUMNS, column // N8_COLUMNS
        if columns_of_b := self._columns:

            def of_column(n8: Value, half: Value, i: RegisterIndex) -> Value:
                return _multiply(self._row(half + mma_m * 2), columns_of_b[(n8 + first_n8) * 2 + i])

            yield 0, groups, of_column
        elif not self._blocks:
            yield 0, groups, lambda n8, half, i: self._row(half + mma_m * 2)
        else:
            first_columns, width = range(column, column + columns, N8_COLUMNS), self._column_blocks.width
            for begin, group in groupby(first_columns, lambda x: x // width * width):
                same_scale = list(group)
                scale = partial(self._block_scale, self._blocks, mma_m * 2, begin, first_n8)
                yield (same_scale[0] - column) // N8_COLUMNS, len(same_scale), scale

    def _row(self, row_half: Value) -> ScaleFactor:
        """Return A's scale of the thread's row in half `row_half`, counted over all 64 rows; None: A has no scales."""
        return self._rows[row_half // (self._row_halves // len(self._rows))] if self._rows else None

    def _block_scale(
        self, blocks: RegisterArray, first_half: int, column: int, first_n8: int, n8: Value, half: Value,
        i: RegisterIndex,
    ) -> Value:  # fmt: skip
        """Return the scale of an element if each block of 128 columns has its own, times A's if A has scales.

        `first_half` and `first_n8` locate the subtile in the tile, in halves of 64 rows and in groups of 8 columns.
        `column`: first of the columns, of ColumnBlocks.width, around the element.
        """
        at_column = self._column_blocks.at_column
        if not self._rows:
            return at_column(blocks, Constant(I32, 0), column, n8 + first_n8)
        return at_column(self._scale_ab, (half + first_half) * len(blocks), column, n8 + first_n8)


def _multiply(x: ScaleFactor, y: Value) -> Value:
    """None counts as 1."""
    return y if x is None else x * y
