"""Warp-specialised: one warp does nothing but start TMA copies, warpgroups do nothing but multiply and store."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.pipeline import PipelineTmaAsync, start
from gemmsmith.core.spec import KernelSpec
from gemmsmith.designs.operands import operands
from gemmsmith.epilogue.lowering import Epilogue
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import I32, U32
from gemmsmith.schedule.cluster_sums import partial_sums
from gemmsmith.schedule.stream import tile_scheduler

REGISTERS = {2: (40, 232), 3: (32, 160)}
"""Registers a thread (producer, consumer) by number of consumers: each sum fits the pool of 64 K.

One consumer needs no more than the 255 it starts with."""


def warp_specialized(k: Builder, spec: KernelSpec) -> None:
    """Persistent: one producer warp feeds `consumers` WGMMA warpgroups; stores drain under the next tile's mainloop."""
    depth, consumers = spec.config.tile[2], spec.config.consumers
    producer_registers, consumer_registers = REGISTERS.get(consumers, (None, None))
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

    with k.warpgroup(0):
        hw.set_registers(producer_registers)
        with k.warp(0, "producer"), k.when(hw.elect_one()):
            write = pipe.producer_start_state()
            with scheduler.each(place) as tile, k.range(tile.k_tiles, name="k_tile") as k_tile:
                pipe.producer_acquire(write)
                a.load(a_smem[write.index], pipe.barrier(write), tile.m, tile.k(k_tile, depth), tile.batch)
                b.load(b_smem[write.index], pipe.barrier(write), tile.n, tile.k(k_tile, depth), tile.batch)
                write.advance()
            pipe.producer_tail(write)

    with k.warpgroups(1, 1 + consumers, "math") as warpgroup:
        hw.set_registers(consumer_registers)
        rows = warpgroup * spec.warpgroup_rows
        read, last = pipe.consumer_start_state(), k.var(I32, 0, "last_stage")
        accumulator = Accumulator(spec.warpgroup_rows, spec.config.tile[1], spec.operand, spec.accumulate)
        epilogue.prepare()
        sums.prepare()
        with scheduler.each(place) as tile:
            epilogue.begin(tile, warpgroup, rows)
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
            accumulator.wait(pending=0)
            with k.when(tile.k_tiles > 0):
                pipe.consumer_release(last.get())
            with sums.finished(accumulator, tile, warpgroup):
                epilogue.consume(accumulator)
        epilogue.finish()
        sums.finish(warpgroup)
