"""The mainloop without TMA (CUTLASS: MmaMultistage): all threads load by cp.async, a few k-tiles ahead of the MMAs.

Loads continue across tiles, so those of a tile's first k-tiles run under the previous tile's epilogue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import and_
from typing import Protocol

from gemmsmith import hw
from gemmsmith.collective.cp_async_operand import CpAsyncOperand
from gemmsmith.collective.gathered_operand import GatheredOperand
from gemmsmith.collective.pipeline import HasBarriers, init_barriers
from gemmsmith.core.product import Role
from gemmsmith.core.spec import KernelSpec, MmaOperand
from gemmsmith.core.tile import Tile
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.shared import SharedBuffer, SharedView
from gemmsmith.lang.types import I32
from gemmsmith.lang.values import Constant, Value, ValueLike
from gemmsmith.tile_scheduler.tiles import OperandCoord, TileScheduler


class CpAsyncSource(Protocol):
    """An operand that threads copy by cp.async. It has `mn_extent` rows (columns of B), and a `tile` in each stage."""

    role: Role
    tile: Tile
    mn_extent: Value
    stages: SharedBuffer

    def start_copies(self) -> ThreadCopies:
        """Declare this thread's state, before the first tile."""


class ThreadCopies(Protocol):
    """One thread's copies of an operand: where its next ones read from, and the cp.async instructions."""

    def set_tile(self, coord: OperandCoord, first_k: Value) -> None:
        """Make the next copies those of the tile at `coord`, from element `first_k` of K on."""

    def copies(self, stage: Value, k_remaining: Value | None) -> list[Callable[[], None]]:
        """Return callables that issue this thread's cp.async copies of a k-tile into a stage.

        `k_remaining`: valid elements of K from the k-tile's first on; None: the tile is fully in bounds, no predicates.
        """

    def advance(self) -> None:
        """Move to the next k-tile."""


OperandFactory = Callable[[MmaOperand, int, int], CpAsyncSource]
"""(operand, stages, threads) -> the operand, which `threads` threads copy."""


class CpAsyncStages:
    """The stages of the operands, before the prologue. Kernel arguments: the operands', and `k`."""

    def __init__(
        self, spec: KernelSpec, scheduler: TileScheduler, make_operand: OperandFactory = CpAsyncOperand,
        operands: Sequence[MmaOperand] | None = None,
    ) -> None:  # fmt: skip
        """Allocate the stages.

        Args:
            spec: The kernel's config, dtypes and layouts.
            scheduler: The tile scheduler.
            make_operand: Makes each operand whose rows are not gathered.
            operands: The operands, whose tiles lie side by side in a stage; None: A and B.
        """
        self.spec, self.scheduler = spec, scheduler
        self.operands = [
            (GatheredOperand if spec.gathers_rows_of(x.role) else make_operand)(x, spec.config.stages, spec.threads)
            for x in operands or spec.operands
        ]
        self.k = current_builder().parameter("k", compute=lambda p: p.k)

    def prologue(self, *others: HasBarriers, prefetch: Sequence[Value] = ()) -> CpAsyncMainloop:
        """Initialize the barriers of `others`, issue the copies of the first k-tiles, and wait for the first of them.

        `prefetch`: tensor maps to prefetch. The copies wait for earlier kernels (programmatic dependent launch).
        """
        if others or prefetch:
            init_barriers(*others, prefetch=prefetch)
        hw.grid_dependency_wait()
        self.scheduler.finish_prologue()
        return CpAsyncMainloop(self)


class CpAsyncMainloop:
    """The stage that is read, and the k-tile that is copied next, which may be one of a later tile.

    The copies of each k-tile are one cp.async group. Past the last tile groups of zeros follow, so that waiting for all
    but the latest `stages` - 2 groups always waits for the next k-tile.
    """

    def __init__(self, stages: CpAsyncStages) -> None:
        """Issue the copies of the first `stages` - 1 k-tiles, and wait for the first of them."""
        k, self.spec, self.operands, self._k = current_builder(), stages.spec, stages.operands, stages.k
        self._work = stages.scheduler.persistent_range()
        self._next_tile = k.var(I32, self._work.start, "next_tile")
        # What is left of the current tile, from the k-tile that is copied next on: its k-tiles, its elements of K, and
        # its k-tiles that are fully in bounds, whose copies need no predicates.
        self._k_tiles_remaining, self._k_remaining = k.var(I32, 0, "k_tiles_to_copy"), k.var(I32, 0, "k_remaining")
        self._full_k_tiles_remaining = k.var(I32, 0, "unpredicated_k_tiles_to_copy")
        self._read_stage = k.var(I32, 0, "read_stage")
        self._copies = [operand.start_copies() for operand in self.operands]
        with k.range(self.spec.config.stages - 1, name="stage") as stage:
            self._copy_k_tile(stage)
        self._wait_next_stage()

    def unpredicated_and_tail_loops(
        self, k_tiles: Value
    ) -> Iterator[tuple[ValueLike, Value, Callable[[int, int], None]]]:
        """Yield two loops that together run over a tile's `k_tiles` k-tiles, each as (start, stop, copy).

        The body of a loop multiplies a k-tile and calls `copy` for a later one: `copy(slice_idx, num_slices)` issues
        slice `slice_idx` of its copies. In the first loop the copied k-tiles are fully in bounds and need no
        predicates, so that the slices can be interleaved with MMAs; in the second, slice 0 has all copies.
        """
        k = current_builder()
        full_k_tiles = k.maximum(k.minimum(k_tiles, self._full_k_tiles_remaining.get()), 0)
        full_k_tiles.named("k_tiles_with_unpredicated_copies")
        self._advance(full_k_tiles)
        yield 0, full_k_tiles, self._copy_unpredicated
        yield full_k_tiles, k_tiles, lambda slice_idx, _: self.copy_k_tile() if slice_idx == 0 else None

    def copy_k_tile(self) -> None:
        """Issue the copies of the next k-tile into the stage that all threads have read."""
        self._copy_k_tile(self._free_stage())

    def _copy_unpredicated(self, slice_idx: int, num_slices: int) -> None:
        """Issue slice `slice_idx` of `num_slices` of the copies of a k-tile that is fully in bounds."""
        self._issue_copies(self._free_stage(), None, slice_idx, num_slices)
        if slice_idx == num_slices - 1:
            self._commit()

    def _free_stage(self) -> Value:
        """Return the index of the stage that all threads have read: the one before the stage that is read now."""
        read_stage, stages = self._read_stage.get(), self.spec.config.stages
        return (current_builder().select(read_stage == 0, stages, read_stage) - 1).named("free_stage")

    def _copy_k_tile(self, stage: Value) -> None:
        """Issue this thread's copies of the next k-tile into a stage, which may be the first of the next tile."""
        k = current_builder()
        with k.when(self._k_tiles_remaining.get() == 0):
            self._begin_tile()
        k_remaining = self._k_remaining.get()
        with k.when(self._full_k_tiles_remaining.get() > 0):
            self._issue_copies(stage, None)
        with k.otherwise():
            self._issue_copies(stage, k_remaining)
        self._commit()
        self._advance(Constant(I32, 1))

    def _issue_copies(self, stage: Value, k_remaining: Value | None, slice_idx: int = 0, num_slices: int = 1) -> None:
        """Issue slice `slice_idx` of `num_slices` of this thread's copies of a k-tile, of all operands."""
        copies = [copy for operand in self._copies for copy in operand.copies(stage, k_remaining)]
        for copy in copies[slice_idx * len(copies) // num_slices : (slice_idx + 1) * len(copies) // num_slices]:
            copy()

    def _commit(self) -> None:
        """Move to the next k-tile, and commit the copies of this one as a cp.async group."""
        for operand in self._copies:
            operand.advance()
        hw.cp_async_commit()

    def _advance(self, k_tiles: Value) -> None:
        self._k_remaining.set(self._k_remaining.get() - k_tiles * self.spec.config.tile[2])
        self._k_tiles_remaining.set(self._k_tiles_remaining.get() - k_tiles)
        self._full_k_tiles_remaining.set(self._full_k_tiles_remaining.get() - k_tiles)

    def next_stage(self) -> None:
        """Wait until all threads have read the current stage and the next one is loaded, and move to it."""
        self._wait_next_stage()
        following = (self._read_stage.get() + 1).named("next_stage")
        self._read_stage.set(current_builder().select(following == self.spec.config.stages, 0, following))

    def stage(self) -> list[SharedView]:
        """Return the operands' tiles in the current stage."""
        return [x.stages[self._read_stage.get()] for x in self.operands]

    def drain(self) -> None:
        """Wait for the groups of zeros, after the last tile."""
        hw.cp_async_wait(0)

    def _begin_tile(self) -> None:
        """Make the next copies those of the next tile's first k-tile, or of zeros after the last tile."""
        k = current_builder()
        with k.when(self._next_tile.get() < self._work.stop):
            tile = self._work.work_tile_at(self._next_tile.get())
            first_k = (tile.k_tile_index(Constant(I32, 0)) * self.spec.config.tile[2]).named("first_k")
            for operand, copies in zip(self.operands, self._copies, strict=True):
                copies.set_tile(tile.coord(operand.role), first_k + tile.a.k_begin)
            in_bounds = reduce(and_, (x.mn_extent - tile.coord(x.role).mn >= x.tile.padded_mn for x in self.operands))
            k_remaining = (tile.k_extent(self._k) - first_k).named("initial_k_remaining")
            full_k_tiles = k.minimum(tile.k_tiles, k_remaining // self.spec.config.tile[2])
            self._full_k_tiles_remaining.set(k.select(in_bounds, full_k_tiles, 0))
            self._k_tiles_remaining.set(tile.k_tiles)
            self._k_remaining.set(k_remaining)
            self._next_tile.set(self._next_tile.get() + self._work.step)
        with k.otherwise():
            k.comment("past the last tile: copies of 0 bytes, so that every k-tile still commits one group")
            self._k_remaining.set(0)
            self._k_tiles_remaining.set(1)

    def _wait_next_stage(self) -> None:
        """Wait for this thread's copies of the next k-tile; the barrier makes all threads' copies visible."""
        hw.cp_async_wait(self.spec.config.stages - 2)
        current_builder().comment(
            "wait until the next k-tile is copied, and no thread reads the stage that is overwritten next"
        )
        hw.sync_threads()
