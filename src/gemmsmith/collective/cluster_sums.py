"""CTAs of a cluster that share a tile bring their sums together in the shared memory of those that finish it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.partial_sums import THREADS, PartialSums, give, take, width_of
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import I32, U32
from gemmsmith.lang.values import Registers, Value
from gemmsmith.schedule.tiles import ClusterPosition, Share, TileScheduler, WorkTile

WARPS = 4
"""Of a warpgroup: each hands a slot back with one lane."""


class ClusterSums:
    """Each warpgroup of a CTA that shares a tile stores accumulators into slots of the same warpgroup of those that
    finish it: all of them, a part of the columns each, or the last. These add what comes to their own, in the order of
    the CTAs.

    Two barriers: `full`, one a slot, where the slot is, counts the bytes that land; `taken`, one a warpgroup of a
    giver, where the giver is. A tile's turn is the number of their phase.
    """

    def __init__(self, spec: KernelSpec, place: ClusterPosition) -> None:
        assert isinstance(place.k, Value)
        self.spec, self.place, self.k, self.finishers = spec, place, place.k, spec.finishers
        self.others, self.consumers = spec.config.cluster_splits - 1, spec.config.consumers
        slots = self.others * self.consumers
        k = current()
        self.slot_bytes = spec.exchange_bytes // slots
        self.slots = k.shared(self.slot_bytes, stages=slots, name="shares")
        self.full = k.shared(8, stages=slots, alignment=8, name="shares full")
        self.taken = k.shared(8, stages=self.consumers, alignment=8, name="shares taken")

    @property
    def pipelines(self) -> tuple[ClusterSums, ...]:
        return (self,)

    def init(self) -> None:
        """Recorded in one thread, before the roles."""
        for i in range(self.others * self.consumers):
            hw.mbarrier_init(self.full[i], 1)
        for i in range(self.consumers):
            hw.mbarrier_init(self.taken[i], WARPS * max(self.finishers - 1, 1))

    def mine(self, tile: WorkTile) -> WorkTile:
        """What of a tile this CTA finishes, if it does: all of it, or its part of the columns."""
        if self.finishers == 1:
            return tile
        return replace(tile, n=(tile.n + self.k * self.spec.finished_columns).named("finished_n"))

    @contextmanager
    def finished(self, accumulator: Accumulator, tile: WorkTile, warpgroup: Value) -> Iterator[Accumulator]:
        """What is recorded inside sees the whole sum of what the CTA finishes, where it finishes something."""
        k, share = current(), tile.share
        assert share is not None
        with k.when(~share.finishes) if self.finishers == 1 else nullcontext():
            self._give(accumulator, share, warpgroup)
            self.given.set(share.turn + 1)
        with k.when(share.finishes):
            own = self._own(accumulator)
            self._take(own, share, warpgroup)
            yield own

    def start(self) -> None:
        """In the math warpgroups, before their first tile."""
        self.given = current().var(I32, 0, "given")

    def finish(self, warpgroup: Value) -> None:
        """No CTA may exit while a finisher still arrives at it."""
        with current().when(self.given.get() > 0):
            hw.mbarrier_wait(self.taken[warpgroup], ((self.given.get() + 1) % 2).to(U32))

    def _rank(self, k: Value | int) -> Value:
        """The CTA with this one's tile and the k-th share."""
        return (self.place.rank - self.place.first + k * self.spec.multicast_size).to(U32)

    def _give(self, accumulator: Accumulator, share: Share, warpgroup: Value) -> None:
        """To each finisher but itself what that one finishes."""
        k = current()
        hw.mbarrier_wait(self.taken[warpgroup], ((share.turn + 1) % 2).to(U32), "cluster")
        mine = (k.thread % THREADS * (4 * width_of(accumulator, self.finishers))).to(U32)
        for part in range(self.finishers):
            whose = self.others + 1 - self.finishers + part
            with k.when(self.k != whose):
                giver = self.k - k.select(self.k > whose, 1, 0)
                slot = (giver * self.consumers + warpgroup).named("slot")
                finisher = self._rank(whose).named("finisher")
                there = hw.mapa(self.slots[slot].address + mine, finisher).named("there")
                full = hw.mapa(self.full[slot], finisher).named("full")
                store = partial(_store, there, full)
                give(accumulator, store, part, self.finishers)

    def _own(self, accumulator: Accumulator) -> Accumulator:
        """This CTA's own sums of what it finishes."""
        if self.finishers == 1:
            return accumulator
        k, spec = current(), self.spec
        own = Accumulator(spec.mma, spec.warpgroup_rows, spec.finished_columns)
        for part in range(self.finishers):
            with k.when(self.k == part):
                for block, every in zip(own.blocks, accumulator.blocks, strict=True):
                    with k.unroll(len(block)) as i:
                        block[i] = every[i + part * len(block)]
        return own

    def _take(self, accumulator: Accumulator, share: Share, warpgroup: Value) -> None:
        k = current()
        mine = (k.thread % THREADS * (4 * width_of(accumulator))).to(U32)
        with k.range(self.others, name="giver") as giver:
            slot = (giver * self.consumers + warpgroup).named("slot")
            with k.when(k.thread % THREADS == 0):
                hw.mbarrier_arrive_expect_tx(self.full[slot], self.slot_bytes)
            hw.mbarrier_wait(self.full[slot], (share.turn % 2).to(U32), "cluster")
            here = (self.slots[slot].address + mine).named("here")
            take(accumulator, lambda values, offset: hw.load_shared(values, here + offset.to(U32)))
            hw.sync_warp()
            with k.when(k.lane == 0):
                whose = self._rank(giver + k.select(giver >= self.k, 1, 0))
                assert share.more is not None
                with k.when(share.more):  # ld has read the slot, which is written again
                    hw.mbarrier_arrive_cluster(self.taken[warpgroup], whose, "cluster")
                with k.otherwise():
                    hw.mbarrier_arrive_cluster(self.taken[warpgroup], whose, "cta")


def _store(there: Value, full: Value, values: Registers, offset: Value) -> None:
    hw.store_async(values, there + offset.to(U32), full)


def partial_sums(spec: KernelSpec, scheduler: TileScheduler) -> PartialSums | ClusterSums:
    """How sums of shares come together in this config."""
    return ClusterSums(spec, scheduler.position) if spec.config.cluster_splits > 1 else PartialSums(spec, scheduler)
