"""Multistage: every warpgroup multiplies, and one thread of them also starts the copies a few k-tiles ahead."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.pipeline import PipelineTmaAsync, start
from gemmsmith.core.spec import KernelSpec
from gemmsmith.designs.operands import operands
from gemmsmith.epilogue.lowering import Epilogue
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import I32, U32
from gemmsmith.lang.values import Value
from gemmsmith.schedule.cluster_sums import partial_sums
from gemmsmith.schedule.stream import tile_scheduler
from gemmsmith.schedule.tiles import WorkTile


def multistage(k: Builder, spec: KernelSpec) -> None:
    """Copies of k-tiles i+1 .. i+stages-1 are in flight while k-tile i multiplies; no warp has a role of its own."""
    depth, ahead = spec.config.tile[2], spec.config.stages - 1
    scheduler = tile_scheduler(spec)
    a, b = operands(k, spec, place := scheduler.position())
    epilogue, sums = Epilogue(spec), partial_sums(spec, place)
    a_smem = k.shared(spec.a_tile, stages=spec.config.stages, name="A", partly=True)
    b_smem = k.shared(spec.b_tile, stages=spec.config.stages, name="B", partly=True)
    pipe = PipelineTmaAsync(
        spec.config.stages, transaction_bytes=k.parameter("stage_bytes", U32),
        cluster_size=spec.multicast_size, first_rank=place.first,
    )  # fmt: skip
    start(pipe, *epilogue.pipelines, *sums.pipelines, prefetch=(a.map, b.map, *epilogue.maps))
    hw.grid_dependency_wait()
    if spec.config.pdl:
        hw.grid_dependency_launch()

    with k.warpgroups(0, spec.config.consumers, "math") as warpgroup:
        producer = (k.thread == 0).named("producer")
        write, read = pipe.producer_start_state(), pipe.consumer_start_state()
        last = k.var(I32, 0, "last_stage")
        rows = warpgroup * spec.warpgroup_rows
        accumulator = Accumulator(spec.warpgroup_rows, spec.config.tile[1], spec.operand, spec.accumulate)

        def produce(tile: WorkTile, k_tile: Value) -> None:
            """Starts the copies of one k-tile, if there is one."""
            with k.when(k_tile < tile.k_tiles):
                with k.when(producer):
                    pipe.producer_acquire(write)
                    a.load(a_smem[write.index], pipe.barrier(write), tile.m, tile.k(k_tile, depth), tile.batch)
                    b.load(b_smem[write.index], pipe.barrier(write), tile.n, tile.k(k_tile, depth), tile.batch)
                write.advance()

        epilogue.prepare()
        sums.prepare()
        with scheduler.each(place) as tile:
            epilogue.begin(tile, warpgroup, rows)
            with k.range(ahead, name="prologue") as k_tile:
                produce(tile, k_tile)
            with k.when(tile.k_tiles == 0):
                accumulator.clear()
            with k.range(tile.k_tiles, name="k_tile") as k_tile:
                pipe.consumer_wait(read)
                a_rows = a_smem[read.index].rows(rows, spec.warpgroup_rows)
                accumulator.multiply(a_rows, b_smem[read.index], accumulate=k_tile > 0)
                accumulator.wait(pending=1)
                with k.when(k_tile > 0):  # one group stays in flight: a stage is released one step late
                    pipe.consumer_release(last.get())
                last.set(read.index)
                read.advance()
                produce(tile, k_tile + ahead)
            accumulator.wait(pending=0)
            with k.when(tile.k_tiles > 0):
                pipe.consumer_release(last.get())
            with sums.finished(accumulator, tile, warpgroup):
                epilogue.consume(accumulator)
        with k.when(producer):
            pipe.producer_tail(write)
        epilogue.finish()
        sums.finish(warpgroup)
