"""Promotion: each k-block is summed by tensor cores, and these sums, times their scales, are added in full fp32."""

from __future__ import annotations

from dataclasses import dataclass

from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.scales import BlockScales, ScalesOfThread
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
    """The sums of a warpgroup, whose rows begin `first_row` below a tile's: of some k-tiles in flight, each in a part
    of the tile, one after the other of all `parts`; and the `total`."""

    def __init__(self, spec: KernelSpec, scales: BlockScales, first_row: Value | int) -> None:
        n, (columns, self.in_flight, _) = spec.config.tile[1], spec.promotion
        self.total = Accumulator(spec.mma, spec.warpgroup_rows, n, "total")
        self._partials = [Accumulator(spec.mma, WGMMA_M, columns, "partial") for _ in range(self.in_flight)]
        self._scales, self._first_row = scales, first_row
        self._factors: dict[int, ScalesOfThread] = {}
        blocks = range(spec.warpgroup_rows // WGMMA_M)
        self.parts = [Part(block, column) for block in blocks for column in range(0, n, columns)]

    def begin(self, tile: WorkTile) -> None:
        """Before a tile's k-tiles."""
        self.total.clear()
        self._scales.begin(tile, self._first_row)

    def multiply(self, number: int, part: Part, a: SharedView, b: SharedView) -> None:
        """Issues a part's product of a k-tile, the `number`-th in flight."""
        partial = self._partials[number]
        rows, columns = a.rows(part.block * WGMMA_M, WGMMA_M), b.rows(part.column, partial.n)
        partial.multiply(rows, columns, accumulate=False)

    def read_scales(self, number: int, stage: Value) -> None:
        """Of a k-tile."""
        self._factors[number] = self._scales.read(stage)

    def wait(self, number: int, behind: int) -> None:
        """Until a k-tile's part is multiplied, while `behind` others, issued later, may run on."""
        self._partials[number].finish(behind)

    def add(self, number: int, part: Part) -> None:
        """Adds the part's scaled sums of a k-tile to the total."""
        partial = self._partials[number]
        factors = self._factors[number].of_part(part.block, part.column, partial.n)
        partial.promote(self.total.blocks[part.block], partial.mma.registers(part.column), factors)
