"""The mainloop's operands on their way into shared memory, as every TMA design brings them: who copies what, when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gemmsmith import hw
from gemmsmith.collective.operand import Operand
from gemmsmith.collective.pipeline import Initialized, PipelineState, PipelineTmaAsync, ReleaseBarrier, start
from gemmsmith.collective.staged_scales import LoadedScales
from gemmsmith.core.mma import PRODUCTS
from gemmsmith.core.problem import BoundProblem, low_part_of, operand_of
from gemmsmith.core.spec import KernelSpec
from gemmsmith.hw.tma import EVICT_FIRST, EVICT_LAST, EVICT_NORMAL
from gemmsmith.lang.builder import current
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import I32, U32
from gemmsmith.lang.values import Constant, Value, ValueLike
from gemmsmith.schedule.tiles import TileScheduler, WorkTile

POLICIES = {"first": EVICT_FIRST, "normal": EVICT_NORMAL, "last": EVICT_LAST}
EARLY, EARLY_COPIES = 4, 12
"""K-tiles whose copies start before the roles begin, and those copies at most, which take the lane 55 cycles each; the
others follow while these arrive."""


class Mainloop:
    """The stages of all operands (`stages`: their bytes of shared memory), the pipeline they are handed on through, and
    the copies.

    CTAs of one cluster row need the same A tile, those of one column the same B tile. Kernel arguments: the operands',
    and stage_bytes. `readers`: of the math warpgroups one in so many reads each stage.
    """

    def __init__(self, spec: KernelSpec, scheduler: TileScheduler, readers: int = 1) -> None:
        self.spec, self._scheduler, self._readers = spec, scheduler, readers
        position, (rows, columns) = scheduler.position, spec.config.cluster
        self.operands = tuple(
            Operand(
                name,
                tile,
                spec.config.stages,
                operand_of(i),
                POLICIES[spec.config.evict[i]],
                low_part_of(i) if spec.low_parts else None,
            )
            for i, (name, tile) in enumerate(zip("ab", spec.tiles, strict=True))
        )
        row_mask = sum(1 << rows * j for j in range(columns))  # ranks run along M first
        column_mask = (1 << rows) - 1
        parts = (
            (position.n, _shift(row_mask, position.m + position.first)),
            (position.m, _shift(column_mask, position.n * rows + position.first)),
        )
        for operand, sharers, (part, mask) in zip(self.operands, spec.sharers, parts, strict=True):
            operand.multicast(sharers, part, mask)
        self._beside: Sequence[LoadedScales] = ()
        last = self.operands[-1].stages
        self.stages = range(self.operands[0].stages.offset, last.offset + last.bytes)

    def load_beside(self, scales: Sequence[LoadedScales]) -> None:
        """Brings these with each k-tile. Before the prologue."""
        self._beside = scales

    def prologue(self, *others: Initialized, prefetch: Sequence[Value]) -> None:
        """Initializes all barriers, the `others`' too, and the cluster meets. The thread that initializes them also
        starts the copies of the first k-tiles of this CTA's first tile, if that is known: each CTA its own, for
        nothing can be multicast before the cluster has met. The global memory of earlier kernels is waited for
        (programmatic dependent launch)."""
        tile = self._scheduler.first()
        # Barriers come behind the epilogue's buffers, which are aligned to more.
        config, cluster_size = self.spec.config, self.spec.multicast_size
        first_rank = self._scheduler.position.first
        self.pipe = PipelineTmaAsync(
            config.stages, transaction_bytes=current().parameter("stage_bytes", U32, self._bytes_of_stage),
            cluster_size=cluster_size, first_rank=first_rank, readers=self._readers,
            scope="cluster" if self.spec.hands_back_to_peers else "cta",
        )  # fmt: skip
        self._aliased = ReleaseBarrier("epilogue done", cluster_size, first_rank) if config.alias_epilogue else None
        most = min(EARLY, max(1, EARLY_COPIES // self._copies), config.stages - 1)
        early: ValueLike = 0
        if tile is not None:
            early = current().minimum(tile.k_tiles, most)
            for scales in self._beside:
                early = scales.early(early, tile)
        self.started = current().var(I32, early, "early")  # k-tiles; 0 from a second tile on

        def copies() -> None:
            if tile is None:
                return
            hw.grid_dependency_wait()
            with current().range(self.started.get(), name="k_tile") as k_tile:
                self.pipe.producer_begin(k_tile)
                self._load(k_tile, self.pipe.barrier(k_tile), tile, k_tile, alone=True)

        own = (self.pipe, self._aliased) if self._aliased else (self.pipe,)
        start(*own, *others, prefetch=(*self._maps, *prefetch), then=copies)
        hw.grid_dependency_wait()
        if config.pdl:
            hw.grid_dependency_launch()

    # -- producers -------------------------------------------------------------------------------------
    def producer_start_state(self) -> PipelineState:
        """Behind the k-tiles that the prologue has started."""
        if self._aliased:
            self._phase = current().var(U32, 0, "aliased_phase")
        for scales in self._beside:
            scales.start_producer(self.started.get())
        return self.pipe.producer_start_state(self.started.get())

    @contextmanager
    def each_k_tile(self) -> Iterator[tuple[WorkTile, Value]]:
        """What a producer does nothing but load: the k-tiles of all tiles but those that the prologue has started."""
        with self._scheduler.each_synchronized() as tile, self.rest(tile) as k_tile:
            yield tile, k_tile

    @contextmanager
    def rest(self, tile: WorkTile, stop: ValueLike | None = None) -> Iterator[Value]:
        """The k-tiles of a tile (up to `stop`) that the prologue has not started; then, if the tile's epilogue lies in
        the stages and another tile follows, waits until it has left them. Once in each tile."""
        with self._scheduler.each_k_tile(tile, self.started.get(), stop) as k_tile:
            yield k_tile
        self.started.set(0)
        if self._aliased:
            with current().when(_overwritten(tile)):
                self._aliased.wait(self._phase)

    def load(self, state: PipelineState, tile: WorkTile, k_tile: Value) -> None:
        """Starts the copies of a k-tile into an acquired stage. Recorded in one thread."""
        self._load(state.index, self.pipe.barrier(state), tile, k_tile)

    def tail(self, state: PipelineState) -> None:
        """Until all CTAs are done with this one's stages."""
        self.pipe.producer_tail(state)

    # -- consumers -------------------------------------------------------------------------------------
    def stage(self, stage: PipelineState | Value) -> list[SharedView]:
        """The tiles of all operands in a stage."""
        index = stage.index if isinstance(stage, PipelineState) else stage
        return [x.stages[index] for x in self.operands]

    def release_alias(self, tile: WorkTile) -> None:
        """After a tile's epilogue: the stages, if it lay in them, are the producer's again, if it needs them."""
        if self._aliased:
            with current().when(_overwritten(tile)):
                self._aliased.consumer_release()

    def _load(self, stage: Value, full: SharedView, tile: WorkTile, k_tile: Value, *, alone: bool = False) -> None:
        number, low = tile.k_tile(k_tile), list[Value | None]([None, None])
        if self.spec.low_parts:
            product, number = (number % PRODUCTS).named("product"), number // PRODUCTS
            low = [product == 0, product == 1]
        k = (number * self.spec.config.tile[2]).named("k")
        copies = list(zip(self.operands, tile.operands, low, strict=True))
        # Few rows lie in the L2: the other operand, which comes from DRAM, goes first.
        for operand, at, of_low in copies if self.spec.config.swap_ab else reversed(copies):
            operand.load(stage, full, at.row, k, at.batch, alone=alone, low=of_low)
        for scales in self._beside:
            scales.load(stage, full, tile, k_tile, number, alone=alone)

    def _bytes_of_stage(self, p: BoundProblem) -> int:
        return sum(x.bytes_of_stage(p) for x in self.operands) + sum(x.bytes_of_stage(p) for x in self._beside)

    @property
    def _copies(self) -> int:
        """How many copies bring a whole k-tile."""
        return sum(x.copies for x in self.operands) + len(self._beside)

    @property
    def _maps(self) -> list[Value]:
        return [map for x in self.operands for map in x.maps] + [x.map for x in self._beside]


def _overwritten(tile: WorkTile) -> Value:
    """Whether copies of another tile follow in the stages. A tile without k-tiles is followed by none that has some."""
    assert tile.more is not None
    return tile.more & (tile.k_tiles > 0)


def _shift(mask: int, by: Value | int) -> Value | int:
    return Constant(U32, mask) << by if isinstance(by, Value) else mask << by
