"""The split-K reductions: of clusters through global memory, and of a cluster's CTAs through DSMEM.

Through global memory (CUTLASS stream-K: fixup) the order is fixed: non-final warpgroups store their accumulator and set
a flag (release); the final one waits for each flag (acquire), clears it and adds. Flags are zero before and after every
kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.pipeline import HasBarriers
from gemmsmith.core.mma import THREADS_PER_WARPGROUP
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import I32, U32, U64
from gemmsmith.lang.values import Constant, RegisterArray, Value
from gemmsmith.tile_scheduler.tiles import ClusterPosition, Split, TileScheduler, WorkTile

VectorCopy = Callable[[RegisterArray, Value], object]
"""(registers, byte offset) -> None: copies a vector between registers and memory."""


class SplitReduction:
    """The reduction of the partial sums of a tile whose K is split; this base class is for tiles that are not split."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec

    @property
    def pipelines(self) -> tuple[HasBarriers, ...]:
        """The objects whose barriers must be initialized."""
        return ()

    def output_tile(self, tile: WorkTile) -> WorkTile:
        """Return the part of a tile that this CTA stores if it reduces: all of the tile, or a slice of its columns."""
        return tile

    def start(self) -> None:
        """Declare a consumer warpgroup's state, before its first tile."""

    @contextmanager
    def reduced_accumulator(self, accumulator: Accumulator, tile: WorkTile, warpgroup: Value) -> Iterator[Accumulator]:
        """Reduce a tile's partial sums; the body of the `with` statement runs in the CTAs that reduce.

        It yields the accumulator with the sums over all splits. Other CTAs only hand over their partial sums.
        """
        yield accumulator

    def tail(self, warpgroup: Value) -> None:
        """Wait for peers after a consumer warpgroup's last tile."""


class GlobalSplitReduction(SplitReduction):
    """The reduction of the partial sums of several clusters, through global memory.

    A slot holds the accumulator of one consumer warpgroup of one CTA. Kernel arguments: `partials`, the address of all
    slots, and `flags`, that of a word per slot, which is 1 while the slot holds partial sums that nobody has added.
    """

    def __init__(self, spec: KernelSpec, scheduler: TileScheduler) -> None:
        super().__init__(spec)
        k, self.cta_rank = current_builder(), scheduler.position.cta_rank
        self._slot_bytes = spec.accumulator_registers * 4 * THREADS_PER_WARPGROUP
        self._barriers = k.named_barriers(spec.config.consumers)

        def slots(p: Problem) -> int:
            return scheduler.clusters_of(p) * spec.cluster_size * spec.config.consumers

        self.partials = k.scratch("partials", lambda p: slots(p) * self._slot_bytes)
        self.flags = k.scratch("flags", lambda p: slots(p) * 4, zero_initialized=True)

    @contextmanager
    def reduced_accumulator(self, accumulator: Accumulator, tile: WorkTile, warpgroup: Value) -> Iterator[Accumulator]:
        """Store the partial sums, or, in the cluster that runs the epilogue, add those of the other clusters."""
        k, split = current_builder(), tile.split
        assert split is not None
        leader = (k.thread % THREADS_PER_WARPGROUP == 0).named("is_reduction_leader")
        with k.when(~split.runs_epilogue):
            self._store(accumulator, split, warpgroup, leader)
        with k.when(split.runs_epilogue):
            # A split from k-tile 0 on has no peers, and a tile that is not split has no valid `first_peer`.
            num_peers = (split.cluster_idx - split.first_peer).named("num_peers")
            with k.range(num_peers, name="peer") as peer, k.when(tile.k_tile_begin > 0):
                self._accumulate(accumulator, split.first_peer + peer, warpgroup, leader)
            yield accumulator

    def _slot(self, cluster_idx: Value, warpgroup: Value) -> Value:
        """Return the index of the slot of `warpgroup` of the CTA with this CTA's rank in cluster `cluster_idx`."""
        cta = cluster_idx * self.spec.cluster_size + self.cta_rank
        return (cta * self.spec.config.consumers + warpgroup).named("slot")

    def _address(self, slot: Value, accumulator: Accumulator) -> Value:
        offset = current_builder().thread % THREADS_PER_WARPGROUP * (4 * vector_width(accumulator))
        return (self.partials + slot.to(U64) * self._slot_bytes + offset.to(U64)).named("thread_partials_ptr")

    def _store(self, accumulator: Accumulator, split: Split, warpgroup: Value, leader: Value) -> None:
        """Store this warpgroup's partial sums in its slot; then the `leader` thread sets the slot's flag."""
        k = current_builder()
        slot = self._slot(split.cluster_idx, warpgroup)
        address = self._address(slot, accumulator)
        store_partials(accumulator, lambda values, offset: hw.store_global(values, address + offset.to(U64), True))
        k.comment("wait until all threads have written their partial sums, which the flag announces")
        hw.barrier_sync(warpgroup + self._barriers, THREADS_PER_WARPGROUP)
        with k.when(leader):
            hw.store_strong(self.flags + (slot * 4).to(U64), Constant(U32, 1), "release", "gpu")

    def _accumulate(self, accumulator: Accumulator, cluster_idx: Value, warpgroup: Value, leader: Value) -> None:
        """Wait for the flag of a slot of cluster `cluster_idx`, clear it, and add the slot's partial sums."""
        k = current_builder()
        slot = self._slot(cluster_idx, warpgroup)
        address, flag = self._address(slot, accumulator), (self.flags + (slot * 4).to(U64)).named("flag_ptr")
        with k.when(leader):
            hw.spin_until_equal(flag, Constant(U32, 1))
            hw.store_strong(flag, Constant(U32, 0), "relaxed", "gpu")
        k.comment("wait until the leader has seen the flag")
        hw.barrier_sync(warpgroup + self._barriers, THREADS_PER_WARPGROUP)
        accumulate_partials(accumulator, lambda values, offset: hw.load_global(values, address + offset.to(U64), True))


def vector_width(accumulator: Accumulator, num_slices: int = 1) -> int:
    """Return how many registers (4 or 2) are copied at once, of one of `num_slices` slices of the columns."""
    return 4 if len(accumulator.fragments[0]) // num_slices % 4 == 0 else 2


def store_partials(accumulator: Accumulator, store: VectorCopy, slice_idx: int = 0, num_slices: int = 1) -> None:
    """Store a slice of the accumulator's columns, vector by vector.

    The threads' n-th vectors are contiguous, so that a warp's accesses are coalesced. `store` stores a vector, at a
    byte offset from this thread's first one.
    """
    width = vector_width(accumulator, num_slices)
    first = slice_idx * (accumulator.fragments.count // num_slices)
    for fragment, vector, offset in _vectors(accumulator, width, num_slices):
        store(fragment.slice(vector * width + first, width), offset)


def accumulate_partials(accumulator: Accumulator, load: VectorCopy) -> None:
    """Add to the accumulator what `store_partials` has stored of another one.

    If that stored a slice, this accumulator has the slice's columns only.
    """
    k, width = current_builder(), vector_width(accumulator)
    for fragment, vector, offset in _vectors(accumulator, width):
        values = k.registers(fragment.type, width, "values")
        load(values, offset)
        with k.unroll(width) as i:
            accumulator.add(fragment, (vector * width + i).named("acc_idx"), values[i])


def _vectors(accumulator: Accumulator, width: int, num_slices: int = 1) -> Iterator[tuple[RegisterArray, Value, Value]]:
    """Record a loop over the vectors, of `width` registers each, of one of `num_slices` slices of the columns.

    Yield the fragment, the index of the vector in the fragment's slice, and the vector's byte offset from this thread's
    first one.
    """
    k, fragments = current_builder(), accumulator.fragments
    count = fragments.count // num_slices // width
    with k.unroll(len(fragments), name="mma_m") as mma_m, k.unroll(count, name="vector") as vector:
        yield fragments[mma_m], vector, (mma_m * count + vector) * (4 * width * THREADS_PER_WARPGROUP)


WARPS_PER_WARPGROUP = 4
"""Warps of a warpgroup, each of which releases a slot with one lane."""


class ClusterSplitReduction(SplitReduction):
    """The reduction of the partial sums of the CTAs of a cluster that split a tile's K.

    Each warpgroup sends its partial sums to the same warpgroup of the CTAs that reduce the tile: all CTAs, of which
    each reduces one slice of the columns, or only the last CTA. A reducing CTA adds the others' sums in rank order.

    The receiver has a slot in shared memory for each peer and warpgroup, and a full barrier per slot, which counts the
    bytes that arrive. The sender has an empty barrier per warpgroup, on which the receivers release their slots. The
    barriers complete one phase per tile, so the parity to wait for is that of the number of tiles the CTA has done.
    """

    def __init__(self, spec: KernelSpec, position: ClusterPosition) -> None:
        super().__init__(spec)
        assert isinstance(position.split_idx, Value)
        self.position, self.split_idx = position, position.split_idx
        self.num_slices, self.consumers = spec.num_reducing_ctas, spec.config.consumers
        self.num_peers = spec.config.cluster_splits - 1
        num_slots = self.num_peers * self.consumers
        k = current_builder()
        self.slot_bytes = spec.cluster_reduction_bytes // num_slots
        name = "split-K exchange"
        self.exchange_slots = k.shared(self.slot_bytes, stages=num_slots, name=name)
        self.full = k.shared(8, stages=num_slots, alignment=8, name=f"{name} full barrier")
        self.empty = k.shared(8, stages=self.consumers, alignment=8, name=f"{name} empty barrier")

    @property
    def pipelines(self) -> tuple[HasBarriers, ...]:
        return (self,)

    def init(self) -> None:
        k = current_builder()
        with k.unroll(self.num_peers * self.consumers, name="slot") as slot:
            hw.mbarrier_init(self.full[slot], 1)
        # Full: the receiver's own arrival, with the bytes. Empty: each warp of each receiver of this CTA's sums.
        with k.unroll(self.consumers, name="consumer") as consumer:
            hw.mbarrier_init(self.empty[consumer], WARPS_PER_WARPGROUP * max(self.num_slices - 1, 1))

    def output_tile(self, tile: WorkTile) -> WorkTile:
        if self.num_slices == 1:
            return tile
        return replace(tile, n=(tile.n + self.split_idx * self.spec.slice_columns).named("split_n_offset"))

    def start(self) -> None:
        self._tiles_sent = current_builder().var(I32, 0, "tiles_sent")

    @contextmanager
    def reduced_accumulator(self, accumulator: Accumulator, tile: WorkTile, warpgroup: Value) -> Iterator[Accumulator]:
        """Send the partial sums that other CTAs reduce, add those that they send, and yield the columns of this CTA."""
        k, split = current_builder(), tile.split
        assert split is not None
        with k.when(~split.runs_epilogue) if self.num_slices == 1 else nullcontext():
            self._send(accumulator, split, warpgroup)
            self._tiles_sent.set(split.tile_ordinal + 1)
        with k.when(split.runs_epilogue):
            own_columns = self._own_columns(accumulator)
            self._receive(own_columns, tile, split, warpgroup)
            yield own_columns

    def tail(self, warpgroup: Value) -> None:
        """Wait until the receivers have released the last slots: no CTA may exit while a peer still arrives on it."""
        with current_builder().when(self._tiles_sent.get() > 0):
            hw.mbarrier_wait(self.empty[warpgroup], ((self._tiles_sent.get() + 1) % 2).to(U32))

    def _rank(self, split_idx: Value | int) -> Value:
        """Return the cluster rank of the CTA that has split `split_idx` of this CTA's tile."""
        base_rank = self.position.cta_rank - self.position.split_base_rank
        return (base_rank + split_idx * self.spec.multicast_size).to(U32)

    def _send(self, accumulator: Accumulator, split: Split, warpgroup: Value) -> None:
        """Send, to each other CTA that reduces, the partial sums of the columns that it reduces."""
        k = current_builder()
        hw.mbarrier_wait(self.empty[warpgroup], ((split.tile_ordinal + 1) % 2).to(U32), "cluster")
        offset = (k.thread % THREADS_PER_WARPGROUP * (4 * vector_width(accumulator, self.num_slices))).to(U32)
        offset.with_name_hint("thread_offset")
        for slice_idx in range(self.num_slices):
            receiver = self.num_peers + 1 - self.num_slices + slice_idx
            with k.when(self.split_idx != receiver):
                sender = self.split_idx - k.select(self.split_idx > receiver, 1, 0)
                slot = (sender * self.consumers + warpgroup).named("slot")
                rank = self._rank(receiver).named("receiver_rank")
                address = hw.mapa(self.exchange_slots[slot].address + offset, rank).named("remote_slot")
                full = hw.mapa(self.full[slot], rank).named("remote_full_barrier")
                store_partials(accumulator, partial(_store_remote, address, full), slice_idx, self.num_slices)

    def _own_columns(self, accumulator: Accumulator) -> Accumulator:
        if self.num_slices == 1:
            return accumulator
        k, spec = current_builder(), self.spec
        own_columns = Accumulator(spec.mma, spec.warpgroup_rows, spec.slice_columns, "slice_accumulator")
        for slice_idx in range(self.num_slices):
            with k.when(self.split_idx == slice_idx):
                for own, full in zip(own_columns.fragments, accumulator.fragments, strict=True):
                    with k.unroll(len(own)) as i:
                        own[i] = full[i + slice_idx * len(own)]
        return own_columns

    def _receive(self, accumulator: Accumulator, tile: WorkTile, split: Split, warpgroup: Value) -> None:
        """Add to `accumulator` the partial sums that the other CTAs send, and release their slots."""
        k = current_builder()
        assert tile.has_next is not None
        thread_offset = (k.thread % THREADS_PER_WARPGROUP * (4 * vector_width(accumulator))).to(U32)
        thread_offset.with_name_hint("thread_offset")
        with k.range(self.num_peers, name="sender") as sender:
            slot = (sender * self.consumers + warpgroup).named("slot")
            with k.when(k.thread % THREADS_PER_WARPGROUP == 0):
                hw.mbarrier_arrive_expect_tx(self.full[slot], self.slot_bytes)
            hw.mbarrier_wait(self.full[slot], (split.tile_ordinal % 2).to(U32), "cluster")
            address = (self.exchange_slots[slot].address + thread_offset).named("thread_slot")
            accumulate_partials(accumulator, lambda values, offset: hw.load_shared(values, address + offset.to(U32)))
            k.comment("wait until all lanes have read the slot that is released next")
            hw.sync_warp()
            with k.when(k.lane == 0):
                rank = self._rank(sender + k.select(sender >= self.split_idx, 1, 0)).with_name_hint("sender_rank")
                with k.when(tile.has_next):  # cluster scope: ld has read the slot, which the peer writes again
                    hw.mbarrier_arrive_remote(self.empty[warpgroup], rank, "cluster")
                with k.otherwise():
                    hw.mbarrier_arrive_remote(self.empty[warpgroup], rank, "cta")


def _store_remote(address: Value, full_barrier: Value, values: RegisterArray, offset: Value) -> None:
    """Store a vector `offset` bytes after an address of a peer's shared memory; it completes on the peer's barrier."""
    hw.store_async(values, address + offset.to(U32), full_barrier)


def make_split_reduction(spec: KernelSpec, scheduler: TileScheduler) -> SplitReduction:
    """Return the reduction of partial sums for a config: through DSMEM, none, or through global memory."""
    if spec.config.cluster_splits > 1:
        return ClusterSplitReduction(spec, scheduler.position)
    return SplitReduction(spec) if spec.config.splits == 1 else GlobalSplitReduction(spec, scheduler)
