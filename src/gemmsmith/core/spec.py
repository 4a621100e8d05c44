"""What is constant in a kernel: a config, and the dtypes and layouts it is made for; not sizes, not strides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

from gemmsmith.core.config import Config
from gemmsmith.core.design import find, listed, taking
from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.graph import Graph, bare
from gemmsmith.core.mma import WGMMA_M, Major, Mma, find_mma
from gemmsmith.core.problem import Matrix, Problem
from gemmsmith.core.tile import Tile

SHARED_LIMIT = 227 * 1024
"""Bytes a CTA can have on compute capability 9.0 (CUDA programming guide, technical specifications)."""
STAGES_LIMIT = SHARED_LIMIT // (2 * 16 * (WGMMA_M + 8))
"""Of the smallest tile, 64x8x16."""
BARRIER_BYTES = 16
"""Bytes of a stage's two mbarriers."""


def operand_major(matrix: Matrix) -> Major:
    """Major-ness of an operand seen as (M or N) x K."""
    return "MN" if matrix.contiguous == "rows" else "K"


@dataclass(frozen=True)
class EpilogueSpec:
    """A graph whose results all have a dtype; the matrices among operands and results that TMA reaches, by name
    (the others are read and written element by element, with any strides), and those of the others whose columns are
    contiguous; whether functions are exact, and whether sums are atomic, in one step and in no fixed order."""

    graph: Graph
    tma: frozenset[str]
    column_major: frozenset[str] = frozenset()
    exact: bool = False
    atomic: bool = False

    @staticmethod
    def bare(d: Matrix) -> EpilogueSpec:
        """The epilogue that stores D and computes nothing."""
        tma, column_major = (frozenset({"out"} if x else ()) for x in (d.stores_by_tma, d.column_major))
        return EpilogueSpec(bare(d.dtype), tma, column_major)

    @property
    def by_threads(self) -> bool:
        """Whether threads store some matrix element by element, not TMA."""
        return not self.tma.issuperset(self.graph.stored)

    def over(self, arrays: Mapping[str, Matrix]) -> EpilogueSpec:
        """The spec for matrices with these strides and alignments. Integers are not loaded by TMA, since the kernel
        computes in fp32."""
        floats = [o.name for o in self.graph.operands if o.extent.is_matrix and o.dtype and not o.dtype.is_integer]
        tma = {name for name in floats if arrays[name].loads_by_tma}
        tma |= {name for name in self.graph.stored if arrays[name].stores_by_tma}
        column_major = frozenset(name for name in self.graph.matrices if arrays[name].column_major)
        return EpilogueSpec(self.graph, frozenset(tma), column_major, self.exact, self.atomic)

    def with_graph(self, graph: Graph) -> EpilogueSpec:
        """The same with another graph."""
        return EpilogueSpec(graph, self.tma, self.column_major, self.exact, self.atomic)


def slices(config: Config, graph: Graph) -> int:
    """CTAs that reduce a slice of a tile's columns each, of those of a cluster that share its K: all of them, where
    that makes slices of 8 columns and of 16 bytes and the graph looks at each by itself, as most do; else one reduces
    it."""
    dtypes = [o.dtype for o in graph.operands] + [r.dtype for r in graph.results]
    columns = max([8, *(16 // dtype.bytes for dtype in dtypes if dtype)]) * config.cluster_splits
    apart = graph.transposable and not graph.halves
    return config.cluster_splits if apart and config.tile[1] % columns == 0 else 1


def check(c: Config) -> None:
    """Raises ConfigError for a config that works with no operands; the message says what would work."""
    for holds, message in _rules(c):
        if not holds:
            raise ConfigError(message)


def _rules(c: Config) -> Iterator[tuple[bool, str]]:
    """The rules in order, each with its message; a rule may assume that those before it hold."""
    (m, n, k), (rows, columns), splits = c.tile, c.cluster, c.cluster_splits
    design = find(c.design)
    yield (c.consumers in design.accumulators,
           f"consumers: got {c.consumers}; use {listed(design.accumulators)} with {c.design}")  # fmt: skip
    warpgroups = c.tile_warpgroups
    yield (m > 0 and m % (WGMMA_M * warpgroups) == 0 and m <= 256,
           f"tile M: got {m}; use a multiple of {WGMMA_M} x {warpgroups} warpgroups, up to 256")  # fmt: skip
    yield 8 <= n <= 256 and n % 8 == 0, f"tile N: got {n}; use a multiple of 8 from 8 to 256"
    yield (k in (16, 32) or (k % 64 == 0 and 64 <= k <= 256),
           f"tile K: got {k}; use 16, 32, or a multiple of 64 up to 256")  # fmt: skip
    yield c.stages >= 2, f"stages: got {c.stages}; use at least 2"
    yield c.stages <= STAGES_LIMIT, f"stages: got {c.stages}; shared memory has room for {STAGES_LIMIT} of the smallest"
    yield ({rows, columns} <= {1, 2, 4} and rows * columns <= 8,
           f"cluster: got {c.cluster}; use 1, 2 or 4 each way, at most 8 CTAs")  # fmt: skip
    yield (1 <= splits <= 8 // (rows * columns),
           f"cluster_splits: got {splits}; use 1 for none, up to {8 // (rows * columns)} with a cluster of "
           f"{rows}x{columns}, at most 8 CTAs in all")  # fmt: skip
    yield 0 <= c.splits <= 64, f"splits: got {c.splits}; use 1 for none, 2 to 64, or 0 for stream-K"
    yield (1 in (c.splits, splits),
           f"splits: got {c.splits} and {splits} in a cluster; use one of them, 1 for the other")  # fmt: skip
    for name, count in (("splits", c.splits), ("cluster_splits", splits)):
        yield (name in design.takes or count == 1,
               f"{name}: got {count}; {c.design} computes whole tiles, use 1, or {taking(name)}")  # fmt: skip
    yield c.raster_group >= 1, f"raster_group: got {c.raster_group}; use at least 1"
    yield (not c.sync_clusters or c.can_sync_clusters,
           f"sync_clusters: got {c.design}, splits {c.splits} and {splits} in a cluster; it takes "
           f"{taking('sync_clusters')} and whole tiles")  # fmt: skip
    yield (
        not c.alias_epilogue or "alias_epilogue" in design.takes,
        f"alias_epilogue: got {c.design}; it takes {taking('alias_epilogue')}",
    )


@dataclass(frozen=True)
class KernelSpec:
    """One kernel serves every problem with the same spec."""

    config: Config
    operand: DType
    accumulate: DType
    majors: tuple[Major, ...]
    epilogue: EpilogueSpec

    @staticmethod
    def of(problem: Problem, config: Config, epilogue: EpilogueSpec | None = None) -> KernelSpec:
        """The spec of a problem, by default of the bare product; ConfigError where the config cannot work."""
        spec = _checked(KernelSpec(
            config, problem.a.dtype, problem.accumulate, tuple(map(operand_major, problem.operands)),
            epilogue or EpilogueSpec.bare(problem.d),
        ))  # fmt: skip
        if spec.epilogue.graph.takes_whole_rows and problem.n > config.tile[1]:
            raise ConfigError(
                f"tile N: got {config.tile[1]} for n = {problem.n}; this epilogue needs a row in one tile, "
                "up to 256 columns"
            )
        return spec

    # -- tiles ---------------------------------------------------------------------------------------
    @property
    def mma(self) -> Mma:
        """The tensor-core instruction. ConfigError where there is none for these dtypes."""
        return find_mma(self.operand, self.operand, self.accumulate)

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """Of A and of B in a stage."""
        m, n, k = self.config.tile
        return tuple(Tile(self.operand, mn, k, major) for mn, major in zip((m, n), self.majors, strict=True))

    @property
    def sharers(self) -> tuple[int, ...]:
        """CTAs of a cluster that need the same tile of A, and the same of B: those of a row, those of a column."""
        rows, columns = self.config.cluster
        return columns, rows

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage of a CTA: what TMA brings into it at most, peers' multicasts included."""
        return sum(tile.bytes for tile in self.tiles)

    @property
    def warpgroup_rows(self) -> int:
        """Rows of the tile that one math warpgroup computes."""
        return self.config.tile[0] // self.config.tile_warpgroups

    # -- sizes ---------------------------------------------------------------------------------------
    @property
    def multicast_size(self) -> int:
        """CTAs of a cluster that share copies: those with the same share of K."""
        return self.config.cluster[0] * self.config.cluster[1]

    @property
    def cluster_size(self) -> int:
        return self.multicast_size * self.config.cluster_splits

    @property
    def slices(self) -> int:
        """CTAs of a cluster that reduce a slice of one tile's columns each."""
        return slices(self.config, self.epilogue.graph)

    @property
    def slice_columns(self) -> int:
        """Columns of a tile that one CTA reduces and stores."""
        return self.config.tile[1] // self.slices

    @property
    def exchange_bytes(self) -> int:
        """Shared memory into which the CTAs of a cluster that share a tile bring their sums."""
        registers = self.accumulator_registers // self.slices * self.config.consumers
        return (self.config.cluster_splits - 1) * registers * 4 * 128

    @property
    def threads(self) -> int:
        return 128 * (self.config.consumers + find(self.config.design).other_warpgroups)

    @property
    def accumulator_registers(self) -> int:
        """Registers a thread that the accumulator takes."""
        return self.warpgroup_rows // self.mma.m * self.mma.registers(self.config.tile[1])

    @property
    def name(self) -> str:
        """A symbol: the design, the tile, and a hash of all else that makes another kernel."""
        c, e = self.config, self.epilogue
        parts = (
            c.replace(splits=int(c.splits == 1)),  # an argument says how many
            self.operand, self.accumulate, *self.majors,
            e.graph, sorted(e.tma), sorted(e.column_major), e.exact, e.atomic,
        )  # fmt: skip
        return f"{c.design}_{'x'.join(map(str, c.tile))}_{sha256(repr(parts).encode()).hexdigest()[:8]}"

    @property
    def layouts(self) -> str:
        """How its matrices lie."""
        majors = ", ".join(f"{name} is {major}-major" for name, major in zip("AB", self.majors, strict=True))
        return f"{majors}; by TMA: {', '.join(sorted(self.epilogue.tma))}"

    def check(self) -> None:
        """Raises ConfigError for a config that cannot work with these operands; the message says what would work."""
        c = self.config
        check(c)
        for name, tile, parts in zip("AB", self.tiles, self.sharers, strict=True):
            if tile.outer % (8 * parts):
                raise ConfigError(
                    f"cluster: {parts} CTAs share the {name} tile, whose {tile.outer} rows do not split into parts "
                    "of 8; use a larger tile or a smaller cluster"
                )
        for name, major in zip("AB", self.majors, strict=True):
            if major not in self.mma.majors:
                raise ConfigError(f"{name}: got {major}-major elements of {self.operand}; wgmma reads K-major ones")
        taken, limit = self.accumulator_registers, find(c.design).accumulators[c.consumers]
        if taken > limit:
            raise ConfigError(
                f"registers: the accumulator of {self.warpgroup_rows}x{c.tile[1]} takes {taken} a thread, "
                f"{taken - limit} more than fit; use more consumers or a smaller tile"
            )


@lru_cache(maxsize=4096)
def _checked(spec: KernelSpec) -> KernelSpec:
    """The spec, checked: once, for products of any size may have it."""
    spec.check()
    return spec
