"""Packing: copies a matrix whose strides or address TMA cannot take into a workspace whose rows it can."""

from __future__ import annotations

from dataclasses import dataclass

from gemmsmith import hw
from gemmsmith.core.pointer import Pointer
from gemmsmith.core.problem import TMA_ALIGNMENT, Matrix
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import I64, U32, U64

THREADS = 256
CHUNK = TMA_ALIGNMENT // 2
"""16-bit elements of one 16-byte store."""


@dataclass(frozen=True)
class Packing:
    """A matrix and its packed copy; `source` is turned so that its columns are the contiguous index, if one is."""

    source: Matrix
    turned: bool

    @staticmethod
    def of(matrix: Matrix) -> Packing:
        turned = matrix.contiguous == "rows"
        return Packing(matrix.T if turned else matrix, turned)

    @property
    def chunks(self) -> int:
        """16-byte chunks of a packed row."""
        return -(-self.source.cols // CHUNK)

    @property
    def bytes(self) -> int:
        """Workspace bytes of the packed copy."""
        return self.source.batch * self.source.rows * self.chunks * TMA_ALIGNMENT

    @property
    def packed(self) -> Matrix:
        """The copy: rows padded to 16 bytes. A broadcast batch stays one."""
        s, pitch = self.source, self.chunks * CHUNK
        copy = Matrix(s.dtype, s.rows, s.cols, pitch, 1, s.batch, s.rows * pitch if s.batch > 1 else 0)
        return copy.T if self.turned else copy

    def arguments(self, source: Pointer, workspace: Pointer) -> dict[str, int | Pointer]:
        """The kernel's arguments for these addresses."""
        s = self.source
        return {
            "source": source, "packed": workspace, "rows": s.rows, "columns": s.cols, "chunks": self.chunks,
            "total": s.batch * s.rows * self.chunks, "row_stride": s.row_stride, "column_stride": s.col_stride,
            "batch_stride": s.batch_stride,
        }  # fmt: skip


def pack() -> Kernel:
    """Each thread gathers 8 elements, one by one, and stores them at once; a grid-stride loop over all chunks."""
    with Builder("pack", threads=THREADS) as k:
        k.header += ["gemmsmith: pack", "copies a matrix of 16-bit elements into rows of whole 16-byte chunks"]
        source, packed = k.pointer("source"), k.pointer("packed")
        rows, columns, chunks, total = (k.parameter(name) for name in ("rows", "columns", "chunks", "total"))
        strides = [k.parameter(name, I64) for name in ("row_stride", "column_stride", "batch_stride")]
        hw.grid_dependency_wait()
        threads = (hw.grid_size() * THREADS).named("threads")
        mine = (hw.block_index() * THREADS + k.thread).named("mine")
        turns = (total - 1) // threads + 1  # sums beyond the total might not be int32
        with k.range(turns, name="turn") as turn:
            inside = (mine < total - turn * threads).named("inside")
            index = (turn * threads + k.select(inside, mine, 0)).named("index")
            column, row, batch = index % chunks * CHUNK, index // chunks % rows, index // chunks // rows
            start = row.to(I64) * strides[0] + column.to(I64) * strides[1] + batch.to(I64) * strides[2]
            elements = []
            for i in range(CHUNK):
                address = source + ((start + strides[1] * i) * 2).to(U64)
                elements.append(hw.load_global_16(address, inside & (column + i < columns)))
            values = k.registers(U32, CHUNK // 2, "values")
            for i in range(CHUNK // 2):
                values[i] = elements[2 * i].to(U32) | elements[2 * i + 1].to(U32) << 16
            hw.store_global(values, packed + index.to(U64) * TMA_ALIGNMENT, inside)
        return k.finish()
