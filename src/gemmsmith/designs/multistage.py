"""Multistage: every warpgroup multiplies, and one thread of them also starts the copies a few k-tiles ahead."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.lowering import Epilogue
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import I32
from gemmsmith.lang.values import Value
from gemmsmith.schedule.cluster_sums import partial_sums
from gemmsmith.schedule.feed import Feed
from gemmsmith.schedule.stream import tile_scheduler
from gemmsmith.schedule.tiles import WorkTile


def multistage(k: Builder, spec: KernelSpec) -> None:
    """Copies of k-tiles i+1 .. i+stages-1 are in flight while k-tile i multiplies; no warp has a role of its own."""
    ahead = spec.config.stages - 1
    scheduler = tile_scheduler(spec)
    place = scheduler.position()
    feed = Feed(spec, place)
    epilogue, sums = Epilogue(spec, feed.stages), partial_sums(spec, place)
    feed.begin(scheduler.first(place), *epilogue.pipelines, *sums.pipelines, prefetch=epilogue.maps)

    with k.warpgroups(0, spec.config.consumers, "math") as warpgroup:
        producer = ((k.warp_index == 0) & hw.elect_one()).named("producer")
        write, read = feed.producer_start_state(), feed.pipe.consumer_start_state()
        last = k.var(I32, 0, "last_stage")
        rows = (warpgroup * spec.warpgroup_rows).named("rows")
        accumulator = Accumulator(spec.warpgroup_rows, spec.config.tile[1], spec.operand, spec.accumulate)

        def produce(tile: WorkTile, k_tile: Value) -> None:
            """Starts the copies of one k-tile, if there is one."""
            with k.when(k_tile < tile.k_tiles):
                with k.when(producer):
                    feed.pipe.producer_acquire(write)
                    feed.load(write, tile, k_tile)
                write.advance()

        epilogue.prepare()
        sums.prepare()
        with scheduler.each(place) as tile:
            epilogue.begin(sums.mine(tile), warpgroup, rows)
            with feed.rest(ahead) as k_tile:
                produce(tile, k_tile)
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
                produce(tile, k_tile + ahead)
            accumulator.wait(pending=0)
            with k.when(tile.k_tiles > 0):
                feed.pipe.consumer_release(last.get())
            with sums.finished(accumulator, tile, warpgroup) as whole:
                epilogue.consume(whole)
        with k.when(producer):
            feed.tail(write)
        epilogue.finish()
        sums.finish(warpgroup)
