"""Packing: copies a matrix whose strides or address TMA cannot take into a workspace whose rows it can."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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
    """A matrix and its packed copy; `source` is `transposed` where that makes its columns the contiguous index."""

    source: Matrix
    transposed: bool

    @staticmethod
    def of(matrix: Matrix) -> Packing:
        transposed = matrix.contiguous == "rows"
        return Packing(matrix.T if transposed else matrix, transposed)

    @property
    def chunks(self) -> int:
        """16-byte chunks of a packed row."""
        return -(-self.source.cols // CHUNK)

    @property
    def bytes(self) -> int:
        """Workspace bytes of the packed copy."""
        return self.total * TMA_ALIGNMENT

    @property
    def packed(self) -> Matrix:
        """The copy: rows padded to 16 bytes. A broadcast batch stays one."""
        s, pitch = self.source, self.chunks * CHUNK
        copy = Matrix(s.dtype, s.rows, s.cols, pitch, 1, s.batch, s.rows * pitch if s.batch > 1 else 0)
        return copy.T if self.transposed else copy

    @property
    def total(self) -> int:
        """16-byte chunks in all."""
        return self.source.batch * self.source.rows * self.chunks


@dataclass(frozen=True)
class BoundPacking:
    """A packing with where the matrix and its copy lie."""

    packing: Packing
    source: Pointer
    packed: Pointer


@lru_cache(maxsize=1)
def pack() -> Kernel:
    """Each thread gathers 8 elements, one by one, and stores them at once; a grid-stride loop over all chunks."""
    with Builder("pack", threads=THREADS) as k:
        k.header += ["gemmsmith: pack", "copies a matrix of 16-bit elements into rows of whole 16-byte chunks"]
        k.grid = lambda p: -(-p.packing.total // THREADS)
        source, packed = k.pointer("source", lambda p: p.source), k.pointer("packed", lambda p: p.packed)
        rows = k.parameter("rows", bind=lambda p: p.packing.source.rows)
        columns = k.parameter("columns", bind=lambda p: p.packing.source.cols)
        chunks = k.parameter("chunks", bind=lambda p: p.packing.chunks)
        total = k.parameter("total", bind=lambda p: p.packing.total)
        strides = [
            k.parameter("row_stride", I64, lambda p: p.packing.source.row_stride),
            k.parameter("column_stride", I64, lambda p: p.packing.source.col_stride),
            k.parameter("batch_stride", I64, lambda p: p.packing.source.batch_stride),
        ]
        hw.grid_dependency_wait()
        threads = (hw.grid_size() * THREADS).named("threads")
        first = (hw.block_index() * THREADS + k.thread).named("first")
        rounds = (total - 1) // threads + 1  # sums beyond the total might not be int32
        with k.range(rounds, name="round") as round:
            inside = (first < total - round * threads).named("inside")
            index = (round * threads + k.select(inside, first, 0)).named("index")
            column, row, batch = index % chunks * CHUNK, index // chunks % rows, index // chunks // rows
            start = row.to(I64) * strides[0] + column.to(I64) * strides[1] + batch.to(I64) * strides[2]
            elements = []
            for i in range(CHUNK):
                address = source + ((start + strides[1] * i) * 2).to(U64)
                elements.append(hw.load_global_narrow(address, inside & (column + i < columns), 16))
            values = k.registers(U32, CHUNK // 2, "values")
            for i in range(CHUNK // 2):
                values[i] = elements[2 * i].to(U32) | elements[2 * i + 1].to(U32) << 16
            hw.store_global(values, packed + index.to(U64) * TMA_ALIGNMENT, inside)
        return k.finish()
