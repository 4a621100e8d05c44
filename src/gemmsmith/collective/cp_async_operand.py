"""A cp.async operand of the mainloop, which all threads copy into its stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from gemmsmith import hw
from gemmsmith.collective.swizzle import VECTOR_BYTES, CopyStep, ThreadCopyPartition
from gemmsmith.core.problem import BoundProblem
from gemmsmith.core.spec import MmaOperand
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import I32, I64, U32, U64
from gemmsmith.lang.values import Constant, Value
from gemmsmith.tile_scheduler.tiles import OperandCoord


class CpAsyncOperand:
    """An operand with a tile in each of `stages` stages, which `threads` threads copy in vectors of 16 bytes.

    Elements past the operand's ends are zero-filled, not read. Kernel arguments: `name`, its address;
    `name`_mn_extent, its rows (columns of B); `name`_ld_bytes, the bytes from one contiguous line, along K or along M
    or N, to the next; `name`_batch_stride_bytes.
    """

    def __init__(self, operand: MmaOperand, stages: int, threads: int) -> None:
        k, name, tile, source = current_builder(), operand.name, operand.tile, operand.source
        self.role, self.tile, nbytes = operand.role, tile, tile.dtype.bytes_of
        leading_dimension = "row_stride" if tile.major == "K" else "col_stride"
        self.address = k.pointer(name, lambda p: source(p)[1])
        self._source = source
        self.mn_extent: Value = k.parameter(f"{name}_mn_extent", compute=self._mn_extent)
        self.ld_bytes = k.parameter(f"{name}_ld_bytes", I64, lambda p: nbytes(getattr(source(p)[0], leading_dimension)))
        self.batch_stride_bytes = k.parameter(
            f"{name}_batch_stride_bytes", I64, lambda p: nbytes(source(p)[0].batch_stride)
        )
        self.stages = k.shared(tile, stages=stages, name=name.upper())
        self.name, self.threads = name, threads
        self.line = "row" if (self.role == "a") == (tile.major == "K") else "column"
        """What is contiguous in the user's A or B: the offsets of a thread's first vector are within one of these."""

    def _mn_extent(self, p: BoundProblem) -> int:
        return self._source(p)[0].rows

    def start_copies(self) -> CpAsyncCopies:
        return CpAsyncCopies(self)


class CpAsyncCopies:
    """One thread's copies of an operand: where its next ones read from, and the cp.async instructions."""

    def __init__(self, operand: CpAsyncOperand) -> None:
        """Declare this thread's state: the address that it copies from next, and how many rows are left from there."""
        k, self._operand, self._tile, self._name = current_builder(), operand, operand.tile, operand.name
        self._partition = ThreadCopyPartition(operand.tile, k.thread, operand.threads, operand.name)
        # The address of this thread's first vector in the next k-tile.
        self._gmem_ptr = k.var(U64, operand.address, f"{operand.name}_gmem_ptr")
        self._declare_rows()

    def _declare_rows(self) -> None:
        """Declare how much of M or N is left from this thread's first vector on: rows if K-major, else bytes."""
        unit = "rows" if self._tile.major == "K" else "row_bytes"
        self._rows_remaining = current_builder().var(I32, 0, f"{self._name}_{unit}_remaining")

    def set_tile(self, coord: OperandCoord, first_k: Value) -> None:
        operand, thread, tile, nbytes = self._operand, self._partition, self._tile, self._tile.dtype.bytes_of
        outer, inner = (coord.mn, first_k) if tile.major == "K" else (first_k, coord.mn)
        vector_idx, row = hw.opaque(thread.vector_idx), hw.opaque(thread.row)
        line_byte_offset = thread.box * tile.pitch + vector_idx.with_name_hint("opaque_vector") * VECTOR_BYTES
        line_byte_offset.with_name_hint(f"{self._name}_{operand.line}_byte_offset")
        row_offset = (outer + row.with_name_hint("opaque_row")).to(I64) * operand.ld_bytes
        offset = row_offset + nbytes(inner.to(I64)) + line_byte_offset.to(I64)
        self._gmem_ptr.set(operand.address + (coord.batch.to(I64) * operand.batch_stride_bytes + offset).to(U64))
        rows = current_builder().minimum(operand.mn_extent - coord.mn, tile.mn)
        self._rows_remaining.set(rows - thread.row if tile.major == "K" else nbytes(rows) - line_byte_offset)

    def copies(self, stage: Value, k_remaining: Value | None) -> list[Callable[[], None]]:
        """Return callables that issue this thread's cp.async copies of a k-tile into a stage.

        `k_remaining`: valid elements of K from the k-tile's first on; None: the tile is fully in bounds, no predicates.
        """
        destination = self._operand.stages[stage].address.named(f"{self._name}_stage_base")

        def copy(step: CopyStep) -> None:
            source, nbytes = self._address(step), self._valid_bytes(step, k_remaining)
            with nullcontext() if step.pred is None else current_builder().when(step.pred):
                hw.cp_async_copy(destination + step.offset, source, nbytes, VECTOR_BYTES)

        return [partial(copy, step) for step in self._partition.copy_steps()]

    def _address(self, step: CopyStep) -> Value:
        return self._gmem_ptr.get() + (self._operand.ld_bytes * step.row + step.box * self._tile.pitch).to(U64)

    def _valid_bytes(self, step: CopyStep, k_remaining: Value | None) -> Value:
        """Return how many bytes of a step's vector are in bounds; cp.async fills the others with zeros."""
        if k_remaining is None:
            return Constant(U32, VECTOR_BYTES)
        k, tile, thread = current_builder(), self._tile, self._partition
        if tile.major == "K":
            outer_remaining, inner_bytes = self._rows_remaining.get(), self._bytes_along_k(k_remaining)
        else:
            outer_remaining, inner_bytes = k_remaining - thread.row, self._rows_remaining.get()
        return k.select(outer_remaining > step.row, self._bytes_of_vector(step, inner_bytes), 0).to(U32)

    def _bytes_along_k(self, k_remaining: Value) -> Value:
        """Return the bytes of a K-major row that are in bounds, from this thread's first vector on."""
        tile, thread = self._tile, self._partition
        line_byte_offset = thread.box * tile.pitch + thread.vector_idx * VECTOR_BYTES
        line_byte_offset.with_name_hint(f"{self._name}_{self._operand.line}_byte_offset")
        return tile.dtype.bytes_of(current_builder().minimum(k_remaining, tile.k)) - line_byte_offset

    def _bytes_of_vector(self, step: CopyStep, inner_bytes: Value) -> Value:
        """Return how many bytes of a step's vector are in bounds along its row.

        `inner_bytes`: bytes in bounds from this thread's first vector on; the vector is `step.box` boxes after that.
        """
        k = current_builder()
        return k.minimum(k.maximum(inner_bytes - step.box * self._tile.pitch, 0), VECTOR_BYTES)

    def advance(self) -> None:
        tile = self._tile
        step = tile.dtype.bytes_of(tile.k) if tile.major == "K" else (self._operand.ld_bytes * tile.k).to(U64)
        self._gmem_ptr.set(self._gmem_ptr.get() + step)
