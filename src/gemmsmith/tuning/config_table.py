"""Table of the configs that may be the fastest for a problem: arrays with one entry per config.

Numbers are float64: numpy rounds quotients of floats much faster than it divides integers, and integers are exact up to
2^53.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np

from gemmsmith.core.config import Config
from gemmsmith.core.design import get_design
from gemmsmith.core.dtypes import BF16, TF32
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.graph import identity_graph
from gemmsmith.core.problem import MAX_EXTENT, Problem
from gemmsmith.core.register_budgets import plan_promotion
from gemmsmith.core.scalars import ceil_div, round_up
from gemmsmith.core.spec import num_reducing_ctas
from gemmsmith.epilogue.epilogue_plan import MAX_TILE_N
from gemmsmith.hw.cluster import MAX_CLUSTERS
from gemmsmith.tuning.candidates import TILE_K_FOR_SMALL_M, candidates, count_aliased_stages, epilogue_buffers
from gemmsmith.tuning.gpus import NUM_SMS

Array = np.ndarray[Any, Any]

SMS_PER_GPC = 16
"""SMs of a GPC of these chips; some have 18."""
CONSECUTIVE_CTAS = 8
"""Consecutive CTAs without clusters that the model takes to be on one GPC; on an H200 up to 18 are (by %smid)."""
MAX_ACTIVE_CLUSTERS = {1: 132, 2: 66, 4: 30, 8: 14}
"""Clusters that are active at once on an H200, by their CTAs (cudaOccupancyMaxActiveClusters): GPCs have 16 or 18
SMs."""
MIN_K_FOR_TILE_K_128 = 512
"""K from which a tile K of 128 is tried; chosen, not measured."""
MIN_MN_FOR_L2_REUSE = 128
"""M or N up to which waves read nothing again from the L2, so `sync_clusters` and `serpentine` only cost time: 128 x
57344 x 8192 loses 1.4 % with sync_clusters, 2.8 % with serpentine too (lockstep-h200)."""
M_GRANULARITY = 8
"""M is rounded up to this number of rows: all tile extents are multiples of 8, so the choice is the same."""
MIN_K_TILES_PER_SPLIT = 4
"""Minimum k-tiles of a split; chosen, not measured."""
SPLITS_PAY_ROWS, SPLITS_PAY_K = range(129, 257), range(14336, 32769)
"""Rows, and 16-bit elements of K, for which a choice considers `splits` (H200, docs/notebook/README.md)."""
SPLITS_PAY_MIN_COLUMNS = 2048
"""Columns from which a choice considers `splits`; likewise."""
SPLITS_PAY_MIN_TF32_RESULTS = 3 * 2**18
"""Results from which a choice considers `splits` for TF32 (splits-tf32-h100)."""
SPLITS_PAY_MAX_3XTF32_RESULTS = 2**20 - 1
"""Results up to which a choice considers `splits` for 3xTF32; likewise."""
MIN_TAIL_WASTE = 1.05
"""Minimum ratio of wave-quantized to actual work at which stream-K is considered; chosen, not measured."""


def get_max_active_clusters(size: int, sms: int = NUM_SMS) -> int:
    """Return the number of clusters of `size` CTAs that are active at once on a GPU of `sms` SMs, at least 1.

    GPUs of other sizes are taken to leave as large a part of their SMs idle as an H200.
    """
    return max(1, MAX_ACTIVE_CLUSTERS.get(size, NUM_SMS // size) * sms // NUM_SMS)


@dataclass(frozen=True, eq=False)
class ConfigTable:
    """Configs, and an array for each of their choices and properties; fields without a docstring are Config's."""

    configs: np.ndarray[Any, Any]
    """The configs, objects of class Config."""
    tile_m: Array
    tile_n: Array
    tile_k: Array
    cluster_shape_m: Array
    cluster_shape_n: Array
    stages: Array
    consumers: Array
    splits: Array
    cluster_splits: Array
    raster_group: Array
    cluster_tile_m: Array
    """Rows of A of a cluster's tiles."""
    cluster_tile_n: Array
    """Columns of B of a cluster's tiles."""
    cluster_size: Array
    """CTAs of a cluster, including splits."""
    max_active_clusters: Array
    """Clusters that are active at once."""
    reducing_ctas: Array
    """CTAs that reduce and store a tile, a slice each."""
    aliased_stages: Array
    """Stages with `alias_epilogue` if that is considered, else 0."""
    subtiles: Array
    """Subtiles of a tile's epilogue, if it loads matrices; else 1, as the next two are."""
    load_stages: Array
    """Subtiles of them that can be loaded at once."""
    store_stages: Array
    """Subtiles of them that can be stored at once."""
    swap_ab: Array
    tile_per_warpgroup: Array
    """True if each consumer warpgroup has its own tile (pingpong)."""
    raster_m: Array
    """True if consecutive tiles run along M."""
    promotion_shapes: Array
    """Columns of a promotion subtile and k-tiles in flight, without and with per-column scales: (configs, 2, 2)."""
    min_tile_n: Array
    """Minimum tile N of all configs, which an epilogue may require."""

    @staticmethod
    def from_configs(
        configs: list[Config], epilogue: EpilogueSpec | None = None, sms: int = NUM_SMS
    ) -> ConfigTable:  # fmt: skip
        """Return the table of these configs for an epilogue on a GPU of `sms` SMs."""
        graph = epilogue.graph if epilogue else identity_graph(BF16)
        numbers: list[tuple[int, ...]] = []
        for c in configs:
            (m, n, _), (cluster_m, cluster_n) = c.tile, c.cluster
            cluster_tile, size = (m * cluster_m, n * cluster_n), cluster_m * cluster_n * c.cluster_splits
            numbers.append((
                *c.tile, *c.cluster, c.stages, c.consumers, c.splits, c.cluster_splits, c.raster_group,
                *(cluster_tile[::-1] if c.swap_ab else cluster_tile), size, get_max_active_clusters(size, sms),
                num_reducing_ctas(c, graph.transposed if c.swap_ab else graph),
                count_aliased_stages(c, epilogue) if epilogue else 0,
                *(epilogue_buffers(c, epilogue) if epilogue else (1, 1, 1)),
            ))  # fmt: skip
        flags = [(c.swap_ab, get_design(c.design).tile_per_warpgroup, c.raster == "m") for c in configs]
        promotions = [plan_promotion(c, per_column)[:2] for c in configs for per_column in (False, True)]
        min_tile_n = min((c.tile[1] for c in configs), default=MAX_TILE_N)
        columns = [
            np.fromiter(configs, object, len(configs)),
            *np.array(numbers, float).reshape(len(configs), 19).T.copy(),
            *np.array(flags, bool).reshape(len(configs), 3).T.copy(),
            np.array(promotions, float).reshape(-1, 2, 2),
            np.full(len(configs), min_tile_n),
        ]
        return ConfigTable(*columns)

    def select(self, indices: Array) -> ConfigTable:
        """Return the table of the configs at these indices."""
        return ConfigTable(*(getattr(self, f.name).take(indices, axis=0) for f in fields(self)))

    def tiles(self, problem: Problem) -> Array:
        """Return the number of clusters' tiles of each config."""
        tiles_m, tiles_n = self.grid(problem.m, problem.n)
        return np.asarray(problem.batch * tiles_m * tiles_n)

    def grid(self, m: int, n: int) -> tuple[Array, Array]:
        """Return the number of clusters' tiles along M and along N of each config, for one batch."""
        return np.ceil(m / self.cluster_tile_m), np.ceil(n / self.cluster_tile_n)

    def gpc_sharers(self, problem: Problem) -> tuple[Array, Array]:
        """Return how many CTAs of a GPC read the same tile of A at once, and how many the same tile of B.

        The CTAs of a GPC have consecutive tiles in the raster order: a part of a group, `raster_group` tiles wide.
        """
        tiles_m, tiles_n = self._kernel_grid(problem)
        raster_group = np.minimum(self.raster_group, np.maximum(1, np.where(self.raster_m, tiles_n, tiles_m)))
        is_consecutive = (self.cluster_size == 1) & (problem.batch == 1)
        clusters = np.where(is_consecutive, CONSECUTIVE_CTAS, SMS_PER_GPC / self.cluster_size)
        num_groups = np.maximum(1, clusters / raster_group)
        return np.where(self.raster_m, raster_group, num_groups), np.where(self.raster_m, num_groups, raster_group)

    def single_wave_raster_m(self, problem: Problem) -> Array:
        """Return `raster_m`, for single waves without clusters by `runs_along_m`."""
        tiles = self._kernel_grid(problem)
        is_set = self.is_single_wave(problem) & (self.cluster_size == 1) & (self.splits == 1)
        is_set &= (np.minimum(*tiles) > 1) & (problem.batch == 1)
        return np.where(is_set, runs_along_m(*tiles), self.raster_m)

    def _kernel_grid(self, problem: Problem) -> tuple[Array, Array]:
        """Return `grid` in the kernel's orientation."""
        tiles_m, tiles_n = self.grid(problem.m, problem.n)
        return np.where(self.swap_ab, tiles_n, tiles_m), np.where(self.swap_ab, tiles_m, tiles_n)

    @property
    def fixed_k_order(self) -> Array:
        """True for each config of which one CTA accumulates all k-tiles of a tile."""
        return np.asarray((self.splits == 1) & (self.cluster_splits == 1))

    def is_single_wave(self, problem: Problem) -> Array:
        """Return for each config whether every CTA has at most one tile."""
        return np.asarray(self.tiles(problem) <= self.max_active_clusters)

    def plausible(self, min_m: int, max_m: int, n: int, k: int, batch: int) -> Array:
        """Return for each config whether it may be `valid_for` some problem with `min_m` to `max_m` rows.

        Its tiles must not be mostly outside of D. If K is split, the work units must fit one wave, and each must have
        at least MIN_K_TILES_PER_SPLIT k-tiles; with stream-K there must be less than four waves of tiles.
        """
        tiles_m, tiles_n = self.grid(min_m, n)
        k_tiles, tiles = np.ceil(k / self.tile_k), batch * tiles_m * tiles_n
        clusters_per_wave = self.max_active_clusters
        kernel_m, kernel_n = np.where(self.swap_ab, n, max_m), np.where(self.swap_ab, max_m, n)
        is_plausible = self.tile_m * self.cluster_shape_m < 2 * np.maximum(kernel_m, 64)
        is_plausible &= self.tile_n * self.cluster_shape_n < 2 * np.maximum(kernel_n, self.min_tile_n)
        # swapped: with one tile over all of M each element of B is read once
        is_plausible &= (self.tile_k != TILE_K_FOR_SMALL_M) | (min_m <= self.tile_n)
        is_plausible &= (self.tile_k == 64) | (k >= MIN_K_FOR_TILE_K_128)
        num_splits = np.maximum(self.splits, self.cluster_splits)
        fits_one_wave = tiles * np.maximum(self.splits, 1) <= clusters_per_wave
        is_split = fits_one_wave & (k_tiles >= MIN_K_TILES_PER_SPLIT * num_splits)
        is_stream_k = self.splits == 0
        is_plausible &= np.where(is_stream_k, tiles < 4 * clusters_per_wave, (num_splits == 1) | is_split)
        return np.asarray(is_plausible)

    def valid_for(self, problem: Problem) -> Array:
        """Return for each config whether it is worth ranking for a problem: `plausible`, and stream-K only if it pays.

        Stream-K must avoid a last wave with idle SMs (MIN_TAIL_WASTE), and leave each cluster enough k-tiles. Numbers
        of tiles must fit int32.
        """
        is_plausible = self.plausible(problem.m, problem.m, problem.n, problem.k, problem.batch)
        k_tiles, tiles = np.ceil(problem.k / self.tile_k), self.tiles(problem)
        clusters_per_wave = self.max_active_clusters
        wastes_last_wave = np.ceil(tiles / clusters_per_wave) * clusters_per_wave > MIN_TAIL_WASTE * tiles
        allows_stream_k = wastes_last_wave & (tiles * k_tiles >= MIN_K_TILES_PER_SPLIT * clusters_per_wave)
        fits_int32 = self._fits_int32(tiles, np.maximum(1, k_tiles))
        return np.asarray(is_plausible & ((self.splits > 0) | allows_stream_k) & fits_int32)

    def _fits_int32(self, tiles: Array, k_tiles: Array) -> Array:
        """Return for each config whether int32 can count its tiles and splits.

        These are the limits of TileScheduler.tiles_of and StreamKTileScheduler.clusters_of.
        """
        splits = np.minimum(np.where(self.splits == 0, k_tiles, self.splits), k_tiles)
        clusters = np.minimum(tiles * splits, MAX_CLUSTERS)
        total_k_tiles = np.where(self.splits == 1, 0, np.minimum(tiles, 2 * clusters) * k_tiles * clusters)
        return np.asarray(np.maximum(tiles, total_k_tiles) <= MAX_EXTENT)


@lru_cache(maxsize=64)
def configs_for_epilogue(
    epilogue: EpilogueSpec, promoted: bool = False, splits: bool = True, sms: int = NUM_SMS
) -> ConfigTable:  # fmt: skip
    """Return the table of all candidates for an epilogue, for any problem, with or without promotion and `splits`."""
    return ConfigTable.from_configs(list(candidates(epilogue, promoted, splits)), epilogue, sms)


def configs_for(epilogue: EpilogueSpec, problem: Problem, splits: bool = True, sms: int = NUM_SMS) -> ConfigTable:
    """Return the candidates that may be valid for a problem; cached for M of the same bit length."""
    bits, sizes = problem.m.bit_length(), (problem.n, problem.k, problem.batch)
    return _configs_for(epilogue, problem.promoted, splits, sms, bits, *sizes)


@lru_cache(maxsize=128)
def _configs_for(
    epilogue: EpilogueSpec, promoted: bool, splits: bool, sms: int, bits: int, n: int, k: int, batch: int
) -> ConfigTable:
    all_configs = configs_for_epilogue(epilogue, promoted, splits, sms)
    return all_configs.select(np.flatnonzero(all_configs.plausible(1 << bits >> 1, (1 << bits) - 1, n, k, batch)))


def splits_pay(problem: Problem) -> bool:
    """Return whether a choice considers `splits`: where the configs that the model chooses with them are faster.

    Operands of 16 and 8 bits: one GEMM of 129 to 256 rows, many columns and a long K (7 % faster in the mean of 33
    GEMMs; elsewhere 13 % slower in the mean of 103). TF32, whose k-tiles take longer: many results (9 % faster,
    elsewhere 4 % slower). 3xTF32: few results (6 % faster, elsewhere 6 % slower). The last two are of 1074 GEMMs.
    """
    if problem.batch != 1:
        return False
    if problem.a.dtype == TF32:
        results = problem.m * problem.n
        few, many = results <= SPLITS_PAY_MAX_3XTF32_RESULTS, results >= SPLITS_PAY_MIN_TF32_RESULTS
        return few if problem.is_3xtf32 else many
    has_long_k = problem.k * problem.a.dtype.bytes // 2 in SPLITS_PAY_K and problem.n >= SPLITS_PAY_MIN_COLUMNS
    return has_long_k and problem.m in SPLITS_PAY_ROWS


def is_single_wave(config: Config, problem: Problem, sms: int = NUM_SMS) -> bool:
    """Return whether each CTA of a config has at most one tile on a GPU of `sms` SMs."""
    (rows, columns), (tiles_m, tiles_n) = config.cluster, _cluster_tiles(config, problem)
    return problem.batch * tiles_m * tiles_n <= get_max_active_clusters(rows * columns * config.cluster_splits, sms)


def runs_along_m(tiles_m: Any, tiles_n: Any) -> Any:
    """Return whether a single wave without clusters should run along M, given its tiles along both dimensions.

    CTAs of a GPC then share tiles of the larger operand: 1.3 % in the mean of 40 GEMMs (raster-h200).
    """
    return tiles_m >= tiles_n


def with_single_wave_raster(config: Config, problem: Problem) -> Config:
    """Return a config of a single wave with the raster of `runs_along_m`; not of a batch, with clusters or `splits`."""
    tiles, has_clusters = _cluster_tiles(config, problem), config.cluster != (1, 1) or config.cluster_splits > 1
    if has_clusters or config.splits != 1 or min(tiles) == 1 or problem.batch > 1:  # one row of tiles has one order
        return config
    return config.replace(raster="m" if runs_along_m(*tiles) else "n")


def _cluster_tiles(config: Config, problem: Problem) -> tuple[int, int]:
    """Return the clusters' tiles along M and along N, of the kernel's orientation."""
    m, n = (problem.n, problem.m) if config.swap_ab else (problem.m, problem.n)
    (rows, columns), (tile_m, tile_n, _) = config.cluster, config.tile
    return ceil_div(m, tile_m * rows), ceil_div(n, tile_n * columns)


def has_l2_reuse(problem: Problem) -> bool:
    """Return whether later waves read parts of both operands again, so that L2 hits depend on the tile order."""
    return min(problem.m, problem.n) > MIN_MN_FOR_L2_REUSE


def rounds_up_m(problem: Problem) -> bool:
    """Return whether `round_up_m` may round: not if A or D is column-major, since M decides their alignment."""
    return not (problem.a.is_column_major or problem.d.is_column_major)


def round_up_m(problem: Problem) -> Problem:
    """Return the problem with M rounded up to `M_GRANULARITY`, so that choices for similar M are cached once.

    A problem whose A or D is column-major is returned as it is.
    """
    if not rounds_up_m(problem):
        return problem
    m = round_up(problem.m, M_GRANULARITY)
    return problem if m == problem.m else problem.with_rows(m)
