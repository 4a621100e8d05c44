"""Warp-specialised: one warp does nothing but start TMA copies, warpgroups do nothing but multiply and store."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.lowering import Epilogue
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import I32
from gemmsmith.schedule.cluster_sums import partial_sums
from gemmsmith.schedule.feed import Feed
from gemmsmith.schedule.lockstep import meetings
from gemmsmith.schedule.stream import tile_scheduler

REGISTERS = {2: (40, 232), 3: (32, 160)}
"""Registers a thread (producer, consumer) by number of consumers: each sum fits the pool of 64 K.

One consumer needs no more than the 255 it starts with."""


def warp_specialized(k: Builder, spec: KernelSpec) -> None:
    """Persistent: one producer warp feeds `consumers` WGMMA warpgroups; stores drain under the next tile's mainloop."""
    consumers = spec.config.consumers
    producer_registers, consumer_registers = REGISTERS.get(consumers, (None, None))
    scheduler = tile_scheduler(spec)
    place = scheduler.position()
    feed = Feed(spec, place)
    lockstep = meetings(spec, scheduler, place)
    epilogue, sums = Epilogue(spec, feed.stages), partial_sums(spec, place)
    feed.begin(scheduler.first(place), *epilogue.pipelines, *sums.pipelines, prefetch=epilogue.maps)

    with k.warpgroup(0):
        hw.set_registers(producer_registers)
        with k.warp(0, "producer"), k.when(hw.elect_one()):
            write = feed.producer_start_state()
            lockstep.start()
            with scheduler.each(place) as tile, feed.rest(tile.k_tiles) as k_tile:
                lockstep.meet(tile, k_tile)
                feed.pipe.producer_acquire(write)
                feed.load(write, tile, k_tile)
                write.advance()
            lockstep.finish()
            feed.tail(write)

    with k.warpgroups(1, 1 + consumers, "math") as warpgroup:
        hw.set_registers(consumer_registers)
        rows = (warpgroup * spec.warpgroup_rows).named("rows")
        read, last = feed.pipe.consumer_start_state(), k.var(I32, 0, "last_stage")
        accumulator = Accumulator(spec.warpgroup_rows, spec.config.tile[1], spec.operand, spec.accumulate)
        epilogue.prepare()
        sums.prepare()
        with scheduler.each(place) as tile:
            epilogue.begin(sums.mine(tile), warpgroup, rows)
            with k.when(tile.k_tiles == 0):
                accumulator.clear()
            k.comment("mainloop")
            with k.range(tile.k_tiles, name="k_tile") as k_tile:
                feed.pipe.consumer_wait(read)
                a_rows = feed.a[read.index].rows(rows, spec.warpgroup_rows)
                accumulator.multiply(a_rows, feed.b[read.index], accumulate=k_tile > 0)
                accumulator.wait(pending=1)
                with k.when(k_tile > 0):  # one group stays in flight: a stage is released one step late
                    feed.pipe.consumer_release(last.get())
                last.set(read.index)
                read.advance()
            accumulator.wait(pending=0)
            with k.when(tile.k_tiles > 0):
                feed.pipe.consumer_release(last.get())
            with sums.finished(accumulator, tile, warpgroup) as whole:
                epilogue.consume(whole)
            feed.end(tile)
        epilogue.finish()
        sums.finish(warpgroup)
