"""What is constant in a kernel: a config, and the dtypes and layouts it is made for; not sizes, not strides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from math import gcd
from typing import NamedTuple

from gemmsmith.core.chip import Chip, find_chip
from gemmsmith.core.config import Config
from gemmsmith.core.design import find, listed, names, promoting
from gemmsmith.core.dtypes import E4M3, E5M2, FP32, DType
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.graph import Graph, bare
from gemmsmith.core.mma import FRAGMENT_REGISTERS, PRODUCTS, QUAD, WARPGROUP, WGMMA_M, Major, Mma, find_mma
from gemmsmith.core.problem import SCALE_BLOCK, Matrix, Problem, Scale
from gemmsmith.core.rules import check, whole_rows
from gemmsmith.core.tile import Tile

SCALE_BOX = 4
"""K-tiles whose block scales TMA brings at once where they are contiguous along K: 16 bytes, its least."""
DEPTH_PADDING = 16
"""Bytes between the depths of a tile that sgemm stages: 8 depths of 4 neighbors are in 32 banks."""
A_STEPS = 4
"""K-steps of an A in registers that these hold at once: some are multiplied while one is loaded."""
BARRIER_BYTES = 16
"""Bytes of a stage's two mbarriers."""
LOW_PARTS_BYTES = 64
"""Bytes of K after which mma_multistage promotes the sums of 3xTF32. One accumulator holds all three products there,
where wgmma's designs sum each on its own; with so short a sum it truncates no more (backends/reference/bounds.py)."""
IN_FLIGHT = (4, 2)
"""K-tiles that a warpgroup multiplies at once, where it promotes their sums: of 64x64 at 64x7168x2048 (FP8, H200)
6.29, 6.49, and alone 7.22 us."""
IN_TURNS = 64
"""Columns up to which each of two warpgroups multiplies one k-tile at once, since they hide each other's promotion:
128x64 at 512x2112x7168 takes 18.5 us so and 19.2 with four in flight, at 256x4096x7168 18.7 and 20.0 (FP8, H200)."""
BESIDE_EXCHANGE = 12
"""Registers that the sums of all k-tiles in flight leave a cluster that adds up its CTAs' sums, if warpgroups share an
SM's registers: with fewer it spills."""


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

    def over(self, arrays: Mapping[str, Matrix]) -> EpilogueSpec:
        """The spec for matrices with these strides and alignments. Integers are not loaded by TMA, since the kernel
        computes in fp32."""
        floats = [o.name for o in self.graph.operands if o.extent.is_matrix and o.dtype and not o.dtype.is_integer]
        tma = {name for name in floats if arrays[name].loads_by_tma}
        tma |= {name for name in self.graph.stored if arrays[name].stores_by_tma}
        column_major = frozenset(name for name in self.graph.matrices if arrays[name].column_major)
        return EpilogueSpec(self.graph, frozenset(tma), column_major, self.exact, self.atomic)

    def with_graph(self, graph: Graph) -> EpilogueSpec:
        """The same epilogue with another graph."""
        return EpilogueSpec(graph, self.tma, self.column_major, self.exact, self.atomic)


@dataclass(frozen=True)
class ScaleSpec:
    """Block scales of an operand: of how many `rows` one is, 1 or 128; and along which index TMA brings a tile's, as it
    can where those of rows are contiguous, 16-byte aligned fp32: "MN" of one k-tile, "K" of SCALE_BOX, a box."""

    rows: int
    dtype: DType
    by_tma: Major | None = None

    @staticmethod
    def of(scale: Scale | None) -> ScaleSpec | None:
        """None for an operand without them."""
        if not scale:
            return None
        by_tma = scale.rows == 1 and scale.matrix.dtype == FP32 and scale.matrix.tma_ready
        return ScaleSpec(scale.rows, scale.matrix.dtype, operand_major(scale.matrix) if by_tma else None)

    def __str__(self) -> str:
        return f"{self.dtype} read " + (f"by TMA along {self.by_tma}" if self.by_tma else "one by one")

    def takes(self, other: ScaleSpec) -> bool:
        """Whether a kernel for these takes others, too: what is read one by one may lie in any layout."""
        return (self.rows, self.dtype) == (other.rows, other.dtype) and self.by_tma in (None, other.by_tma)

    def count(self, rows: int) -> int:
        """How many scales a tile of so many rows, which begins at any multiple of them, may need."""
        farthest = SCALE_BLOCK - gcd(rows, SCALE_BLOCK)  # that it begins behind a border
        return rows if self.rows == 1 else -(-(farthest + rows) // SCALE_BLOCK)

    def staged_bytes(self, rows: int) -> int:
        """Shared memory of one stage, or of one box, fp32 each."""
        alignment, k_tiles = 128 if self.by_tma else 16, SCALE_BOX if self.by_tma == "K" else 1
        return -(-4 * k_tiles * self.count(rows) // alignment) * alignment

    def slots(self, stages: int) -> int:
        """Stages; or boxes, as many as may be needed at once where each tile has many k-tiles."""
        return -(-stages // SCALE_BOX) + 1 if self.by_tma == "K" else stages


def slices(config: Config, graph: Graph) -> int:
    """CTAs that reduce a slice of a tile's columns each, of those of a cluster that share its K: all of them, where
    that makes slices of 8 columns and of 16 bytes and the graph looks at each by itself, as most do; else one reduces
    it."""
    dtypes = [o.dtype for o in graph.operands] + [r.dtype for r in graph.results]
    columns = max([8, *(16 // dtype.bytes for dtype in dtypes if dtype)]) * config.cluster_splits
    apart = graph.transposable and not graph.halves
    return config.cluster_splits if apart and config.tile[1] % columns == 0 else 1


class PromotedSums(NamedTuple):
    """What a warpgroup's promoted sums are like: columns of a tile of which it sums a k-tile at once, 64 rows of them;
    k-tiles that it has in flight; and registers a thread that the total, one k-tile's sums and its scales take."""

    columns: int
    in_flight: int
    registers: int


def promotion(c: Config, each_column: bool = False) -> PromotedSums:
    """wgmma's: all columns at once, or half where registers are few; and as many k-tiles in flight as there are
    registers for, which hides the promotion of one under the product of the next, and half of the stages at most, for
    they are handed back behind it. With `each_column` each has a scale of its own. mma.sync's: a whole k-tile's."""
    design, (down, across) = find(c.design), c.warpgroups
    rows, n, limit = c.tile[0] // down, c.tile[1] // across, design.promoted.get(c.consumers, 0)
    total, scales = rows * n // WARPGROUP, (n // QUAD + 12) * each_column
    if design.multiplies == "mma":
        return PromotedSums(n, 1, 2 * total)
    columns = n if n % 16 or total + scales + n // 2 <= limit else n // 2
    of_one = scales + columns // 2
    in_parts = (rows, columns) != (WGMMA_M, n)
    in_turns = c.consumers == 2 and not design.own_tiles and columns <= IN_TURNS
    free = limit - total - BESIDE_EXCHANGE * (c.cluster_splits > 1 and c.consumers > 1)
    in_flight = (
        1 if in_parts or in_turns else next((x for x in IN_FLIGHT if x * of_one <= free and 2 * x <= c.stages), 1)
    )
    return PromotedSums(columns, in_flight, total + of_one)


@dataclass(frozen=True)
class KernelSpec:
    """One kernel serves every problem with the same spec."""

    config: Config
    mma: Mma
    majors: tuple[Major, ...]
    epilogue: EpilogueSpec
    promoted: bool = False
    scales: tuple[ScaleSpec | None, ScaleSpec | None] = (None, None)
    low_parts: bool = False

    @staticmethod
    def of(problem: Problem, config: Config, epilogue: EpilogueSpec | None = None) -> KernelSpec:
        """The spec of a problem, by default of the bare product; ConfigError where the config cannot work."""
        multiplies = find(config.design).multiplies
        if (multiplies == "fma") != (problem.a.dtype == FP32):
            for_fp32 = listed(name for name in names() if find(name).multiplies == "fma")
            raise ConfigError(
                f"design: got {config.design} for operands of {problem.a.dtype}; fp32 operands, without a precision, "
                f"are for {for_fp32}, and for no other"
            )
        mma = find_mma(problem.a.dtype, problem.b.dtype, problem.accumulate, multiplies)
        majors = tuple(map(operand_major, problem.operands))
        of_a, of_b = map(ScaleSpec.of, problem.scales)
        epilogue = epilogue or EpilogueSpec.bare(problem.d)
        spec = _checked(KernelSpec(config, mma, majors, epilogue, problem.promoted, (of_a, of_b), problem.low_parts))
        columns = spec.warpgroup_columns
        if spec.epilogue.graph.takes_whole_rows and problem.n > columns:
            of = f", {columns} a warpgroup," if columns < config.tile[1] else ""
            raise ConfigError(
                f"tile N: got {config.tile[1]}{of} for n = {problem.n}; this epilogue needs a row in one tile, "
                "up to 256 columns"
            )
        return spec

    # -- tiles ---------------------------------------------------------------------------------------
    @property
    def tiles(self) -> tuple[Tile, ...]:
        """A's and B's tiles in a stage."""
        m, n, k = self.config.tile
        operands = zip((self.mma.a, self.mma.b), (m, n), self.majors, strict=True)
        return tuple(Tile(dtype, mn, k, major) for dtype, mn, major in operands)

    @property
    def sharers(self) -> tuple[int, ...]:
        """CTAs of a cluster that need the same tile of A, and the same of B: those of a row, those of a column."""
        rows, columns = self.config.cluster
        return columns, rows

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage of a CTA: what TMA brings into it at most, peers' multicasts included."""
        padding = DEPTH_PADDING * (self.mma.by == "fma")
        return sum(tile.bytes + tile.k * padding for tile in self.tiles)

    def scale_bytes(self, stages: int) -> int:
        """Shared memory for block scales beside so many stages, with the barriers of boxes."""
        sides = [(x, rows) for x, rows in zip(self.scales, self.config.tile, strict=False) if x]
        barriers = sum(x.slots(stages) * BARRIER_BYTES for x, _ in sides if x.by_tma == "K")
        return barriers + sum(x.slots(stages) * x.staged_bytes(rows) for x, rows in sides)

    @property
    def warpgroup_rows(self) -> int:
        """Rows of the tile that one math warpgroup computes."""
        return self.config.tile[0] // self.config.warpgroups[0]

    @property
    def warpgroup_columns(self) -> int:
        """Columns of the tile that one math warpgroup computes."""
        return self.config.tile[1] // self.config.warpgroups[1]

    @property
    def chip(self) -> Chip:
        """What the kernel is made for."""
        return find_chip(self.config.chip)

    @property
    def tma(self) -> frozenset[str]:
        """The epilogue's matrices that TMA loads and stores: those that it reaches, if the chip has it."""
        return self.epilogue.tma if self.chip.has("sm_90") else frozenset()

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
        """Columns of a tile that one warpgroup reduces and stores."""
        return self.warpgroup_columns // self.slices

    @property
    def exchange_bytes(self) -> int:
        """Shared memory into which the CTAs of a cluster that share a tile bring their sums."""
        registers = self.accumulator_registers // self.slices * self.config.consumers
        return (self.config.cluster_splits - 1) * registers * 4 * WARPGROUP

    @property
    def threads(self) -> int:
        return WARPGROUP * (self.config.consumers + find(self.config.design).other_warpgroups)

    @property
    def accumulator_registers(self) -> int:
        """Registers a thread that the accumulator takes."""
        return self.warpgroup_rows // self.mma.m * self.mma.registers(self.warpgroup_columns)

    @property
    def a_in_registers(self) -> bool:
        """Whether A lies as wgmma reads it from registers only."""
        return self.majors[0] not in self.mma.majors

    @property
    def hands_back_to_peers(self) -> bool:
        """Whether stages that ld has read are handed back to other CTAs: those that share A. That takes the scope
        .cluster, which costs wgmma's designs 18 % (notebook, decision 9)."""
        return self.a_in_registers and self.sharers[0] > 1

    @property
    def a_steps(self) -> int:
        """K-steps of A's fragments that registers hold at once: none where A is read from shared memory."""
        return min(self.config.tile[2] // self.mma.k, A_STEPS) if self.a_in_registers else 0

    @property
    def a_registers(self) -> int:
        """Registers a thread that A's fragments take."""
        return self.a_steps * self.warpgroup_rows // self.mma.m * FRAGMENT_REGISTERS

    @property
    def promotion(self) -> PromotedSums:
        return promotion(self.config, self._scales_columns)

    @property
    def _scales_columns(self) -> bool:
        """Whether each column of B has a block scale of its own."""
        of_b = self.scales[1]
        return of_b is not None and of_b.rows == 1

    @property
    def products(self) -> int:
        """K-tiles that are multiplied for each of A and B: those of 3xTF32 where low parts are read from memory; where
        they are worked out in registers a k-tile is multiplied at once."""
        return PRODUCTS if self.low_parts and self.mma.by == "wgmma" else 1

    @property
    def name(self) -> str:
        """A symbol: the design, the tile, and a hash of all else that makes another kernel."""
        c, e = self.config, self.epilogue
        parts = (
            c.replace(splits=int(c.splits == 1)),  # an argument says how many
            str(self.mma), *self.majors, self.promoted, self.scales, self.low_parts,
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
        size = self.mma.a.bytes
        if not whole_rows(c.tile[2], size):
            raise ConfigError(
                f"tile K: got {c.tile[2]} with operands of {self.mma.a}; "
                f"use {32 // size}, {64 // size}, or a multiple of {128 // size} up to {512 // size}"
            )
        across = c.warpgroups[1]
        if c.tile[1] % across or not self.mma.has_n(self.warpgroup_columns):
            of_each = f" of each of {across} warpgroups" * (across > 1)
            raise ConfigError(f"tile N: got {c.tile[1]}; {self.mma} has {self.mma.n_listed}{of_each}")
        if self.mma.by == "mma" and c.tile[2] * size % 64:
            raise ConfigError(f"tile K: got {c.tile[2]} of {self.mma.a}; {c.design} takes a multiple of {64 // size}")
        if self.mma.by == "fma" and any(
            (self.threads % tile.mn and tile.mn % self.threads) or self.threads % tile.k or self.threads > 8 * tile.mn
            for tile in self.tiles
        ):
            raise ConfigError(
                f"tile: got {c.tile} for {self.threads} threads; {c.design} takes M, N and K that divide their "
                "number, M and N of at least an eighth of it, or multiples"
            )
        for name, tile, parts in zip("AB", self.tiles, self.sharers, strict=True):
            if tile.outer % (8 * parts):
                raise ConfigError(
                    f"cluster: {parts} CTAs share the {name} tile, whose {tile.outer} rows do not split into parts "
                    "of 8; use a larger tile or a smaller cluster"
                )
        besides = () if self.promoted else self.mma.register_majors, ()
        for name, major, dtype, more in zip("AB", self.majors, (self.mma.a, self.mma.b), besides, strict=True):
            if major not in (*self.mma.majors, *more):
                raise ConfigError(f"{name}: got {major}-major elements of {dtype}; {self.mma.by} reads K-major ones")
        self._check_conversions()
        design, taken = find(c.design), self.accumulator_registers + self.a_registers
        limit = design.accumulators[c.consumers]
        if self.promoted:
            self._check_promotion()
            taken, limit = self.promotion.registers, design.promoted[c.consumers]
        if taken > limit:
            what, several = "accumulators" if self.promoted else "accumulator", self.promoted or self.a_in_registers
            beside = " and A's fragments" * self.a_in_registers
            raise ConfigError(
                f"registers: the {what} of {self.warpgroup_rows}x{self.warpgroup_columns}{beside} "
                f"take{'s' * (not several)} {taken} a thread, {taken - limit} more than fit; "
                "use more consumers or a smaller tile"
                + ", or a scale for 128 columns, not for each"
                * self._scales_columns
            )

    def _check_conversions(self) -> None:
        graph = self.epilogue.graph
        named = [(x.name, x.dtype) for x in graph.operands] + [(x.name, x.dtype) for x in graph.results]
        named += [("cast", node.value) for node in graph.nodes if node.op == "cast"]
        for name, dtype in named:
            if dtype in (E4M3, E5M2) and not self.chip.has("sm_89"):
                raise ConfigError(f"{name}: got {dtype} for {self.chip}, which cannot convert it; use sm_89 or later")

    def _check_promotion(self) -> None:
        c, row = self.config, SCALE_BLOCK if self.mma.by == "wgmma" else LOW_PARTS_BYTES
        block = row // self.mma.a.bytes  # of TF32 as many bytes
        argument, asked = ("precision", "3xtf32") if self.low_parts else ("accumulate", "promoted")
        if c.consumers not in find(c.design).promoted:
            hint = "" if self.low_parts else ', or accumulate="fast"'
            raise ConfigError(
                f'{argument}: got "{asked}" with {c.design}; use the design {promoting(self.low_parts)}{hint}'
            )
        if c.tile[2] != block:
            raise ConfigError(f'tile K: got {c.tile[2]} with {argument}="{asked}"; use {block}')


@lru_cache(maxsize=4096)
def _checked(spec: KernelSpec) -> KernelSpec:
    """The spec, checked: once, for products of any size may have it."""
    spec.check()
    return spec
