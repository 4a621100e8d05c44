"""The mainloop of a consumer warpgroup with promoted sums (CUTLASS: CollectiveMma with GmmaFP8Accumulation)."""

from __future__ import annotations

from contextlib import nullcontext

from gemmsmith.collective.block_scales import BlockScales, WarpgroupScales
from gemmsmith.collective.pipeline import OrderedSequenceBarrier
from gemmsmith.collective.promotion import Promotion
from gemmsmith.collective.tma_mainloop import TmaMainloop
from gemmsmith.kernels.wgmma_mainloop import WgmmaMainloop
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import I32, PRED
from gemmsmith.lang.values import Value
from gemmsmith.tile_scheduler.tiles import WorkTile


class PromotedMainloop:
    """Multiplies each k-tile of a tile separately, and adds the product, times its scales, to the fp32 accumulator.

    A k-tile's product is promoted (added by CUDA cores), subtile by subtile, while other wgmma groups run: those of
    other k-tiles in flight, or of other warpgroups.
    """

    def __init__(
        self, loads: TmaMainloop, scales: BlockScales, warpgroup_row: Value | int,
        order: OrderedSequenceBarrier | None = None,
    ) -> None:  # fmt: skip
        k, self._loads, self._order = current_builder(), loads, order
        self._rows, self._scales = (warpgroup_row, loads.spec.warpgroup_rows), WarpgroupScales(scales, warpgroup_row)
        self._read, self._promotion = loads.pipeline.consumer_start_state(), Promotion(loads.spec)
        self.accumulator = self._promotion.accumulator
        self._next_stage_is_full = k.var(PRED, False, "next_stage_is_full")
        self._k_tiles_remaining = k.var(I32, 0, "k_tiles_remaining") if order else None

    def skip(self, tiles: Value | int, k_tiles: Value) -> None:
        """Skip `tiles` tiles of `k_tiles` k-tiles, which are another warpgroup's."""
        self._read.skip(k_tiles * tiles)
        self._scales.skip_tiles(k_tiles, tiles)
        self._next_stage_is_full.set(False)

    def begin_tile(self, tile: WorkTile) -> None:
        """Clear the accumulator."""
        self.accumulator.clear()

    def mma(self, tile: WorkTile) -> None:
        """Multiply and promote a tile's k-tiles, as their stages become full."""
        k = current_builder()
        self._scales.begin_tile(tile)
        if self._order and self._k_tiles_remaining:
            self._k_tiles_remaining.set(tile.k_tiles)
            with k.when(tile.k_tiles > 0):
                self._order.wait()
        if not tile.a.is_clipped:
            self._steps(tile)
            return
        has_rows = (tile.m + self._rows[0] < tile.a.group_end).named("has_rows_of_group")
        with k.when(has_rows):
            self._steps(tile)
        with k.when(~has_rows):
            self._release_all(tile)

    def _steps(self, tile: WorkTile) -> None:
        k, in_flight = current_builder(), self._promotion.k_tiles_in_flight
        k.comment("mainloop")
        with k.range(tile.k_tiles // in_flight, name="k_tile_group" if in_flight > 1 else "k_tile"):
            self._step(in_flight)
        if in_flight > 1:
            with k.range((tile.k_tiles % in_flight).named("remaining_k_tiles"), name="k_tile"):
                self._step(1)

    def _release_all(self, tile: WorkTile) -> None:
        """Release the stages of a tile whose group has no rows in this warpgroup's part: nothing is multiplied."""
        k = current_builder()
        k.comment("no row of the group: only release the stages")
        with k.range(tile.k_tiles, name="k_tile"):
            self._loads.consumer_wait(self._read, self._next_stage_is_full.get())
            self._scales.skip()  # and a warp's lanes have seen the stage full before one of them releases it
            self._loads.pipeline.consumer_release(self._read.index)
            self._read.advance()
            self._next_stage_is_full.set(False)
        if self._order:
            with k.when(tile.k_tiles > 0):
                self._order.arrive()

    def _step(self, count: int) -> None:
        """Multiply and promote `count` k-tiles, whose MMAs are in flight together.

        For each subtile the MMAs of all `count` k-tiles are issued; then each is waited for and promoted in turn.
        """
        k, pipeline, promotion, stages = current_builder(), self._loads.pipeline, self._promotion, list[Value]()
        for subtile in promotion.subtiles:
            is_first, is_last = subtile == promotion.subtiles[0], subtile == promotion.subtiles[-1]
            for i in range(count):
                if is_first:
                    self._loads.consumer_wait(self._read, None if i else self._next_stage_is_full.get())
                    stages.append(self._read.index.named("stage"))
                    # before wgmma, during which shared memory is slow
                    promotion.scales[i] = self._scales.read(stages[i])
                    self._read.advance()
                a, b = self._loads.stage(stages[i])
                promotion.multiply(i, subtile, a.rows(*self._rows), b)
                if is_first:
                    self._scales.release()  # while wgmma runs, which hides the fence
            if self._order and self._k_tiles_remaining and is_first:
                self._k_tiles_remaining.set(self._k_tiles_remaining.get() - count)
                with k.when(self._k_tiles_remaining.get() == 0):  # the tile needs no further stage
                    self._order.arrive()
            for i in range(count):
                promotion.wait(i, pending=count - 1 - i)
                if is_last:
                    pipeline.consumer_release(stages[i])
                    if i == count - 1:
                        remaining = self._k_tiles_remaining
                        with k.when(remaining.get() > 0) if remaining else nullcontext():
                            # tested while promotion.add runs
                            self._next_stage_is_full.set(pipeline.consumer_test_wait(self._read))
                promotion.add(i, subtile)


def make_consumer(
    loads: TmaMainloop, warpgroup_row: Value | int, scales: BlockScales | None = None,
    order: OrderedSequenceBarrier | None = None,
) -> WgmmaMainloop | PromotedMainloop:  # fmt: skip
    """Return the mainloop of a consumer warpgroup, with promoted sums if the kernel's spec asks for them."""
    if loads.spec.promoted:
        return PromotedMainloop(loads, scales or BlockScales(loads.spec), warpgroup_row, order)
    return WgmmaMainloop(loads, warpgroup_row, order)
