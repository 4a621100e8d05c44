"""The mainloop of every design with TMA: loads of A and B into the stages of a pipeline (CUTLASS: CollectiveMma)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from gemmsmith import hw
from gemmsmith.collective.pipeline import (
    HasBarriers,
    PipelineState,
    PipelineTmaAsync,
    StagesReleasedBarrier,
    init_barriers,
)
from gemmsmith.collective.staged_scales import TmaScales
from gemmsmith.collective.tma_operand import TmaOperand
from gemmsmith.core.mma import TF32X3_MMAS
from gemmsmith.core.operand import Role
from gemmsmith.core.problem import BoundProblem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.shared import SharedBuffer, SharedView
from gemmsmith.lang.types import I32, U32
from gemmsmith.lang.values import Constant, Value, ValueLike
from gemmsmith.tile_scheduler.tiles import TileScheduler, WorkTile

MAX_PROLOGUE_K_TILES = 4
"""Maximum k-tiles whose loads the prologue issues; the producer issues the others while these arrive. With 8 kernels
are no faster (docs/notebook/kernel-start.md)."""
MAX_PROLOGUE_TMA_LOADS = 12
"""Maximum TMA loads that the prologue issues: each costs the issuing lane 55 cycles. Without the limit some shapes of
64 rows are 2 to 4 % slower; a limit of 8 or 5 is no better (docs/notebook/kernel-start.md)."""


class StagedOperand(Protocol):
    """An operand with a tile in each stage of the mainloop."""

    @property
    def role(self) -> Role:
        """Whether its rows are those of A or those of B."""

    @property
    def stages(self) -> SharedBuffer:
        """Its tiles in shared memory."""


class TmaMainloop:
    """The stages of the operands, their pipeline, and their TMA loads.

    The CTAs of a cluster row need the same tile of A, those of a cluster column the same tile of B; they multicast them
    to one another. Kernel arguments: the operands', and stage_bytes.
    """

    def __init__(
        self, spec: KernelSpec, scheduler: TileScheduler, operands: Sequence[StagedOperand] | None = None,
        consumer_groups: int = 1,
    ) -> None:  # fmt: skip
        """Allocate the stages.

        Args:
            spec: The kernel's config, dtypes and layouts.
            scheduler: The tile scheduler.
            operands: The operands, whose tiles lie side by side in a stage; None: A and B, by TMA. What is no
                TmaOperand is written by other warps, which arrive with `pipeline.non_tma_producer_commit`.
            consumer_groups: Consumer warpgroups that take stages in turn (2 for pingpong, else 1).
        """
        self.spec, self._scheduler, self._consumer_groups = spec, scheduler, consumer_groups
        position, (cluster_m, cluster_n) = scheduler.position, spec.config.cluster
        self.operands = operands or [TmaOperand(x, spec.config.stages) for x in spec.operands]
        self._tma_operands = [x for x in self.operands if isinstance(x, TmaOperand)]
        row_mask = sum(1 << cluster_m * n for n in range(cluster_n))  # ranks run along M first
        column_mask = (1 << cluster_m) - 1
        slices: dict[Role, tuple[int, Value | int, Value | int]] = {
            "a": (cluster_n, position.n, _shift(row_mask, position.m + position.split_base_rank)),
            "b": (cluster_m, position.m, _shift(column_mask, position.n * cluster_m + position.split_base_rank)),
        }
        for operand in self._tma_operands:
            operand.enable_multicast(*slices[operand.role])
        self._scale_loads: Sequence[TmaScales] = ()
        self.stage_buffers = [x.stages for x in self.operands]

    def attach_scale_loads(self, scales: Sequence[TmaScales]) -> None:
        """Load these block scales with each k-tile. Called before `prologue`."""
        self._scale_loads = scales

    def prologue(self, *others: HasBarriers, prefetch: Sequence[Value]) -> None:
        """Initialize all barriers, those of `others` too, and load the first k-tiles of this CTA's first tile.

        The thread that initializes the barriers issues these loads before the cluster barrier, so each CTA loads its
        whole tiles, without multicast. Waits for the global memory of earlier kernels (programmatic dependent launch).
        """
        tile = self._scheduler.first_work_tile()
        config, cluster_size = self.spec.config, self.spec.multicast_size
        first_rank = self._scheduler.position.split_base_rank
        self.pipeline = PipelineTmaAsync(
            config.stages, transaction_bytes=current_builder().parameter("stage_bytes", U32, self._stage_bytes),
            cluster_size=cluster_size, first_rank=first_rank, consumer_groups=self._consumer_groups,
            scope="cluster" if self.spec.releases_stages_to_peers else "cta", name="mainloop",
        )  # fmt: skip
        self._stages_released_barrier = (
            StagesReleasedBarrier("epilogue smem barrier", cluster_size, first_rank) if config.alias_epilogue else None
        )
        limit = min(
            MAX_PROLOGUE_K_TILES, max(1, MAX_PROLOGUE_TMA_LOADS // self._tma_loads_per_k_tile), config.stages - 1
        )
        prologue_k_tiles: ValueLike = 0
        if tile is not None:
            prologue_k_tiles = current_builder().minimum(tile.k_tiles, limit)
            for scales in self._scale_loads:
                prologue_k_tiles = scales.limit_prologue(prologue_k_tiles, tile)
        self.prologue_k_tiles = current_builder().var(I32, prologue_k_tiles, "prologue_k_tiles")
        """K-tiles of the current tile whose loads the prologue has issued: 0 from the second tile on."""

        def issue_loads() -> None:
            assert tile is not None
            hw.grid_dependency_wait()
            with current_builder().range(self.prologue_k_tiles.get(), name="k_tile") as k_tile:
                self.pipeline.producer_expect_bytes(k_tile)
                self._load(k_tile, self.pipeline.full_barrier(k_tile), tile, k_tile, multicast=False)

        own = (self.pipeline, self._stages_released_barrier) if self._stages_released_barrier else (self.pipeline,)
        init_barriers(*own, *others, prefetch=(*self._maps, *prefetch), after_init=issue_loads if tile else None)
        hw.grid_dependency_wait()
        if config.pdl:
            hw.launch_dependent_grids()

    # -- producers -------------------------------------------------------------------------------------
    def producer_start_state(self) -> PipelineState:
        """Declare the producer's variables and return its state, past the k-tiles that the prologue loads."""
        if self._stages_released_barrier:
            self._stages_released_phase = current_builder().var(U32, 0, "epilogue_smem_phase")
        for scales in self._scale_loads:
            scales.init_producer(self.prologue_k_tiles.get())
        return self.pipeline.producer_start_state(self.prologue_k_tiles.get())

    @contextmanager
    def k_tile_loop(self) -> Iterator[tuple[WorkTile, Value]]:
        """Loop over every (tile, k-tile) that the producer warp still has to load."""
        with self._scheduler.synchronized_tile_loop() as tile, self.remaining_k_tile_loop(tile) as k_tile:
            yield tile, k_tile

    @contextmanager
    def remaining_k_tile_loop(self, tile: WorkTile, stop: ValueLike | None = None) -> Iterator[Value]:
        """Loop over the tile's k-tiles (up to `stop`) whose loads the prologue has not issued. Called once per tile.

        Afterwards, if the epilogue's buffers alias the stages and another tile follows, wait until the epilogue has
        released the stages.
        """
        first = self.prologue_k_tiles.get().named("first_unloaded_k_tile")
        with self._scheduler.k_tile_loop(tile, first, stop) as k_tile:
            yield k_tile
        self.prologue_k_tiles.set(0)
        if self._stages_released_barrier:
            with current_builder().when(_next_tile_loads_stages(tile)):
                self._stages_released_barrier.wait(self._stages_released_phase)

    def load(self, state: PipelineState, tile: WorkTile, k_tile: Value) -> None:
        """Issue the loads of a k-tile into an acquired stage. One thread executes it."""
        self._load(state.index, self.pipeline.full_barrier(state), tile, k_tile)

    def tail(self, state: PipelineState) -> None:
        """Wait until all CTAs have released this CTA's stages."""
        self.pipeline.producer_tail(state)

    # -- consumers -------------------------------------------------------------------------------------
    def consumer_wait(self, state: PipelineState, token: Value | None = None) -> None:
        """Wait until a stage is full, and wgmma may read it."""
        self.pipeline.consumer_wait(state, token)
        if len(self._tma_operands) < len(self.operands):
            hw.fence_proxy_async()  # orders what cp.async and st have written before wgmma reads it

    def stage(self, stage: PipelineState | Value) -> list[SharedView]:
        """Return the operands' tiles in a stage."""
        index = stage.index if isinstance(stage, PipelineState) else stage
        return [x.stages[index] for x in self.operands]

    def release_aliased_stages(self, tile: WorkTile) -> None:
        """Release the stages that a tile's epilogue has reused, if another tile needs them."""
        if self._stages_released_barrier:
            with current_builder().when(_next_tile_loads_stages(tile)):
                self._stages_released_barrier.consumer_release()

    def _load(self, stage: Value, full: SharedView, tile: WorkTile, k_tile: Value, *, multicast: bool = True) -> None:
        k_tile_idx = tile.k_tile_index(k_tile)
        is_tf32_residual: dict[Role, Value] = {}
        if self.spec.is_3xtf32:
            tf32_product, k_tile_idx = (k_tile_idx % TF32X3_MMAS).named("tf32_product"), k_tile_idx // TF32X3_MMAS
            is_tf32_residual = {"a": tf32_product == 0, "b": tf32_product == 1}
        k = (k_tile_idx * self.spec.config.tile[2]).named("k")
        # An operand with few rows is in the L2: the other one, which comes from DRAM, is loaded first.
        for operand in self._tma_operands if self.spec.config.swap_ab else reversed(self._tma_operands):
            coord, is_residual = tile.coord(operand.role), is_tf32_residual.get(operand.role)
            first_k = k if coord.k_begin is None else k + coord.k_begin
            operand.load(stage, full, coord, first_k, multicast=multicast, is_tf32_residual=is_residual)
        for scales in self._scale_loads:
            scales.load(stage, full, tile, k_tile, k_tile_idx, in_prologue=not multicast)

    def _stage_bytes(self, p: BoundProblem) -> int:
        return sum(x.stage_bytes(p) for x in self._tma_operands) + sum(x.stage_bytes(p) for x in self._scale_loads)

    @property
    def _tma_loads_per_k_tile(self) -> int:
        """TMA loads of a k-tile without multicast."""
        return sum(x.loads_per_tile for x in self._tma_operands) + len(self._scale_loads)

    @property
    def _maps(self) -> list[Value]:
        return [map for x in self._tma_operands for map in x.maps] + [x.map for x in self._scale_loads]


def _next_tile_loads_stages(tile: WorkTile) -> Value:
    """Return whether loads of another tile follow in the stages.

    If a tile has no k-tiles, the tiles after it have none either.
    """
    assert tile.has_next is not None
    return tile.has_next & (tile.k_tiles > 0)


def _shift(mask: int, by: Value | int) -> Value | int:
    return (Constant(U32, mask) << by).with_name_hint("multicast_mask") if isinstance(by, Value) else mask << by
