"""The producer warpgroup of a GEMM that gathers rows of an operand: all of its threads copy them by cp.async."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.block_scales import BlockScales
from gemmsmith.collective.gathered_operand import GatheredOperand
from gemmsmith.collective.tma_mainloop import TmaMainloop
from gemmsmith.core.mma import THREADS_PER_WARPGROUP
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import I32
from gemmsmith.lang.values import Constant

SCALE_WARP = 1
"""The warp that copies the scales that TMA cannot load."""


def gathering_producer(k: Builder, mainloop: TmaMainloop, operand: GatheredOperand, scales: BlockScales) -> None:
    """Record the producer warpgroup: all its threads copy rows of `operand` into the stages, by index.

    One thread of warp 0 also issues the TMA loads of the other operand. Lanes of warp SCALE_WARP also copy scales that
    TMA cannot load.
    """
    pipeline, tile_k = mainloop.pipeline, operand.tile.k
    producer, rows, k_remaining = mainloop.start_producer(), operand.start_copies(), k.var(I32, 0, "k_remaining")
    with mainloop.scheduler.tile_loop() as tile:
        rows.set_tile(tile.coord(operand.role), Constant(I32, 0))
        k_remaining.set(operand.k_extent)
        copy_scales = scales.start_copies(tile) if scales.lane_copied_scales else None
        with producer.remaining_k_tile_loop(tile) as k_tile:
            with k.when(k.warp_index == 0), k.when(hw.elect_one()):
                producer.load(tile, k_tile)
            pipeline.non_tma_producer_acquire(producer.write)
            for copy in rows.copies(producer.write.index, k_remaining.get()):
                copy()
            pipeline.non_tma_producer_commit(producer.write, THREADS_PER_WARPGROUP, cp_async=True, st_shared=False)
            if copy_scales:
                with k.when(k.warp_index == SCALE_WARP), scales.copying_lanes():
                    copy_scales(pipeline, producer.write)
            rows.advance()
            k_remaining.set(k_remaining.get() - tile_k)
            producer.advance()
    with k.when(k.warp_index == 0), k.when(hw.elect_one()):
        producer.tail()
