"""How a tile's results leave shared memory, group of subtiles by group, and the hazards on the buffers in between.

The results of a group are written to a buffer by all threads of a warpgroup and stored from there: by TMA, by threads,
or both (some results one way, some the other); with alias_epilogue the buffers are the mainloop's stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from gemmsmith import hw
from gemmsmith.core.mma import THREADS_PER_WARPGROUP, WGMMA_M
from gemmsmith.epilogue.epilogue_plan import EpiloguePlan
from gemmsmith.epilogue.inputs import SubtileCoord, TileAuxLoad, WarpgroupTile
from gemmsmith.epilogue.outputs import Stores
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import I32
from gemmsmith.lang.values import Constant, Value


class StoreGroup:
    """The `index`-th group of a tile's subtiles, which are stored together, from one stage of the buffers.

    `epi_m`: the 64 rows of the group's only subtile, if a run-time loop over columns computes it; else None.
    """

    def __init__(
        self, plan: EpiloguePlan, stores: Stores | None, wg_tile: WarpgroupTile, index: Value,
        epi_m: Value | None = None,
    ) -> None:  # fmt: skip
        self.index, self._plan, self._stores, self._wg_tile, self._epi_m = index, plan, stores, wg_tile, epi_m
        self._only_subtile = self._coord(Constant(I32, 0)) if plan.subtiles_per_store == 1 else None

    @property
    def first_subtile(self) -> SubtileCoord | None:
        """The first subtile, if the others of the group have the same rows, and later columns; else None."""
        same_rows = self._plan.subtiles_n % self._plan.subtiles_per_store == 0
        return self._only_subtile or (self._coord(Constant(I32, 0)) if same_rows else None)

    @contextmanager
    def subtiles(self) -> Iterator[SubtileCoord]:
        """Loop over the subtiles of the group; the last group of a tile may have fewer."""
        k, plan = current_builder(), self._plan
        if self._only_subtile:
            yield self._only_subtile
            return
        with k.unroll(plan.subtiles_per_store, name="subtile" if plan.store_groups == 1 else "subtile_in_group") as i:
            is_subtile = self.index * plan.subtiles_per_store + i < plan.subtiles
            with k.when(is_subtile) if plan.subtiles % plan.subtiles_per_store else nullcontext():
                yield self._coord(i)

    def _coord(self, i: Value) -> SubtileCoord:
        """Return the position of the group's `i`-th subtile, with its buffers: those of the group's stage."""
        plan = self._plan
        subtile = (self.index * plan.subtiles_per_store + i).with_name_hint("subtile")
        epi_m: Value = Constant(I32, 0)
        epi_n = subtile
        if self._epi_m is not None:
            epi_m, epi_n = self._epi_m, subtile - self._epi_m * plan.subtiles_n
        elif plan.subtiles_m > 1:
            epi_m, epi_n = (subtile // plan.subtiles_n).named("epi_m"), subtile % plan.subtiles_n
        index = (self.index % plan.store_stages * plan.subtiles_per_store + i).named("buffer_index")
        buffers = self._stores.subtile_buffers(self._wg_tile, index) if self._stores else {}
        column = (epi_n * plan.epi_tile_n).named("subtile_column")
        return SubtileCoord(subtile, epi_m, column, column if self._epi_m is None else Constant(I32, 0), buffers)


@dataclass(frozen=True)
class NoStores:
    """The results are reductions only, which need no buffer.

    `barrier`: the named barrier of the warpgroup's threads.
    """

    plan: EpiloguePlan
    wg_tile: WarpgroupTile
    barrier: Value
    leader: Value
    tma_loads: TileAuxLoad | None

    def begin_tile(self) -> None:
        """Wait until all threads have written the broadcast operands, which other threads read."""
        if self.plan.broadcasts:
            self._sync("wait until all threads have written the broadcast operands")

    def when_inside(self, group: StoreGroup) -> AbstractContextManager[None]:
        """Open a branch for a group that is not wholly past the tile's end. Here all groups are computed."""
        return nullcontext()

    def begin_group(self, group: StoreGroup) -> None:
        """Do nothing: no buffer is written."""

    def end_group(self, group: StoreGroup) -> None:
        """Wait until all threads have read the operands of the group's subtiles, which are then overwritten.

        TMA overwrites those that it loads, by loads that the leader issues then; the next tile, the broadcast operands.
        """
        if self.tma_loads:
            hw.fence_proxy_async()  # orders the reads before TMA writes the buffer
            self._sync("wait until all threads have read the buffer that is loaded next")
            with current_builder().when(self.leader):
                self.tma_loads.refill_stage(group.index)
        elif self.plan.broadcasts:  # without loads there is one group
            self._sync("wait until all threads have read the broadcast operands, which the next tile overwrites")

    def end_tile(self) -> None:
        """Do nothing: `end_group` has waited."""

    def _sync(self, hazard: str) -> None:
        current_builder().comment(hazard)
        hw.barrier_sync(self.barrier, THREADS_PER_WARPGROUP)


@dataclass(frozen=True)
class ThreadStores(NoStores):
    """All threads store the results. The barriers of a group also separate accesses to the broadcast operands.

    `all_math_barrier`: with alias_epilogue, the named barrier of all math warpgroups, since the buffers are the
    mainloop's stages, which all of them read; else 0.
    """

    stores: Stores
    all_math_barrier: int

    @property
    def accessed_by_tma(self) -> bool:
        """Whether TMA is the next to access a buffer that threads have accessed, which a proxy fence must order."""
        return self.tma_loads is not None

    def begin_tile(self) -> None:
        """With alias_epilogue, wait until no warpgroup's wgmma reads the stages any more, which are the buffers.

        The broadcast operands need no barrier here: `begin_group` has one.
        """
        if self.all_math_barrier:
            k = current_builder()
            k.comment("wait until no warpgroup reads the stages, which the epilogue's buffers overwrite")
            hw.barrier_sync(self.all_math_barrier, THREADS_PER_WARPGROUP * self.stores.consumers)

    def begin_group(self, group: StoreGroup) -> None:
        """Wait until the previous store from the group's buffer has read it, before threads write it again.

        With alias_epilogue there is none before the first group of a tile.
        """
        if not self.all_math_barrier:
            self.wait_for_buffer(group)
        elif self.plan.store_groups > 1:
            with current_builder().when(group.index > 0):
                self.wait_for_buffer(group)

    def wait_for_buffer(self, group: StoreGroup) -> None:
        """Wait until the previous store from the group's buffer has read it."""
        self._sync("wait until the buffer may be overwritten: its previous store has read it")

    def end_group(self, group: StoreGroup) -> None:
        """Wait until all threads have written the group's buffer, then store its results.

        By then all threads have also read the operands of the subtile, so that the leader can load the next one.
        """
        if self.accessed_by_tma:
            hw.fence_proxy_async()
        self._sync("wait until all threads have written the buffer that is stored next")
        with current_builder().when(self.leader):
            self.issue(group)
        if without_tma := self.stores.arrays_without_tma:
            with group.subtiles() as coord:
                self.stores.store_with_threads(self.wg_tile, coord, without_tma)

    def issue(self, group: StoreGroup) -> None:
        """Issue the copies that the leader issues after a group: here the loads into the stage of its subtile.

        If there are loads, a group has one subtile, so that its index is the group's.
        """
        if self.tma_loads:
            self.tma_loads.refill_stage(group.index)

    def wait_read(self) -> None:
        """Order this thread's reads of the buffers, if any, before TMA writes them."""
        if self.stores.arrays:
            hw.fence_proxy_async()

    def end_tile(self) -> None:
        """With alias_epilogue, finish the reads of the buffers: the warp then releases them as stages to be loaded."""
        if self.all_math_barrier:
            self.wait_read()
            hw.sync_warp()


@dataclass(frozen=True)
class TmaStores(ThreadStores):
    """The leader issues the TMA stores of a group, which drain while the next subtiles are computed."""

    accessed_by_tma = True

    def wait_for_buffer(self, group: StoreGroup) -> None:
        """Wait until the previous store has read the buffer, by TMA in the leader and by all threads."""
        with current_builder().when(self.leader):
            self.stores.acquire(group.index)
        super().wait_for_buffer(group)

    def issue(self, group: StoreGroup) -> None:
        """Issue the group's TMA stores, as one bulk group, and then the TMA loads of later subtiles' operands."""
        self.issue_stores(group)
        hw.bulk_commit()
        super().issue(group)

    def issue_stores(self, group: StoreGroup) -> None:
        with group.subtiles() as coord:
            self.stores.issue(self.wg_tile, coord)

    def wait_read(self) -> None:
        """Wait until the TMA stores have read the buffers, and order this thread's reads."""
        with current_builder().when(self.leader):
            hw.bulk_wait_read(0)
        super().wait_read()


@dataclass(frozen=True)
class ClippedTmaStores(TmaStores):
    """Subtiles in which a group ends before the last row (or column) are stored by all threads, the others by TMA.

    A TMA store would also write the rows behind the end, which may be the next group's.
    """

    @contextmanager
    def when_inside(self, group: StoreGroup) -> Iterator[None]:
        """Open a branch for a store group that is not wholly past the tile's end. Others are not computed.

        For these the leader commits an empty bulk group, since `Stores.acquire` counts one for each store group.
        """
        k, coord = current_builder(), group.first_subtile
        if coord is None or self.tma_loads:
            yield
            return
        with k.when(self._is_before_end(coord, whole=False)):
            yield
        with k.otherwise(), k.when(self.leader):  # buffers are acquired by the number of bulk groups since
            hw.bulk_commit()

    def end_group(self, group: StoreGroup) -> None:
        """Store a group: by TMA what it can store, and by all threads the clipped subtiles."""
        super().end_group(group)
        with group.subtiles() as coord, current_builder().when(~self._is_before_end(coord, whole=True)):
            self.stores.store_with_threads(self.wg_tile, coord, self.stores.maps)

    def issue_stores(self, group: StoreGroup) -> None:
        """Issue the TMA stores of the group's subtiles that are not clipped."""
        with group.subtiles() as coord, current_builder().when(self._is_before_end(coord, whole=True)):
            self.stores.issue(self.wg_tile, coord)

    def _is_before_end(self, coord: SubtileCoord, whole: bool) -> Value:
        """Return whether a subtile begins before the tile's group ends; if `whole`, whether all of it is before."""
        work = self.wg_tile.work
        if work.a.is_clipped:
            position, end = self.wg_tile.m + (coord.epi_m + int(whole)) * WGMMA_M, work.a.group_end
        else:
            position, end = work.n + coord.column + self.plan.epi_tile_n * whole, work.b.group_end
        return (position <= end).named("is_inside") if whole else (position < end).named("begins_inside")
