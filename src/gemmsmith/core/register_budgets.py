"""Registers per thread: thresholds up to which ptxas was seen not to spill, and how a warpgroup promotes its sums."""

from __future__ import annotations

from typing import NamedTuple

from gemmsmith.core.config import Config
from gemmsmith.core.design import get_design
from gemmsmith.core.mma import LANES_PER_QUAD, THREADS_PER_WARPGROUP, WGMMA_M

MAX_ACCUMULATOR_FRACTIONS = {
    "plain": (1, 1, 1),
    "plain, 32 bits stored by threads": (0.9, 0.9, 0.9),
    "functions": (0.8, 0.8, 0.8),
    "several matrices": (0.8, 0.64, 0),
    "several matrices, by threads or of 32 bits": (0.8, 0, 0),
    "matrix loaded by threads": (0.44, 0, 0),
}
"""Fraction of the design's accumulator registers that accumulators, and elements to be quantized, may take, by the
class of the epilogue: if a warpgroup has up to 64 rows, if it has more, and if it has more and K is split or sums are
promoted. Within it candidates do not spill, but for 256x112 with `splits` (20 bytes). Some epilogues of each class are
compiled by benchmarks/fit/register_budgets.py."""
MAX_ACC_REGISTERS_WITH_GATHER = 192
"""Maximum accumulator registers of designs with TMA if rows are gathered, which leaves the consumers fewer registers.
With 32-bit results the next one applies. With more the kernels spilled."""
MAX_ACC_REGISTERS_WITH_SCATTER = 160
"""The maximum if rows are scattered."""
REGISTER_HEAVY_OPS = frozenset({"erf", "gelu", "ndtr", "expm1", "elu"})
"""Functions whose intermediate values would spill with the largest accumulators."""
MAX_EXCHANGED_COLUMNS = 192
"""Maximum tile N of a cluster split if the epilogue needs full rows in registers; wider tiles spill."""
MAX_ODD_TRANSPOSED_COLUMNS = 144
"""Maximum tile N of pingpong's tiles of 128 rows that store 32-bit elements along columns, if it is no multiple of 16:
then epilogue subtiles have full width, and spill."""
MAX_TRANSPOSED_COLUMNS_WITH_OPERANDS = 176
"""The maximum of such tiles, of any width, if the epilogue has operands: with 192 columns and a bias ptxas spills."""
CLUSTER_REDUCTION_REGISTERS = 12
"""Registers reserved by promotion for the cluster reduction if several warpgroups share an SM; with fewer it spills."""
RESERVED_REGISTERS_CLUSTER_SPLIT = 32
"""Registers that promotion must leave for a cluster split, or for an epilogue that needs full rows if K is split
otherwise. This and the next three: with fewer ptxas spills."""
RESERVED_REGISTERS_SPLIT_QUANTIZE = 4
"""Registers that promotion must leave for a quantizing epilogue with split-K or stream-K."""
RESERVED_REGISTERS_SPLIT_QUANTIZE_PASSES = 40
"""The same if promotion takes several passes: 128x208 tiles, which leave 36, spill with blocks of 16 columns."""
RESERVED_REGISTERS_NO_TMA_LOAD = 16
"""Registers that promotion, with the accumulators of all k-tiles in flight, must leave for an epilogue that loads a
matrix without TMA."""
MAX_LIVE_REGISTERS = 200
"""Maximum registers of mma_multistage's accumulators, A's fragments of a k-step, B's of two, and residuals; with more
the kernels spilled."""
MAX_DOUBLE_BUFFERED_REGISTERS = 40
"""Maximum registers of one buffer of sgemm's A and B with double buffering. Those of a tile 256 columns wide do not fit
together with its accumulator."""
SM80_REGISTER_BUDGET = 116
"""Registers for the accumulator and `REGISTERS_PER_SUBTILE_MATRIX` of each matrix of the epilogue in the sm_80 designs.
This and the next two: kernels with more spilled on one chip or another (tests/kernels/test_chosen.py)."""
REGISTERS_PER_SUBTILE_MATRIX = 32
"""Registers for a 64x64 subtile of a matrix."""
MAX_REDUCTIONS = 3
"""Maximum reductions of an epilogue of the sm_80 designs without spills."""


PROMOTION_K_TILES_IN_FLIGHT = (4, 2)
"""Candidate numbers of k-tiles in flight per warpgroup with promoted sums. 64x64 tiles at 64x7168x2048 (FP8, H200):
6.29 us with 4, 6.49 with 2, 7.22 with 1."""
MAX_COLUMNS_WITH_ONE_K_TILE_IN_FLIGHT = 64
"""Up to this many columns, two warpgroups keep one k-tile each in flight: each hides the other's promotion. 128x64
tiles (FP8, H200): 18.5 us with one k-tile in flight, 19.2 with four at 512x2112x7168; 18.7 and 20.0 at 256x4096x7168.
"""


class PromotionPlan(NamedTuple):
    """Plan for a warpgroup's promoted sums.

    `n_per_pass`: columns, of 64 rows, that are multiplied and promoted at a time. `k_tiles_in_flight`: k-tiles whose
    MMAs are in flight at a time. `registers_per_thread`: those of the accumulator, of one k-tile's sums and its scales.
    """

    n_per_pass: int
    k_tiles_in_flight: int
    registers_per_thread: int


def plan_promotion(c: Config, per_column_scales: bool = False) -> PromotionPlan:
    """Return the plan for promoted sums. `per_column_scales`: each column of B has its own block scale.

    With wgmma: all columns in one pass, or half of them if registers are short. With one pass, as many k-tiles in
    flight as registers allow: the promotion of one is hidden behind the MMAs of the next. They are at most half of the
    stages, since a stage is released only after the promotion of its k-tile.
    With mma.sync: all rows and columns of a k-tile at once, into a second accumulator.
    """
    design, (warpgroups_m, warpgroups_n) = get_design(c.design), c.warpgroups
    rows, n = c.tile[0] // warpgroups_m, c.tile[1] // warpgroups_n
    limit = design.max_promoted_registers.get(c.consumers, 0)
    accumulator = rows * n // THREADS_PER_WARPGROUP
    scales = n // LANES_PER_QUAD + 12 if per_column_scales else 0
    if not design.mma_op.reads_smem:
        return PromotionPlan(n, 1, 2 * accumulator)
    # a pass has n / 2 registers for the sums of 64 rows; half of the columns must be a multiple of 8
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
