"""Promotion (fp8 two-level accumulation).

Tensor cores sum each scale block along K, and CUDA cores add these sums, times their scales, in full fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.block_scales import ThreadScales
from gemmsmith.core.mma import WGMMA_M
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.shared import SharedView


@dataclass(frozen=True)
class PromotionSubtile:
    """The part of a warpgroup's tile that is promoted at once: some columns, from `column` on, of 64 rows.

    `spec.promotion` has the number of columns.
    """

    mma_m: int
    column: int


class Promotion:
    """The promotion state of a warpgroup: a temporary accumulator per k-tile in flight, and the fp32 accumulator.

    Each k-tile is multiplied and promoted subtile by subtile. `slot` numbers the k-tiles in flight, and so the
    temporary accumulators, from 0 on. (CUTLASS: GmmaFP8Accumulation, accum_ and accum_temp_.)
    """

    def __init__(self, spec: KernelSpec) -> None:
        n, (columns, self.k_tiles_in_flight, _) = spec.config.tile[1], spec.promotion
        self.accumulator = Accumulator(spec.mma, spec.warpgroup_rows, n)
        self._accumulator_temps = [
            Accumulator(spec.mma, WGMMA_M, columns, "accumulator_temp") for _ in range(self.k_tiles_in_flight)
        ]
        self.scales: dict[int, ThreadScales] = {}
        """The thread's scales of each k-tile in flight."""
        mma_ms = range(spec.warpgroup_rows // WGMMA_M)
        self.subtiles = [PromotionSubtile(mma_m, column) for mma_m in mma_ms for column in range(0, n, columns)]

    def multiply(self, slot: int, subtile: PromotionSubtile, a: SharedView, b: SharedView) -> None:
        """Issue the wgmmas of a subtile into the temporary accumulator `slot`; `a` and `b` are the k-tile's tiles."""
        temp = self._accumulator_temps[slot]
        temp.multiply(a.rows(subtile.mma_m * WGMMA_M, WGMMA_M), b.rows(subtile.column, temp.n), accumulate=False)

    def wait(self, slot: int, pending: int) -> None:
        """Wait until the temporary accumulator `slot` is complete; `pending` later wgmma groups may stay in flight."""
        self._accumulator_temps[slot].wait_complete(pending)

    def add(self, slot: int, subtile: PromotionSubtile) -> None:
        """Add the temporary accumulator `slot`, times its k-tile's `scales`, to the subtile of the fp32 accumulator."""
        temp = self._accumulator_temps[slot]
        scales = self.scales[slot].subtile_scales(subtile.mma_m, subtile.column, temp.n)
        temp.promote_into(
            self.accumulator.fragments[subtile.mma_m], temp.mma.accumulator_registers(subtile.column), scales
        )
