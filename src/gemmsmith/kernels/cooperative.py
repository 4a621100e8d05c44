"""Cooperative design: a producer warp issues TMA loads, consumer warpgroups share each tile.

CUTLASS: KernelTmaWarpSpecializedCooperative.
"""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.block_scales import BlockScales
from gemmsmith.collective.gathered_operand import GatheredOperand
from gemmsmith.collective.tma_mainloop import TmaMainloop, TmaStages
from gemmsmith.core.design import Design, register_design
from gemmsmith.core.mma import THREADS_PER_WARPGROUP
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.collective_epilogue import Epilogue
from gemmsmith.kernels.promoted_mainloop import make_consumer
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import I32
from gemmsmith.lang.values import Constant, Value
from gemmsmith.tile_scheduler import MakeScheduler, make_tile_scheduler

SETMAXNREG = {2: (40, 232), 3: (32, 160)}
"""setmaxnreg values (producer, consumer) by number of consumer warpgroups; the totals fit the register file of 64 K.

With one consumer the 255 registers per thread at launch are enough."""
SETMAXNREG_WITH_GATHER = {2: (56, 224), 3: (56, 152)}
"""Likewise, if the producer's threads have addresses of the rows that they copy."""
SCALE_WARP = 1
"""The warp that copies the scales that TMA cannot load."""


def registers_per_thread(spec: KernelSpec) -> tuple[int | None, int | None]:
    """Return the setmaxnreg values of the producer and of the consumers; None keeps those at launch."""
    gathers = spec.grouping is not None and spec.grouping.gathers
    return (SETMAXNREG_WITH_GATHER if gathers else SETMAXNREG).get(spec.config.consumers, (None, None))


def record_cooperative(k: Builder, spec: KernelSpec, make_scheduler: MakeScheduler = make_tile_scheduler) -> None:
    """Record the kernel, which is persistent: a tile's stores overlap with the next tile's mainloop.

    Args:
        k: The kernel's builder.
        spec: Its config, dtypes and layouts.
        make_scheduler: Returns the tile scheduler of a spec.
    """
    consumers = spec.config.consumers
    producer_registers, consumer_registers = registers_per_thread(spec)
    scheduler = make_scheduler(spec)
    stages = TmaStages(spec, scheduler)
    epilogue = Epilogue(spec, scheduler, stages.buffers)
    scales = BlockScales(spec)
    mainloop = stages.prologue(*epilogue.pipelines, *scales.pipelines, prefetch=epilogue.maps, scales=scales.tma_scales)

    with k.warpgroup(0):
        hw.set_registers(producer_registers)
        producer_warps(k, mainloop, scales)

    with k.warpgroups(1, 1 + consumers, "consumer") as warpgroup:
        hw.set_registers(consumer_registers)
        consumer_loop(mainloop, epilogue, warpgroup, scales)


def producer_warps(k: Builder, mainloop: TmaMainloop, scales: BlockScales) -> None:
    """Record the producer warpgroup: one warp issues TMA loads, another copies the scales that TMA cannot load.

    If rows are gathered, all of its warps copy them (`gathering_producer`).
    """
    if mainloop.gathered_operand:
        gathering_producer(k, mainloop, mainloop.gathered_operand, scales)
        return
    with k.warp(0, "producer"), k.when(hw.elect_one()):
        producer = mainloop.start_producer()
        with producer.k_tile_loop() as (tile, k_tile):
            producer.load(tile, k_tile)
            producer.advance()
        producer.tail()
    if scales.lane_copied_scales:
        with k.warp(1, "scales"), scales.copying_lanes():
            write = mainloop.pipeline.producer_start_state()
            with mainloop.scheduler.tile_loop() as tile:
                copy_scales = scales.start_copies(tile)
                with k.range(tile.k_tiles, name="k_tile"):
                    mainloop.pipeline.non_tma_producer_acquire(write)
                    copy_scales(mainloop.pipeline, write)
                    write.advance()


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
        pipeline.producer_tail(producer.write)


def consumer_loop(
    mainloop: TmaMainloop, epilogue: Epilogue, warpgroup: Value, scales: BlockScales | None = None
) -> None:  # fmt: skip
    """Record a consumer warpgroup, which multiplies and stores its rows of each tile.

    Args:
        mainloop: The mainloop, which gives the tiles.
        epilogue: The kernel's epilogue.
        warpgroup: The index of the warpgroup among the consumers.
        scales: The block scales; None if there are none.
    """
    warpgroup_row = (warpgroup * mainloop.spec.warpgroup_rows).named("warpgroup_row")
    consumer = make_consumer(mainloop, warpgroup_row, scales)
    warpgroup_epilogue = epilogue.start(warpgroup, warpgroup_row)
    with mainloop.scheduler.tile_loop() as tile:
        tile_epilogue = warpgroup_epilogue.load(tile)
        consumer.begin_tile(tile)
        consumer.mma(tile)
        tile_epilogue.store(consumer.accumulator)
        mainloop.release_aliased_stages(tile)
    warpgroup_epilogue.finish()


register_design(Design(
    "cooperative", record_cooperative, producer_warpgroups=1,
    max_accumulator_registers={1: 200, 2: 200, 3: 100},  # 3: ptxas assigns at most 128 to a CTA of 512 threads
    supported_options=frozenset({
        "splits", "cluster_splits", "alias_epilogue", "sync_clusters", "block_scales", "3xtf32", "interleaved_b",
        "a_in_registers",
    }),
    groups_along=frozenset({"m", "k"}),
    max_promoted_registers={1: 208, 2: 192, 3: 128},
))  # fmt: skip
