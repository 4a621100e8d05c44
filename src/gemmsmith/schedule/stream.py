"""Stream-K and split-K: clusters share the k-tiles of a tile, so that all of them have work to the end.

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
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import I32, ORDER_LENGTH
from gemmsmith.lang.values import Constant, Value
from gemmsmith.schedule.tiles import Share, TileScheduler, WorkTile

MOST_PARTS, LEAST_IDLE = 4, 50
"""Of a tile that is cut like others: who reduces it adds them one after the other. And what share of the time, one in
so many, clusters may be idle for that: large products gain 1 % by it."""


class _Cut(NamedTuple):
    """How this cluster's work is cut: so many `whole` tiles, of all clusters `whole_tiles`; then its part of the row of
    `row` k-tiles, of which `cutters` clusters have one: from `begin` to `end`, which lies in the row's tile `last`."""

    whole: Value
    whole_tiles: Value
    last: Value
    begin: Value
    end: Value
    row: Value
    cutters: Value


class StreamScheduler(TileScheduler):
    """With G clusters and T tiles, the last tiles are one row of k-tiles that is cut into equal parts, at most one a
    cluster; those before are computed whole, G at a time. Behind whole tiles the row is the T mod G that would not fill
    a wave, each cut into 2 to 4 parts, so that all of a wave still read the same few k-tiles. Where there are not
    two clusters for each of these, or too many would be idle, the row is G tiles longer, and cut into G parts, wherever
    those begin; so it is, with its T tiles, where there are fewer than G.

    A cluster works its part from the end backwards: it first computes the head of a tile that a later cluster reduces,
    and at last the tail of one whose head was computed first. So nobody waits for long, and a cluster leaves at most
    one partial tile. With T x S clusters, S for each tile, this is split-K.
    """

    def clusters_of(self, p: Problem) -> int:
        """How many clusters have work. ArgumentError for products too deep for the kernel's int32 sums."""
        tiles, k_tiles, splits = self.tiles_of(p), self.k_tiles_of(p), self.spec.config.splits
        if not k_tiles:
            return tiles
        clusters = min(tiles * min(splits or k_tiles, k_tiles), ORDER_LENGTH)
        if min(tiles, 2 * clusters) * k_tiles * clusters > MAX_EXTENT:
            raise ArgumentError(f"{p}: too deep for {splits or 'stream-K'} splits of K; use splits=1")
        return clusters

    counts = "number"

    def walk(self) -> tuple[Value, Value, Value]:
        """Over the tiles and shares of this cluster."""
        k = current()
        cluster, clusters = self.cluster, self.clusters
        waves = self.tiles // clusters
        remaining = k.select(self.k_tiles == 0, 0, self.tiles - waves * clusters).named("remaining")
        parts_of_each = k.minimum(k.minimum(clusters // k.maximum(remaining, 1), self.k_tiles), MOST_PARTS)
        idle = (clusters - remaining * parts_of_each) * LEAST_IDLE > clusters * parts_of_each * waves
        aligned = ((waves > 0) & (remaining > 0) & (parts_of_each > 1) & ~idle).named("aligned")
        longer = k.select((waves > 0) & (remaining > 0) & ~aligned, clusters, 0)
        shared = (remaining + longer).named("shared_tiles")
        cutters = k.select(aligned, remaining * parts_of_each, clusters).named("cutters")
        whole_tiles = (self.tiles - shared).named("whole_tiles")
        row = (shared * self.k_tiles).named("shared_k_tiles")
        begin = (k.minimum(cluster, cutters) * row // cutters).named("begin")
        end = (k.minimum(cluster + 1, cutters) * row // cutters).named("end")
        depth = k.maximum(self.k_tiles, 1).named("depth")
        last = (k.maximum(end - 1, 0) // depth).named("last")
        parts = k.select(end > begin, last - begin // depth + 1, 0).named("parts")
        whole = ((whole_tiles - cluster + clusters - 1) // clusters).named("whole")
        self._cut = _Cut(whole, whole_tiles, last, begin, end, row, cutters)
        return Constant(I32, 0), whole + parts, Constant(I32, 1)

    def at(self, number: Value) -> WorkTile:
        """The tile or share of that number."""
        k, cut = current(), self._cut
        sharing = (number >= cut.whole).named("sharing")
        of_row = (cut.last - (number - cut.whole)).named("of_row")
        index = k.select(sharing, cut.whole_tiles + of_row, self.cluster + number * self.clusters).named("tile")
        start = k.select(sharing, of_row * self.k_tiles, 0).named("start")
        first = k.select(sharing, k.maximum(cut.begin - start, 0), 0).named("first_k_tile")
        stop = k.select(sharing, k.minimum(cut.end - start, self.k_tiles), self.k_tiles).named("end_k_tile")
        # c row / cutters <= start
        other = (((start + 1) * cut.cutters - 1) // k.maximum(cut.row, 1)).named("other")
        share = Share(first, (stop == self.k_tiles).named("reduces"), self.cluster, other, number)
        backwards = self._odd(k.minimum(number, cut.whole))
        return self._tile(index, (stop - first).named("k_tiles_of_share"), share, backwards)

    def first(self) -> WorkTile | None:
        """None: finding the first share takes divisions."""
        return None


class ClusterScheduler(TileScheduler):
    """The CTAs of a cluster share the k-tiles of each of its tiles; each reduces a slice of it, or the last all."""

    @contextmanager
    def each(self, step: int = 1, first: Value | int = 0) -> Iterator[WorkTile]:
        """The shares of this CTA, one after the other."""
        assert step == 1, "whole tiles only"
        k = current()
        count, share = self._share()
        number = k.var(I32, 0, "number")
        with k.range(self.cluster, self.tiles, self.clusters, name="tile") as tile:
            more = (tile + self.clusters < self.tiles).named("more")
            now = replace(share, number=number.get().named("number_now"))
            yield replace(self._tile(tile, count, now, self._odd(now.number)), more=more)
            number.set(now.number + 1)

    def first(self) -> WorkTile | None:
        return self._first(*self._share())

    def _share(self) -> tuple[Value, Share]:
        """How many k-tiles of each tile are this CTA's, and which, at its first."""
        splits = self.spec.config.cluster_splits
        assert isinstance(self.position.k, Value)
        begin = (self.position.k * self.k_tiles // splits).named("first_k_tile")
        count = ((self.position.k + 1) * self.k_tiles // splits - begin).named("k_tiles_of_share")
        reduces = (self.position.k >= splits - self.spec.slices).named("reduces")
        return count, Share(begin, reduces, self.cluster, self.cluster, Constant(I32, 0))


def tile_scheduler(spec: KernelSpec) -> TileScheduler:
    """The scheduler of a config."""
    if spec.config.cluster_splits > 1:
        return ClusterScheduler(spec)
    return TileScheduler(spec) if spec.config.splits == 1 else StreamScheduler(spec)
