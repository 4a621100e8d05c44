"""The mainloop of a consumer warpgroup (CUTLASS: CollectiveMma)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gemmsmith import hw
from gemmsmith.collective.pipeline import LaggedRelease, OrderedSequenceBarrier
from gemmsmith.collective.register_a import make_accumulator
from gemmsmith.collective.tma_mainloop import TmaMainloop
from gemmsmith.core.mma import WGMMA_M
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.values import Value
from gemmsmith.tile_scheduler.tiles import WorkTile


class WgmmaMainloop:
    """Multiplies the k-tiles of a tile by wgmma, in a consumer warpgroup.

    The wgmma group of one k-tile stays in flight while the next is issued, so each stage is released a k-tile later.
    """

    def __init__(
        self, loads: TmaMainloop, warpgroup_row: Value | int, order: OrderedSequenceBarrier | None = None
    ) -> None:
        """Declare the consumer's variables. `order` lets warpgroups with tiles of their own (pingpong) take turns."""
        self._loads, self._rows, self._order = loads, (warpgroup_row, loads.spec.warpgroup_rows), order
        self._read, self._release = loads.pipeline.consumer_start_state(), LaggedRelease(loads.pipeline)
        self.accumulator = make_accumulator(loads.spec)
        self._ragged_k = loads.ragged_k

    def skip(self, tiles: Value | int, k_tiles: Value) -> None:
        """Skip `tiles` tiles of `k_tiles` k-tiles, which are another warpgroup's."""
        self._read.skip(tiles * k_tiles)

    def begin_tile(self, tile: WorkTile) -> None:
        """Clear the accumulator of a tile without k-tiles; others overwrite it."""
        with current_builder().when(tile.k_tiles == 0):
            self.accumulator.clear()

    def mma(self, tile: WorkTile, after_k_tile: Callable[[WorkTile, Value], None] | None = None) -> None:
        """Multiply a tile's k-tiles, as their stages become full.

        If the tile ends early because its group does, only as many blocks of 64 rows are multiplied as the group has
        rows for; or, if columns are grouped, only the columns that it has, rounded up to one of `accumulator.widths`.
        `after_k_tile(tile, k_tile)` is recorded after each k-tile.
        """
        if self._order:
            self._order.wait()
        rows, n = self._rows[1], self.accumulator.n
        if tile.a.is_clipped:
            parts = [(x, x, n) for x in range(0, rows + 1, WGMMA_M)]
            extent = (tile.a.group_end - (tile.m + self._rows[0])).named("rows_of_group")
            self._mma_part(tile, extent, parts, after_k_tile)
        elif tile.b.is_clipped:
            parts = [(x, rows, x) for x in self.accumulator.widths]
            extent = (tile.b.group_end - tile.n).named("columns_of_group")
            self._mma_part(tile, extent, parts, after_k_tile)
        else:
            self._mma(tile, rows, n, after_k_tile)

    def _mma_part(
        self, tile: WorkTile, extent: Value, parts: Sequence[tuple[int, int, int]],
        after_k_tile: Callable[[WorkTile, Value], None] | None,
    ) -> None:  # fmt: skip
        """Multiply the smallest part of the tile that covers `extent` rows or columns, by a branch for each part.

        `parts`: (rows or columns that the part covers, rows to multiply, columns to multiply), ascending. Tests go from
        the largest part down.
        """
        k, (*smaller, (_, rows, n)) = current_builder(), parts
        if not smaller:
            self._mma(tile, rows, n, after_k_tile)
            return
        with k.when(extent > smaller[-1][0]):
            self._mma(tile, rows, n, after_k_tile)
        with k.otherwise():
            self._mma_part(tile, extent, smaller, after_k_tile)

    def _mma(self, tile: WorkTile, rows: int, n: int, after_k_tile: Callable[[WorkTile, Value], None] | None) -> None:
        """Multiply the first `rows` rows of this warpgroup and the first `n` columns; the other sums become zero."""
        k = current_builder()
        self.accumulator.clear_outside(rows, n)  # the epilogue reads all, and drops what is past the end
        if not rows:
            self._release_all(tile, after_k_tile)
            return
        k.comment("mainloop")
        with k.range(tile.k_tiles, name="k_tile") as k_tile:
            self._loads.consumer_wait(self._read)
            a, b = self._loads.stage(self._read)
            if self._ragged_k:
                self._ragged_k.zero_past_end(tile, k_tile, (a, b))
            self.accumulator.multiply(a.rows(self._rows[0], rows), b, k_tile > 0, n)
            self.accumulator.wait(pending=1)
            self._release.release_previous(k_tile, self._read)
            self._read.advance()
            if after_k_tile:
                after_k_tile(tile, k_tile)
        if self._order:
            self._order.arrive()
        self.accumulator.wait(pending=0)
        self._release.release_last(tile.k_tiles)

    def _release_all(self, tile: WorkTile, after_k_tile: Callable[[WorkTile, Value], None] | None) -> None:
        """Release the stages of a tile whose group has no rows in this warpgroup's part: nothing is multiplied.

        The other consumer warpgroups may have rows, and the producer waits for all of them.
        """
        k = current_builder()
        k.comment("no row of the group: only release the stages")
        with k.range(tile.k_tiles, name="k_tile") as k_tile:
            self._loads.consumer_wait(self._read)
            hw.sync_warp()  # all lanes have seen the stage full before one releases it
            self._release.release_previous(k_tile, self._read)
            self._read.advance()
            if after_k_tile:
                after_k_tile(tile, k_tile)
        self._release.release_last(tile.k_tiles)
        if self._order:  # not before: the other warpgroup would wait for a phase of which this one has not waited
            self._order.arrive()
