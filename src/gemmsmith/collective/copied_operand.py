"""An operand of the mainloop that all threads copy into its stages, by cp.async."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from gemmsmith import hw
from gemmsmith.collective.swizzle import CHUNK_BYTES, Chunks, Turn
from gemmsmith.core.problem import Source
from gemmsmith.core.tile import Tile
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import I32, I64, U32, U64
from gemmsmith.lang.values import Constant, Value
from gemmsmith.schedule.tiles import Coordinates


class CopiedOperand:
    """A tile of an operand in each of `stages` stages, copied in chunks of 16 bytes by `threads` threads. What lies
    outside of the operand becomes zeros, and is not read. Kernel arguments: `name`, where it lies; its rows; the bytes
    from one line to the next (a row, or a column if it is MN-major), and from one of a batch to the next."""

    def __init__(self, name: str, tile: Tile, stages: int, source: Source, threads: int) -> None:
        k, self.tile, size = current(), tile, tile.dtype.bytes
        line = "row_stride" if tile.major == "K" else "col_stride"
        self._address = k.pointer(name, lambda p: source(p)[1])
        self.rows: Value = k.parameter(f"{name}_rows", bind=lambda p: source(p)[0].rows)
        self._line = k.parameter(f"{name}_line", I64, lambda p: getattr(source(p)[0], line) * size)
        self._batch = k.parameter(f"{name}_batch", I64, lambda p: source(p)[0].batch_stride * size)
        self.stages = k.shared(tile, stages=stages, name=name.upper())
        self._threads = threads

    def start(self) -> None:
        """Before the first tile."""
        k, name = current(), self.stages.name.lower()
        self._chunks = Chunks(self.tile, k.thread, self._threads)
        self._source = k.var(U64, self._address, f"{name}_source")  # of this thread's first chunk in the next k-tile
        self._left = k.var(I32, 0, f"{name}_left")  # rows of the operand from there on, or, if MN-major, bytes of them

    def begin(self, at: Coordinates, first_k: Value) -> None:
        """The next copies are those of a tile, from element `first_k` on."""
        chunks, tile, size = self._chunks, self.tile, self.tile.dtype.bytes
        line, along = (at.row, first_k) if tile.major == "K" else (first_k, at.row)
        column = chunks.box * tile.pitch + hw.opaque(chunks.chunk) * CHUNK_BYTES
        offset = (line + hw.opaque(chunks.row)).to(I64) * self._line + along.to(I64) * size + column.to(I64)
        self._source.set(self._address + (at.batch.to(I64) * self._batch + offset).to(U64))
        rows = current().minimum(self.rows - at.row, tile.mn)
        self._left.set(rows - chunks.row if tile.major == "K" else rows * size - column)

    def copies(self, stage: Value, k_left: Value | None) -> list[Callable[[], None]]:
        """What starts this thread's copies of a k-tile, of whose elements of K there are `k_left`; None: all is
        inside."""
        destination, source = self.stages[stage].address, self._source.get()

        def copy(turn: Turn) -> None:
            where = source + (self._line * turn.row + turn.box * self.tile.pitch).to(U64)
            count = Constant(U32, CHUNK_BYTES) if k_left is None else self._count(turn, k_left)
            with nullcontext() if turn.inside is None else current().when(turn.inside):
                hw.cp_async_copy(destination + turn.offset, where, count, CHUNK_BYTES)

        return [partial(copy, turn) for turn in self._chunks.turns()]

    def _count(self, turn: Turn, k_left: Value) -> Value:
        """The bytes of a chunk that are inside."""
        k, tile, chunks = current(), self.tile, self._chunks
        if tile.major == "K":
            column = chunks.box * tile.pitch + chunks.chunk * CHUNK_BYTES
            lines, along = self._left.get(), k.minimum(k_left, tile.k) * tile.dtype.bytes - column
        else:
            lines, along = k_left - chunks.row, self._left.get()
        inside = k.minimum(k.maximum(along - turn.box * tile.pitch, 0), CHUNK_BYTES)
        return k.select(lines > turn.row, inside, 0).to(U32)

    def advance(self) -> None:
        """The next copies are those of the next k-tile."""
        tile = self.tile
        step = tile.k * tile.dtype.bytes if tile.major == "K" else (self._line * tile.k).to(U64)
        self._source.set(self._source.get() + step)
