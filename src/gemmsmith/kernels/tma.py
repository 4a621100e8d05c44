"""TMA without roles (CUTLASS: KernelTma): every warpgroup multiplies, and one thread of them also starts the copies a
few k-tiles ahead."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.loaded_a import accumulator_of
from gemmsmith.collective.mainloop import Mainloop
from gemmsmith.collective.pipeline import LateRelease
from gemmsmith.core.design import Design, register_design
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.device.lowering import Epilogue
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.values import Value
from gemmsmith.schedule.stream import tile_scheduler
from gemmsmith.schedule.tiles import WorkTile


def tma(k: Builder, spec: KernelSpec) -> None:
    """Copies of k-tiles i+1 .. i+stages-1 are in flight while k-tile i multiplies; no warp has a role of its own."""
    ahead = spec.config.stages - 1
    scheduler = tile_scheduler(spec)
    mainloop = Mainloop(spec, scheduler)
    epilogue = Epilogue(spec, scheduler, mainloop)
    mainloop.prologue(*epilogue.pipelines, prefetch=epilogue.maps)

    with k.warpgroups(0, spec.config.consumers, "math") as warpgroup:
        producer = ((k.warp_index == 0) & hw.elect_one()).named("producer")
        write, read = mainloop.producer_start_state(), mainloop.pipe.consumer_start_state()
        release = LateRelease(mainloop.pipe)
        rows = (warpgroup * spec.warpgroup_rows).named("rows")
        accumulator = accumulator_of(spec)

        def produce(tile: WorkTile, k_tile: Value) -> None:
            """Starts the copies of one k-tile, if there is one."""
            with k.when(k_tile < tile.k_tiles):
                with k.when(producer):
                    mainloop.pipe.producer_acquire(write)
                    mainloop.load(write, tile, k_tile)
                write.advance()

        epilogue.start(warpgroup, rows)
        with scheduler.each() as tile:
            epilogue.load(tile)
            with mainloop.rest(tile, ahead) as k_tile:
                produce(tile, k_tile)
            with k.when(tile.k_tiles == 0):
                accumulator.clear()
            k.comment("mainloop")
            with k.range(tile.k_tiles, name="k_tile") as k_tile:
                mainloop.pipe.consumer_wait(read)
                a, b = mainloop.stage(read)
                accumulator.multiply(a.rows(rows, spec.warpgroup_rows), b, accumulate=k_tile > 0)
                accumulator.wait(pending=1)
                release.previous(k_tile, read)
                read.advance()
                produce(tile, k_tile + ahead)
            accumulator.wait(pending=0)
            release.last(tile.k_tiles)
            epilogue.store(accumulator, tile)
        with k.when(producer):
            mainloop.tail(write)
        epilogue.finish()


register_design(Design(
    "tma", tma, accumulators={1: 200, 2: 200, 3: 200}, takes=frozenset({"splits", "cluster_splits"}),
    formerly="multistage",
))  # fmt: skip
