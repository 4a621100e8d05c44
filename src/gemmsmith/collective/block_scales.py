"""Block scales of A and B as the consumer warpgroups use them: the scales of a thread's accumulator elements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from math import gcd

from gemmsmith import hw
from gemmsmith.collective.accumulator import ColumnScales, RegisterIndex, ScaleFactor
from gemmsmith.collective.pipeline import PipelineState, PipelineTmaAsync
from gemmsmith.collective.staged_scales import (
    WARP_THREADS,
    LaneCopiedScales,
    StagedScales,
    TmaKMajorScales,
    TmaScales,
    make_staged_scales,
)
from gemmsmith.core.mma import (
    FRAGMENT_HALF_ROWS,
    LANES_PER_QUAD,
    N8_COLUMNS,
    WGMMA_M,
    fragment_column,
    fragment_row,
)
from gemmsmith.core.problem import SCALE_BLOCK
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import F32, I32
from gemmsmith.lang.values import Constant, RegisterArray, Value
from gemmsmith.tile_scheduler.tiles import WorkTile


class BlockScales:
    """The block scales of both operands.

    One warp issues the copies (`copying_lanes`, `set_tile_for_copies`, `copy`); the consumer warpgroups use the other
    methods.
    """

    def __init__(self, spec: KernelSpec, consumer_groups: int = 1) -> None:
        """Allocate the stages. `consumer_groups`: consumer warpgroups that take stages in turn."""
        self._row_halves, self._n = 2 * spec.warpgroup_rows // WGMMA_M, spec.config.tile[1]
        self.scaled_operands = make_staged_scales(spec, consumer_groups)
        self.a, self.b = (next((x for x in self.scaled_operands if x.role == role), None) for role in "ab")
        self.tma_scales = [x for x in self.scaled_operands if isinstance(x, TmaScales)]
        self.lane_copied_scales = [x for x in self.scaled_operands if isinstance(x, LaneCopiedScales)]
        self._num_copying_lanes = min(WARP_THREADS, max((x.num_scales for x in self.lane_copied_scales), default=0))

    @property
    def pipelines(self) -> list[PipelineTmaAsync]:
        """The pipelines whose barriers must be initialized."""
        return [x.pipeline for x in self.scaled_operands if isinstance(x, TmaKMajorScales)]

    def copying_lanes(self) -> AbstractContextManager[None]:
        """Enter a branch of the lanes of the scale warp that issue copies; each waits for stages and arrives."""
        k = current_builder()
        return k.when(k.lane < self._num_copying_lanes) if self._num_copying_lanes < WARP_THREADS else nullcontext()

    def set_tile_for_copies(self, tile: WorkTile) -> None:
        """Make the next copies those of a tile. The copying lanes execute it."""
        for scales in self.lane_copied_scales:
            scales.set_tile(tile)

    def copy(self, pipeline: PipelineTmaAsync, write_state: PipelineState) -> None:
        """Issue the copies of the tile's next scale block into an acquired stage, and arrive on its full barrier."""
        for scales in self.lane_copied_scales:
            scales.load_next(write_state.index)
        uses_cp_async = any(scales.uses_cp_async for scales in self.lane_copied_scales)
        uses_st_shared = not all(scales.uses_cp_async for scales in self.lane_copied_scales)
        pipeline.non_tma_producer_commit(
            write_state, self._num_copying_lanes, cp_async=uses_cp_async, st_shared=uses_st_shared
        )

    def init_consumer(self) -> None:
        """Declare a consumer warpgroup's state, before its first tile."""
        for scales in self.scaled_operands:
            scales.init_consumer()

    def skip(self, k_tiles: Value, tiles: Value | int) -> None:
        """Skip `tiles` tiles of `k_tiles` k-tiles, which are another warpgroup's."""
        for scales in self.scaled_operands:
            scales.skip(k_tiles, tiles)

    def begin_tile(self, tile: WorkTile, warpgroup_row: Value | int) -> None:
        """Begin a tile. `warpgroup_row`: the warpgroup's first row in the CTA's tile."""
        k = current_builder()
        for scales in self.scaled_operands:
            scales.begin_tile(tile)
        if self.a and self.a.scale.granularity == 1:
            self._row = (warpgroup_row + fragment_row(k.warp_index % 4, k.lane)).named("thread_row")
        else:
            self._row = (tile.a.mn % SCALE_BLOCK + warpgroup_row).named("row_in_scale_block")
        self._offset_in_scale_block = (tile.b.mn % SCALE_BLOCK).named("column_in_scale_block")

    def read(self, stage: Value) -> ThreadScales:
        """Load the scales of this thread's elements from a full stage."""
        for scales in self.scaled_operands:
            scales.wait()
        k = current_builder()
        rows = self._read_rows(self.a, stage) if self.a else None
        columns = blocks = None
        if self.b and self.b.scale.granularity == 1:
            columns = self._read_columns(self.b, stage)
        elif self.b:
            blocks = k.registers(F32, self.b.num_scales, "scale_b_frag")
            with k.unroll(self.b.num_scales, name="block") as block:
                self.b.read(stage, block, blocks, block)
        if self.scaled_operands:
            k.comment("wait until all lanes have read the stage that is released next")
            hw.sync_warp()
        for scales in self.scaled_operands:
            scales.release()
        return ThreadScales(
            self._row_halves, rows, columns, blocks, gcd(self._n, SCALE_BLOCK), self._offset_in_scale_block
        )

    def _read_rows(self, scales: StagedScales, stage: Value) -> RegisterArray:
        """Return the scale of the thread's row in each half of every 64 rows, or of each 64 rows if both have one."""
        k, per_row = current_builder(), scales.scale.granularity == 1
        registers = k.registers(F32, self._row_halves if per_row else self._row_halves // 2, "scale_a_frag")
        with k.unroll(len(registers), name="row_half" if per_row else "mma_m") as i:
            row = self._row + i // 2 * WGMMA_M + i % 2 * FRAGMENT_HALF_ROWS if per_row else self._row + i * WGMMA_M
            scales.read(stage, row if per_row else row // SCALE_BLOCK, registers, i)
        return registers

    def _read_columns(self, scales: StagedScales, stage: Value) -> RegisterArray:
        """Return the scales of the thread's two columns in every 8."""
        k = current_builder()
        registers = k.registers(F32, self._n // LANES_PER_QUAD, "scale_b_frag")
        with k.unroll(self._n // N8_COLUMNS, name="n8") as n8:
            scales.read(stage, n8 * N8_COLUMNS + fragment_column(k.lane), registers, n8 * 2, 2)
        return registers


class ThreadScales:
    """A thread's scales for one k-tile: per row, and per column or per 128-column scale block."""

    def __init__(
        self, row_halves: int, rows: RegisterArray | None, columns: RegisterArray | None, blocks: RegisterArray | None,
        width: int, offset_in_block: Value,
    ) -> None:  # fmt: skip
        """Combine the scales.

        Args:
            row_halves: Halves of every 64 rows, in each of which the thread has a row.
            rows: The scale of the thread's row in each of them, or of both rows of each 64.
            columns: The scales of the thread's columns, if B has one per column.
            blocks: The scales of the tile's blocks of 128 columns, if B has one per block.
            width: Columns, a divisor of 128, of which a tile's offset in its first block is a multiple.
            offset_in_block: The tile's offset in its first block.
        """
        self._row_halves, self._rows, self._columns, self._blocks = row_halves, rows, columns, blocks
        self._width, self._offset_in_block = width, offset_in_block
        if rows and blocks:
            k = current_builder()
            self._scale_ab = k.registers(F32, row_halves * len(blocks), "scale_ab")
            with k.unroll(row_halves, name="row_half") as row_half, k.unroll(len(blocks), name="block") as block:
                self._scale_ab[row_half * len(blocks) + block] = _multiply(self._row(row_half), blocks[block])

    def subtile_scales(self, mma_m: int, column: int, columns: int) -> Iterator[ColumnScales]:
        """Yield the scales of the `mma_m`-th 64 rows and of `columns` columns from `column` on."""
        groups, first_n8 = columns // N8_COLUMNS, column // N8_COLUMNS
        if self._columns:
            yield 0, groups, partial(self._column_scale, self._columns, mma_m * 2, first_n8)
        elif not self._blocks:
            yield 0, groups, lambda n8, half, i: self._row(half + mma_m * 2)
        else:
            first_columns = range(column, column + columns, N8_COLUMNS)
            for begin, group in groupby(first_columns, lambda x: x // self._width * self._width):
                same_scale = list(group)
                scale = partial(self._block_scale, self._blocks, mma_m * 2, begin)
                yield (same_scale[0] - column) // N8_COLUMNS, len(same_scale), scale

    def _row(self, row_half: Value) -> ScaleFactor:
        """Return the scale of the thread's row in a half of every 64 rows."""
        return self._rows[row_half // (self._row_halves // len(self._rows))] if self._rows else None

    def _column_scale(
        self, columns: RegisterArray, first_half: int, first_n8: int, n8: Value, half: Value, i: RegisterIndex
    ) -> Value:
        """Return the scale of an element if each column has its own."""
        return _multiply(self._row(half + first_half), columns[(n8 + first_n8) * 2 + i])

    def _block_scale(
        self, blocks: RegisterArray, first_half: int, column: int, n8: Value, half: Value, i: RegisterIndex
    ) -> Value:
        """Return the scale of an element if each block of 128 columns has its own."""
        if not self._rows:
            return self.at_column(blocks, Constant(I32, 0), column)
        return self.at_column(self._scale_ab, (half + first_half) * len(blocks), column)

    def at_column(self, scales: RegisterArray, first: Value, column: int) -> Value:
        """Return the scale of a column, from those of the blocks of 128, which are in registers from `first` on.

        A tile starts at a multiple of its width n, so each group of gcd(n, 128) columns is in one block: the last
        possible one or the one before.
        """
        first_block, last_block = column // SCALE_BLOCK, (column + SCALE_BLOCK - self._width) // SCALE_BLOCK
        if first_block == last_block:
            return scales[first + first_block]
        is_in_last = self._offset_in_block + column >= last_block * SCALE_BLOCK
        return current_builder().select(is_in_last, scales[first + last_block], scales[first + first_block])


def _multiply(x: ScaleFactor, y: Value) -> Value:
    return y if x is None else x * y
