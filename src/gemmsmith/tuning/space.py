"""The configs that may be the fastest for a problem, as arrays with one entry a config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from gemmsmith.core.config import Config
from gemmsmith.core.design import find
from gemmsmith.core.dtypes import BF16, FP32
from gemmsmith.core.graph import Graph, bare
from gemmsmith.core.mma import WGMMA_M
from gemmsmith.core.problem import MAX_EXTENT, Problem
from gemmsmith.core.spec import (
    BARRIER_BYTES,
    SHARED_LIMIT,
    EpilogueSpec,
    KernelSpec,
    operand_major,
    slices,
)
from gemmsmith.epilogue.device.held import held_registers
from gemmsmith.epilogue.device.layout import ALIGNMENT, MOST_COLUMNS, least_bytes, piece_columns, suits
from gemmsmith.kernels.pack import Packing
from gemmsmith.lang.types import ORDER_LENGTH

Column = np.ndarray[Any, Any]

SMS = 132
"""H100 SXM and H200."""
COOPERATIVE = [(256, n, 2) for n in range(192, 56, -8)] + [(192, n, 3) for n in range(192, 56, -8)]
COOPERATIVE += [(128, n, 2) for n in range(256, 128, -8)]
COOPERATIVE += [(128, n, 1) for n in (*range(128, 56, -8), 48, 32, 16, 8)]
COOPERATIVE += [(64, n, 1) for n in range(256, 0, -8)]
"""(M, N, consumers). Two warpgroups share a tile only where one has too few registers: it costs them 0.7 %."""
SHARED = [(128, n, 2) for n in (*range(128, 56, -8), 48, 32, 16, 8)]
PINGPONG = [(64, n) for n in range(256, 80, -16)] + [(128, n) for n in range(176, 56, -8)]
CLUSTERS = [(1, 1), (1, 2), (2, 1)]
"""Those of four CTAs, fewer of which fit, were the fastest for 3 of 324 shapes (survey-h200.json)."""
SPLITS, CLUSTER_SPLITS = (0, 2, 3, 4, 5, 6, 8, 12, 16), (2, 4)
MOST_STAGES = 16
RESIDENT = {1: 132, 2: 66, 4: 30, 8: 14}
"""Clusters that an H200 holds at once, by their CTAs: its GPCs have 16 or 18 SMs."""
FEW_ROWS, FEW_ROWS_DEPTH = 32, 256
"""Columns of swapped tiles for the fewest rows, and the K that only they are tried with."""
DEEP = 512
"""K from which tiles of 128 are tried."""
READ_ONCE_ROWS = 128
"""With no more rows (or columns) the other operand is read once, or by all at once: 128 x 57344 x 8192 loses 1.4 % in
sync_clusters, 2.8 % with serpentine too (benchmarks/results/lockstep-h200.json)."""
SMALLEST_SHARE = 4
"""The least number of k-tiles in a share of K."""
WASTE = 1.05
"""Of the last wave, from which cutting it up is tried."""
MOST_COPIES = 11
"""Of an operand's k-tile, beside two math warpgroups; of both operands beside three, or where D is not stored by TMA:
with more, their addresses do not fit the producer's registers. Boxes along M or N may be as narrow as 16 elements."""
CROWDED, APART = 0.8, 0.44
"""Of the registers that accumulators may take, what they, and elements to be quantised, may where an epilogue needs
more than a few; and where it reads a matrix without TMA, whose elements and addresses are held at once."""
RICH = frozenset({"erf", "gelu", "expm1", "elu"})
"""Functions whose intermediate values would spill with the largest accumulators."""


def stages_that_fit(config: Config, epilogue: EpilogueSpec, stage_bytes: int, taken: int = 0) -> int:
    """As many of the config's stages as shared memory holds beside what its epilogue should be left and what else is
    `taken`, but at least two."""
    free = SHARED_LIMIT - least_bytes(epilogue.graph, epilogue.tma, config) - taken
    return max(2, min(config.stages, free // (stage_bytes + BARRIER_BYTES)))


@lru_cache(maxsize=4096)
def fitting(config: Config, spec: KernelSpec) -> Config:
    """The config with as many of its stages as fit a kernel, whose tiles may be padded (MN-major rows to 32 bytes) and
    whose epilogue may be computed transposed."""
    exchange = spec.exchange_bytes + ALIGNMENT * (spec.exchange_bytes > 0)  # its barriers
    return config.replace(stages=stages_that_fit(config, spec.epilogue, spec.stage_bytes, exchange))


def spec_for(config: Config, problem: Problem, epilogue: EpilogueSpec | None = None) -> KernelSpec:
    """The spec of a config, whose `swap_ab` transposes a problem and its epilogue (by default the bare product's) as
    far as that is known without its matrices. ConfigError where the config cannot work."""
    if not config.swap_ab:
        return KernelSpec.of(_as_read(problem), config, epilogue)
    return KernelSpec.of(_as_read(problem.T), config, _transposed(epilogue) if epilogue else None)


def _as_read(problem: Problem) -> Problem:
    """The problem of operands as TMA reads them: perhaps packed, which makes rows of what has none."""
    if problem.a.tma_ready and problem.b.tma_ready:
        return problem
    a, b = (m if m.tma_ready else Packing.of(m).packed for m in (problem.a, problem.b))
    return Problem(a, b, problem.d, problem.accumulate)


@lru_cache(maxsize=64)
def _transposed(epilogue: EpilogueSpec) -> EpilogueSpec:
    """The epilogue for the transposed product, with all that TMA may reach there: columns of 8 bits become rows."""
    columns = {r.name for r in epilogue.graph.results if r.dtype and r.dtype.bits < 16} & epilogue.column_major
    return replace(epilogue, graph=epilogue.graph.transposed(), tma=epilogue.tma | columns)


def resident_clusters(size: int) -> int:
    """Clusters of that many CTAs that run at once."""
    return RESIDENT.get(size, SMS // size)


@dataclass(frozen=True, eq=False)
class Space:
    """Configs, and a column of numbers for each of their choices."""

    configs: np.ndarray[Any, Any]
    """Of Config."""
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
    cluster_size: Column
    resident: Column
    own_tiles: Column
    swap_ab: Column
    reusing: Column
    """For each config, its stages with `alias_epilogue`, if that is considered; else 0."""
    narrowest: Column
    """Columns of the narrowest tile of all: an epilogue may take no narrower one."""

    @staticmethod
    def of(configs: list[Config], epilogue: EpilogueSpec | None = None) -> Space:
        choices = [(c, find(c.design).own_tiles) for c in configs]
        numbers = np.array([
            (*c.tile, *c.cluster, c.stages, c.consumers, c.splits, c.cluster_splits, own_tiles, c.swap_ab)
            for c, own_tiles in choices
        ], np.int64).reshape(-1, 11)  # fmt: skip
        m, n, k, rows, columns, stages, consumers, splits, cluster_splits, own_tiles, swap_ab = numbers.T
        size = rows * columns * cluster_splits
        resident = np.array([resident_clusters(int(x)) for x in size])
        graph = epilogue.graph if epilogue else bare(BF16)
        ends = np.array([slices(c, graph.transposed() if c.swap_ab else graph) for c in configs], np.int64)
        reusing = np.array([_reusing(c, epilogue) if epilogue and _lone(c) else 0 for c in configs])
        return Space(
            np.fromiter(configs, object, len(configs)), m, n, k, rows, columns, stages, consumers, splits,
            cluster_splits, ends, size, resident,
            own_tiles.astype(bool), swap_ab.astype(bool), reusing, np.full(len(configs), n.min(initial=MOST_COLUMNS)),
        )  # fmt: skip

    def take(self, which: Column) -> Space:
        """The configs at these indices."""
        columns = {f.name: getattr(self, f.name)[which] for f in fields(self)[1:]}
        return Space(self.configs[which], **columns)

    def sizes(self, problem: Problem) -> tuple[Column, Column]:
        """M and N for each config: of the problem, or with `swap_ab` of its transpose."""
        return np.where(self.swap_ab, problem.n, problem.m), np.where(self.swap_ab, problem.m, problem.n)

    def tiles(self, problem: Problem) -> Column:
        """For each config, the number of clusters that have a tile."""
        return self._tiles(problem.m, problem.n, problem.batch)

    def _tiles(self, m: int, n: int, batch: int) -> Column:
        rows, columns = self._cluster
        return np.asarray(batch * -(-m // rows) * -(-n // columns))

    @cached_property
    def _cluster(self) -> tuple[Column, Column]:
        """For each config, how many rows of A and columns of B a cluster's tiles have."""
        m, n = self.m * self.rows, self.n * self.columns
        return np.where(self.swap_ab, n, m), np.where(self.swap_ab, m, n)

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
        k_tiles, tiles = -(-k // self.k), self._tiles(fewest, n, batch)
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
        k_tiles, tiles, resident = -(-problem.k // self.k), self.tiles(problem), self.resident
        ragged = (-(-tiles // resident) * resident > WASTE * tiles) & (tiles * k_tiles >= SMALLEST_SHARE * resident)
        return np.asarray(good & ((self.splits > 0) | ragged) & self.fed(problem) & self.countable(problem))

    def fed(self, problem: Problem) -> Column:
        """For each config, whether its producer has registers for the copies of a k-tile, in the operands' layouts."""
        layout = _layout(problem)
        if layout not in self._fed:
            self._fed[layout] = self._fed_by(*layout)
        return self._fed[layout]

    @cached_property
    def _fed(self) -> dict[tuple[bool, ...], Column]:
        return {}

    def _fed_by(self, a: bool, b: bool, swapped_a: bool, swapped_b: bool, direct: bool) -> Column:
        of_a = np.where(np.where(self.swap_ab, swapped_a, a), _boxes(self.m), _boxes(self.k))
        of_b = np.where(np.where(self.swap_ab, swapped_b, b), _boxes(self.n), _boxes(self.k))
        few = (self.consumers == 3) | direct
        copies = np.where(few, of_a + of_b, np.maximum(of_a, of_b))
        return np.asarray((self.consumers == 1) | (copies <= MOST_COPIES))

    def countable(self, problem: Problem) -> Column:
        """For each config, whether int32 can count its tiles and shares of K, which launches require."""
        tiles, k_tiles = self.tiles(problem), np.maximum(1, -(-problem.k // self.k))
        clusters = np.minimum(
            tiles * np.minimum(np.where(self.splits == 0, k_tiles, self.splits), k_tiles), ORDER_LENGTH
        )
        k_tiles_of_all = np.where(self.splits == 1, 0, np.minimum(tiles, 2 * clusters) * k_tiles * clusters)
        return np.asarray(np.maximum(tiles, k_tiles_of_all) <= MAX_EXTENT)


@lru_cache(maxsize=64)
def space(epilogue: EpilogueSpec) -> Space:
    """The configs that are considered for an epilogue, whatever the problem."""
    return Space.of(list(_configs(epilogue)), epilogue)


def considered(epilogue: EpilogueSpec, problem: Problem) -> Space:
    """Those of them that may be sensible for a problem, kept for others with up to twice as many rows."""
    return _considered(epilogue, problem.m.bit_length(), problem.n, problem.k, problem.batch)


@lru_cache(maxsize=128)
def _considered(epilogue: EpilogueSpec, bits: int, n: int, k: int, batch: int) -> Space:
    every = space(epilogue)
    return every.take(np.flatnonzero(every.possible(1 << bits >> 1, (1 << bits) - 1, n, k, batch)))


def _boxes(extent: Column) -> Column:
    """Of 64, 32 or 16 elements along a tile's contiguous index: see Tile."""
    whole = -(-extent // 16) * 16
    return np.asarray(whole // np.gcd(whole, 64))


def is_fed(config: Config, problem: Problem) -> bool:
    """Whether a config's producer has registers for its copies; `problem` is that of the unswapped product."""
    return bool(_alone(config).fed(problem)[0])


@lru_cache(maxsize=1024)
def _alone(config: Config) -> Space:
    return Space.of([config])


def _layout(problem: Problem) -> tuple[bool, ...]:
    """What `fed` depends on: whether A and B are MN-major, and with `swap_ab`, and whether threads store D."""
    as_read = _as_read(problem).operands + _as_read(problem.T).operands
    return *(operand_major(x) == "MN" for x in as_read), not problem.d.stores_by_tma


def has_one_tile(config: Config, problem: Problem) -> bool:
    """Whether each CTA of a config has one tile at most."""
    m, n = (problem.n, problem.m) if config.swap_ab else (problem.m, problem.n)
    (rows, columns), (tile_m, tile_n, _) = config.cluster, config.tile
    tiles = problem.batch * -(-m // (tile_m * rows)) * -(-n // (tile_n * columns))
    return tiles <= resident_clusters(rows * columns * config.cluster_splits)


def has_room(config: Config, epilogue: EpilogueSpec) -> bool:
    """Whether an epilogue left a config, fitted to it, registers beside its accumulators and three stages."""
    m, n, _ = config.tile
    return config.stages >= 3 and _has_registers(config.design, m, n, config.consumers, epilogue)


@lru_cache(maxsize=1024)
def with_reuse_for(epilogue: EpilogueSpec, config: Config) -> Config:
    """A bare product's config of one tile a CTA: an epilogue's results leave through the stages as the product did, and
    where a matrix is loaded wherever they fit: 0.3 to 1.3 % of six such products (tries-h200.json)."""
    through = _reusing(config, epilogue) if _lone(config) and (config.alias_epilogue or _loads(epilogue)) else 0
    return config.replace(alias_epilogue=through > 0, stages=through or config.stages)


def reads_again(problem: Problem) -> bool:
    """Whether later waves read parts of both operands again, so that L2 hits depend on the order of the tiles."""
    return min(problem.m, problem.n) > READ_ONCE_ROWS


def _configs(epilogue: EpilogueSpec) -> Iterator[Config]:
    yield from _oriented(epilogue, False)
    if epilogue.graph.transposable:
        yield from _oriented(_transposed(epilogue), True)


def _oriented(epilogue: EpilogueSpec, swap: bool) -> Iterator[Config]:
    """The configs with that `swap_ab`, for an epilogue of what they compute."""
    cooperative = COOPERATIVE + SHARED * _heavy(epilogue)
    tiles: list[tuple[str, int, int, int]] = [("cooperative", *t) for t in cooperative]
    tiles += [("pingpong", *t, 2) for t in PINGPONG]
    if swap:
        tiles = [tile for tile in tiles if not _spills_transposed(*tile[:3], epilogue.graph)]
    roomy = [tile for tile in tiles if _has_registers(*tile, epilogue)]
    for design, m, n, consumers in roomy or [tile for tile in tiles if suits(epilogue.graph, epilogue.tma, tile[2])]:
        depths = (64, 128) if m == 64 or m + n <= 256 else (64,)
        for k in (*depths, FEW_ROWS_DEPTH) if swap and n <= FEW_ROWS else depths:
            tiled = Config(design, (m, n, k), consumers=consumers, stages=MOST_STAGES, swap_ab=swap)
            stages = stages_that_fit(tiled, epilogue, (m + n) * k * 2)
            for cluster in CLUSTERS:
                if stages < 3 or n % (8 * cluster[0]):
                    continue
                raster = "n" if cluster[1] > cluster[0] else "m"
                c = tiled.replace(cluster=cluster, stages=stages, raster=raster)
                yield c
                if n % 16 == 0 if n > FEW_ROWS else swap:
                    yield from _shares(c, epilogue)


def _has_registers(name: str, m: int, n: int, consumers: int, epilogue: EpilogueSpec) -> bool:
    """Whether a tile suits an epilogue, and has registers for it beside the accumulators."""
    design = find(name)
    blocks = m // WGMMA_M // design.tile_warpgroups(consumers)
    if not suits(epilogue.graph, epilogue.tma, n) or (blocks > 1 and _heavy(epilogue)):
        return False
    held = held_registers(epilogue.graph, piece_columns(epilogue.graph, epilogue.tma, n))
    taken = (blocks * n / 2 + held) / design.accumulators[consumers]
    return taken <= (APART if _reads_apart(epilogue) else 1.0 if _light(epilogue) and not held else CROWDED)


def _spills_transposed(design: str, m: int, n: int, graph: Graph) -> bool:
    """Whether a tile spills where fp32 elements are stored along columns, one by one, in pieces as wide as the tile."""
    stored = any(r.dtype == FP32 and r.name in graph.stored for r in graph.results)
    return stored and design == "pingpong" and m == 128 and n > 144 and n % 16 > 0


@lru_cache(maxsize=64)
def _heavy(epilogue: EpilogueSpec) -> bool:
    """Whether an epilogue needs so many registers that a warpgroup should have 64 rows: for matrices beside the first
    and reductions, if they are two, for a matrix that is read without TMA, and for one that is stored along its
    columns."""
    graph, extents = epilogue.graph, epilogue.graph.extents()
    matrices = [o.extent for o in graph.operands] + [extents[r.node] for r in graph.results]
    reductions = [node for node in graph.nodes if node.op == "reduce"]
    held = max(sum(extent.is_matrix for extent in matrices) - 1, 0) + len(reductions)
    column_major = any(r.name in epilogue.column_major for r in graph.results)
    return held > 1 or _reads_apart(epilogue) or (graph.computes and column_major)


@lru_cache(maxsize=64)
def _light(epilogue: EpilogueSpec) -> bool:
    """Whether an epilogue is considered with the largest accumulators: the bare product, or little more, stored by TMA.
    One that loads a matrix would have too few or too narrow pieces of it in flight (tries-h200.json)."""
    graph, extents = epilogue.graph, epilogue.graph.extents()
    vectors = [o for o in graph.operands if o.extent.height or o.extent.width]
    rich = epilogue.exact or any(node.op in RICH for node in graph.nodes)
    direct = any(extents[r.node].is_matrix and r.name not in epilogue.tma for r in graph.results)
    return not graph.computes or not (len(vectors) > 1 or _loads(epilogue) or rich or direct or _heavy(epilogue))


def _reads_apart(epilogue: EpilogueSpec) -> bool:
    """Whether the epilogue reads a matrix without TMA."""
    return any(o.extent.is_matrix and o.name not in epilogue.tma for o in epilogue.graph.operands)


def _loads(epilogue: EpilogueSpec) -> bool:
    """Whether the epilogue reads a matrix."""
    return any(o.extent.is_matrix for o in epilogue.graph.operands)


def _lone(c: Config) -> bool:
    """Whether one warpgroup computes a whole tile: `alias_epilogue` is faster with one, slower with two."""
    return c.design == "cooperative" and c.consumers == c.splits == 1 and not c.swap_ab


def _reusing(c: Config, epilogue: EpilogueSpec) -> int:
    """The stages of a config whose results TMA stores through them, of which two surely hold them; else 0."""
    stored = sum(r.dtype.bytes for r in epilogue.graph.results if r.dtype and r.name in epilogue.tma)
    m, n, k = c.tile
    stage = (m + n) * k * 2
    fits = 0 < m * n * stored <= 2 * stage
    alias_epilogue = c.replace(alias_epilogue=True, stages=MOST_STAGES)
    return stages_that_fit(alias_epilogue, epilogue, stage, _exchange(c, epilogue)) if fits else 0


def _exchange(c: Config, epilogue: EpilogueSpec) -> int:
    """Bytes of shared memory for the sums that the CTAs of a cluster exchange, and for their barriers."""
    slots = (c.cluster_splits - 1) * c.tile[0] * c.tile[1] * 4 // slices(c, epilogue.graph)
    return slots + ALIGNMENT * (slots > 0)


def _shares(base: Config, epilogue: EpilogueSpec) -> Iterator[Config]:
    if "splits" not in find(base.design).takes or base.consumers == 3:  # three have few registers
        return
    for splits in SPLITS:
        yield base.replace(splits=splits)
    m, n, k = base.tile
    for splits in CLUSTER_SPLITS:
        shared = base.replace(cluster_splits=splits, stages=MOST_STAGES)
        stages = stages_that_fit(shared, epilogue, (m + n) * k * 2, _exchange(shared, epilogue))
        if base.cluster[0] * base.cluster[1] * splits in RESIDENT and stages >= 3:
            yield shared.replace(stages=stages)
