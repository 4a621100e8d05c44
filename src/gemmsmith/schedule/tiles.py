"""The static tile scheduler: raster orders in bands, persistent or one tile a cluster.

Clusters, not CTAs, are given tiles: the CTAs of a ragged cluster whose tile lies outside the matrix compute what
is never stored, and take part in its barriers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from gemmsmith import hw
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.problem import MAX_EXTENT, Problem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import I32, ORDER, ORDER_LENGTH
from gemmsmith.lang.values import Constant, Value, ValueLike
from gemmsmith.schedule.division import Divisor
from gemmsmith.schedule.sync_clusters import ClusterSync

IN_ORDER = tuple(range(ORDER_LENGTH))
"""Cluster i comes i-th in the walk."""


@dataclass(frozen=True)
class Share:
    """A tile whose k-tiles several CTAs sum: this one's are `first` and later ones. `reduces`: this CTA adds up all
    sums of the tile, or of a slice of its columns, and stores it; of several clusters the one that has the last k-tile
    does. Where they are of several clusters: this one is `cluster` in the walk, the others are those from `other` on.
    `number` counts the CTA's tiles."""

    first: Value
    reduces: Value
    cluster: Value
    other: Value
    number: Value


@dataclass(frozen=True)
class Coordinates:
    """Where a tile of an operand begins, which is seen as (M or N) x K: its row, and its batch."""

    row: Value
    batch: Value


@dataclass(frozen=True)
class WorkTile:
    """`operands`: where the CTA's tiles of A and B are read. `m`, `n`, `batch`: the element of D where its tile begins.
    `k_tiles`: how many it sums: all, or a share; the last first where it goes `backwards`. `more`: another tile follows
    in the CTA; None in `first`. `whole_wave`: all clusters have a whole tile in this wave; None where tiles may be
    shared."""

    operands: tuple[Coordinates, ...]
    m: Value
    n: Value
    batch: Value
    k_tiles: Value
    share: Share | None = None
    backwards: Value | None = None
    more: Value | None = None
    whole_wave: Value | None = None

    def k_tile(self, number: Value) -> Value:
        """Which k-tile of the product its own number `number` is."""
        if self.backwards is not None:
            number = current().select(self.backwards, self.k_tiles - 1 - number, number)
        return number if self.share is None else self.share.first + number


@dataclass(frozen=True)
class ClusterPosition:
    """Where a CTA is in its cluster: (m, n) among those with the same share of K, the `k`-th; `first` is the rank
    of the first of these."""

    m: Value | int
    n: Value | int
    rank: Value
    k: Value | int = 0
    first: Value | int = 0


class TileScheduler:
    """Walks the tiles of a cluster. Kernel arguments: tiles_m, tiles_n (in clusters), tiles (all), k_tiles, the
    divisors of the walk, and `order`, where in the walk each cluster begins: any permutation of the grid's clusters is
    right, and one that puts neighbors in the walk on neighboring SMs lets the chip merge their reads. This one is the
    `cluster`-th of `clusters`, and this CTA's `position` in it; they are read here, before the roles begin."""

    counts = "tile"
    """What the numbers of the walk are."""

    def __init__(self, spec: KernelSpec) -> None:
        k = current()
        self.spec, width = spec, spec.config.raster_group
        self.tiles_m = k.parameter("tiles_m", bind=lambda p: self.grid(p)[0])
        self.tiles_n = k.parameter("tiles_n", bind=lambda p: self.grid(p)[1])
        self.tiles = k.parameter("tiles", bind=self.tiles_of)
        self.k_tiles = k.parameter("k_tiles", bind=self.k_tiles_of)
        self.plane = Divisor("plane", lambda p: max(math.prod(self.grid(p)), 1))
        self.band = Divisor("band", lambda p: max(self._sides(p)[1] * width, 1))
        self.last_band = Divisor("last_band", lambda p: self._sides(p)[0] % width or width)
        # The order comes behind the numbers, which then are one line of the constant cache.
        self.order = k.parameter("order", ORDER, lambda p: IN_ORDER)
        k.grid = self.clusters_of
        self.cluster = hw.order_entry(self.order, hw.block_index() // spec.cluster_size).named("cluster")
        self.clusters = (hw.grid_size() // spec.cluster_size).named("clusters")
        self.position = self._position()
        self._sync = ClusterSync(self.clusters, self.position.rank) if spec.config.sync_clusters else None

    # -- what the host computes of a problem ---------------------------------------------------------------
    def grid(self, p: Problem) -> tuple[int, int]:
        """Tiles of a whole cluster along M and along N."""
        tile, cluster = self.spec.config.tile, self.spec.config.cluster
        return -(-p.m // (tile[0] * cluster[0])), -(-p.n // (tile[1] * cluster[1]))

    def tiles_of(self, p: Problem) -> int:
        """How many tiles a product has. ArgumentError for more than the kernel counts."""
        tiles = math.prod(self.grid(p)) * p.batch
        if tiles > MAX_EXTENT:
            raise ArgumentError(f"{p}: {tiles} tiles are more than an int32 can count; use a larger tile")
        return tiles

    def k_tiles_of(self, p: Problem) -> int:
        """K-tiles that are multiplied: each once, or where low parts lie in memory once for each product of 3xTF32."""
        return -(-p.k // self.spec.config.tile[2]) * self.spec.products

    def clusters_of(self, p: Problem) -> int:
        """How many clusters have work."""
        return self.tiles_of(p)

    def _sides(self, p: Problem) -> tuple[int, int]:
        """Tiles across the bands of the walk, and along them."""
        m, n = self.grid(p)
        return (n, m) if self.spec.config.raster == "m" else (m, n)

    # -- what the kernel does ------------------------------------------------------------------------------
    def _position(self) -> ClusterPosition:
        """Ranks run along M first."""
        (rows, columns), splits = self.spec.config.cluster, self.spec.config.cluster_splits
        rank: Value = Constant(I32, 0)
        if rows * columns * splits > 1:
            rank = hw.cluster_rank().named("rank")
        share: Value | int = rank // (rows * columns) if splits > 1 else 0
        first = share * (rows * columns)
        within = rank - first if splits > 1 else rank
        m = 0 if rows == 1 else within if columns == 1 else within % rows
        n = 0 if columns == 1 else within if rows == 1 else within // rows
        return ClusterPosition(m, n, rank, share, first)

    @contextmanager
    def each(self, step: int = 1, first: Value | int = 0) -> Iterator[WorkTile]:
        """The tiles of this cluster, one after the other, `clusters` apart; of them those whose numbers are `first`,
        `first` + `step` and so on."""
        start, stop, by = self.walk()
        start = start if step == 1 else start + first * by
        with current().range(start, stop, by * step, name=self.counts) as tile:
            yield replace(self.at(tile), more=(tile + by * step < stop).named("more"))

    def walk(self) -> tuple[Value, Value, Value]:
        """Where the loop of `each` starts and stops, and its step, in the numbers that `at` takes."""
        return self.cluster, self.tiles, self.clusters

    def at(self, tile: Value) -> WorkTile:
        """The work at a number of the walk."""
        begin = (tile - self.cluster).named("wave_begin")
        found = self._tile(tile, self.k_tiles, backwards=self._odd(begin // self.clusters))
        return replace(found, whole_wave=(begin + self.clusters <= self.tiles).named("whole_wave"))

    @contextmanager
    def each_synchronized(self) -> Iterator[WorkTile]:
        """The same in the one thread that produces: clusters wait for one another in `each_k_tile`, if the config has
        them do so."""
        if self._sync:
            self._sync.start()
        with self.each() as tile:
            yield tile
        if self._sync:
            self._sync.finish()

    @contextmanager
    def each_k_tile(self, tile: WorkTile, first: Value, stop: ValueLike | None = None) -> Iterator[Value]:
        """The producer's k-tiles of a tile, from `first` on."""
        with current().range(first, tile.k_tiles if stop is None else stop, name="k_tile") as k_tile:
            if self._sync and tile.whole_wave is not None:
                self._sync.meet(k_tile, tile.whole_wave)
            yield k_tile

    def first(self) -> WorkTile | None:
        """What `each` begins with; None where that takes long to find out."""
        return self._first(self.k_tiles)

    def _first(self, k_tiles: Value, share: Share | None = None) -> WorkTile:
        tile = self._tile(self.cluster, k_tiles, share)
        for value in (tile.batch, tile.m, tile.n):
            value.name = f"first_{value.name}"
        return tile

    def _odd(self, number: Value) -> Value | None:
        """Whether a CTA goes through its tile of this number backwards."""
        return (number % 2 == 1).named("backwards") if self.spec.config.serpentine else None

    def _tile(
        self,
        index: Value,
        k_tiles: Value,
        share: Share | None = None,
        backwards: Value | None = None,
    ) -> WorkTile:
        batch, m, n = current().call("tile_coordinates", self._coordinates, index, takes=["tile"])
        operands = Coordinates(m, batch), Coordinates(n, batch)
        return WorkTile(operands, m, n, batch, k_tiles, share, backwards)

    def _coordinates(self, index: Value) -> list[Value]:
        """The batch of a cluster's tile number `index`, and element (m, n) where this CTA's part of it starts."""
        tile, size, position = self.spec.config.tile, self.spec.config.cluster, self.position
        batch = self.plane.quotient(index).named("batch")
        within = (index - batch * (self.tiles_m * self.tiles_n)).named("within")
        if self.spec.config.raster == "m":
            n, m = self._band(within, self.tiles_n, self.tiles_m)
        else:
            m, n = self._band(within, self.tiles_m, self.tiles_n)
        tile_m = ((m * size[0] + position.m) * tile[0]).named("tile_m")
        tile_n = ((n * size[1] + position.n) * tile[1]).named("tile_n")
        return [batch, tile_m, tile_n]

    def _band(self, index: Value, across: Value, along: Value) -> tuple[Value, Value]:
        """Tile `index` of a walk along `along` in bands `raster_group` wide of `across`: (across, along)."""
        k, width = current(), self.spec.config.raster_group
        band = self.band.quotient(index).named("band")
        position = (index - band * (along * width)).named("position")
        if width == 1:
            return band, position
        remaining = (across - band * width).named("remaining")
        whole = (remaining >= width).named("whole_band")
        row = k.select(whole, position // width, self.last_band.quotient(position)).named("row")
        return band * width + position - row * k.select(whole, width, remaining), row
