"""The compile-time constants of a kernel: a config, and the dtypes and layouts of operands; no sizes, no strides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from math import gcd
from typing import NamedTuple

from gemmsmith.core.chip import Chip, get_chip
from gemmsmith.core.config import Config
from gemmsmith.core.design import Design, designs_for_dtype, designs_for_groups, get_design
from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP32, DType
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.graph import EpilogueGraph, Result, identity_graph
from gemmsmith.core.grouping import GROUP_END_MULTIPLE, Grouping
from gemmsmith.core.integers import ceil_div, round_up
from gemmsmith.core.mma import (
    A_FRAGMENT,
    LANES_PER_QUAD,
    TF32X3_MMAS,
    THREADS_PER_WARPGROUP,
    WGMMA_M,
    Major,
    Mma,
    select_mma,
)
from gemmsmith.core.operand import MmaOperand
from gemmsmith.core.problem import Matrix, Problem, Scale, operand_getter
from gemmsmith.core.product import ROLES, Role
from gemmsmith.core.register_budgets import (
    CLUSTER_REDUCTION_REGISTERS,
    MAX_ACC_REGISTERS_WITH_GATHER,
    MAX_ACC_REGISTERS_WITH_SCATTER,
)
from gemmsmith.core.rules import check_config, fills_swizzle_rows
from gemmsmith.core.tensor_map import INTERLEAVED_ROWS
from gemmsmith.core.tile import ATOM_ROWS, SWIZZLE_ALIGNMENT_BYTES, Tile

SCALES_PER_TMA_BOX = 4
"""Block scales (k-tiles) per TMA box along K: 4 fp32 = 16 bytes, TMA's minimum."""
MAX_A_K_STEPS_IN_REGISTERS = 4
"""K-steps of A's fragments in registers at a time: some are multiplied while one is loaded."""
BARRIER_PAIR_BYTES = 16
"""A stage's full and empty mbarrier, 8 bytes each."""
PROMOTION_K_TILES_IN_FLIGHT = (4, 2)
"""Candidate numbers of k-tiles in flight per warpgroup with promoted sums. 64x64 tiles at 64x7168x2048 (FP8, H200):
6.29 us with 4, 6.49 with 2, 7.22 with 1."""
MAX_COLUMNS_WITH_ONE_K_TILE_IN_FLIGHT = 64
"""Up to this many columns, two warpgroups keep one k-tile each in flight: each hides the other's promotion. 128x64
tiles (FP8, H200): 18.5 us with one k-tile in flight, 19.2 with four at 512x2112x7168; 18.7 and 20.0 at 256x4096x7168.
"""


def operand_major(matrix: Matrix) -> Major:
    """Return the major-ness of an operand viewed as (M or N) x K."""
    return "MN" if matrix.is_column_major else "K"


@dataclass(frozen=True)
class EpilogueSpec:
    """An epilogue graph, whose results all have a dtype, and how its arrays are accessed.

    `tma_eligible`: names of the matrices, operands and results, that TMA can access; others are accessed element by
    element, with any strides. `column_major`: names of the matrices with contiguous columns. `fast_math`: SFU
    approximations instead of CUDA's math library. `deterministic`: reductions in two passes of fixed order instead of
    by atomics, and scattered rows are stored instead of added by atomics.
    """

    graph: EpilogueGraph
    tma_eligible: frozenset[str]
    column_major: frozenset[str] = frozenset()
    fast_math: bool = True
    deterministic: bool = True

    @classmethod
    def identity(cls, d: Matrix) -> EpilogueSpec:
        """Return the epilogue that only stores D."""
        tma_eligible, column_major = (frozenset({"out"} if x else ()) for x in (d.can_tma_store, d.is_column_major))
        return cls(identity_graph(d.dtype), tma_eligible, column_major)

    def for_arrays(self, arrays: Mapping[str, Matrix]) -> EpilogueSpec:
        """Return the spec for matrices with these strides and alignments.

        Integers are not loaded by TMA, since the kernel computes in fp32.
        """
        floats = [
            o.name for o in self.graph.operands if o.broadcast_dims.is_matrix and o.dtype and not o.dtype.is_integer
        ]
        tma_eligible = [name for name in floats if arrays[name].can_tma_load]
        tma_eligible += [name for name in self.graph.matrix_result_names if arrays[name].can_tma_store]
        column_major = [name for name in self.graph.matrix_names if arrays[name].is_column_major]
        return EpilogueSpec(
            self.graph, frozenset(tma_eligible), frozenset(column_major), self.fast_math, self.deterministic
        )

    def with_clipped_rows(self, role: Role = "a") -> EpilogueSpec:
        """Return the spec for tiles whose rows (columns, with role "b") begin and end anywhere.

        What is contiguous along them is accessed element by element. Raises ConfigError for reductions over them
        that cannot be done.
        """
        for r in self.reductions_in_order("m" if role == "a" else "n"):
            kind, _ = self.graph.nodes[r.node].attribute
            if role == "b":
                raise ConfigError(
                    f"{r.name}: got a {kind} over rows of groups, which are columns of the kernel's D; change swap_ab"
                )
            if kind == "mean":
                raise ConfigError(f"{r.name}: got a mean over rows that are divided into groups; use a sum")
        column_major = self.tma_eligible & self.column_major
        return replace(self, tma_eligible=column_major if role == "b" else self.tma_eligible - column_major)

    def reductions_in_order(self, dim: str) -> list[Result]:
        """Return the reductions over a dimension, "m" or "n", that are not sums by atomics."""
        reductions = [r for r in self.graph.results if self.graph.is_reduction(r) and not self.is_atomic(r)]
        return [r for r in reductions if dim in self.graph.nodes[r.node].attribute[1]]

    def is_atomic(self, result: Result) -> bool:
        """Return whether warps add to the result itself, which is zeroed before. Only fp32 sums support that."""
        node = self.graph.nodes[result.node]
        return node.op == "reduce" and not self.deterministic and node.attribute[0] == "sum" and result.dtype == FP32

    def with_graph(self, graph: EpilogueGraph) -> EpilogueSpec:
        """Return the same spec with another graph."""
        return EpilogueSpec(graph, self.tma_eligible, self.column_major, self.fast_math, self.deterministic)


@dataclass(frozen=True)
class ScaleSpec:
    """Block scales of an operand: rows per scale (1 or 128), and how they are loaded.

    `by_tma`: "MN", a TMA box of one k-tile; "K", a box of SCALES_PER_TMA_BOX k-tiles; None: element by element. TMA
    loads scales per row that are fp32, contiguous and 16-byte aligned. `interleaved`: the operand's rows alternate
    between two matrices, and so do the scales of 128 rows of each.
    """

    granularity: int
    dtype: DType
    by_tma: Major | None = None
    interleaved: bool = False

    @classmethod
    def from_scale(cls, scale: Scale | None) -> ScaleSpec | None:
        """Return the spec of an operand's block scales; None if it has none."""
        if not scale:
            return None
        matrix, by_tma = scale.matrix, scale.granularity == 1 and scale.matrix.dtype == FP32
        major = operand_major(matrix) if by_tma and matrix.is_tma_compatible else None
        return cls(scale.granularity, matrix.dtype, major, matrix.interleave_stride != 0)

    def in_groups(self, grouping: Grouping, role: Role) -> ScaleSpec:
        """Return the spec for tiles that begin at any row: TMA cannot read along the rows there, nor gathered rows."""
        begins_anywhere = self.by_tma == "MN" and grouping.begins_anywhere(role)
        return replace(self, by_tma=None) if begins_anywhere or grouping.gathers_rows_of(role) else self

    def __str__(self) -> str:
        of_two = " of two" * self.interleaved
        return f"{self.dtype}{of_two} read " + (f"by TMA along {self.by_tma}" if self.by_tma else "one by one")

    def is_compatible_with(self, other: ScaleSpec) -> bool:
        """Return whether a kernel for these scales accepts `other`: element-wise loads support any layout."""
        return self == replace(other, by_tma=self.by_tma) and self.by_tma in (None, other.by_tma)

    @property
    def matrices(self) -> int:
        """The matrices between which the rows alternate, and so do the scales."""
        return 2 if self.interleaved else 1

    @property
    def period(self) -> int:
        """Rows after which the next scale of a matrix follows."""
        return self.granularity * self.matrices

    def max_scales(self, rows: int) -> int:
        """Return the most scales that a tile of `rows` rows needs, which starts at a multiple of `rows`."""
        max_offset = self.period - gcd(rows, self.period)  # largest offset of a tile's first row within a period
        return ceil_div(max_offset + rows, self.period) * self.matrices

    def staged_bytes(self, rows: int) -> int:
        """Return the bytes of shared memory of one stage, or of one TMA box, in fp32."""
        alignment = 128 if self.by_tma else 16
        k_tiles = SCALES_PER_TMA_BOX if self.by_tma == "K" else 1
        return round_up(4 * k_tiles * self.max_scales(rows), alignment)

    def num_stages(self, stages: int) -> int:
        """Return the stages of scales; with boxes along K, the most that `stages` consecutive k-tiles need."""
        return ceil_div(stages, SCALES_PER_TMA_BOX) + 1 if self.by_tma == "K" else stages


def num_reducing_ctas(config: Config, graph: EpilogueGraph) -> int:
    """Return the number of CTAs that each reduce a column slice of a tile whose K is split in a cluster.

    All of them, if slices are multiples of 8 columns and 16 bytes and no node needs a whole row, so that the graph can
    also be transposed; else 1.
    """
    dtypes = [o.dtype for o in graph.operands] + [r.dtype for r in graph.results]
    columns = max([8, *(16 // dtype.bytes for dtype in dtypes if dtype)]) * config.cluster_splits
    can_slice_columns = graph.is_transposable and not graph.has_interleaved_columns
    return config.cluster_splits if can_slice_columns and config.tile[1] % columns == 0 else 1


def mma_of(problem: Problem, config: Config) -> Mma:
    """Return the instruction of a config's design for a problem. Raises ConfigError if it has none."""
    op, dtype = get_design(config.design).mma_op, problem.a.dtype
    if op.multiplies(FP32) != (dtype == FP32):
        raise ConfigError(
            f"design: got {config.design} for operands of {dtype}; fp32 operands without `precision` need the design "
            f"{designs_for_dtype(FP32)}, which takes nothing else"
        )
    return select_mma(dtype, problem.b.dtype, problem.accumulator_dtype, op)


class PromotionPlan(NamedTuple):
    """Plan for a warpgroup's promoted sums.

    `n_per_pass`: columns, of 64 rows, that are summed per pass. `k_tiles_in_flight`: MMAs of k-tiles in flight.
    `registers_per_thread`: those of the accumulator, of one k-tile's sums and of its scales.
    """

    n_per_pass: int
    k_tiles_in_flight: int
    registers_per_thread: int


def plan_promotion(c: Config, per_column_scales: bool = False) -> PromotionPlan:
    """Return the plan for promoted sums.

    For wgmma: all columns in one pass, or half if registers are short; as many k-tiles in flight as registers allow,
    which hides the promotion of one behind the MMAs of the next, and at most half of the stages, since these are
    released after the promotion. `per_column_scales`: each column of B has its own block scale.
    For mma.sync: whole k-tiles.
    """
    design, (warpgroups_m, warpgroups_n) = get_design(c.design), c.warpgroups
    rows, n = c.tile[0] // warpgroups_m, c.tile[1] // warpgroups_n
    limit = design.max_promoted_registers.get(c.consumers, 0)
    accumulator = rows * n // THREADS_PER_WARPGROUP
    scales = n // LANES_PER_QUAD + 12 if per_column_scales else 0
    if not design.mma_op.reads_smem:
        return PromotionPlan(n, 1, 2 * accumulator)
    n_per_pass = n if n % 16 or accumulator + scales + n // 2 <= limit else n // 2
    registers_in_flight = scales + n_per_pass // 2
    has_several_passes = (rows, n_per_pass) != (WGMMA_M, n)
    warpgroups_alternate = (
        c.consumers == 2 and not design.tile_per_warpgroup and n_per_pass <= MAX_COLUMNS_WITH_ONE_K_TILE_IN_FLIGHT
    )
    free = limit - accumulator
    if c.cluster_splits > 1 and c.consumers > 1:
        free -= CLUSTER_REDUCTION_REGISTERS
    k_tiles = 1
    if not has_several_passes and not warpgroups_alternate:
        fitting = (x for x in PROMOTION_K_TILES_IN_FLIGHT if x * registers_in_flight <= free and 2 * x <= c.stages)
        k_tiles = next(fitting, 1)
    return PromotionPlan(n_per_pass, k_tiles, accumulator + registers_in_flight)


@dataclass(frozen=True)
class KernelSpec:
    """The compile-time constants of a kernel, which serves every problem with the same spec.

    `interleaved`: the operand whose rows, as (M or N) x K, alternate between two matrices in groups of 8.
    """

    config: Config
    mma: Mma
    majors: tuple[Major, ...]
    epilogue: EpilogueSpec
    promoted: bool = False
    scales: tuple[ScaleSpec | None, ScaleSpec | None] = (None, None)
    is_3xtf32: bool = False
    grouping: Grouping | None = None
    interleaved: Role | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        options = self.promoted, self.scales, self.is_3xtf32, self.grouping, self.interleaved
        return hash((self.config, self.mma, self.majors, self.epilogue, options))

    @classmethod
    def from_problem(cls, problem: Problem, config: Config, epilogue: EpilogueSpec | None = None) -> KernelSpec:
        """Return the spec of a problem, by default with the identity epilogue.

        Raises ConfigError if the config cannot work with the problem.
        """
        mma = mma_of(problem, config)
        majors = tuple(map(operand_major, problem.operands))
        scale_a, scale_b = (
            scale.in_groups(problem.grouping, role) if scale and problem.grouping else scale
            for role, scale in zip(ROLES, map(ScaleSpec.from_scale, problem.scales), strict=True)
        )
        epilogue = epilogue or EpilogueSpec.identity(problem.d)
        grouping = problem.grouping
        if grouping and grouping.clips_rows:
            epilogue = epilogue.with_clipped_rows(grouping.role)
        if get_design(config.design).clips_rows:
            if any(epilogue.graph.is_reduction(r) for r in epilogue.graph.results):
                raise ConfigError(f"epilogue: got a reduction with {config.design}; return the matrix")
            epilogue = epilogue.with_clipped_rows()
            if majors[0] == "MN" and problem.m:
                raise ConfigError(
                    f"a: got column-major with {config.design}, whose tiles begin anywhere; use row-major"
                )
        interleaved = next((role for role, x in zip(ROLES, problem.operands, strict=True) if x.interleave_stride), None)
        options = problem.promoted, (scale_a, scale_b), problem.is_3xtf32, grouping, interleaved
        spec = _checked(cls(config, mma, majors, epilogue, *options))
        columns = spec.warpgroup_columns
        if spec.epilogue.graph.requires_full_rows and problem.n > columns:
            per_warpgroup = f", {columns} per warpgroup," if columns < config.tile[1] else ""
            raise ConfigError(
                f"tile N: got {config.tile[1]}{per_warpgroup} for n = {problem.n}; this epilogue needs a row in one "
                "tile, up to 256 columns"
            )
        return spec

    # -- tiles ---------------------------------------------------------------------------------------
    @property
    def tiles(self) -> tuple[Tile, ...]:
        """Tiles of A and B in a stage."""
        m, n, k = self.config.tile
        operands = zip((self.mma.a, self.mma.b), (m, n), self.majors, strict=True)
        return tuple(Tile(dtype, mn, k, major) for dtype, mn, major in operands)

    @property
    def operands(self) -> tuple[MmaOperand, ...]:
        """The operands of the mainloop, A and B."""
        (a, b), (evict_a, evict_b) = self.tiles, self.config.evict
        residuals = [operand_getter(f"{name}_residual") if self.is_3xtf32 else None for name in "ab"]
        return (
            MmaOperand("a", "a", a, operand_getter("a"), evict_a, residuals[0], self.interleaved == "a"),
            MmaOperand("b", "b", b, operand_getter("b"), evict_b, residuals[1], self.interleaved == "b"),
        )

    def gathers_rows_of(self, role: Role) -> bool:
        """Return whether rows of the operands of a role are gathered."""
        return self.grouping is not None and self.grouping.gathers_rows_of(role)

    @property
    def multicast_ctas(self) -> tuple[int, ...]:
        """CTAs that share a multicast of A (along the cluster's N), and of B (along its M)."""
        rows, columns = self.config.cluster
        return columns, rows

    @cached_property
    def stage_bytes(self) -> int:
        """Bytes of shared memory of one stage of a CTA, the peers' multicast slices included."""
        return sum(tile.bytes + tile.k * self.design.mma_op.k_padding_bytes for tile in self.tiles)

    def scale_bytes(self, stages: int) -> int:
        """Return the bytes of shared memory for block scales, with barriers of boxes, next to `stages` of A and B."""
        scales = [(x, rows) for x, rows in zip(self.scales, self.config.tile, strict=False) if x]
        barriers = sum(x.num_stages(stages) * BARRIER_PAIR_BYTES for x, _ in scales if x.by_tma == "K")
        return barriers + sum(x.num_stages(stages) * x.staged_bytes(rows) for x, rows in scales)

    @property
    def warpgroup_rows(self) -> int:
        """Rows of the tile that one consumer warpgroup computes."""
        return self.config.tile[0] // self.config.warpgroups[0]

    @property
    def warpgroup_columns(self) -> int:
        """Columns of the tile that one consumer warpgroup computes."""
        return self.config.tile[1] // self.config.warpgroups[1]

    @property
    def design(self) -> Design:
        """How the kernel's warps share the work."""
        return get_design(self.config.design)

    @property
    def chip(self) -> Chip:
        """The architecture that the kernel is compiled for."""
        return get_chip(self.config.chip)

    @property
    def tma_names(self) -> frozenset[str]:
        """Names of the epilogue's matrices that are loaded and stored by TMA.

        None if the chip does not support it, or if the design clips rows, which TMA does not do; no results whose rows
        are scattered.
        """
        if not self.chip.supports("sm_90") or get_design(self.config.design).clips_rows:
            return frozenset()
        scatters = self.grouping is not None and self.grouping.scatters
        return self.epilogue.tma_eligible - frozenset(self.epilogue.graph.matrix_result_names if scatters else ())

    @property
    def adds_rows(self) -> bool:
        """True if results are added by atomics to the rows to which they are scattered."""
        return self.grouping is not None and self.grouping.scatters and not self.epilogue.deterministic

    # -- sizes ---------------------------------------------------------------------------------------
    @property
    def multicast_size(self) -> int:
        """CTAs of a cluster that share multicast loads: those with the same K split."""
        return self.config.cluster[0] * self.config.cluster[1]

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.multicast_size * self.config.cluster_splits

    @property
    def num_reducing_ctas(self) -> int:
        """CTAs of a cluster that each reduce a column slice of one tile."""
        return num_reducing_ctas(self.config, self.epilogue.graph)

    @property
    def slice_columns(self) -> int:
        """Columns of a tile that one warpgroup reduces and stores."""
        return self.warpgroup_columns // self.num_reducing_ctas

    def mainloop_bytes(self, stages: int) -> int:
        """Return the bytes of shared memory of `stages`, of their scales and barriers, and of the cluster reduction."""
        reduction = self.cluster_reduction_bytes
        barriers = SWIZZLE_ALIGNMENT_BYTES * (reduction > 0)  # the cluster reduction's, up to the next swizzled tile
        others = reduction + barriers + (self.grouping.table_bytes if self.grouping else 0)
        return stages * (self.stage_bytes + BARRIER_PAIR_BYTES) + self.scale_bytes(stages) + others

    @cached_property
    def cluster_reduction_bytes(self) -> int:
        """Bytes of shared memory for the cluster reduction of split-K partial sums."""
        registers = self.accumulator_registers // self.num_reducing_ctas * self.config.consumers
        return (self.config.cluster_splits - 1) * registers * 4 * THREADS_PER_WARPGROUP

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return THREADS_PER_WARPGROUP * (self.config.consumers + self.design.producer_warpgroups)

    @property
    def accumulator_registers(self) -> int:
        """Registers per thread of the accumulator."""
        return self.warpgroup_rows // self.mma.m * self.mma.accumulator_registers(self.warpgroup_columns)

    @property
    def a_in_registers(self) -> bool:
        """True if A has a layout that wgmma reads from registers only."""
        return self.majors[0] not in self.mma.majors

    @property
    def releases_stages_to_peers(self) -> bool:
        """True if stages that `ld` has read are released to other CTAs, those that share A.

        Their mbarrier.arrive then needs .cluster scope. Kernels that read A from shared memory do without, since it
        would cost them 18 % (docs/internals/decisions/09-arrival-scope.md).
        """
        return self.a_in_registers and self.multicast_ctas[0] > 1

    @property
    def a_k_steps(self) -> int:
        """K-steps of A's fragments in registers at a time; 0 if A is read from shared memory."""
        return min(self.config.tile[2] // self.mma.k, MAX_A_K_STEPS_IN_REGISTERS) if self.a_in_registers else 0

    @property
    def a_registers(self) -> int:
        """Registers per thread of A's fragments."""
        return self.a_k_steps * self.warpgroup_rows // self.mma.m * A_FRAGMENT.registers

    @property
    def promotion(self) -> PromotionPlan:
        """The plan for promoted sums."""
        return plan_promotion(self.config, self._has_per_column_scales)

    @property
    def _has_per_column_scales(self) -> bool:
        """True if each column of B has a block scale of its own."""
        scale_b = self.scales[1]
        return scale_b is not None and scale_b.granularity == 1

    @property
    def mmas_per_k_tile(self) -> int:
        """MMAs per k-tile: 3 for 3xTF32 if residuals are in shared memory, as for wgmma; else 1."""
        return TF32X3_MMAS if self.is_3xtf32 and self.design.mma_op.reads_smem else 1

    @property
    def name(self) -> str:
        """The kernel's symbol: the design, the tile, and a hash of everything else that changes the kernel."""
        c, e = self.config, self.epilogue
        parts = (
            c.replace(splits=int(c.splits == 1)),  # the number of splits is a kernel argument
            str(self.mma), *self.majors, self.promoted, self.scales, self.is_3xtf32,
            e.graph, sorted(e.tma_eligible), sorted(e.column_major), e.fast_math, e.deterministic,
            *([self.grouping] if self.grouping else []), *([self.interleaved] if self.interleaved else []),
        )  # fmt: skip
        return f"{c.design}_{'x'.join(map(str, c.tile))}_{sha256(repr(parts).encode()).hexdigest()[:8]}"

    @property
    def layout_summary(self) -> str:
        """One-line summary of operand layouts, for error messages."""
        majors = ", ".join(f"{name} is {major}-major" for name, major in zip("AB", self.majors, strict=True))
        return f"{majors}; by TMA: {', '.join(sorted(self.epilogue.tma_eligible))}"

    def check(self) -> None:
        """Raise ConfigError if the config is invalid for these operands; the message says what would work."""
        c = self.config
        check_config(c)
        size = self.mma.a.bytes
        if not fills_swizzle_rows(c.tile[2], size):
            raise ConfigError(
                f"tile K: got {c.tile[2]} with operands of {self.mma.a}; "
                f"use {32 // size}, {64 // size}, or a multiple of {128 // size} up to {512 // size}"
            )
        warpgroups_n = c.warpgroups[1]
        if c.tile[1] % warpgroups_n or not self.mma.supports_n(self.warpgroup_columns):
            per_warpgroup = f" for each of {warpgroups_n} warpgroups" if warpgroups_n > 1 else ""
            supported = f"{self.mma.supported_n_text}{per_warpgroup}"
            raise ConfigError(f"tile N: got {c.tile[1]}; {self.mma} supports {supported}")
        op = self.design.mma_op
        if c.tile[2] * size % op.tile_k_bytes:
            multiple = op.tile_k_bytes // size
            raise ConfigError(f"tile K: got {c.tile[2]} of {self.mma.a}; {c.design} needs a multiple of {multiple}")
        if not op.uses_tensor_cores and any(
            (self.threads % tile.mn and tile.mn % self.threads) or self.threads % tile.k or self.threads > 8 * tile.mn
            for tile in self.tiles
        ):
            raise ConfigError(
                f"tile: got {c.tile} for {self.threads} threads; {c.design} needs tile M, N and K that "
                "divide the thread count (M and N may also be multiples of it), and M and N >= threads / 8"
            )
        for role, tile, ctas in zip(ROLES, self.tiles, self.multicast_ctas, strict=True):
            slice_rows = INTERLEAVED_ROWS if role == self.interleaved else ATOM_ROWS
            if tile.outer % (slice_rows * ctas):
                raise ConfigError(
                    f"cluster: {ctas} CTAs share the {role.upper()} tile, whose {tile.outer} rows do not split into "
                    f"multicast slices of {slice_rows}; use a larger tile or a smaller cluster"
                )
        if self.interleaved and not self.design.uses_tma:
            raise ConfigError(f"b: got a tuple with {c.design}, which takes one array; use interleave(*b)")
        if self.interleaved and self.is_3xtf32:
            raise ConfigError('b: got a tuple with precision="3xtf32", which takes one array; use interleave(*b)')
        if self.interleaved == "b" and self.slice_columns % INTERLEAVED_ROWS:
            raise ConfigError(f"tile N: got {c.tile[1]} for a tuple b; use a multiple of {INTERLEAVED_ROWS}")
        register_majors = () if self.promoted else self.mma.register_majors, ()
        for name, major, dtype, more in zip("AB", self.majors, (self.mma.a, self.mma.b), register_majors, strict=True):
            if major not in (*self.mma.majors, *more):
                raise ConfigError(f"{name}: got {major}-major elements of {dtype}; {op.name} supports K-major only")
        self._check_conversions()
        if self.grouping:
            self._check_grouping(self.grouping)
        design, needed = self.design, self.accumulator_registers + self.a_registers
        limit = design.max_accumulator_registers[c.consumers]
        if self.grouping and self.grouping.has_row_indices and design.uses_tma:
            has_32_bit_result = any(r.dtype and r.dtype.bits == 32 for r in self.epilogue.graph.results)
            is_low = self.grouping.scatters or has_32_bit_result
            limit = min(limit, MAX_ACC_REGISTERS_WITH_SCATTER if is_low else MAX_ACC_REGISTERS_WITH_GATHER)
        if self.promoted:
            self._check_promotion()
            needed, limit = self.promotion.registers_per_thread, design.max_promoted_registers[c.consumers]
        if needed > limit:
            label = "accumulators" if self.promoted else "accumulator"
            fragments = " and A's fragments" if self.a_in_registers else ""
            verb = "need" if self.promoted or self.a_in_registers else "needs"
            hint = ", or a scale per 128 columns instead of per column" if self._has_per_column_scales else ""
            raise ConfigError(
                f"registers: the {label} of {self.warpgroup_rows}x{self.warpgroup_columns}{fragments} {verb} {needed} "
                f"per thread, {needed - limit} more than fit; use more consumers or a smaller tile{hint}"
            )

    def _check_conversions(self) -> None:
        graph = self.epilogue.graph
        named = [(x.name, x.dtype) for x in graph.operands] + [(x.name, x.dtype) for x in graph.results]
        named += [("cast", node.attribute) for node in graph.nodes if node.op == "cast"]
        for name, dtype in named:
            if dtype in (E4M3, E5M2) and not self.chip.supports("sm_89"):
                raise ConfigError(f"{name}: got {dtype} for {self.chip}, which cannot convert it; use sm_89 or later")

    def _check_grouping(self, grouping: Grouping) -> None:
        """Raise ConfigError if the config cannot compute a grouped GEMM."""
        c = self.config
        if not self.design.mma_op.uses_tensor_cores:
            raise ConfigError(f'precision: got None for fp32 with {grouping}; use "tf32" or "3xtf32"')
        if grouping.along not in self.design.groups_along:
            raise ConfigError(f"design: got {c.design} with {grouping}; use {designs_for_groups(grouping.along)}")
        for name, default in (("splits", 1), ("cluster_splits", 1), ("serpentine", False), ("sync_clusters", False)):
            if getattr(c, name) != default:
                raise ConfigError(f"{name}: got {getattr(c, name)} with {grouping}; use {default}")
        if self.adds_rows and not self.chip.supports("sm_90"):
            for r in self.epilogue.graph.results:
                if r.dtype == BF16:
                    raise ConfigError(
                        f"{r.name}: got bf16 with deterministic=False for {self.chip}, which cannot add it "
                        "by atomics; use fp16 or fp32"
                    )
        if grouping.along == "k" and self.mma.a.bits == 32:
            raise ConfigError("a, b: got fp32 with groups along k; use 16-bit or 8-bit operands")
        if grouping.along == "k" and c.alias_epilogue:
            raise ConfigError("alias_epilogue: got True with groups along k; use False")
        if grouping.gathers and self.mmas_per_k_tile > 1:
            raise ConfigError(f'precision: got "3xtf32" with a gather and {c.design}; use "tf32"')
        if grouping.gathers and self.multicast_ctas[ROLES.index(grouping.role)] > 1:
            cluster = (c.cluster[0], 1) if grouping.role == "a" else (1, c.cluster[1])
            raise ConfigError(f"cluster: got {c.cluster} with a gather, whose rows are not multicast; use {cluster}")
        if grouping.along == "k" and self.mma.a.bits == 8 and GROUP_END_MULTIPLE % c.tile[2]:
            raise ConfigError(f"tile K: got {c.tile[2]} with {grouping}; use a divisor of {GROUP_END_MULTIPLE}")

    def _check_promotion(self) -> None:
        c, block = self.config, self.design.mma_op.promotion_k_bytes // self.mma.a.bytes
        argument, value = ("precision", "3xtf32") if self.is_3xtf32 else ("accumulate", "promoted")
        if c.consumers not in self.design.max_promoted_registers:
            hint = "" if self.is_3xtf32 else ', or accumulate="fast"'
            designs = designs_for_dtype(self.mma.a, promoted=True)
            raise ConfigError(f'{argument}: got "{value}" with {c.design}; use the design {designs}{hint}')
        if c.tile[2] != block:
            raise ConfigError(f'tile K: got {c.tile[2]} with {argument}="{value}"; use {block}')


@lru_cache(maxsize=4096)
def _checked(spec: KernelSpec) -> KernelSpec:
    """Validate the spec; return the first equal one, since many problems share one."""
    spec.check()
    return spec
