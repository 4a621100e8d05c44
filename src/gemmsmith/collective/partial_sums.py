"""Clusters that share a tile bring their sums together, in a fixed order, through global memory.

Each warpgroup works for itself: those that do not finish the tile write their accumulators and raise a flag; the one
that does waits for each flag in turn, lowers it again, and adds. So flags are zero before and after a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.pipeline import Initialised
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import U32, U64
from gemmsmith.lang.values import Constant, Registers, Value
from gemmsmith.schedule.tiles import Share, TileScheduler, WorkTile

THREADS = 128
"""Of a warpgroup."""
Move = Callable[[Registers, Value], object]
"""(registers, byte offset): what moves a vector."""


class PartialSums:
    """Kernel arguments, where tiles are shared: `partials` and `flags`, a slot of registers and a word for each
    warpgroup of each CTA."""

    def __init__(self, spec: KernelSpec, scheduler: TileScheduler) -> None:
        k = current()
        self.spec, self.rank = spec, scheduler.position.rank
        if spec.config.splits != 1:
            self._barriers = k.named_barriers(spec.config.consumers)

            def slots(p: Problem) -> int:
                return scheduler.clusters_of(p) * spec.cluster_size * spec.config.consumers

            self.partials = k.scratch("partials", lambda p: slots(p) * self._slot_bytes)
            self.flags = k.scratch("flags", lambda p: slots(p) * 4, zeroed=True)

    @property
    def pipelines(self) -> tuple[Initialised, ...]:
        return ()

    def mine(self, tile: WorkTile) -> WorkTile:
        """What of a tile this CTA finishes: all of it."""
        return tile

    def start(self) -> None:
        """In the math warpgroups, before their first tile: nothing."""

    def finish(self, warpgroup: Value) -> None:
        """After the last tile: nothing."""

    @contextmanager
    def finished(self, accumulator: Accumulator, tile: WorkTile, warpgroup: Value) -> Iterator[Accumulator]:
        """What is recorded inside sees the tile's whole sum, in the cluster that finishes it."""
        k, share = current(), tile.share
        if share is None:
            yield accumulator
            return
        leader = k.thread % THREADS == 0
        with k.when(~share.finishes):
            self._give(accumulator, share, warpgroup, leader)
        with k.when(share.finishes):
            with k.range(share.cluster - share.other, name="giver") as giver, k.when(share.first > 0):
                self._take(accumulator, share.other + giver, warpgroup, leader)
            yield accumulator

    def _slot(self, cluster: Value, warpgroup: Value) -> Value:
        """The number of a warpgroup's slot."""
        cta = cluster * self.spec.cluster_size + self.rank
        return (cta * self.spec.config.consumers + warpgroup).named("slot")

    def _place(self, slot: Value, accumulator: Accumulator) -> Value:
        """Where this thread's first vector lies."""
        mine = current().thread % THREADS * (4 * width_of(accumulator))
        return (self.partials + slot.to(U64) * self._slot_bytes + mine.to(U64)).named("place")

    @property
    def _slot_bytes(self) -> int:
        return self.spec.accumulator_registers * 4 * THREADS

    def _give(self, accumulator: Accumulator, share: Share, warpgroup: Value, leader: Value) -> None:
        k = current()
        slot = self._slot(share.cluster, warpgroup)
        place = self._place(slot, accumulator)
        give(accumulator, lambda values, offset: hw.store_global(values, place + offset.to(U64), True))
        hw.barrier_sync(warpgroup + self._barriers, THREADS)
        with k.when(leader):
            hw.store_strong(self.flags + (slot * 4).to(U64), Constant(U32, 1), "release", "gpu")

    def _take(self, accumulator: Accumulator, cluster: Value, warpgroup: Value, leader: Value) -> None:
        k = current()
        slot = self._slot(cluster, warpgroup)
        place, flag = self._place(slot, accumulator), self.flags + (slot * 4).to(U64)
        with k.when(leader):
            hw.wait_acquire(flag, Constant(U32, 1))
            hw.store_strong(flag, Constant(U32, 0), "relaxed", "gpu")
        hw.barrier_sync(warpgroup + self._barriers, THREADS)
        take(accumulator, lambda values, offset: hw.load_global(values, place + offset.to(U64), True))


def width_of(accumulator: Accumulator, parts: int = 1) -> int:
    """Registers of a part of the columns that are moved at once."""
    return 4 if len(accumulator.blocks[0]) // parts % 4 == 0 else 2


def give(accumulator: Accumulator, store: Move, part: int = 0, parts: int = 1) -> None:
    """Stores the registers of a part of the columns, a vector at a time; a vector of all threads lies side by side."""
    for block, i, values, offset in _vectors(accumulator, parts):
        first = part * (len(block) // parts)
        for j in range(len(values)):
            values[j] = block[i * len(values) + (first + j)]
        store(values, offset)


def take(accumulator: Accumulator, load: Move) -> None:
    """Adds what lies there, in the order of `give`."""
    for block, i, values, offset in _vectors(accumulator):
        load(values, offset)
        for j in range(len(values)):
            accumulator.add(block, i * len(values) + j, values[j])


def _vectors(accumulator: Accumulator, parts: int = 1) -> Iterator[tuple[Registers, Value, Registers, Value]]:
    """(block, number of a vector in it, registers to move it through, bytes from this thread's first vector)."""
    k, width = current(), width_of(accumulator, parts)
    for n, block in enumerate(accumulator.blocks):
        count = len(block) // parts // width
        with k.unroll(count, name="vector") as i:
            yield block, i, k.registers(block.type, width, "values"), (i + n * count) * (4 * width * THREADS)
