"""The configs that may be the fastest for a problem, as arrays with one entry a config.

Numbers are float64, whose quotients numpy rounds much faster than it divides integers; they are exact up to 2^53.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from gemmsmith.core.config import Config
from gemmsmith.core.design import find
from gemmsmith.core.dtypes import BF16
from gemmsmith.core.graph import bare
from gemmsmith.core.problem import MAX_EXTENT, Problem
from gemmsmith.core.spec import EpilogueSpec, promotion, slices
from gemmsmith.epilogue.device.layout import MOST_COLUMNS
from gemmsmith.lang.types import ORDER_LENGTH
from gemmsmith.tuning.candidates import FEW_ROWS_DEPTH, candidates, stages_through

Column = np.ndarray[Any, Any]

SMS, GPC_SMS = 132, 16
"""Of H100 SXM and H200; and of one of their GPCs, some of which have 18."""
RESIDENT = {1: 132, 2: 66, 4: 30, 8: 14}
"""Clusters that an H200 holds at once, by their CTAs: its GPCs have 16 or 18 SMs."""
DEEP = 512
"""K from which tiles of 128 are tried."""
READ_ONCE_ROWS = 128
"""With no more rows (or columns) the other operand is read once, or by all at once: 128 x 57344 x 8192 loses 1.4 % in
sync_clusters, 2.8 % with serpentine too (benchmarks/results/lockstep-h200.json)."""
STEP = 8
"""Rows of A that no two tiles tell apart: their extents are multiples of it."""
SMALLEST_SHARE = 4
"""The least number of k-tiles in a share of K."""
WASTE = 1.05
"""Of the last wave, from which cutting it up is tried."""


def resident_clusters(size: int) -> int:
    """Clusters of that many CTAs that run at once."""
    return RESIDENT.get(size, SMS // size)


@dataclass(frozen=True, eq=False)
class Space:
    """Configs, and a column of numbers for each of their choices."""

    configs: np.ndarray[Any, Any]
    """Objects of class Config."""
    m: Column
    n: Column
    k: Column
    rows: Column
    columns: Column
    stages: Column
    consumers: Column
    splits: Column
    cluster_splits: Column
    slices: Column
    cluster_m: Column
    cluster_n: Column
    """Rows of A, and columns of B, of a cluster's tiles."""
    cluster_size: Column
    resident: Column
    own_tiles: Column
    swap_ab: Column
    raster_m: Column
    band: Column
    """Whether consecutive tiles run along M, and how many tiles wide their band is."""
    reusing: Column
    """For each config, its stages with `alias_epilogue`, if that is considered; else 0."""
    promoted: Column
    """For each config, the columns that a warpgroup sums at once where sums are promoted, and its k-tiles in flight;
    then where each column has a scale: (configs, 2, 2)."""
    narrowest: Column
    """Columns of the narrowest tile of all: an epilogue may take no narrower one."""

    @staticmethod
    def of(configs: list[Config], epilogue: EpilogueSpec | None = None) -> Space:
        numbers = np.array([
            (*c.tile, *c.cluster, c.stages, c.consumers, c.splits, c.cluster_splits) for c in configs
        ], float).reshape(-1, 9)  # fmt: skip
        m, n, k, rows, columns, stages, consumers, splits, cluster_splits = numbers.T.copy()
        own_tiles = np.array([find(c.design).own_tiles for c in configs], bool)
        swap_ab = np.array([c.swap_ab for c in configs], bool)
        raster_m = np.array([c.raster == "m" for c in configs], bool)
        band = np.array([c.raster_group for c in configs], float)
        size = rows * columns * cluster_splits
        resident = np.array([resident_clusters(int(x)) for x in size], float)
        graph = epilogue.graph if epilogue else bare(BF16)
        ends = np.array([slices(c, graph.transposed() if c.swap_ab else graph) for c in configs], float)
        cluster_m, cluster_n = m * rows, n * columns
        reusing = np.array([stages_through(c, epilogue) if epilogue else 0 for c in configs], float)
        sums = [promotion(c, each)[:2] for c in configs for each in (False, True)]
        promoted = np.array(sums, float).reshape(-1, 2, 2)
        return Space(
            np.fromiter(configs, object, len(configs)), m, n, k, rows, columns, stages, consumers, splits,
            cluster_splits, ends, np.where(swap_ab, cluster_n, cluster_m), np.where(swap_ab, cluster_m, cluster_n),
            size, resident, own_tiles, swap_ab, raster_m, band, reusing, promoted,
            np.full(len(configs), n.min(initial=MOST_COLUMNS)),
        )  # fmt: skip

    def take(self, which: Column) -> Space:
        """The configs at these indices."""
        columns = {f.name: getattr(self, f.name).take(which, axis=0) for f in fields(self)[1:]}
        return Space(self.configs.take(which), **columns)

    def sizes(self, problem: Problem) -> tuple[Column, Column]:
        """M and N for each config: of the problem, or with `swap_ab` of its transpose."""
        return np.where(self.swap_ab, problem.n, problem.m), np.where(self.swap_ab, problem.m, problem.n)

    def tiles(self, problem: Problem) -> Column:
        """For each config, the number of clusters that have a tile."""
        down, across = self.grid(problem.m, problem.n)
        return np.asarray(problem.batch * down * across)

    def grid(self, m: int, n: int) -> tuple[Column, Column]:
        """For each config, the number of clusters along M, and along N, of a product of one batch."""
        return np.ceil(m / self.cluster_m), np.ceil(n / self.cluster_n)

    def alike(self, problem: Problem) -> tuple[Column, Column]:
        """How many CTAs of a GPC, neighbors in raster order, read the same tile of A, and of B, at one time."""
        m, n = self.sizes(problem)
        down, across = np.ceil(m / (self.m * self.rows)), np.ceil(n / (self.n * self.columns))
        band = np.minimum(self.band, np.maximum(1, np.where(self.raster_m, across, down)))
        bands = np.maximum(1, GPC_SMS / self.cluster_size / band)
        return np.where(self.raster_m, band, bands), np.where(self.raster_m, bands, band)

    @property
    def in_order(self) -> Column:
        """For each config, whether one CTA sums all k-tiles of a tile."""
        return np.asarray((self.splits == 1) & (self.cluster_splits == 1))

    def once(self, problem: Problem) -> Column:
        """For each config, whether every CTA has one tile at most."""
        return np.asarray(self.tiles(problem) <= self.resident)

    def possible(self, fewest: int, most: int, n: int, k: int, batch: int) -> Column:
        """For each config, whether it may be `sensible` for some problem with `fewest` to `most` rows: its tiles are
        not mostly outside, and there are few enough of them, and enough of K, for its shares."""
        down, across = self.grid(fewest, n)
        k_tiles, tiles = np.ceil(k / self.k), batch * down * across
        good = self.m * self.rows < 2 * np.maximum(np.where(self.swap_ab, n, most), 64)
        good &= self.n * self.columns < 2 * np.maximum(np.where(self.swap_ab, most, n), self.narrowest)
        good &= (self.k != FEW_ROWS_DEPTH) | (fewest <= self.n)  # B is read once
        good &= (self.k == 64) | (k >= DEEP)
        shares = np.maximum(self.splits, self.cluster_splits)
        few = (tiles * np.maximum(self.splits, 1) <= self.resident) & (k_tiles >= SMALLEST_SHARE * shares)
        good &= np.where(self.splits == 0, tiles < 4 * self.resident, (shares == 1) | few)
        return np.asarray(good)

    def sensible(self, problem: Problem) -> Column:
        """For each config, whether its tiles are not mostly outside of the problem and its shares of K long enough."""
        good = self.possible(problem.m, problem.m, problem.n, problem.k, problem.batch)
        k_tiles, tiles, resident = np.ceil(problem.k / self.k), self.tiles(problem), self.resident
        ragged = (np.ceil(tiles / resident) * resident > WASTE * tiles) & (tiles * k_tiles >= SMALLEST_SHARE * resident)
        return np.asarray(good & ((self.splits > 0) | ragged) & self._countable(tiles, np.maximum(1, k_tiles)))

    def _countable(self, tiles: Column, k_tiles: Column) -> Column:
        """For each config, whether int32 can count its tiles and shares of K, which launches require."""
        clusters = np.minimum(
            tiles * np.minimum(np.where(self.splits == 0, k_tiles, self.splits), k_tiles), ORDER_LENGTH
        )
        k_tiles_of_all = np.where(self.splits == 1, 0, np.minimum(tiles, 2 * clusters) * k_tiles * clusters)
        return np.asarray(np.maximum(tiles, k_tiles_of_all) <= MAX_EXTENT)


@lru_cache(maxsize=64)
def space(epilogue: EpilogueSpec, promoted: bool = False) -> Space:
    """The configs that are considered for an epilogue, whatever the problem; of sums that are `promoted` or not."""
    return Space.of(list(candidates(epilogue, promoted)), epilogue)


def considered(epilogue: EpilogueSpec, problem: Problem) -> Space:
    """Those of them that may be sensible for a problem, kept for others with up to twice as many rows."""
    bits, sizes = problem.m.bit_length(), (problem.n, problem.k, problem.batch)
    return _considered(epilogue, problem.promoted, bits, *sizes)


@lru_cache(maxsize=128)
def _considered(epilogue: EpilogueSpec, promoted: bool, bits: int, n: int, k: int, batch: int) -> Space:
    every = space(epilogue, promoted)
    return every.take(np.flatnonzero(every.possible(1 << bits >> 1, (1 << bits) - 1, n, k, batch)))


def has_one_tile(config: Config, problem: Problem) -> bool:
    """Whether each CTA of a config has one tile at most."""
    m, n = (problem.n, problem.m) if config.swap_ab else (problem.m, problem.n)
    (rows, columns), (tile_m, tile_n, _) = config.cluster, config.tile
    tiles = problem.batch * -(-m // (tile_m * rows)) * -(-n // (tile_n * columns))
    return tiles <= resident_clusters(rows * columns * config.cluster_splits)


def reads_again(problem: Problem) -> bool:
    """Whether later waves read parts of both operands again, so that L2 hits depend on the order of the tiles."""
    return min(problem.m, problem.n) > READ_ONCE_ROWS


@lru_cache(maxsize=4096)
def in_steps(problem: Problem) -> Problem:
    """The problem with its rows rounded up to `STEP`; itself where a column-major A or D depends on their number."""
    if problem.a.column_major or problem.d.column_major:
        return problem
    rows, (of_a, of_b) = -(-problem.m // STEP) * STEP, problem.scales
    if of_a:
        of_a = replace(of_a, matrix=replace(of_a.matrix, rows=-(-rows // of_a.rows)))
    return replace(problem, a=replace(problem.a, rows=rows), d=replace(problem.d, rows=rows), scales=(of_a, of_b))
