"""An operand of the mainloop whose rows are gathered by index: cp.async copies them into the stages."""

from __future__ import annotations

from collections.abc import Callable

from gemmsmith import hw
from gemmsmith.collective.cp_async_operand import CpAsyncCopies, CpAsyncOperand
from gemmsmith.collective.global_array import RowIndices
from gemmsmith.collective.swizzle import VECTOR_BYTES, CopyStep
from gemmsmith.core.grouping import GATHER
from gemmsmith.core.problem import BoundProblem
from gemmsmith.core.spec import MmaOperand
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import I32, I64, U32, U64
from gemmsmith.lang.values import Constant, Value
from gemmsmith.tile_scheduler.tiles import OperandCoord


class GatheredOperand(CpAsyncOperand):
    """A K-major operand whose row i is row gather[i] of an array in global memory, or zeros if there is no such row.

    Kernel arguments: those of CpAsyncOperand, and of RowIndices.
    """

    def __init__(self, operand: MmaOperand, stages: int, threads: int) -> None:
        super().__init__(operand, stages, threads)
        self.indices = RowIndices(GATHER, operand.name, lambda p: self._source(p)[0].rows)
        self.k_extent = current_builder().parameter(f"{operand.name}_k_extent", compute=lambda p: p.k)

    def _mn_extent(self, p: BoundProblem) -> int:
        return p.m if self.role == "a" else p.n

    def start_copies(self) -> GatheredCopies:
        return GatheredCopies(self)


class GatheredCopies(CpAsyncCopies):
    """One thread's copies of a gathered operand. The indices of its rows of a tile are loaded once, into registers."""

    def __init__(self, operand: GatheredOperand) -> None:
        super().__init__(operand)
        self._indices = operand.indices

    def _declare_rows(self) -> None:
        """Declare a register for the array's row of each of this thread's rows of a tile."""
        rows = dict.fromkeys(step.row for step in self._partition.copy_steps())  # the same in each box
        self._position = {row: i for i, row in enumerate(rows)}
        self._source_rows = current_builder().registers(I32, len(rows), f"{self._name}_source_rows")
        for i in range(len(rows)):
            self._source_rows[i] = Constant(I32, -1)  # there are copies of zeros without a tile, too

    def set_tile(self, coord: OperandCoord, first_k: Value) -> None:
        """Load the indices of this thread's rows of the tile at `coord`, and move to element `first_k` of K."""
        thread, tile = self._partition, self._tile
        end = coord.end(self._operand.mn_extent)
        first = (coord.mn + thread.row).named(f"{self._name}_first_row")
        for row, i in self._position.items():
            self._source_rows[i] = self._indices.load(first + row, first + row < end)
        offset = tile.dtype.bytes_of(first_k) + thread.box * tile.pitch + thread.vector_idx * VECTOR_BYTES
        self._gmem_ptr.set(self._operand.address + offset.to(U64))

    def _address(self, step: CopyStep) -> Value:
        row = hw.opaque(self._source_row(step))  # recompute addresses instead of keeping one register pair per copy
        offset = row.to(I64) * self._operand.ld_bytes + step.box * self._tile.pitch
        return self._gmem_ptr.get() + offset.to(U64)

    def copies(self, stage: Value, k_remaining: Value | None) -> list[Callable[[], None]]:
        self._bytes_of_box: dict[int, Value] = {}  # by box, the bytes of a vector before the end of K: for all rows
        return super().copies(stage, k_remaining)

    def _valid_bytes(self, step: CopyStep, k_remaining: Value | None) -> Value:
        """Return how many bytes of a step's vector exist: none if its row's index is invalid; the others are zeros."""
        valid: Value = Constant(I32, VECTOR_BYTES)
        if k_remaining is not None and step.box not in self._bytes_of_box:
            in_bounds = self._bytes_of_vector(step, self._bytes_along_k(k_remaining))
            self._bytes_of_box[step.box] = in_bounds.named(f"{self._name}_vector_bytes")
        valid = self._bytes_of_box.get(step.box, valid)
        return current_builder().select(self._source_row(step) >= 0, valid, 0).to(U32)

    def _source_row(self, step: CopyStep) -> Value:
        return self._source_rows[self._position[step.row]]
