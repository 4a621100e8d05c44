"""Pingpong: two math warpgroups, each with tiles of its own, so that one's epilogue runs under the other's mainloop."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.order import OrderBarrier
from gemmsmith.core.spec import KernelSpec
from gemmsmith.designs.warp_specialized import REGISTERS
from gemmsmith.epilogue.lowering import Epilogue
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import I32
from gemmsmith.schedule.feed import Feed
from gemmsmith.schedule.tiles import TileScheduler


def pingpong(k: Builder, spec: KernelSpec) -> None:
    """Persistent: one producer warp feeds both warpgroups, which take turns at the tensor cores, tile by tile."""
    producer_registers, consumer_registers = REGISTERS[2]
    scheduler = TileScheduler(spec)
    place = scheduler.position()
    feed = Feed(spec, place, turns=2)
    epilogue = Epilogue(spec, feed.stages)
    order = OrderBarrier(2)
    feed.begin(scheduler.first(place), *epilogue.pipelines, prefetch=epilogue.maps)

    with k.warpgroup(0):
        hw.set_registers(producer_registers)
        with k.warp(0, "producer"), k.when(hw.elect_one()):
            write = feed.producer_start_state()
            with scheduler.each(place) as tile, feed.rest(tile.k_tiles) as k_tile:
                feed.pipe.producer_acquire(write)
                feed.load(write, tile, k_tile)
                write.advance()
            feed.tail(write)

    with k.warpgroups(1, 3, "math") as warpgroup:
        hw.set_registers(consumer_registers)
        read, last = feed.pipe.consumer_start_state(), k.var(I32, 0, "last_stage")
        accumulator = Accumulator(spec.warpgroup_rows, spec.config.tile[1], spec.operand, spec.accumulate)
        epilogue.prepare()
        order.start(warpgroup)
        read.skip(warpgroup * scheduler.k_tiles)
        with scheduler.each(place, turns=2, first=warpgroup) as tile:
            epilogue.begin(tile, warpgroup, 0)
            with k.when(tile.k_tiles == 0):
                accumulator.clear()
            order.wait(warpgroup)
            k.comment("mainloop")
            with k.range(tile.k_tiles, name="k_tile") as k_tile:
                feed.pipe.consumer_wait(read)
                accumulator.multiply(feed.a[read.index], feed.b[read.index], accumulate=k_tile > 0)
                accumulator.wait(pending=1)
                with k.when(k_tile > 0):  # one group stays in flight: a stage is released one step late
                    feed.pipe.consumer_release(last.get())
                last.set(read.index)
                read.advance()
            order.arrive(warpgroup)
            accumulator.wait(pending=0)
            with k.when(tile.k_tiles > 0):
                feed.pipe.consumer_release(last.get())
            read.skip(tile.k_tiles)
            epilogue.consume(accumulator)
        epilogue.finish()
