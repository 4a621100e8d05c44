"""Pingpong: two math warpgroups, each with tiles of its own, so that one's epilogue runs under the other's mainloop."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.order import OrderBarrier
from gemmsmith.collective.pipeline import PipelineTmaAsync, start
from gemmsmith.core.spec import KernelSpec
from gemmsmith.designs.operands import operands
from gemmsmith.designs.warp_specialized import REGISTERS
from gemmsmith.epilogue.lowering import Epilogue
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import I32, U32
from gemmsmith.schedule.tiles import TileScheduler


def pingpong(k: Builder, spec: KernelSpec) -> None:
    """Persistent: one producer warp feeds both warpgroups, which take turns at the tensor cores, tile by tile."""
    depth, stages = spec.config.tile[2], spec.config.stages
    producer_registers, consumer_registers = REGISTERS[2]
    scheduler = TileScheduler(spec)
    a, b = operands(k, spec, place := scheduler.position())
    epilogue = Epilogue(spec)
    a_smem = k.shared(spec.a_tile, stages=stages, name="A", partly=True)
    b_smem = k.shared(spec.b_tile, stages=stages, name="B", partly=True)
    pipe = PipelineTmaAsync(
        stages, transaction_bytes=k.parameter("stage_bytes", U32), cluster_size=spec.multicast_size, turns=2
    )
    order = OrderBarrier(2)
    start(pipe, *epilogue.pipelines, prefetch=(a.map, b.map, *epilogue.maps))
    hw.grid_dependency_wait()
    if spec.config.pdl:
        hw.grid_dependency_launch()

    with k.warpgroup(0):
        hw.set_registers(producer_registers)
        with k.warp(0, "producer"), k.when(hw.elect_one()):
            write = pipe.producer_start_state()
            with scheduler.each(place) as tile, k.range(tile.k_tiles, name="k_tile") as k_tile:
                pipe.producer_acquire(write)
                a.load(a_smem[write.index], pipe.barrier(write), tile.m, k_tile * depth, tile.batch)
                b.load(b_smem[write.index], pipe.barrier(write), tile.n, k_tile * depth, tile.batch)
                write.advance()
            pipe.producer_tail(write)

    with k.warpgroups(1, 3, "math") as warpgroup:
        hw.set_registers(consumer_registers)
        read, last = pipe.consumer_start_state(), k.var(I32, 0, "last_stage")
        accumulator = Accumulator(spec.warpgroup_rows, spec.config.tile[1], spec.operand, spec.accumulate)
        epilogue.prepare()
        order.start(warpgroup)
        read.skip(warpgroup * scheduler.k_tiles)
        with scheduler.each(place, turns=2, first=warpgroup) as tile:
            epilogue.begin(tile, warpgroup, 0)
            with k.when(tile.k_tiles == 0):
                accumulator.clear()
            order.wait(warpgroup)
            with k.range(tile.k_tiles, name="k_tile") as k_tile:
                pipe.consumer_wait(read)
                accumulator.multiply(a_smem[read.index], b_smem[read.index], accumulate=k_tile > 0)
                accumulator.wait(pending=1)
                with k.when(k_tile > 0):  # one group stays in flight: a stage is released one step late
                    pipe.consumer_release(last.get())
                last.set(read.index)
                read.advance()
            order.arrive(warpgroup)
            accumulator.wait(pending=0)
            with k.when(tile.k_tiles > 0):
                pipe.consumer_release(last.get())
            read.skip(tile.k_tiles)
            epilogue.consume(accumulator)
        epilogue.finish()
