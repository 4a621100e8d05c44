"""Where the 16-byte chunks of a swizzled tile lie in shared memory: by row and column, and one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from gemmsmith.core.tile import Tile, swizzled
from gemmsmith.lang.types import I32, U32
from gemmsmith.lang.values import Constant, Value

CHUNK_BYTES = 16


def chunk_offset(tile: Tile, row: Value, chunk: Value | int, byte: Value | int = 0) -> Value:
    """Byte offset of a 16-byte chunk of a row, plus `byte`, in a tile that may be several boxes."""
    per_box = tile.pitch // CHUNK_BYTES
    swizzle_row = {128: row % 8, 64: row // 2 % 4, 32: row // 4 % 2}.get(tile.swizzle)
    base = row * tile.pitch
    if tile.boxes > 1:
        base, chunk = base + chunk // per_box * tile.box_bytes, chunk % per_box
    where = chunk if swizzle_row is None else swizzle_row ^ chunk
    return (base + (where << 4) + byte).to(U32)


@dataclass(frozen=True)
class Turn:
    """One of a thread's chunks: it lies `offset` bytes behind the tile's start, in `row` of `box`, counted from the
    thread's first; None where some threads have none in this turn."""

    offset: Value
    row: int
    box: int
    inside: Value | None


class Chunks:
    """The chunks of a tile, which `threads` threads move, a multiple of 128: thread t those with number t, t + threads
    and so on, row by row and box by box. `row`, `box` and `chunk` say where its first lies; the others are in the same
    column of their box."""

    def __init__(self, tile: Tile, thread: Value, threads: int) -> None:
        per_row = tile.pitch // CHUNK_BYTES
        self.tile, self._thread, self._threads = tile, thread, threads
        self._lines = threads // per_row
        """Rows, of all boxes, that the threads move in one turn."""
        line = (thread // per_row).named("line")
        self.chunk = (thread % per_row).named("chunk")
        self.row: Value = line
        self.box: Value = Constant(I32, 0)
        if self._lines > tile.outer:
            self.row, self.box = (line % tile.outer).named("row_of_box"), (line // tile.outer).named("box")
        self._offset = swizzled(thread * CHUNK_BYTES, tile.swizzle).to(U32).named("chunk_of_thread")

    def turns(self) -> list[Turn]:
        """The turns in which this thread moves its chunks."""
        tile, found = self.tile, []
        total = tile.bytes // CHUNK_BYTES
        for first in range(0, total, self._threads):
            lines = first // self._threads * self._lines
            row, box = lines % tile.outer, lines // tile.outer
            assert tile.boxes == 1 or self._lines % tile.outer == 0 or tile.outer % self._lines == 0
            inside = None if first + self._threads <= total else self._thread < total - first
            found.append(Turn(self._offset + first * CHUNK_BYTES, row, box, inside))
        return found
