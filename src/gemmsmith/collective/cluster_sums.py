"""CTAs of a cluster that share a tile bring their sums together in the shared memory of those that reduce it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.partial_sums import PartialSums, receive, send, width_of
from gemmsmith.core.mma import WARPGROUP
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import I32, U32
from gemmsmith.lang.values import Registers, Value
from gemmsmith.schedule.tiles import ClusterPosition, Share, TileScheduler, WorkTile

WARPS = 4
"""Warps of a warpgroup: each releases a slot with one lane."""


class ClusterSums:
    """Each warpgroup of a CTA that shares a tile stores accumulators into slots of the same warpgroup of the CTAs that
    reduce it: all of them, a slice of the columns each, or the last. These add what comes to their own, in the order of
    the CTAs.

    Two barriers: `full`, one a slot, in the receiver, counts the bytes that land; `empty`, one a warpgroup, in the
    sender. The CTA's tiles are numbered, and a tile's number is that of their phase.
    """

    def __init__(self, spec: KernelSpec, position: ClusterPosition) -> None:
        assert isinstance(position.k, Value)
        self.spec, self.position, self.k, self.slices = spec, position, position.k, spec.slices
        self.others, self.consumers = spec.config.cluster_splits - 1, spec.config.consumers
        slots = self.others * self.consumers
        k = current()
        self.slot_bytes = spec.exchange_bytes // slots
        self.slots = k.shared(self.slot_bytes, stages=slots, name="shares")
        self.full = k.shared(8, stages=slots, alignment=8, name="shares full")
        self.empty = k.shared(8, stages=self.consumers, alignment=8, name="shares empty")

    @property
    def pipelines(self) -> tuple[ClusterSums, ...]:
        return (self,)

    def init(self) -> None:
        """Recorded in one thread, before the roles."""
        for i in range(self.others * self.consumers):
            hw.mbarrier_init(self.full[i], 1)
        for i in range(self.consumers):
            hw.mbarrier_init(self.empty[i], WARPS * max(self.slices - 1, 1))

    def reduced(self, tile: WorkTile) -> WorkTile:
        """What of a tile this CTA reduces and stores, if it does: all of it, or its slice of the columns."""
        if self.slices == 1:
            return tile
        return replace(tile, n=(tile.n + self.k * self.spec.slice_columns).named("slice_n"))

    @contextmanager
    def finished(self, accumulator: Accumulator, tile: WorkTile, warpgroup: Value) -> Iterator[Accumulator]:
        """What is recorded inside sees the whole sum of what the CTA reduces, where it reduces something."""
        k, share = current(), tile.share
        assert share is not None
        with k.when(~share.reduces) if self.slices == 1 else nullcontext():
            self._send(accumulator, share, warpgroup)
            self.sent.set(share.number + 1)
        with k.when(share.reduces):
            own = self._own(accumulator)
            self._receive(own, tile, warpgroup)
            yield own

    def start(self) -> None:
        """In the math warpgroups, before their first tile."""
        self.sent = current().var(I32, 0, "sent")

    def finish(self, warpgroup: Value) -> None:
        """No CTA may exit while a receiver still arrives at it."""
        with current().when(self.sent.get() > 0):
            hw.mbarrier_wait(self.empty[warpgroup], ((self.sent.get() + 1) % 2).to(U32))

    def _rank(self, k: Value | int) -> Value:
        """The CTA with this one's tile and the k-th share."""
        return (self.position.rank - self.position.first + k * self.spec.multicast_size).to(U32)

    def _send(self, accumulator: Accumulator, share: Share, warpgroup: Value) -> None:
        """Sends each other CTA that reduces a slice the columns of that slice."""
        k = current()
        hw.mbarrier_wait(self.empty[warpgroup], ((share.number + 1) % 2).to(U32), "cluster")
        offset = (k.thread % WARPGROUP * (4 * width_of(accumulator, self.slices))).to(U32)
        for slice in range(self.slices):
            receiver = self.others + 1 - self.slices + slice
            with k.when(self.k != receiver):
                sender = self.k - k.select(self.k > receiver, 1, 0)
                slot = (sender * self.consumers + warpgroup).named("slot")
                rank = self._rank(receiver).named("receiver")
                address = hw.mapa(self.slots[slot].address + offset, rank).named("remote_slot")
                full = hw.mapa(self.full[slot], rank).named("remote_full")
                send(accumulator, partial(_store, address, full), slice, self.slices)

    def _own(self, accumulator: Accumulator) -> Accumulator:
        """This CTA's own sums of what it reduces."""
        if self.slices == 1:
            return accumulator
        k, spec = current(), self.spec
        own = Accumulator(spec.mma, spec.warpgroup_rows, spec.slice_columns)
        for slice in range(self.slices):
            with k.when(self.k == slice):
                for block, every in zip(own.blocks, accumulator.blocks, strict=True):
                    with k.unroll(len(block)) as i:
                        block[i] = every[i + slice * len(block)]
        return own

    def _receive(self, accumulator: Accumulator, tile: WorkTile, warpgroup: Value) -> None:
        k, share = current(), tile.share
        assert share is not None
        assert tile.more is not None
        offset_of_thread = (k.thread % WARPGROUP * (4 * width_of(accumulator))).to(U32)
        with k.range(self.others, name="sender") as sender:
            slot = (sender * self.consumers + warpgroup).named("slot")
            with k.when(k.thread % WARPGROUP == 0):
                hw.mbarrier_arrive_expect_tx(self.full[slot], self.slot_bytes)
            hw.mbarrier_wait(self.full[slot], (share.number % 2).to(U32), "cluster")
            address = (self.slots[slot].address + offset_of_thread).named("slot_of_thread")
            receive(accumulator, lambda values, offset: hw.load_shared(values, address + offset.to(U32)))
            hw.sync_warp()
            with k.when(k.lane == 0):
                rank = self._rank(sender + k.select(sender >= self.k, 1, 0))
                with k.when(tile.more):  # ld has read the slot, which is written again
                    hw.mbarrier_arrive_cluster(self.empty[warpgroup], rank, "cluster")
                with k.otherwise():
                    hw.mbarrier_arrive_cluster(self.empty[warpgroup], rank, "cta")


def _store(address: Value, full: Value, values: Registers, offset: Value) -> None:
    hw.store_async(values, address + offset.to(U32), full)


def partial_sums(spec: KernelSpec, scheduler: TileScheduler) -> PartialSums | ClusterSums:
    """How sums of shares come together in this config."""
    return ClusterSums(spec, scheduler.position) if spec.config.cluster_splits > 1 else PartialSums(spec, scheduler)
