"""Stream-K and split-K: clusters, or the CTAs of a cluster, divide the k-tiles of a tile among themselves.

Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU", 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.problem import MAX_EXTENT, Problem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.hw.cluster import MAX_CLUSTERS
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import I32
from gemmsmith.lang.values import Constant, Value
from gemmsmith.tile_scheduler.tiles import ZERO, Split, TileScheduler, WorkRange, WorkTile

MAX_SPLITS_PER_TILE = 4
"""Maximum splits of a tile if all stream-K tiles have equally many: the reducing cluster adds them serially. Chosen;
not measured."""
INVERSE_MAX_IDLE_FRACTION = 50
"""1 / the fraction of the time that clusters may be idle because of equal splits; with more, the splits are unequal.
Large GEMMs gain 1 % by it."""


class _StreamKAssignment(NamedTuple):
    """This cluster's work: its data-parallel tiles (dp), then some k-tiles of the stream-K tiles (sk).

    The latter are k-tiles iter_begin to iter_end - 1, where the k-tiles of all stream-K tiles ("iters") are numbered
    tile by tile, from 0 on.
    """

    dp_work_tiles: Value
    """Data-parallel tiles of this cluster."""
    dp_tiles: Value
    """Data-parallel tiles of all clusters."""
    last_sk_tile: Value
    """The stream-K tile of k-tile iter_end - 1, counted from the first stream-K tile."""
    iter_begin: Value
    iter_end: Value
    sk_iters: Value
    """K-tiles of all stream-K tiles."""
    sk_units: Value
    """Clusters that have some of them."""
    work_tiles: Value
    """Tiles and splits of this cluster."""


class StreamKTileScheduler(TileScheduler):
    """Computes the first tiles data-parallel, a wave at a time, and splits the last ones along K over the clusters.

    With G clusters and T tiles:

    - If T < G, all T tiles are stream-K tiles: their k-tiles are divided evenly over the clusters.
    - If the T mod G tiles of the last, partial wave can have 2 to MAX_SPLITS_PER_TILE splits each without leaving too
      many clusters idle, they are the stream-K tiles and have equal splits. All clusters of a wave then read the same
      few k-tiles.
    - Otherwise the stream-K tiles are the last (T mod G) + G tiles, and their k-tiles are divided evenly over the
      clusters, wherever the tiles begin.

    A cluster works through its k-tiles from the end: it first computes the head of a tile that a later cluster reduces,
    and last the tail of a tile whose head was computed first. So no cluster waits for long, and each writes at most one
    partial tile. With T * S clusters, S per tile, this is split-K.
    """

    def __init__(self, spec: KernelSpec) -> None:
        super().__init__(spec)
        self._assignments: dict[object, _StreamKAssignment] = {}
        """This cluster's work by role: each warp role calls a device function that is printed once."""

    def clusters_of(self, p: Problem) -> int:
        """Return how many clusters have work: with `splits` S per tile, S for each tile; with stream-K, one per k-tile.

        They are at most MAX_CLUSTERS.

        Raises:
            ArgumentError: K is so large that the kernel's int32 arithmetic would overflow.
        """
        tiles, k_tiles, splits = self.tiles_of(p), self.k_tiles_of(p), self.spec.config.splits
        if not k_tiles:
            return tiles
        clusters = min(tiles * min(splits or k_tiles, k_tiles), MAX_CLUSTERS)
        if min(tiles, 2 * clusters) * k_tiles * clusters > MAX_EXTENT:
            raise ArgumentError(f"{p}: K is too large for {splits or 'stream-K'} splits; use splits=1")
        return clusters

    loop_variable = "tile_ordinal"

    def persistent_range(self) -> WorkRange:
        """Return the range of the tile loop: it numbers this cluster's tiles and splits from 0 on."""
        k = current_builder()
        own = _StreamKAssignment(*k.call("stream_k_assignment", self._assign)) if k.current_role else self._assign()
        self._assignments[k.current_role] = own
        return WorkRange(Constant(I32, 0), own.work_tiles, Constant(I32, 1), self._split_at)

    def _assign(self) -> _StreamKAssignment:
        """Compute this cluster's work, by the rules in the docstring of the class."""
        k = current_builder()
        cluster_idx, cluster_count = self.cluster_idx, self.cluster_count
        waves = (self.tiles // cluster_count).named("full_waves")
        tail_tiles = k.select(self.k_tiles == 0, 0, self.tiles - waves * cluster_count).named("tail_tiles")
        max_splits = k.minimum(cluster_count // k.maximum(tail_tiles, 1), self.k_tiles)
        splits_per_tile = k.minimum(max_splits, MAX_SPLITS_PER_TILE).named("splits_per_tile")
        idle_clusters = cluster_count - tail_tiles * splits_per_tile
        too_idle = idle_clusters * INVERSE_MAX_IDLE_FRACTION > cluster_count * splits_per_tile * waves
        uniform_splits = ((waves > 0) & (tail_tiles > 0) & (splits_per_tile > 1) & ~too_idle).named("uniform_splits")
        extra_tiles = k.select((waves > 0) & (tail_tiles > 0) & ~uniform_splits, cluster_count, 0)
        sk_tiles = (tail_tiles + extra_tiles).named("sk_tiles")
        sk_units = k.select(uniform_splits, tail_tiles * splits_per_tile, cluster_count).named("sk_units")
        dp_tiles = (self.tiles - sk_tiles).named("dp_tiles")
        sk_iters = (sk_tiles * self.k_tiles).named("sk_iters")
        iter_begin = (k.minimum(cluster_idx, sk_units) * sk_iters // sk_units).named("iter_begin")
        iter_end = (k.minimum(cluster_idx + 1, sk_units) * sk_iters // sk_units).named("iter_end")
        iters_per_tile = k.maximum(self.k_tiles, 1).named("iters_per_tile")
        last_sk_tile = (k.maximum(iter_end - 1, 0) // iters_per_tile).named("last_sk_tile")
        sk_work_tiles = k.select(iter_end > iter_begin, last_sk_tile - iter_begin // iters_per_tile + 1, 0)
        sk_work_tiles.named("sk_work_tiles")
        dp_work_tiles = ((dp_tiles - cluster_idx + cluster_count - 1) // cluster_count).named("dp_work_tiles")
        work_tiles = (dp_work_tiles + sk_work_tiles).named("work_tiles")
        return _StreamKAssignment(
            dp_work_tiles, dp_tiles, last_sk_tile, iter_begin, iter_end, sk_iters, sk_units, work_tiles
        )

    def _split_at(self, tile: Value) -> WorkTile:
        """Return the work of this cluster's tile or split number `tile`, from what `_assign` has computed in the role.

        A cluster first computes its data-parallel tiles, then its stream-K tiles, from the last to the first.
        """
        k, own = current_builder(), self._assignments[current_builder().current_role]
        is_sk_tile = (tile >= own.dp_work_tiles).named("is_sk_tile")
        sk_tile_idx = (own.last_sk_tile - (tile - own.dp_work_tiles)).named("sk_tile_idx")
        index = k.select(is_sk_tile, own.dp_tiles + sk_tile_idx, self.cluster_idx + tile * self.cluster_count)
        index.named("cluster_tile")
        tile_iter_begin = k.select(is_sk_tile, sk_tile_idx * self.k_tiles, 0).named("tile_iter_begin")
        begin = k.select(is_sk_tile, k.maximum(own.iter_begin - tile_iter_begin, 0), 0).named("k_tile_begin")
        end = k.select(is_sk_tile, k.minimum(own.iter_end - tile_iter_begin, self.k_tiles), self.k_tiles)
        end.named("k_tile_end")
        # The cluster that has the tile's first k-tile: the last c that begins at or before it, so with c * sk_iters <
        # (tile_iter_begin + 1) * sk_units, since its iter_begin is c * sk_iters // sk_units.
        first_peer = (((tile_iter_begin + 1) * own.sk_units - 1) // k.maximum(own.sk_iters, 1)).named("first_peer")
        split = Split((end == self.k_tiles).named("runs_epilogue"), self.cluster_idx, first_peer, tile)
        # All stream-K work of a cluster counts as one tile, so it has one direction along K.
        reverse_k = self._is_reversed(k.minimum(tile, own.dp_work_tiles))
        return self._work_tile(index, (end - begin).named("work_k_tiles"), split, begin, reverse_k)

    def first_work_tile(self) -> WorkTile | None:
        """Return None: the first split takes divisions to find."""
        return None


class ClusterSplitKTileScheduler(TileScheduler):
    """Splits the k-tiles of each tile over the CTAs of a cluster.

    Each CTA reduces a slice of the tile's columns, or the last one reduces the tile.
    """

    @contextmanager
    def tile_loop(self, step: int = 1, first: Value | int = 0) -> Iterator[WorkTile]:
        """Loop over this CTA's splits of the cluster's tiles. `step` and `first` have their defaults."""
        assert step == 1, "only cooperative designs split tiles over a cluster"
        k = current_builder()
        work_k_tiles, split, begin = self._split()
        ordinal = k.var(I32, 0, "tiles_done")
        with k.range(self.cluster_idx, self.tiles, self.cluster_count, name="cluster_tile") as tile:
            has_next = (tile + self.cluster_count < self.tiles).named("has_next")
            split_here = replace(split, tile_ordinal=ordinal.get().named("tile_ordinal"))
            reverse_k = self._is_reversed(split_here.tile_ordinal)
            yield replace(self._work_tile(tile, work_k_tiles, split_here, begin, reverse_k), has_next=has_next)
            ordinal.set(split_here.tile_ordinal + 1)

    def first_work_tile(self) -> WorkTile | None:
        """Return this CTA's split of its first tile."""
        return self._first_work_tile(*self._split())

    def _split(self) -> tuple[Value, Split, Value]:
        """Return (k-tiles of this CTA per tile, its split of its first tile, number of its first k-tile in a tile)."""
        splits = self.spec.config.cluster_splits
        assert isinstance(self.position.split_idx, Value)
        begin = (self.position.split_idx * self.k_tiles // splits).named("k_tile_begin")
        k_tiles = ((self.position.split_idx + 1) * self.k_tiles // splits - begin).named("work_k_tiles")
        runs_epilogue = (self.position.split_idx >= splits - self.spec.num_reducing_ctas).named("runs_epilogue")
        return k_tiles, Split(runs_epilogue, self.cluster_idx, self.cluster_idx, ZERO), begin
