"""TMA design without warp specialization: all warpgroups multiply, and one thread also issues the TMA loads.

CUTLASS: KernelTma.
"""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.pipeline import LaggedRelease
from gemmsmith.collective.register_a import make_accumulator
from gemmsmith.collective.tma_mainloop import TmaMainloop
from gemmsmith.core.design import Design, register_design
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.collective_epilogue import Epilogue
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.values import Value
from gemmsmith.tile_scheduler.stream_k import make_tile_scheduler
from gemmsmith.tile_scheduler.tiles import WorkTile


def tma(k: Builder, spec: KernelSpec) -> None:
    """Record the kernel: persistent; loads of k-tiles i+1 .. i+stages-1 are in flight while k-tile i is multiplied."""
    lookahead = spec.config.stages - 1
    scheduler = make_tile_scheduler(spec)
    mainloop = TmaMainloop(spec, scheduler)
    epilogue = Epilogue(spec, scheduler, mainloop)
    mainloop.prologue(*epilogue.pipelines, prefetch=epilogue.maps)

    with k.warpgroups(0, spec.config.consumers, "consumer") as warpgroup:
        is_producer = ((k.warp_index == 0) & hw.elect_one()).named("is_producer")
        write, read = mainloop.producer_start_state(), mainloop.pipeline.consumer_start_state()
        release = LaggedRelease(mainloop.pipeline)
        warpgroup_row = (warpgroup * spec.warpgroup_rows).named("warpgroup_row")
        accumulator = make_accumulator(spec)

        def load_k_tile(tile: WorkTile, k_tile: Value) -> None:
            """Issue the loads of a k-tile, if it exists."""
            with k.when(k_tile < tile.k_tiles):
                with k.when(is_producer):
                    mainloop.pipeline.producer_acquire(write)
                    mainloop.load(write, tile, k_tile)
                write.advance()

        epilogue.start(warpgroup, warpgroup_row)
        with scheduler.tile_loop() as tile:
            epilogue.load(tile)
            with mainloop.remaining_k_tile_loop(tile, lookahead) as k_tile:
                load_k_tile(tile, k_tile)
            with k.when(tile.k_tiles == 0):
                accumulator.clear()
            k.comment("mainloop")
            with k.range(tile.k_tiles, name="k_tile") as k_tile:
                mainloop.pipeline.consumer_wait(read)
                a, b = mainloop.stage(read)
                accumulator.multiply(a.rows(warpgroup_row, spec.warpgroup_rows), b, accumulate=k_tile > 0)
                accumulator.wait(pending=1)
                release.release_previous(k_tile, read)
                read.advance()
                load_k_tile(tile, k_tile + lookahead)
            accumulator.wait(pending=0)
            release.release_last(tile.k_tiles)
            epilogue.store(accumulator, tile)
        with k.when(is_producer):
            mainloop.tail(write)
        epilogue.finish()


register_design(Design(
    "tma", tma, max_accumulator_registers={1: 200, 2: 200, 3: 200},
    supported_options=frozenset({"splits", "cluster_splits"}),
))  # fmt: skip
