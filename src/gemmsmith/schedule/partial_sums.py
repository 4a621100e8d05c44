"""Clusters that share a tile bring their sums together, in a fixed order, through global memory.

Each warpgroup works for itself: those that do not finish the tile write their accumulators and raise a flag; the one
that does waits for each flag in turn, lowers it again, and adds. So flags are zero before and after a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.pipeline import Initialised
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import U32, U64
from gemmsmith.lang.values import Constant, Registers, Value
from gemmsmith.schedule.tiles import ClusterPosition, Share, WorkTile

FIRST_BARRIER = 8
"""Named barriers of the warpgroups; the epilogue's come before."""
THREADS = 128
"""Of a warpgroup."""


class PartialSums:
    """Kernel arguments, where tiles are shared: `partials` and `flags`, a slot of registers and a word for each
    warpgroup of each CTA."""

    def __init__(self, spec: KernelSpec, place: ClusterPosition) -> None:
        k = current()
        self.spec, self.place = spec, place
        if spec.config.splits != 1:
            self.partials, self.flags = k.pointer("partials"), k.pointer("flags")

    @property
    def pipelines(self) -> tuple[Initialised, ...]:
        return ()

    def prepare(self) -> None:
        """In the math warpgroups, before their first tile: nothing."""

    def finish(self, warpgroup: Value) -> None:
        """After the last tile: nothing."""

    @contextmanager
    def finished(self, accumulator: Accumulator, tile: WorkTile, warpgroup: Value) -> Iterator[None]:
        """What is recorded inside sees the tile's whole sum, in the cluster that finishes it."""
        k, share = current(), tile.share
        if share is None:
            yield
            return
        leader = k.thread % THREADS == 0
        with k.when(~share.finishes):
            self._give(accumulator, share, warpgroup, leader)
        with k.when(share.finishes):
            with k.range(share.cluster - share.other, name="giver") as giver, k.when(share.first > 0):
                self._take(accumulator, share.other + giver, warpgroup, leader)
            yield

    def _slot(self, cluster: Value, warpgroup: Value) -> Value:
        """The number of a warpgroup's slot."""
        cta = cluster * self.spec.cluster_size + self.place.rank
        return (cta * self.spec.config.consumers + warpgroup).named("slot")

    def _place(self, slot: Value, accumulator: Accumulator) -> Value:
        """Where this thread's first vector lies."""
        bytes_of_slot = sum(len(block) for block in accumulator.blocks) * 4 * THREADS
        mine = current().thread % THREADS * (4 * width_of(accumulator))
        return (self.partials + slot.to(U64) * bytes_of_slot + mine.to(U64)).named("place")

    def _give(self, accumulator: Accumulator, share: Share, warpgroup: Value, leader: Value) -> None:
        k = current()
        slot = self._slot(share.cluster, warpgroup)
        place = self._place(slot, accumulator)
        for block, first, width in vectors(accumulator):
            with k.unroll(len(block) // width, name="vector") as i:
                values = k.registers(block.type, width, "values")
                for j in range(width):
                    values[j] = block[i * width + j]
                hw.store_global(values, place + ((i + first) * (4 * width * THREADS)).to(U64), True)
        hw.barrier_sync(warpgroup + FIRST_BARRIER, THREADS)
        with k.when(leader):
            hw.store_release(self.flags + (slot * 4).to(U64), Constant(U32, 1))

    def _take(self, accumulator: Accumulator, cluster: Value, warpgroup: Value, leader: Value) -> None:
        k = current()
        slot = self._slot(cluster, warpgroup)
        place, flag = self._place(slot, accumulator), self.flags + (slot * 4).to(U64)
        with k.when(leader):
            hw.wait_acquire(flag, Constant(U32, 1))
            hw.store_release(flag, Constant(U32, 0))
        hw.barrier_sync(warpgroup + FIRST_BARRIER, THREADS)
        for block, first, width in vectors(accumulator):
            with k.unroll(len(block) // width, name="vector") as i:
                values = k.registers(block.type, width, "values")
                hw.load_global(values, place + ((i + first) * (4 * width * THREADS)).to(U64), True)
                for j in range(width):
                    accumulator.add(block, i * width + j, values[j])


def width_of(accumulator: Accumulator) -> int:
    """Registers that are moved at once."""
    return 4 if len(accumulator.blocks[0]) % 4 == 0 else 2


def vectors(accumulator: Accumulator) -> Iterator[tuple[Registers, int, int]]:
    """(block, number of its first vector, registers a vector); a vector of all threads lies side by side."""
    width = width_of(accumulator)
    for i, block in enumerate(accumulator.blocks):
        yield block, i * (len(block) // width), width


def bytes_of_slots(spec: KernelSpec, clusters: int) -> tuple[int, int]:
    """Of `partials` and of `flags`, for a grid."""
    slots = clusters * spec.cluster_size * spec.config.consumers
    return slots * spec.accumulator_registers * 4 * THREADS, slots * 4
