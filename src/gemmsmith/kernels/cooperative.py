"""Cooperative (warp-specialized): one warp only starts TMA copies, warpgroups only multiply and store."""

from __future__ import annotations

from contextlib import nullcontext

from gemmsmith import hw
from gemmsmith.collective.loaded_a import accumulator_of
from gemmsmith.collective.mainloop import Mainloop
from gemmsmith.collective.order import OrderBarrier
from gemmsmith.collective.pipeline import LateRelease
from gemmsmith.collective.promotion import Promotion
from gemmsmith.collective.scales import BlockScales
from gemmsmith.core.design import Design, register_design
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.device.lowering import Epilogue
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import I32, PRED
from gemmsmith.lang.values import Value
from gemmsmith.schedule.stream import tile_scheduler
from gemmsmith.schedule.tiles import TileScheduler

REGISTERS = {2: (40, 232), 3: (32, 160)}
"""Registers a thread (producer, consumer) by number of consumers: each sum fits the pool of 64 K.

One consumer needs no more than the 255 it starts with."""


def cooperative(k: Builder, spec: KernelSpec) -> None:
    """Persistent: one producer warp feeds `consumers` WGMMA warpgroups; stores drain under the next tile's mainloop."""
    consumers = spec.config.consumers
    producer_registers, consumer_registers = REGISTERS.get(consumers, (None, None))
    scheduler = tile_scheduler(spec)
    mainloop = Mainloop(spec, scheduler)
    epilogue = Epilogue(spec, scheduler, mainloop)
    scales = BlockScales(spec)  # behind the buffers that are aligned to more
    mainloop.load_beside(scales.loaded)
    mainloop.prologue(*epilogue.pipelines, *scales.pipelines, prefetch=epilogue.maps)

    with k.warpgroup(0):
        hw.set_registers(producer_registers)
        produce(k, scheduler, mainloop, scales)

    with k.warpgroups(1, 1 + consumers, "math") as warpgroup:
        hw.set_registers(consumer_registers)
        if spec.promoted:
            scales.start()
            promote(k, spec, scheduler, mainloop, scales, epilogue, warpgroup)
        else:
            multiply(k, spec, scheduler, mainloop, epilogue, warpgroup)


def produce(k: Builder, scheduler: TileScheduler, mainloop: Mainloop, scales: BlockScales) -> None:
    """What the warps of the producers' warpgroup do: one starts copies, and one copies scales that TMA cannot bring."""
    with k.warp(0, "producer"), k.when(hw.elect_one()):
        write = mainloop.producer_start_state()
        with mainloop.each_k_tile() as (tile, k_tile):
            mainloop.pipe.producer_acquire(write)
            mainloop.load(write, tile, k_tile)
            write.advance()
        mainloop.tail(write)
    if scales.copied:
        with k.warp(1, "scales"), scales.lanes():
            write = mainloop.pipe.producer_start_state()
            with scheduler.each() as tile:
                scales.begin_copies(tile)
                with k.range(tile.k_tiles, name="k_tile"):
                    mainloop.pipe.beside_acquire(write)
                    scales.copy(mainloop.pipe, write)
                    write.advance()


def multiply(
    k: Builder, spec: KernelSpec, scheduler: TileScheduler, mainloop: Mainloop, epilogue: Epilogue, warpgroup: Value
) -> None:
    """What a math warpgroup does: a k-tile is multiplied while the one before it is released."""
    rows = (warpgroup * spec.warpgroup_rows).named("rows")
    read, release = mainloop.pipe.consumer_start_state(), LateRelease(mainloop.pipe)
    accumulator = accumulator_of(spec)
    epilogue.start(warpgroup, rows)
    with scheduler.each() as tile:
        epilogue.load(tile)
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
        accumulator.wait(pending=0)
        release.last(tile.k_tiles)
        epilogue.store(accumulator, tile)
    epilogue.finish()


def promote(
    k: Builder, spec: KernelSpec, scheduler: TileScheduler, mainloop: Mainloop, scales: BlockScales, epilogue: Epilogue,
    warpgroup: Value, order: OrderBarrier | None = None,
) -> None:  # fmt: skip
    """The same, promoted: k-tiles are multiplied each on its own, part by part, and added to a total, while those in
    flight behind it, or other warpgroups', are multiplied. With an `order` each warpgroup has tiles of its own."""
    rows: Value | int = 0 if order else (warpgroup * spec.warpgroup_rows).named("rows")
    read, sums = mainloop.pipe.consumer_start_state(), Promotion(spec, scales, rows)
    full, left = k.var(PRED, False, "next_is_full"), k.var(I32, 0, "left") if order else None

    def k_tiles(count: int) -> None:
        stages: list[Value] = []
        for part in sums.parts:
            for i in range(count):
                if part == sums.parts[0]:
                    mainloop.pipe.consumer_wait(read, None if i else full.get())
                    stages.append(read.index.named("stage"))
                    sums.read_scales(i, stages[i])  # before wgmma, beside which shared memory is slow
                    read.advance()
                a, b = mainloop.stage(stages[i])
                sums.multiply(i, part, a.rows(rows, spec.warpgroup_rows), b)
            if order and left and part == sums.parts[0]:
                left.set(left.get() - count)
                with k.when(left.get() == 0):  # all stages of the tile were full
                    order.arrive(warpgroup)
            for i in range(count):
                sums.wait(i, behind=count - 1 - i)
                if part == sums.parts[-1]:
                    mainloop.pipe.consumer_release(stages[i])
                    if i == count - 1:
                        with k.when(left.get() > 0) if left else nullcontext():
                            full.set(mainloop.pipe.consumer_test_wait(read))  # while the sums are added
                sums.add(i, part)

    def skip(tiles: Value | int) -> None:
        """So many tiles, which are the other warpgroup's."""
        read.skip(scheduler.k_tiles * tiles)
        scales.skip(scheduler.k_tiles, tiles)
        full.set(False)

    epilogue.start(warpgroup, rows)
    if order:
        order.start(warpgroup)
        skip(warpgroup)
    with scheduler.each(2, warpgroup) if order else scheduler.each() as tile:
        epilogue.load(tile)
        sums.begin(tile)
        if order and left:
            left.set(tile.k_tiles)
            with k.when(tile.k_tiles > 0):
                order.wait(warpgroup)
        k.comment("mainloop")
        with k.range(tile.k_tiles // sums.in_flight, name="k_group"):
            k_tiles(sums.in_flight)
        if sums.in_flight > 1:
            with k.range(tile.k_tiles % sums.in_flight, name="k_tile"):
                k_tiles(1)
        if order:
            skip(1)
        epilogue.store(sums.total, tile)
    epilogue.finish()


register_design(Design(
    "cooperative", cooperative, other_warpgroups=1,
    accumulators={1: 200, 2: 200, 3: 100},  # with 512 threads a CTA ptxas has 128 registers a thread for all
    takes=frozenset({"splits", "cluster_splits", "alias_epilogue", "sync_clusters"}),
    formerly="warp_specialized", promoted={1: 208, 2: 192, 3: 128},
))  # fmt: skip
