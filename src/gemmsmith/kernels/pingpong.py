"""Pingpong design: consumer warpgroups with their own tiles; the epilogues of some overlap with one's mainloop.

CUTLASS: KernelTmaWarpSpecializedPingpong, which has two. With three, an epilogue may take twice as long as a mainloop.
"""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.block_scales import BlockScales
from gemmsmith.collective.pipeline import OrderedSequenceBarrier
from gemmsmith.collective.tma_mainloop import TmaStages
from gemmsmith.core.design import Design, register_design
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.collective_epilogue import Epilogue
from gemmsmith.kernels.cooperative import producer_warps, registers_per_thread
from gemmsmith.kernels.promoted_mainloop import make_consumer
from gemmsmith.lang.builder import Builder
from gemmsmith.tile_scheduler import make_tile_scheduler


def pingpong(k: Builder, spec: KernelSpec) -> None:
    """Record the kernel, which is persistent: one producer warp serves all consumer warpgroups.

    Consumer warpgroup i has tiles i, i + consumers, i + 2 * consumers, ... of the CTA, and skips the stages of the
    others' tiles. The warpgroups take turns on the tensor cores.
    """
    consumers = spec.config.consumers
    producer_registers, consumer_registers = registers_per_thread(spec)
    scheduler = make_tile_scheduler(spec)
    stages = TmaStages(spec, scheduler, consumer_groups=consumers)
    epilogue = Epilogue(spec, scheduler)
    scales = BlockScales(spec, consumer_groups=consumers)
    mainloop = stages.prologue(*epilogue.pipelines, *scales.pipelines, prefetch=epilogue.maps, scales=scales.tma_scales)

    with k.warpgroup(0):
        hw.set_registers(producer_registers)
        producer_warps(k, mainloop, scales)

    with k.warpgroups(1, 1 + consumers, "consumer") as warpgroup:
        hw.set_registers(consumer_registers)
        order = OrderedSequenceBarrier(consumers, warpgroup)
        consumer = make_consumer(mainloop, 0, scales, order)
        warpgroup_epilogue = epilogue.start(warpgroup, 0)
        order.prime()
        consumer.skip(warpgroup, scheduler.k_tiles)
        with scheduler.tile_loop(step=consumers, first=warpgroup) as tile:
            tile_epilogue = warpgroup_epilogue.load(tile)
            consumer.begin_tile(tile)
            consumer.mma(tile)
            consumer.skip(consumers - 1, scheduler.k_tiles)
            tile_epilogue.store(consumer.accumulator)
        warpgroup_epilogue.finish()


register_design(Design(
    "pingpong", pingpong, max_accumulator_registers={2: 200, 3: 100}, producer_warpgroups=1, tile_per_warpgroup=True,
    defaults={"tile": (64, 256, 64), "consumers": 2}, max_promoted_registers={2: 192},
    groups_along=frozenset({"m"}),
    supported_options=frozenset({"block_scales", "3xtf32", "interleaved_b", "a_in_registers"}),
))  # fmt: skip
