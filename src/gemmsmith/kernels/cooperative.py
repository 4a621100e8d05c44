"""Cooperative design: a producer warp issues TMA loads, consumer warpgroups share each tile.

CUTLASS: KernelTmaWarpSpecializedCooperative.
"""

from __future__ import annotations

from contextlib import nullcontext

from gemmsmith import hw
from gemmsmith.collective.block_scales import BlockScales
from gemmsmith.collective.ordered_sequence_barrier import OrderedSequenceBarrier
from gemmsmith.collective.promotion import Promotion
from gemmsmith.collective.tma_mainloop import TmaMainloop
from gemmsmith.core.design import Design, register_design
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.collective_epilogue import Epilogue
from gemmsmith.kernels.wgmma_mainloop import WgmmaMainloop
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import I32, PRED
from gemmsmith.lang.values import Value
from gemmsmith.tile_scheduler.stream_k import MakeScheduler, make_tile_scheduler
from gemmsmith.tile_scheduler.tiles import TileScheduler

SETMAXNREG = {2: (40, 232), 3: (32, 160)}
"""setmaxnreg values (producer, consumer) by number of consumer warpgroups; the totals fit the register file of 64 K.

With one consumer the 255 registers per thread at launch are enough."""


def cooperative(k: Builder, spec: KernelSpec, make_scheduler: MakeScheduler = make_tile_scheduler) -> None:
    """Record the kernel: persistent; stores overlap with the next tile's mainloop."""
    consumers = spec.config.consumers
    producer_registers, consumer_registers = SETMAXNREG.get(consumers, (None, None))
    scheduler = make_scheduler(spec)
    mainloop = TmaMainloop(spec, scheduler)
    epilogue = Epilogue(spec, scheduler, mainloop)
    scales = BlockScales(spec)
    mainloop.attach_scale_loads(scales.tma_scales)
    mainloop.prologue(*epilogue.pipelines, *scales.pipelines, prefetch=epilogue.maps)

    with k.warpgroup(0):
        hw.set_registers(producer_registers)
        producer_warps(k, scheduler, mainloop, scales)

    with k.warpgroups(1, 1 + consumers, "consumer") as warpgroup:
        hw.set_registers(consumer_registers)
        if spec.promoted:
            scales.init_consumer()
            promoted_consumer_loop(k, spec, scheduler, mainloop, scales, epilogue, warpgroup)
        else:
            consumer_loop(spec, scheduler, mainloop, epilogue, warpgroup)


def producer_warps(k: Builder, scheduler: TileScheduler, mainloop: TmaMainloop, scales: BlockScales) -> None:
    """Record the producer warpgroup: one warp issues TMA loads, another copies the scales that TMA cannot load."""
    with k.warp(0, "producer"), k.when(hw.elect_one()):
        write = mainloop.producer_start_state()
        with mainloop.k_tile_loop() as (tile, k_tile):
            mainloop.pipeline.producer_acquire(write)
            mainloop.load(write, tile, k_tile)
            write.advance()
        mainloop.tail(write)
    if scales.lane_copied_scales:
        with k.warp(1, "scales"), scales.copying_lanes():
            write = mainloop.pipeline.producer_start_state()
            with scheduler.tile_loop() as tile:
                scales.set_tile_for_copies(tile)
                with k.range(tile.k_tiles, name="k_tile"):
                    mainloop.pipeline.non_tma_producer_acquire(write)
                    scales.copy(mainloop.pipeline, write)
                    write.advance()


def consumer_loop(
    spec: KernelSpec, scheduler: TileScheduler, mainloop: TmaMainloop, epilogue: Epilogue, warpgroup: Value
) -> None:
    """Record a consumer warpgroup."""
    warpgroup_row = (warpgroup * spec.warpgroup_rows).named("warpgroup_row")
    consumer = WgmmaMainloop(spec, mainloop, warpgroup_row)
    warpgroup_epilogue = epilogue.start(warpgroup, warpgroup_row)
    with scheduler.tile_loop() as tile:
        tile_epilogue = warpgroup_epilogue.load(tile)
        consumer.clear_if_empty(tile)
        consumer.mma(tile)
        consumer.mma_tail(tile)
        tile_epilogue.store(consumer.accumulator)
    warpgroup_epilogue.finish()


def promoted_consumer_loop(
    k: Builder, spec: KernelSpec, scheduler: TileScheduler, mainloop: TmaMainloop, scales: BlockScales,
    epilogue: Epilogue, warpgroup: Value, order: OrderedSequenceBarrier | None = None,
) -> None:  # fmt: skip
    """Record a consumer warpgroup with promotion.

    Each k-tile is accumulated separately, subtile by subtile, and added, scaled, to the fp32 accumulator, while other
    wgmma groups run: of k-tiles in flight or of other warpgroups. With `order` (pingpong) each warpgroup has its own
    tiles.
    """
    warpgroup_row: Value | int = 0 if order else (warpgroup * spec.warpgroup_rows).named("warpgroup_row")
    read, promotion = mainloop.pipeline.consumer_start_state(), Promotion(spec, scales, warpgroup_row)
    next_stage_is_full = k.var(PRED, False, "next_stage_is_full")
    k_tiles_remaining = k.var(I32, 0, "k_tiles_remaining") if order else None

    def multiply_k_tiles(count: int) -> None:
        stages: list[Value] = []
        for subtile in promotion.subtiles:
            for i in range(count):
                if subtile == promotion.subtiles[0]:
                    mainloop.pipeline.consumer_wait(read, None if i else next_stage_is_full.get())
                    stages.append(read.index.named("stage"))
                    promotion.read_scales(i, stages[i])  # before wgmma, during which shared memory is slow
                    read.advance()
                a, b = mainloop.stage(stages[i])
                promotion.multiply(i, subtile, a.rows(warpgroup_row, spec.warpgroup_rows), b)
            if order and k_tiles_remaining and subtile == promotion.subtiles[0]:
                k_tiles_remaining.set(k_tiles_remaining.get() - count)
                with k.when(k_tiles_remaining.get() == 0):  # the tile needs no further stage
                    order.arrive(warpgroup)
            for i in range(count):
                promotion.wait(i, pending=count - 1 - i)
                if subtile == promotion.subtiles[-1]:
                    mainloop.pipeline.consumer_release(stages[i])
                    if i == count - 1:
                        with k.when(k_tiles_remaining.get() > 0) if k_tiles_remaining else nullcontext():
                            # tested while promotion.add runs
                            next_stage_is_full.set(mainloop.pipeline.consumer_test_wait(read))
                promotion.add(i, subtile)

    def skip_peer_tiles(tiles: Value | int) -> None:
        """Skip `tiles` tiles of the other warpgroup."""
        read.skip(scheduler.k_tiles * tiles)
        scales.skip(scheduler.k_tiles, tiles)
        next_stage_is_full.set(False)

    warpgroup_epilogue = epilogue.start(warpgroup, warpgroup_row)
    if order:
        order.prime(warpgroup)
        skip_peer_tiles(warpgroup)
    with scheduler.tile_loop(2, warpgroup) if order else scheduler.tile_loop() as tile:
        tile_epilogue = warpgroup_epilogue.load(tile)
        promotion.begin_tile(tile)
        if order and k_tiles_remaining:
            k_tiles_remaining.set(tile.k_tiles)
            with k.when(tile.k_tiles > 0):
                order.wait(warpgroup)
        k.comment("mainloop")
        in_flight = promotion.k_tiles_in_flight
        with k.range(tile.k_tiles // in_flight, name="k_tile_group" if in_flight > 1 else "k_tile"):
            multiply_k_tiles(in_flight)
        if in_flight > 1:
            with k.range((tile.k_tiles % in_flight).named("remaining_k_tiles"), name="k_tile"):
                multiply_k_tiles(1)
        if order:
            skip_peer_tiles(1)
        tile_epilogue.store(promotion.accumulator)
    warpgroup_epilogue.finish()


register_design(Design(
    "cooperative", cooperative, producer_warpgroups=1,
    max_accumulator_registers={1: 200, 2: 200, 3: 100},  # 3: ptxas assigns at most 128 to a CTA of 512 threads
    supported_options=frozenset({"splits", "cluster_splits", "alias_epilogue", "sync_clusters"}),
    max_promoted_registers={1: 208, 2: 192, 3: 128},
))  # fmt: skip
