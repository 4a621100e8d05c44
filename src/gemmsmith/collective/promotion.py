"""Promotion: each k-block is summed by tensor cores, and these sums, times their scales, are added in full fp32."""

from __future__ import annotations

from dataclasses import dataclass

from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.scales import BlockScales
from gemmsmith.core.mma import WGMMA_M
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.values import Value
from gemmsmith.schedule.tiles import WorkTile


@dataclass(frozen=True)
class Part:
    """64 rows of a warpgroup's part of a tile, the `block`-th, and columns of it from `column` on."""

    block: int
    column: int


class Promotion:
    """The sums of a warpgroup, whose rows begin `first_row` below a tile's: of one k-block in a part of the tile, which
    all `parts` share, and the `total`."""

    def __init__(self, spec: KernelSpec, scales: BlockScales, first_row: Value) -> None:
        n = spec.config.tile[1]
        self.total = Accumulator(spec.mma, spec.warpgroup_rows, n, "total")
        self._partial = Accumulator(spec.mma, WGMMA_M, spec.partial_columns, "partial")
        self._scales, self._first_row = scales, first_row
        blocks = range(spec.warpgroup_rows // WGMMA_M)
        self.parts = [Part(block, column) for block in blocks for column in range(0, n, spec.partial_columns)]

    def begin(self, tile: WorkTile) -> None:
        """Before a tile's k-blocks."""
        self.total.clear()
        self._scales.begin(tile, self._first_row)

    def multiply(self, part: Part, a: SharedView, b: SharedView) -> None:
        """Issues a part's product of a k-block."""
        rows, columns = a.rows(part.block * WGMMA_M, WGMMA_M), b.rows(part.column, self._partial.n)
        self._partial.multiply(rows, columns, accumulate=False)

    def read_scales(self, stage: Value) -> None:
        """Of a k-block, while it is multiplied."""
        self._scales.read(stage)

    def wait(self) -> None:
        """Until the part is multiplied."""
        self._partial.wait(pending=0)

    def add(self, part: Part) -> None:
        """Adds the part's scaled sums of a k-block to the total."""
        factors = self._scales.factors(part.block, part.column, self._partial.n)
        offset = self._partial.mma.registers(part.column)
        self._partial.promote(self.total.blocks[part.block], offset, factors)
