"""The static tile scheduler: grouped raster orders, persistent or one tile per cluster.

Tiles are assigned to clusters, not CTAs. If the matrix ends inside a cluster's tile, the CTAs whose tile is outside of
it compute values that are never stored, and take part in the cluster's barriers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from gemmsmith import hw
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.problem import MAX_EXTENT, Problem
from gemmsmith.core.product import Role
from gemmsmith.core.scalars import ceil_div
from gemmsmith.core.spec import KernelSpec
from gemmsmith.hw.cluster import CLUSTER_PERMUTATION, MAX_CLUSTERS
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import I32
from gemmsmith.lang.values import Constant, Value
from gemmsmith.tile_scheduler.fast_divmod import FastDivmod
from gemmsmith.tile_scheduler.group_table import GroupTable
from gemmsmith.tile_scheduler.sync_clusters import ClusterKSync

GRID_ORDER = tuple(range(MAX_CLUSTERS))
"""The permutation by which cluster i begins with tile i."""
ZERO: Value = Constant(I32, 0)
NO_END: Value = Constant(I32, MAX_EXTENT)


@dataclass(frozen=True)
class Split:
    """This CTA's split of a tile whose k-tiles several CTAs divide among themselves."""

    runs_epilogue: Value
    """This CTA adds all partial sums of the tile, or of its slice of the columns, and runs the epilogue on the result.

    Of several clusters, the one with the last k-tile does (CUTLASS: is_final_split).
    """
    cluster_idx: Value
    """This CTA's cluster."""
    first_peer: Value
    """The first cluster with a split of the tile; the others follow up to cluster_idx."""
    tile_ordinal: Value
    """How many tiles and splits the CTA has processed before this one."""


@dataclass(frozen=True)
class OperandCoord:
    """Coordinates of a tile's first element in the operands of a role, seen as (M or N) x K."""

    mn: Value
    """The row."""
    batch: Value
    k_begin: Value = ZERO
    """The element of K at which k-tile 0 begins. With TMA a multiple of 16 bytes."""
    group_end: Value = NO_END
    """The first row after `mn` that is not the tile's, because its group ends; NO_END if no group does. See Design."""

    @property
    def is_clipped(self) -> bool:
        """True if the tile's rows may end before the tile does, because its group ends."""
        return self.group_end is not NO_END

    def end(self, extent: Value) -> Value:
        """Return the first row after `mn` that is not the tile's: where its group ends, or the operand's `extent`."""
        return self.group_end if self.is_clipped else extent


@dataclass(frozen=True)
class WorkTile:
    """The work of a CTA: a tile, or one split of its K: where the tile begins, and which k-tiles are summed."""

    a: OperandCoord
    """Coordinates of the first elements of the CTA's tiles of A, and of other operands with A's role: D's rows."""
    b: OperandCoord
    m: Value
    """The first row of D, in elements."""
    n: Value
    batch: Value
    group: Value
    """The group, or the batch. Operands of the epilogue with one value a group have it as their batch."""
    k_tiles: Value
    """K-tiles to sum: all, or those of the split."""
    k_tile_begin: Value = ZERO
    """The index along K of the first of them."""
    split: Split | None = None
    reverse_k: Value | None = None
    """The k-tiles are summed from the last to the first."""
    has_next: Value | None = None
    """The CTA has another tile after this one. None for TileScheduler.first_work_tile."""
    group_k_extent: Value = NO_END
    """The elements of K of the tile's group; what follows in its last k-tile is another's. NO_END if K is undivided."""
    is_full_wave: Value | None = None
    """All clusters have a tile in this wave. None if tiles may be split."""

    def coord(self, role: Role) -> OperandCoord:
        """Return the coordinates of the operands of a role."""
        return self.a if role == "a" else self.b

    def k_extent(self, extent: Value) -> Value:
        """Return the elements of K that are summed: those of the tile's group, or `extent` without groups along K."""
        return extent if self.group_k_extent is NO_END else self.group_k_extent

    def k_tile_index(self, k_tile: Value) -> Value:
        """Return the index along the GEMM's K of this work's k-tile number `k_tile`, in the order of the summation."""
        if self.reverse_k is not None:
            k_tile = current_builder().select(self.reverse_k, self.k_tiles - 1 - k_tile, k_tile)
        return (self.k_tile_begin + k_tile).with_name_hint("k_tile_idx")


@dataclass(frozen=True)
class ClusterPosition:
    """A CTA's position in its cluster: (m, n) among the CTAs with the same split of K."""

    m: Value | int
    n: Value | int
    cta_rank: Value
    split_idx: Value | int = 0
    """Which split of K the CTA has; 0 without splits over the cluster."""
    split_base_rank: Value | int = 0
    """The rank of the first CTA with the same split of K."""


@dataclass(frozen=True)
class WorkRange:
    """The values that a CTA's tile loop runs over, and the function that returns the work of each of them."""

    start: Value
    stop: Value
    step: Value
    work_tile_at: Callable[[Value], WorkTile]


class TileScheduler:
    """Assigns tiles to clusters: cluster i of G computes tiles i, i + G, i + 2 G … of the raster order.

    `cluster_idx`, `cluster_count` and this CTA's `position` in its cluster are read here, before the roles begin.

    Kernel arguments: cluster_tiles_m, cluster_tiles_n, cluster_tiles (all), k_tiles, and the divisors of the raster
    order. `cluster_permutation` maps a cluster's index in the grid to cluster_idx. Any permutation is correct; one that
    puts consecutive tiles on one GPC lets reads of its SMs merge.
    """

    table: GroupTable | None = None
    """The table of a grouped GEMM's groups."""
    loop_variable = "cluster_tile"
    """The name of the tile loop's variable in the printed CUDA."""

    def __init__(self, spec: KernelSpec) -> None:
        """Declare the kernel arguments, and read this CTA's place in the grid."""
        k, self.spec = current_builder(), spec
        self._declare_grid()
        k.work_clusters, k.persistent, k.max_clusters = self.clusters_of, True, MAX_CLUSTERS
        cluster_idx = hw.block_index() // spec.cluster_size
        may_wait = spec.config.splits != 1 or spec.config.sync_clusters  # for another cluster, which starts earlier
        if spec.cluster_size > 1 and not may_wait:
            order = k.parameter("cluster_permutation", CLUSTER_PERMUTATION, lambda p: GRID_ORDER)
            cluster_idx = hw.load_cluster_permutation(order, cluster_idx)
        self.cluster_idx = cluster_idx.named("cluster_idx")
        self.cluster_count = (hw.grid_size() // spec.cluster_size).named("cluster_count")
        self.position = self._position()
        self.cluster_sync = None
        if spec.config.sync_clusters:
            self.cluster_sync = ClusterKSync(self.cluster_count, self.position.cta_rank)

    def _declare_grid(self) -> None:
        k, width = current_builder(), self.spec.config.raster_group
        self.tiles_m = k.parameter("cluster_tiles_m", compute=lambda p: self.grid(p)[0])
        self.tiles_n = k.parameter("cluster_tiles_n", compute=lambda p: self.grid(p)[1])
        self.tiles = k.parameter("cluster_tiles", compute=self.tiles_of)
        self.k_tiles = k.parameter("k_tiles", compute=self.k_tiles_of)
        self.batch_divmod = FastDivmod("batch_divmod", lambda p: max(math.prod(self.grid(p)), 1))
        self.group_divmod = FastDivmod("group_divmod", lambda p: max(self._minor_and_major(p)[1] * width, 1))
        self.last_group_divmod = FastDivmod(
            "last_group_width_divmod", lambda p: self._minor_and_major(p)[0] % width or width
        )

    # -- computed by the host for a problem ----------------------------------------------------------------
    def grid(self, p: Problem) -> tuple[int, int]:
        """Return the number of a cluster's tiles along M and along N."""
        tile, cluster = self.spec.config.tile, self.spec.config.cluster
        return ceil_div(p.m, tile[0] * cluster[0]), ceil_div(p.n, tile[1] * cluster[1])

    def tiles_of(self, p: Problem) -> int:
        """Return the number of tiles of all clusters.

        Raises:
            ArgumentError: There are more than the kernel's int32 arithmetic can count.
        """
        tiles = math.prod(self.grid(p)) * p.batch
        if tiles > MAX_EXTENT:
            raise ArgumentError(f"{p}: {tiles} tiles are more than an int32 can count; use a larger tile")
        return tiles

    def k_tiles_of(self, p: Problem) -> int:
        """Return the number of k-tiles per tile.

        With 3xTF32 whose residuals are computed before the kernel, each counts three times, once per product.
        """
        return ceil_div(p.k, self.spec.config.tile[2]) * self.spec.mmas_per_k_tile

    def clusters_of(self, p: Problem) -> int:
        """Return how many clusters have work."""
        return self.tiles_of(p)

    def _minor_and_major(self, p: Problem) -> tuple[int, int]:
        """Return the number of tiles along the minor and the major axis of the raster order (see `_grouped_coord`)."""
        m, n = self.grid(p)
        return (n, m) if self.spec.config.raster == "m" else (m, n)

    # -- recorded in the kernel ----------------------------------------------------------------------------
    def _position(self) -> ClusterPosition:
        """Return this CTA's position in its cluster. Ranks run along M first, then along N, then over splits of K."""
        (cluster_m, cluster_n), splits = self.spec.config.cluster, self.spec.config.cluster_splits
        rank = hw.cluster_rank().named("cta_rank") if cluster_m * cluster_n * splits > 1 else ZERO
        split_idx: Value | int = 0
        base_rank: Value | int = 0
        rank_in_split = rank
        if splits > 1:
            split_idx = (rank // (cluster_m * cluster_n)).with_name_hint("split_idx")
            base_rank = (split_idx * (cluster_m * cluster_n)).with_name_hint("split_base_rank")
            rank_in_split = (rank - base_rank).with_name_hint("rank_in_split")
        m = 0 if cluster_m == 1 else rank_in_split if cluster_n == 1 else rank_in_split % cluster_m
        n = 0 if cluster_n == 1 else rank_in_split if cluster_m == 1 else rank_in_split // cluster_m
        return ClusterPosition(m, n, rank, split_idx, base_rank)

    @contextmanager
    def tile_loop(self, step: int = 1, first: Value | int = 0) -> Iterator[WorkTile]:
        """Loop over this cluster's tiles number `first`, `first + step`, `first + 2 * step` and so on.

        With pingpong `step` warpgroups share the tiles, and `first` is the number of the warpgroup.
        """
        work = self.persistent_range()
        start, by = work.start if step == 1 else work.start + first * work.step, work.step * step
        with current_builder().range(start, work.stop, by, name=self.loop_variable) as tile:
            yield replace(work.work_tile_at(tile), has_next=(tile + by < work.stop).named("has_next"))

    def persistent_range(self) -> WorkRange:
        """Return the range of the tile loop."""
        return WorkRange(self.cluster_idx, self.tiles, self.cluster_count, self._work_tile_at)

    def _work_tile_at(self, tile: Value) -> WorkTile:
        wave_begin = (tile - self.cluster_idx).named("wave_begin")
        reverse_k = self._is_reversed(wave_begin // self.cluster_count)
        work_tile = self._work_tile(tile, self.k_tiles, reverse_k=reverse_k)
        return replace(work_tile, is_full_wave=(wave_begin + self.cluster_count <= self.tiles).named("is_full_wave"))

    def finish_prologue(self) -> None:
        """Wait until what one warp computes for the scheduler in the prologue is complete: here nothing."""

    def first_work_tile(self) -> WorkTile | None:
        """Return the work of `tile_loop`'s first iteration, whose first k-tiles the prologue loads.

        None if it takes long to compute, or reads memory: arrays may only be read after `hw.grid_dependency_wait`.
        """
        return self._first_work_tile(self.k_tiles)

    def _first_work_tile(self, k_tiles: Value, split: Split | None = None, k_tile_begin: Value = ZERO) -> WorkTile:
        """Return this CTA's work in the first tile of its cluster; the arguments are attributes of the WorkTile."""
        tile = self._work_tile(self.cluster_idx, k_tiles, split, k_tile_begin)
        for value in (tile.batch, tile.m, tile.n):
            value.name = f"first_{value.name}"
        return tile

    def _is_reversed(self, ordinal: Value) -> Value | None:
        """Return whether the CTA sums the k-tiles of its `ordinal`-th tile in reverse, or None if it never does."""
        return (ordinal % 2 == 1).named("reverse_k") if self.spec.config.serpentine else None

    def _work_tile(
        self, index: Value, k_tiles: Value, split: Split | None = None, k_tile_begin: Value = ZERO,
        reverse_k: Value | None = None,
    ) -> WorkTile:  # fmt: skip
        batch, m, n = current_builder().call(
            "tile_coordinates", self._tile_coordinates, index, parameter_names=["cluster_tile"]
        )
        a, b = OperandCoord(m, batch), OperandCoord(n, batch)
        return WorkTile(a, b, m, n, batch, batch, k_tiles, k_tile_begin, split, reverse_k)

    def _tile_coordinates(self, index: Value) -> list[Value]:
        """Return the batch of a cluster's tile `index`, and element (m, n) at which this CTA's tile in it begins."""
        tile, cluster, position = self.spec.config.tile, self.spec.config.cluster, self.position
        batch = self.batch_divmod.divide(index).named("batch")
        index_in_batch = (index - batch * (self.tiles_m * self.tiles_n)).named("index_in_batch")
        if self.spec.config.raster == "m":
            n, m = self._grouped_coord(index_in_batch, self.tiles_n, self.tiles_m)
        else:
            m, n = self._grouped_coord(index_in_batch, self.tiles_m, self.tiles_n)
        tile_m = ((m * cluster[0] + position.m) * tile[0]).named("m_offset")
        tile_n = ((n * cluster[1] + position.n) * tile[1]).named("n_offset")
        return [batch, tile_m, tile_n]

    def _grouped_coord(self, index: Value, minor_tiles: Value, major_tiles: Value) -> tuple[Value, Value]:
        """Return the position (minor, major) of tile number `index` in a grouped raster order.

        The order runs along the major axis in groups of `raster_group` tiles of the minor axis: within a group the
        minor index changes first. The last group may be narrower. (CUTLASS: cluster_idx_minor, cluster_idx_major;
        max_swizzle_size is the group's width.)
        """
        k, width = current_builder(), self.spec.config.raster_group
        group = self.group_divmod.divide(index).named("group")
        offset_in_group = (index - group * (major_tiles * width)).named("offset_in_group")
        if width == 1:
            return group, offset_in_group
        minor_tiles_remaining = (minor_tiles - group * width).named("minor_tiles_remaining")
        is_full_group = (minor_tiles_remaining >= width).named("is_full_group")
        last_major = self.last_group_divmod.divide(offset_in_group)
        major = k.select(is_full_group, offset_in_group // width, last_major).named("cluster_tile_major")
        return group * width + offset_in_group - major * k.select(is_full_group, width, minor_tiles_remaining), major
