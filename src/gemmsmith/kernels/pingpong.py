"""Pingpong: two math warpgroups, each with tiles of its own, so that one's epilogue runs under the other's mainloop."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.loaded_a import accumulator_of
from gemmsmith.collective.mainloop import Mainloop
from gemmsmith.collective.order import OrderBarrier
from gemmsmith.collective.pipeline import LateRelease
from gemmsmith.collective.scales import BlockScales
from gemmsmith.core.design import Design, register_design
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.device.lowering import Epilogue
from gemmsmith.kernels.cooperative import REGISTERS, produce, promote
from gemmsmith.lang.builder import Builder
from gemmsmith.schedule.tiles import TileScheduler


def pingpong(k: Builder, spec: KernelSpec) -> None:
    """Persistent: one producer warp feeds both warpgroups, which take turns at the tensor cores, tile by tile."""
    producer_registers, consumer_registers = REGISTERS[2]
    scheduler = TileScheduler(spec)
    mainloop = Mainloop(spec, scheduler, readers=2)
    epilogue = Epilogue(spec, scheduler, mainloop)
    scales = BlockScales(spec, readers=2)
    mainloop.load_beside(scales.loaded)
    order = OrderBarrier(2)
    mainloop.prologue(*epilogue.pipelines, *scales.pipelines, prefetch=epilogue.maps)

    with k.warpgroup(0):
        hw.set_registers(producer_registers)
        produce(k, scheduler, mainloop, scales)

    with k.warpgroups(1, 3, "math") as warpgroup:
        hw.set_registers(consumer_registers)
        if spec.promoted:
            scales.start()
            promote(k, spec, scheduler, mainloop, scales, epilogue, warpgroup, order)
            return
        read, release = mainloop.pipe.consumer_start_state(), LateRelease(mainloop.pipe)
        accumulator = accumulator_of(spec)
        epilogue.start(warpgroup, 0)
        order.start(warpgroup)
        read.skip(warpgroup * scheduler.k_tiles)
        with scheduler.each(step=2, first=warpgroup) as tile:
            epilogue.load(tile)
            with k.when(tile.k_tiles == 0):
                accumulator.clear()
            order.wait(warpgroup)
            k.comment("mainloop")
            with k.range(tile.k_tiles, name="k_tile") as k_tile:
                mainloop.pipe.consumer_wait(read)
                a, b = mainloop.stage(read)
                accumulator.multiply(a, b, accumulate=k_tile > 0)
                accumulator.wait(pending=1)
                release.previous(k_tile, read)
                read.advance()
            order.arrive(warpgroup)
            accumulator.wait(pending=0)
            release.last(tile.k_tiles)
            read.skip(tile.k_tiles)
            epilogue.store(accumulator, tile)
        epilogue.finish()


register_design(Design(
    "pingpong", pingpong, accumulators={2: 200}, other_warpgroups=1, own_tiles=True,
    defaults={"tile": (64, 256, 64), "consumers": 2}, promoted={2: 192},
))  # fmt: skip
