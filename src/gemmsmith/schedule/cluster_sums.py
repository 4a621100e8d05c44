"""CTAs of a cluster that share a tile bring their sums together in the shared memory of the one that finishes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import I32, U32
from gemmsmith.lang.values import Value
from gemmsmith.schedule.partial_sums import THREADS, PartialSums, give, take, width_of
from gemmsmith.schedule.tiles import ClusterPosition, Share, WorkTile

WARPS = 4
"""Of a warpgroup: each hands a slot back with one lane."""


class ClusterSums:
    """Each warpgroup of a CTA that does not finish the tile stores its accumulators into a slot of the same warpgroup
    of the one that does, which adds them in the order of the CTAs.

    Two barriers: `full`, one a slot, where the slot is, counts the bytes that land; `taken`, one a warpgroup of a
    giver, where the giver is. A tile's turn is the number of their phase.
    """

    def __init__(self, spec: KernelSpec, place: ClusterPosition) -> None:
        self.spec, self.place = spec, place
        self.givers, self.consumers = spec.config.cluster_splits - 1, spec.config.consumers
        slots = self.givers * self.consumers
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
        for i in range(self.givers * self.consumers):
            hw.mbarrier_init(self.full[i], 1)
        for i in range(self.consumers):
            hw.mbarrier_init(self.taken[i], WARPS)

    @contextmanager
    def finished(self, accumulator: Accumulator, tile: WorkTile, warpgroup: Value) -> Iterator[None]:
        """What is recorded inside sees the tile's whole sum, in the CTA that finishes it."""
        k, share = current(), tile.share
        assert share is not None
        with k.when(~share.finishes):
            self._give(accumulator, share, warpgroup)
            self.given.set(share.turn + 1)
        with k.when(share.finishes):
            self._take(accumulator, share, warpgroup)
            yield

    def prepare(self) -> None:
        """In the math warpgroups, before their first tile."""
        self.given = current().var(I32, 0, "given")

    def finish(self, warpgroup: Value) -> None:
        """No CTA may exit while the finisher still arrives at it."""
        with current().when(self.given.get() > 0):
            hw.mbarrier_wait(self.taken[warpgroup], ((self.given.get() + 1) % 2).to(U32))

    def _rank(self, k: Value | int) -> Value:
        """The CTA with this one's tile and the k-th share."""
        return (self.place.rank - self.place.first + k * self.spec.multicast_size).to(U32)

    def _give(self, accumulator: Accumulator, share: Share, warpgroup: Value) -> None:
        k = current()
        slot = (self.place.k * self.consumers + warpgroup).named("slot")
        finisher = self._rank(self.givers).named("finisher")
        hw.mbarrier_wait(self.taken[warpgroup], ((share.turn + 1) % 2).to(U32))
        mine = k.thread % THREADS * (4 * width_of(accumulator))
        there = hw.mapa(self.slots[slot].address + mine.to(U32), finisher).named("there")
        full = hw.mapa(self.full[slot], finisher).named("full")
        give(accumulator, lambda values, offset: hw.store_async(values, there + offset.to(U32), full))

    def _take(self, accumulator: Accumulator, share: Share, warpgroup: Value) -> None:
        k = current()
        mine = (k.thread % THREADS * (4 * width_of(accumulator))).to(U32)
        with k.range(self.givers, name="giver") as giver:
            slot = (giver * self.consumers + warpgroup).named("slot")
            with k.when(k.thread % THREADS == 0):
                hw.mbarrier_arrive_expect_tx(self.full[slot], self.slot_bytes)
            hw.mbarrier_wait(self.full[slot], (share.turn % 2).to(U32), cluster=True)
            here = (self.slots[slot].address + mine).named("here")
            take(accumulator, lambda values, offset: hw.load_shared(values, here + offset.to(U32)))
            hw.sync_warp()
            with k.when(k.lane == 0):
                hw.mbarrier_arrive_cluster(self.taken[warpgroup], self._rank(giver))


def partial_sums(spec: KernelSpec, place: ClusterPosition) -> PartialSums | ClusterSums:
    """How sums of shares come together in this config."""
    return ClusterSums(spec, place) if spec.config.cluster_splits > 1 else PartialSums(spec, place)
