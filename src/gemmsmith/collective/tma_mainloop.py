"""The mainloop of every design with TMA: loads of A and B into the stages of a pipeline (CUTLASS: CollectiveMma)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from gemmsmith import hw
from gemmsmith.collective.gathered_operand import GatheredOperand
from gemmsmith.collective.pipeline import (
    HasBarriers,
    Peers,
    PipelineState,
    PipelineTmaAsync,
    StagesReleasedBarrier,
    init_barriers,
    stage_index,
)
from gemmsmith.collective.ragged_k import RaggedK
from gemmsmith.collective.staged_scales import TmaScales
from gemmsmith.collective.tma_operand import TmaOperand
from gemmsmith.core.mma import TF32X3_MMAS, THREADS_PER_WARPGROUP
from gemmsmith.core.problem import BoundProblem
from gemmsmith.core.product import Role
from gemmsmith.core.spec import KernelSpec, MmaOperand
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.shared import SharedBuffer, SharedView
from gemmsmith.lang.types import I32, U32
from gemmsmith.lang.values import Constant, Value, ValueLike
from gemmsmith.tile_scheduler.tiles import TileScheduler, WorkTile

MAX_PROLOGUE_K_TILES = 4
"""Maximum k-tiles whose loads the prologue issues; the producer issues the others while these arrive. With 8 kernels
are no faster (docs/notebook/README.md)."""
MAX_PROLOGUE_TMA_LOADS = 12
"""Maximum TMA loads that the prologue issues: each costs the issuing lane 55 cycles. Without the limit some shapes of
64 rows are 2 to 4 % slower; a limit of 8 or 5 is no better (docs/notebook/README.md)."""


class StagedOperand(Protocol):
    """An operand with a tile in each stage of the mainloop."""

    @property
    def role(self) -> Role:
        """Whether its rows are those of A or those of B."""

    @property
    def stages(self) -> SharedBuffer:
        """Its tiles in shared memory."""


class TmaStages:
    """The stages of the operands, before the prologue has loaded the first of them.

    The CTAs of a cluster row need the same tile of A, those of a cluster column the same tile of B; they multicast them
    to one another. Kernel arguments: the operands', and stage_bytes if something is always loaded as a whole.
    """

    def __init__(
        self, spec: KernelSpec, scheduler: TileScheduler, operands: Sequence[StagedOperand] | None = None,
        consumer_groups: int = 1,
    ) -> None:  # fmt: skip
        """Allocate the stages.

        Args:
            spec: The kernel's config, dtypes and layouts.
            scheduler: The tile scheduler.
            operands: The operands, whose tiles lie side by side in a stage; None: A and B, by TMA, unless rows are
                gathered. What is no TmaOperand is written by other warps, which arrive with
                `pipeline.non_tma_producer_commit`.
            consumer_groups: Consumer warpgroups that take stages in turn (pingpong: all, else 1).
        """
        self.spec, self.scheduler, self.consumer_groups = spec, scheduler, consumer_groups
        position, (cluster_m, cluster_n) = scheduler.position, spec.config.cluster
        self.operands = operands or [_make_operand(spec, x) for x in spec.operands]
        self.tma_operands = [x for x in self.operands if isinstance(x, TmaOperand)]
        row_mask = sum(1 << cluster_m * n for n in range(cluster_n))  # ranks run along M first
        column_mask = (1 << cluster_m) - 1
        slices: dict[Role, tuple[int, Value | int, Value | int]] = {
            "a": (cluster_n, position.n, _shift(row_mask, position.m + position.split_base_rank)),
            "b": (cluster_m, position.m, _shift(column_mask, position.n * cluster_m + position.split_base_rank)),
        }
        for operand in self.tma_operands:
            operand.enable_multicast(*slices[operand.role])
        self.buffers = [x.stages for x in self.operands]

    @property
    def peers(self) -> Peers:
        """The CTAs that this one exchanges multicasts with.

        First those of its cluster column, which share B's tile, itself included; then the others of its cluster row,
        which share A's tile.
        """
        position, (cluster_m, cluster_n) = self.scheduler.position, self.spec.config.cluster
        roles = {x.role for x in self.tma_operands}
        column, row = cluster_m if "b" in roles else 1, cluster_n if "a" in roles else 1

        def rank(i: Value) -> Value:
            """Return the cluster rank of the i-th of these CTAs."""
            # Ranks run along M first: rank = m + n * cluster_m.
            if cluster_m == 1 or cluster_n == 1:
                return i + position.split_base_rank
            # Extents are powers of two, and a peer has the same n or the same m: its rank differs from this CTA's in
            # the bits of m only (i < column) or in those of n only. For a row of at most 2, i is already such a mask.
            if row > 2 or column == 1:
                i = current_builder().select(i < column, i, (i - (column - 1)) * cluster_m)
            return position.cta_rank ^ i

        return Peers(column + row - 1, rank)

    def prologue(
        self, *others: HasBarriers, prefetch: Sequence[Value], scales: Sequence[TmaScales] = ()
    ) -> TmaMainloop:
        """Initialize all barriers and load the first k-tiles of this CTA's first tile; return the started mainloop.

        Args:
            *others: Other objects whose barriers are initialized.
            prefetch: Other tensor maps to prefetch.
            scales: Block scales that are loaded with each k-tile.
        """
        mainloop = TmaMainloop(self, scales)
        mainloop.load_first_k_tiles(*others, prefetch=prefetch)
        return mainloop


class TmaMainloop:
    """The stages and their pipeline. The producer calls `start_producer`, consumers `consumer_wait` and `stage`.

    Attributes:
        pipeline: The stages' barriers.
        ragged_k: What zeroes the elements of a group's last k-tile that are the next group's; None if groups have whole
            k-tiles.
        gathered_operand: The operand whose rows are gathered by the producer warpgroup; None if there is none.
        prologue_k_tiles: K-tiles of the current tile whose loads the prologue has issued: 0 from the second tile on.
    """

    def __init__(self, stages: TmaStages, scales: Sequence[TmaScales]) -> None:
        """Allocate the barriers. `scales`: the block scales that TMA loads with each k-tile."""
        k, spec, peers = current_builder(), stages.spec, stages.peers
        self.spec, self.scheduler, self.scales = spec, stages.scheduler, scales
        self._operands, self._tma_operands = stages.operands, stages.tma_operands
        self.gathered_operand = next((x for x in stages.operands if isinstance(x, GatheredOperand)), None)
        has_ragged_k = spec.grouping is not None and spec.grouping.along == "k" and spec.mma.a.bits == 16
        self.ragged_k = RaggedK(spec) if has_ragged_k else None
        self._first_work_tile = tile = self.scheduler.first_work_tile()

        whole = [x for x in self._tma_operands if not x.skips_rows]

        def stage_bytes(p: BoundProblem) -> int:
            return sum(x.stage_bytes(p) for x in whole) + sum(x.stage_bytes(p) for x in scales)

        self.pipeline = PipelineTmaAsync(
            spec.config.stages, peers=peers,
            transaction_bytes=k.parameter("stage_bytes", U32, stage_bytes) if whole or scales else Constant(U32, 0),
            consumer_groups=stages.consumer_groups, scope="cluster" if spec.releases_stages_to_peers else "cta",
            # Zeros that consumers have written come before what peers multicast to the stage.
            acquire_scope="cluster" if self.ragged_k and peers.count > 1 else None, name="mainloop",
        )  # fmt: skip
        self.stages_released_barrier = (
            StagesReleasedBarrier("epilogue smem barrier", peers) if spec.config.alias_epilogue else None
        )
        tma_loads = sum(x.loads_per_tile for x in self._tma_operands) + len(scales)  # of a k-tile, without multicast
        limit = min(MAX_PROLOGUE_K_TILES, max(1, MAX_PROLOGUE_TMA_LOADS // tma_loads), spec.config.stages - 1)
        prologue_k_tiles: ValueLike = 0
        if tile is not None:
            prologue_k_tiles = k.minimum(tile.k_tiles, limit)
            for x in scales:
                prologue_k_tiles = x.limit_prologue(prologue_k_tiles, tile)
        self.prologue_k_tiles = k.var(I32, prologue_k_tiles, "prologue_k_tiles")

    def load_first_k_tiles(self, *others: HasBarriers, prefetch: Sequence[Value]) -> None:
        """Initialize all barriers, and load the first k-tiles of this CTA's first tile.

        `others`: further objects whose barriers are initialized. `prefetch`: further tensor maps to prefetch.

        The thread that initializes the barriers issues these loads before the cluster barrier, so each CTA loads its
        whole tiles, without multicast. Waits for the global memory of earlier kernels (programmatic dependent launch).
        """
        tile, released = self._first_work_tile, self.stages_released_barrier

        def issue_loads() -> None:
            """Load the first k-tiles of the first tile, without multicast."""
            assert tile is not None
            hw.grid_dependency_wait()
            with current_builder().range(self.prologue_k_tiles.get(), name="k_tile") as k_tile:
                self.pipeline.producer_expect_bytes(k_tile, self.loaded_bytes(tile))
                self.load(k_tile, tile, k_tile, [None] * len(self.scales), multicast=False)

        own = (self.pipeline, released) if released else (self.pipeline,)
        maps = *(map for x in self._tma_operands for map in x.maps), *(x.map for x in self.scales)
        init_barriers(*own, *others, prefetch=(*maps, *prefetch), after_init=issue_loads if tile else None)
        hw.grid_dependency_wait()
        self.scheduler.finish_prologue()

    def start_producer(self) -> TmaProducer:
        """Declare the variables of the producer."""
        return TmaProducer(self)

    def loaded_bytes(self, tile: WorkTile) -> ValueLike:
        """Return the bytes that the loads of a k-tile write to its stage: fewer if they skip rows past an end."""
        clipped = (x.loaded_bytes(tile.coord(x.role)) for x in self._tma_operands if x.skips_rows)
        return self.pipeline.transaction_bytes + sum(clipped, start=Constant(I32, 0)).to(U32)

    def load(
        self, stage: Value, tile: WorkTile, k_tile: Value, scale_states: Sequence[PipelineState | None], *,
        multicast: bool = True,
    ) -> None:  # fmt: skip
        """Issue the loads of a k-tile into a stage that is free. One thread executes it.

        Args:
            stage: Index of the stage.
            tile: The tile.
            k_tile: Number of the k-tile among those of the tile, in the order in which they are summed.
            scale_states: For each of `scales`, the producer's state in its pipeline, or None (see TmaScales.load).
            multicast: As for TmaOperand.load.
        """
        full, k_tile_idx = self.pipeline.full_barrier(stage), tile.k_tile_index(k_tile)
        is_tf32_residual: dict[Role, Value] = {}
        if self.spec.is_3xtf32:
            tf32_product, k_tile_idx = (k_tile_idx % TF32X3_MMAS).named("tf32_product"), k_tile_idx // TF32X3_MMAS
            is_tf32_residual = {"a": tf32_product == 0, "b": tf32_product == 1}
        k = (k_tile_idx * self.spec.config.tile[2]).named("k")
        # An operand with few rows is in the L2: the other one, which comes from DRAM, is loaded first.
        for operand in self._tma_operands if self.spec.config.swap_ab else reversed(self._tma_operands):
            coord, is_residual = tile.coord(operand.role), is_tf32_residual.get(operand.role)
            operand.load(stage, full, coord, k + coord.k_begin, multicast=multicast, is_tf32_residual=is_residual)
        for scales, state in zip(self.scales, scale_states, strict=True):
            scales.load(stage, full, tile, k_tile, k_tile_idx, state)

    # -- consumers -------------------------------------------------------------------------------------
    def consumer_wait(self, state: PipelineState, token: Value | None = None) -> None:
        """Wait until the stage of `state` is full, and wgmma may read it.

        `token`: see PipelineTmaAsync.consumer_wait.
        """
        self.pipeline.consumer_wait(state, token)
        if len(self._tma_operands) < len(self._operands):
            hw.fence_proxy_async()  # for cp.async's writes, which wgmma reads; a writer by st needs its own fence

    def stage(self, stage: PipelineState | Value) -> list[SharedView]:
        """Return the operands' tiles in a stage."""
        return [x.stages[stage_index(stage)] for x in self._operands]

    def release_aliased_stages(self, tile: WorkTile) -> None:
        """Release the stages that a tile's epilogue has reused, if another tile needs them."""
        if self.stages_released_barrier:
            with current_builder().when(next_tile_loads_stages(tile)):
                self.stages_released_barrier.consumer_release()


class TmaProducer:
    """The producer of a mainloop, which loads what the prologue has not: its state is the stage that it writes next."""

    def __init__(self, mainloop: TmaMainloop) -> None:
        """Declare the producer's variables."""
        self._mainloop, k_tiles, released = mainloop, mainloop.prologue_k_tiles, mainloop.stages_released_barrier
        self._released_phase = current_builder().var(U32, 0, "epilogue_smem_phase") if released else None
        self._scale_states = [x.producer_start_state(k_tiles.get()) for x in mainloop.scales]
        self.write = mainloop.pipeline.producer_start_state(k_tiles.get())
        """The stage that is written next."""

    @contextmanager
    def k_tile_loop(self) -> Iterator[tuple[WorkTile, Value]]:
        """Loop over every (tile, k-tile) that the producer still has to load.

        With the config's `sync_clusters` it waits now and then for the producers of other clusters (ClusterKSync).
        """
        scheduler = self._mainloop.scheduler
        if sync := scheduler.cluster_sync:
            sync.start_producer()
        with scheduler.tile_loop() as tile, self.remaining_k_tile_loop(tile) as k_tile:
            if sync and tile.is_full_wave is not None:
                sync.sync(k_tile, tile.is_full_wave)
            yield tile, k_tile
        if sync:
            sync.finish()

    @contextmanager
    def remaining_k_tile_loop(self, tile: WorkTile, stop: ValueLike | None = None) -> Iterator[Value]:
        """Loop over the tile's k-tiles (up to `stop`) whose loads the prologue has not issued. Called once per tile.

        Afterwards, if the epilogue's buffers alias the stages and another tile follows, wait until the epilogue has
        released the stages.
        """
        x = self._mainloop
        first = x.prologue_k_tiles.get().named("first_unloaded_k_tile")
        with current_builder().range(first, tile.k_tiles if stop is None else stop, name="k_tile") as k_tile:
            yield k_tile
        x.prologue_k_tiles.set(0)
        if x.stages_released_barrier and self._released_phase:
            with current_builder().when(next_tile_loads_stages(tile)):
                x.stages_released_barrier.wait(self._released_phase)

    def load(self, tile: WorkTile, k_tile: Value) -> None:
        """Wait until the next stage is free, and issue the loads of a k-tile into it. One thread executes it."""
        self._mainloop.pipeline.producer_acquire(self.write, self._mainloop.loaded_bytes(tile))
        self._mainloop.load(self.write.index, tile, k_tile, self._scale_states)

    def advance(self) -> None:
        """Advance to the next stage."""
        self.write.advance()

    def tail(self) -> None:
        """Wait until all CTAs have released this CTA's stages."""
        self._mainloop.pipeline.producer_tail(self.write)


def _make_operand(spec: KernelSpec, operand: MmaOperand) -> StagedOperand:
    if spec.gathers_rows_of(operand.role):
        return GatheredOperand(operand, spec.config.stages, THREADS_PER_WARPGROUP)
    return TmaOperand(operand, spec.config.stages, skips_rows=not operand.interleaved)


def next_tile_loads_stages(tile: WorkTile) -> Value:
    """Return whether loads of another tile follow in the stages.

    If a tile has no k-tiles, the tiles after it have none either.
    """
    assert tile.has_next is not None
    return tile.has_next & (tile.k_tiles > 0)


def _shift(mask: int, by: Value | int) -> Value | int:
    return (Constant(U32, mask) << by).with_name_hint("multicast_mask") if isinstance(by, Value) else mask << by
