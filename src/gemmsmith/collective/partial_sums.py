"""Clusters that share a tile bring their sums together, in a fixed order, through global memory.

Each warpgroup works for itself: those of clusters that do not reduce the tile write their accumulators and set a
flag; that of the cluster that does waits for one flag after the other, clears it, and adds. So flags are zero before
and after a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.pipeline import Initialized
from gemmsmith.core.mma import WARPGROUP
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import U32, U64
from gemmsmith.lang.values import Constant, Registers, Value
from gemmsmith.schedule.tiles import Share, TileScheduler, WorkTile

Move = Callable[[Registers, Value], object]
"""(registers, byte offset): moves a vector."""


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
    def pipelines(self) -> tuple[Initialized, ...]:
        return ()

    def reduced(self, tile: WorkTile) -> WorkTile:
        """What of a tile this CTA reduces and stores: all of it."""
        return tile

    def start(self) -> None:
        """In the math warpgroups, before their first tile: nothing."""

    def finish(self, warpgroup: Value) -> None:
        """After the last tile: nothing."""

    @contextmanager
    def finished(self, accumulator: Accumulator, tile: WorkTile, warpgroup: Value) -> Iterator[Accumulator]:
        """What is recorded inside sees the tile's whole sum, in the cluster that reduces it."""
        k, share = current(), tile.share
        if share is None:
            yield accumulator
            return
        leader = k.thread % WARPGROUP == 0
        with k.when(~share.reduces):
            self._send(accumulator, share, warpgroup, leader)
        with k.when(share.reduces):
            with k.range(share.cluster - share.other, name="sender") as sender, k.when(share.first > 0):
                self._receive(accumulator, share.other + sender, warpgroup, leader)
            yield accumulator

    def _slot(self, cluster: Value, warpgroup: Value) -> Value:
        """The number of a warpgroup's slot."""
        cta = cluster * self.spec.cluster_size + self.rank
        return (cta * self.spec.config.consumers + warpgroup).named("slot")

    def _address(self, slot: Value, accumulator: Accumulator) -> Value:
        """Where this thread's first vector lies."""
        offset = current().thread % WARPGROUP * (4 * width_of(accumulator))
        return (self.partials + slot.to(U64) * self._slot_bytes + offset.to(U64)).named("partials_of_thread")

    @property
    def _slot_bytes(self) -> int:
        return self.spec.accumulator_registers * 4 * WARPGROUP

    def _send(self, accumulator: Accumulator, share: Share, warpgroup: Value, leader: Value) -> None:
        k = current()
        slot = self._slot(share.cluster, warpgroup)
        address = self._address(slot, accumulator)
        send(accumulator, lambda values, offset: hw.store_global(values, address + offset.to(U64), True))
        hw.barrier_sync(warpgroup + self._barriers, WARPGROUP)
        with k.when(leader):
            hw.store_strong(self.flags + (slot * 4).to(U64), Constant(U32, 1), "release", "gpu")

    def _receive(self, accumulator: Accumulator, cluster: Value, warpgroup: Value, leader: Value) -> None:
        k = current()
        slot = self._slot(cluster, warpgroup)
        address, flag = self._address(slot, accumulator), self.flags + (slot * 4).to(U64)
        with k.when(leader):
            hw.wait_acquire(flag, Constant(U32, 1))
            hw.store_strong(flag, Constant(U32, 0), "relaxed", "gpu")
        hw.barrier_sync(warpgroup + self._barriers, WARPGROUP)
        receive(accumulator, lambda values, offset: hw.load_global(values, address + offset.to(U64), True))


def width_of(accumulator: Accumulator, slices: int = 1) -> int:
    """Registers that are moved at once, of a slice of the columns."""
    return 4 if len(accumulator.blocks[0]) // slices % 4 == 0 else 2


def send(accumulator: Accumulator, store: Move, slice: int = 0, slices: int = 1) -> None:
    """Stores the registers of a slice of the columns, a vector at a time; a vector of all threads lies side by side."""
    for block, i, values, offset in _vectors(accumulator, slices):
        first = slice * (len(block) // slices)
        for j in range(len(values)):
            values[j] = block[i * len(values) + (first + j)]
        store(values, offset)


def receive(accumulator: Accumulator, load: Move) -> None:
    """Adds what lies there, in the order of `send`."""
    for block, i, values, offset in _vectors(accumulator):
        load(values, offset)
        for j in range(len(values)):
            accumulator.add(block, i * len(values) + j, values[j])


def _vectors(accumulator: Accumulator, slices: int = 1) -> Iterator[tuple[Registers, Value, Registers, Value]]:
    """(block, number of a vector in it, registers to move it through, bytes from this thread's first vector)."""
    k, width = current(), width_of(accumulator, slices)
    for n, block in enumerate(accumulator.blocks):
        count = len(block) // slices // width
        with k.unroll(count, name="vector") as i:
            yield block, i, k.registers(block.type, width, "values"), (i + n * count) * (4 * width * WARPGROUP)
