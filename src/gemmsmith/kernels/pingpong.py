"""Pingpong design: two consumer warpgroups with their own tiles; one's epilogue overlaps with the other's mainloop.

CUTLASS: KernelTmaWarpSpecializedPingpong.
"""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.block_scales import BlockScales
from gemmsmith.collective.ordered_sequence_barrier import OrderedSequenceBarrier
from gemmsmith.collective.tma_mainloop import TmaMainloop
from gemmsmith.core.design import Design, register_design
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.collective_epilogue import Epilogue
from gemmsmith.kernels.cooperative import SETMAXNREG, producer_warps, promoted_consumer_loop
from gemmsmith.kernels.wgmma_mainloop import WgmmaMainloop
from gemmsmith.lang.builder import Builder
from gemmsmith.tile_scheduler.tiles import TileScheduler


def pingpong(k: Builder, spec: KernelSpec) -> None:
    """Record the kernel: persistent; both warpgroups have one producer warp and alternate on the tensor cores."""
    producer_registers, consumer_registers = SETMAXNREG[2]
    scheduler = TileScheduler(spec)
    mainloop = TmaMainloop(spec, scheduler, consumer_groups=2)
    epilogue = Epilogue(spec, scheduler, mainloop)
    scales = BlockScales(spec, consumer_groups=2)
    mainloop.attach_scale_loads(scales.tma_scales)
    order = OrderedSequenceBarrier(2)
    mainloop.prologue(*epilogue.pipelines, *scales.pipelines, prefetch=epilogue.maps)

    with k.warpgroup(0):
        hw.set_registers(producer_registers)
        producer_warps(k, scheduler, mainloop, scales)

    with k.warpgroups(1, 3, "consumer") as warpgroup:
        hw.set_registers(consumer_registers)
        if spec.promoted:
            scales.init_consumer()
            promoted_consumer_loop(k, spec, scheduler, mainloop, scales, epilogue, warpgroup, order)
            return
        consumer = WgmmaMainloop(spec, mainloop, warpgroup_row=0)
        warpgroup_epilogue = epilogue.start(warpgroup, 0)
        order.prime(warpgroup)
        consumer.read.skip(warpgroup * scheduler.k_tiles)
        with scheduler.tile_loop(step=2, first=warpgroup) as tile:
            tile_epilogue = warpgroup_epilogue.load(tile)
            consumer.clear_if_empty(tile)
            order.wait(warpgroup)
            consumer.mma(tile)
            order.arrive(warpgroup)
            consumer.mma_tail(tile)
            consumer.read.skip(tile.k_tiles)
            tile_epilogue.store(consumer.accumulator)
        warpgroup_epilogue.finish()


register_design(Design(
    "pingpong", pingpong, max_accumulator_registers={2: 200}, producer_warpgroups=1, tile_per_warpgroup=True,
    defaults={"tile": (64, 256, 64), "consumers": 2}, max_promoted_registers={2: 192},
))  # fmt: skip
