"""The split-K reduction of clusters, through global memory, in a fixed order (CUTLASS stream-K: fixup).

Non-final warpgroups store their accumulator and set a flag (release); the final one waits for each flag (acquire),
clears it and adds. Flags are zero before and after every kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.pipeline import HasBarriers
from gemmsmith.core.mma import THREADS_PER_WARPGROUP
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import U32, U64
from gemmsmith.lang.values import Constant, RegisterArray, Value, Variable
from gemmsmith.tile_scheduler.tiles import Split, TileScheduler, WorkTile

VectorCopy = Callable[[RegisterArray, Value], object]
"""(registers, byte offset) -> None: copies a vector between registers and memory."""


class GlobalSplitReduction:
    """The reduction of the partial sums of a tile's splits; without splits it does nothing.

    Kernel arguments, with splits: `partials`, a slot for the accumulator of each warpgroup of each CTA, and `flags`, a
    word for each of them.
    """

    def __init__(self, spec: KernelSpec, scheduler: TileScheduler) -> None:
        k = current_builder()
        self.spec, self.cta_rank = spec, scheduler.position.cta_rank
        if spec.config.splits != 1:
            self._barriers = k.named_barriers(spec.config.consumers)

            def slots(p: Problem) -> int:
                return scheduler.clusters_of(p) * spec.cluster_size * spec.config.consumers

            self.partials = k.scratch("partials", lambda p: slots(p) * self._slot_bytes)
            self.flags = k.scratch("flags", lambda p: slots(p) * 4, zero_initialized=True)

    @property
    def pipelines(self) -> tuple[HasBarriers, ...]:
        """The objects whose barriers must be initialized: none."""
        return ()

    def output_tile(self, tile: WorkTile) -> WorkTile:
        """Return what this CTA reduces and stores of a tile: all of it."""
        return tile

    def consumer_start_state(self) -> None:
        """Return a consumer warpgroup's state: none."""

    def tail(self, warpgroup: Value, tiles_sent: Variable | None) -> None:
        """Do nothing."""

    @contextmanager
    def reduced_accumulator(
        self, accumulator: Accumulator, tile: WorkTile, warpgroup: Value, tiles_sent: Variable | None
    ) -> Iterator[Accumulator]:
        """Enter a branch that runs only in CTAs that reduce, and yield the fully reduced accumulator."""
        k, split = current_builder(), tile.split
        if split is None:
            yield accumulator
            return
        leader = (k.thread % THREADS_PER_WARPGROUP == 0).named("is_reduction_leader")
        with k.when(~split.runs_epilogue):
            self._store(accumulator, split, warpgroup, leader)
        with k.when(split.runs_epilogue):
            num_peers = (split.cluster_idx - split.first_peer).named("num_peers")
            with k.range(num_peers, name="peer") as peer, k.when(split.k_tile_begin > 0):
                self._accumulate(accumulator, split.first_peer + peer, warpgroup, leader)
            yield accumulator

    def _slot(self, cluster_idx: Value, warpgroup: Value) -> Value:
        """Return the index of a warpgroup's slot."""
        cta = cluster_idx * self.spec.cluster_size + self.cta_rank
        return (cta * self.spec.config.consumers + warpgroup).named("slot")

    def _address(self, slot: Value, accumulator: Accumulator) -> Value:
        """Return the address of this thread's first vector in a slot."""
        offset = current_builder().thread % THREADS_PER_WARPGROUP * (4 * vector_width(accumulator))
        return (self.partials + slot.to(U64) * self._slot_bytes + offset.to(U64)).named("thread_partials_ptr")

    @property
    def _slot_bytes(self) -> int:
        return self.spec.accumulator_registers * 4 * THREADS_PER_WARPGROUP

    def _store(self, accumulator: Accumulator, split: Split, warpgroup: Value, leader: Value) -> None:
        k = current_builder()
        slot = self._slot(split.cluster_idx, warpgroup)
        address = self._address(slot, accumulator)
        store_partials(accumulator, lambda values, offset: hw.store_global(values, address + offset.to(U64), True))
        k.comment("wait until all threads have written their partial sums, which the flag announces")
        hw.barrier_sync(warpgroup + self._barriers, THREADS_PER_WARPGROUP)
        with k.when(leader):
            hw.store_strong(self.flags + (slot * 4).to(U64), Constant(U32, 1), "release", "gpu")

    def _accumulate(self, accumulator: Accumulator, cluster_idx: Value, warpgroup: Value, leader: Value) -> None:
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
    """Return the registers of a vector in which a slice of the accumulator's columns is copied."""
    return 4 if len(accumulator.fragments[0]) // num_slices % 4 == 0 else 2


def store_partials(accumulator: Accumulator, store: VectorCopy, slice_idx: int = 0, num_slices: int = 1) -> None:
    """Store a slice of the accumulator's columns, vector by vector; the threads' n-th vectors are contiguous."""
    width = vector_width(accumulator, num_slices)
    first = slice_idx * (accumulator.fragments.count // num_slices)
    for fragment, vector, offset in _vectors(accumulator, width, num_slices):
        store(fragment.slice(vector * width + first, width), offset)


def accumulate_partials(accumulator: Accumulator, load: VectorCopy) -> None:
    """Add what `store_partials` has stored to the accumulator."""
    k, width = current_builder(), vector_width(accumulator)
    for fragment, vector, offset in _vectors(accumulator, width):
        values = k.registers(fragment.type, width, "values")
        load(values, offset)
        with k.unroll(width) as i:
            accumulator.add(fragment, (vector * width + i).named("acc_idx"), values[i])


def _vectors(accumulator: Accumulator, width: int, num_slices: int = 1) -> Iterator[tuple[RegisterArray, Value, Value]]:
    """Yield (fragment, index of a vector of `width` in it, byte offset from this thread's first vector)."""
    k, fragments = current_builder(), accumulator.fragments
    count = fragments.count // num_slices // width
    with k.unroll(len(fragments), name="mma_m") as mma_m, k.unroll(count, name="vector") as vector:
        yield fragments[mma_m], vector, (mma_m * count + vector) * (4 * width * THREADS_PER_WARPGROUP)
