"""TMA design without warp specialization: all warpgroups multiply, and one thread also issues the TMA loads.

CUTLASS: KernelTma.
"""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.tma_mainloop import TmaStages
from gemmsmith.core.design import Design, register_design
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.collective_epilogue import Epilogue
from gemmsmith.kernels.wgmma_mainloop import WgmmaMainloop
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.values import Value
from gemmsmith.tile_scheduler import make_tile_scheduler
from gemmsmith.tile_scheduler.tiles import WorkTile


def tma(k: Builder, spec: KernelSpec) -> None:
    """Record the kernel, which is persistent.

    While k-tile i is multiplied, the loads of k-tiles i+1 to i+stages-1 are in flight: the thread that issues them does
    so between two MMAs.
    """
    lookahead = spec.config.stages - 1
    scheduler = make_tile_scheduler(spec)
    stages = TmaStages(spec, scheduler)
    epilogue = Epilogue(spec, scheduler)
    mainloop = stages.prologue(*epilogue.pipelines, prefetch=epilogue.maps)

    with k.warpgroups(0, spec.config.consumers, "consumer") as warpgroup:
        is_producer = ((k.warp_index == 0) & hw.elect_one()).named("is_producer")
        producer = mainloop.start_producer()
        warpgroup_row = (warpgroup * spec.warpgroup_rows).named("warpgroup_row")
        consumer = WgmmaMainloop(mainloop, warpgroup_row)

        def load_k_tile(tile: WorkTile, k_tile: Value) -> None:
            """Issue the loads of a k-tile, if it exists."""
            with k.when(k_tile < tile.k_tiles):
                with k.when(is_producer):
                    producer.load(tile, k_tile)
                producer.advance()

        warpgroup_epilogue = epilogue.start(warpgroup, warpgroup_row)
        with scheduler.tile_loop() as tile:
            tile_epilogue = warpgroup_epilogue.load(tile)
            with producer.remaining_k_tile_loop(tile, lookahead) as k_tile:
                load_k_tile(tile, k_tile)
            consumer.begin_tile(tile)
            consumer.mma(tile, after_k_tile=lambda tile, k_tile: load_k_tile(tile, k_tile + lookahead))
            tile_epilogue.store(consumer.accumulator)
        with k.when(is_producer):
            producer.tail()
        warpgroup_epilogue.finish()


register_design(Design(
    "tma", tma, max_accumulator_registers={1: 200, 2: 200, 3: 200},
    supported_options=frozenset({"splits", "cluster_splits", "interleaved_b", "a_in_registers"}),
))  # fmt: skip
