"""The compile-time constants of a kernel: a config, and the dtypes and layouts of operands; no sizes, no strides."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from gemmsmith.core.chip import Chip, get_chip
from gemmsmith.core.config import Config
from gemmsmith.core.design import Design, get_design
from gemmsmith.core.dtypes import DType
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.frozen import cached_property
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.core.grouping import Grouping
from gemmsmith.core.mma import (
    A_FRAGMENT,
    TF32X3_MMAS,
    THREADS_PER_WARPGROUP,
    Major,
    Mma,
)
from gemmsmith.core.problem import OperandFn, operand_getter
from gemmsmith.core.product import ROLES, Role
from gemmsmith.core.register_budgets import PromotionPlan, plan_promotion
from gemmsmith.core.scale_spec import ScaleSpec
from gemmsmith.core.tile import SWIZZLE_ALIGNMENT_BYTES, Tile

MAX_A_K_STEPS_IN_REGISTERS = 4
"""K-steps of A's fragments in registers at a time: some are multiplied while one is loaded."""
BARRIER_PAIR_BYTES = 16
"""A stage's full and empty mbarrier, 8 bytes each."""


def num_reducing_ctas(config: Config, graph: EpilogueGraph) -> int:
    """Return how many CTAs of a cluster that splits K each reduce, and store, a slice of a tile's columns.

    All `cluster_splits` CTAs do if their slices can be stored separately: a slice is a multiple of 8 columns (the
    groups of the accumulator fragment) and of 16 bytes (TMA), and no node needs a whole row or a column's index, which
    `is_transposable` tells. Else 1: one CTA reduces the whole tile.
    """
    dtypes = [o.dtype for o in graph.operands] + [r.dtype for r in graph.results]
    columns = max([8, *(16 // dtype.bytes for dtype in dtypes if dtype)]) * config.cluster_splits
    can_slice_columns = graph.is_transposable and not graph.has_interleaved_columns
    return config.cluster_splits if can_slice_columns and config.tile[1] % columns == 0 else 1


@dataclass(frozen=True)
class MmaOperand:
    """An operand of the mainloop, which loads and multiplies one tile of it per k-tile.

    Attributes:
        name: Prefix of its kernel arguments.
        role: "a" if its rows are rows of D, "b" if they are columns of D.
        tile: Its tile in a stage: dtype in memory, extents, major-ness.
        source: Function of a BoundProblem that returns its matrix, viewed as (M or N) x K, and its Pointer.
        evict: L2 eviction policy of its loads: "first", "normal" or "last".
        residual: Likewise for the matrix of its TF32 residuals, x - tf32(x); None without 3xTF32.
        interleaved: Its rows alternate between two matrices, in groups of 8.
    """

    name: str
    role: Role
    tile: Tile
    source: OperandFn
    evict: str = "normal"
    residual: OperandFn | None = None
    interleaved: bool = False


@dataclass(frozen=True)
class KernelSpec:
    """The compile-time constants of a kernel, which serves every problem with the same spec.

    `config`: the tile, the cluster, the stages and so on. `mma`: the instruction, with the dtypes that it multiplies.
    `majors`: the layouts of A and B: "K" or "MN", which dimension is contiguous.
    `epilogue`: the epilogue's graph, and how it is computed.
    `promoted`: the sum of each `mma_op.promotion_k_bytes` of K is multiplied by its `scales` and added in fp32.
    `scales`: the block scales of A and B; None for an operand without them.
    `is_3xtf32`: A and B have residuals, which are multiplied, too.
    `interleaved`: the operand whose rows, as (M or N) x K, alternate between two matrices in groups of 8.
    `stored`: the dtypes of A and B in memory and in the stages; None: those that the instruction multiplies.
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
    stored: tuple[DType, DType] | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        options = self.promoted, self.scales, self.is_3xtf32, self.grouping, self.interleaved, self.stored
        return hash((self.config, self.mma, self.majors, self.epilogue, options))

    # -- tiles ---------------------------------------------------------------------------------------
    @property
    def tiles(self) -> tuple[Tile, ...]:
        """Tiles of A and B in a stage."""
        m, n, k = self.config.tile
        operands = zip(self.stored or (self.mma.a, self.mma.b), (m, n), self.majors, strict=True)
        return tuple(Tile(dtype, mn, k, major) for dtype, mn, major in operands)

    @property
    def operands(self) -> tuple[MmaOperand, ...]:
        """The operands of the mainloop, A and B."""
        residuals = [operand_getter(f"{name}_residual") if self.is_3xtf32 else None for name in ROLES]
        return tuple(
            MmaOperand(role, role, tile, operand_getter(role), evict, residual, self.interleaved == role)
            for role, tile, evict, residual in zip(ROLES, self.tiles, self.config.evict, residuals, strict=True)
        )

    def gathers_rows_of(self, role: Role) -> bool:
        """Return whether the rows of a role's operands are gathered."""
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
        """Return the bytes of shared memory for the block scales of a pipeline of `stages` stages.

        Scales that TMA loads in boxes along K have stages of their own, each with two barriers.
        """
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

        There are none if the chip lacks TMA, or if the design's tiles may end before their last row, since a TMA store
        writes all rows of its box. Results whose rows are scattered are not among them.
        """
        if not self.chip.supports("sm_90") or self.design.clips_rows:
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
        """Return the bytes of shared memory of a kernel with `stages` stages, without those of its epilogue.

        They are for the stages, their barriers and block scales, the cluster reduction and a grouped GEMM's table.
        """
        reduction = self.cluster_reduction_bytes
        barriers = SWIZZLE_ALIGNMENT_BYTES * (reduction > 0)  # the cluster reduction's, up to the next swizzled tile
        others = reduction + barriers + (self.grouping.table_bytes if self.grouping else 0)
        return stages * (self.stage_bytes + BARRIER_PAIR_BYTES) + self.scale_bytes(stages) + others

    @cached_property
    def cluster_reduction_bytes(self) -> int:
        """Bytes of shared memory for the cluster reduction of split-K partial sums.

        A CTA gets the 32-bit partial sums of the columns that it reduces from each other CTA with a split of the tile.
        """
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
        would cost them 18 % (docs/internals/decisions.md).
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
        return plan_promotion(self.config, self.has_per_column_scales)

    @property
    def has_per_column_scales(self) -> bool:
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
            *(self.stored or []),
        )  # fmt: skip
        return f"{c.design}_{'x'.join(map(str, c.tile))}_{sha256(repr(parts).encode()).hexdigest()[:8]}"

    @property
    def layout_summary(self) -> str:
        """One-line summary of operand layouts, for error messages."""
        majors = ", ".join(f"{name} is {major}-major" for name, major in zip("AB", self.majors, strict=True))
        return f"{majors}; by TMA: {', '.join(sorted(self.epilogue.tma_eligible))}"
