"""How a warpgroup promotes its sums: columns per pass, k-tiles in flight, registers."""

from __future__ import annotations

from typing import NamedTuple

from gemmsmith.core.config import Config
from gemmsmith.core.design import get_design
from gemmsmith.core.mma import (
    LANES_PER_QUAD,
    THREADS_PER_WARPGROUP,
    WGMMA_M,
)
from gemmsmith.core.register_budgets import (
    CLUSTER_REDUCTION_REGISTERS,
)

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
