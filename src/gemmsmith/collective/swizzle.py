"""Offsets of the 16-byte vectors of a swizzled tile in shared memory, by row and by thread."""

from __future__ import annotations

from dataclasses import dataclass

from gemmsmith.core.errors import KernelError
from gemmsmith.core.tile import Tile, swizzled
from gemmsmith.lang.types import I32, U32
from gemmsmith.lang.values import Constant, Value

VECTOR_BYTES = 16
"""Bytes of a vector: the unit of the swizzle, and the widest load and store of a thread."""


def swizzled_vector_offset(tile: Tile, row: Value, vector_idx: Value | int, byte: Value | int = 0) -> Value:
    """Return the byte offset (u32) of byte `byte` of the 16-byte vector `vector_idx` of a box row, in a swizzled tile.

    The swizzle xors the vector's index in its row with the index of the row's 128-byte line: a line holds 1, 2 or 4
    rows of 128, 64 or 32 bytes. `vector_idx` counts across the boxes of a row.
    """
    per_box = tile.pitch // VECTOR_BYTES
    xor_mask = {128: row % 8, 64: row // 2 % 4, 32: row // 4 % 2}.get(tile.swizzle)
    base = row * tile.pitch
    if tile.boxes > 1:
        base, vector_idx = base + vector_idx // per_box * tile.box_bytes, vector_idx % per_box
    swizzled_idx = vector_idx if xor_mask is None else xor_mask ^ vector_idx
    return (base + (swizzled_idx << 4) + byte).to(U32)


@dataclass(frozen=True)
class CopyStep:
    """One vector of a thread's share of a tile copy."""

    offset: Value
    """Bytes from the tile's start in shared memory."""
    row: int
    """The row, counted from that of the thread's first vector."""
    box: int
    """The box, counted from that of the thread's first vector."""
    pred: Value | None
    """This thread has a vector in this step; None: all threads have one."""


def has_whole_steps(tile: Tile, threads: int) -> bool:
    """Return whether `threads` threads can copy a tile as ThreadCopyPartition does.

    In one step each thread copies one vector of 16 bytes. A step must consist of whole rows. If the tile is stored as
    several boxes, of `tile.outer` rows each, a step must also consist of whole boxes or be an equal part of one: then a
    thread's rows of all steps have the same place in their boxes.
    """
    per_row = tile.pitch // VECTOR_BYTES
    rows = threads // per_row
    return threads % per_row == 0 and (tile.boxes == 1 or rows % tile.outer == 0 or tile.outer % rows == 0)


class ThreadCopyPartition:
    """The 16-byte vectors of tile `name` that one of `threads` threads copies (CuTe: tiled copy).

    `threads` is a multiple of 128. Thread t has vectors t, t + threads and so on, numbered row by row and box by box.
    `row`, `box` and `vector_idx` locate its first one; its others have the same `vector_idx` in their rows.
    """

    def __init__(self, tile: Tile, thread: Value, threads: int, name: str) -> None:
        """Locate the first vector of `thread`. Raises KernelError unless `has_whole_steps(tile, threads)`."""
        per_row = tile.pitch // VECTOR_BYTES
        if not has_whole_steps(tile, threads):
            raise KernelError(f"{name}: {threads} threads copy whole rows of whole boxes; got {tile}")
        self.tile, self._thread, self._threads = tile, thread, threads
        self._rows_per_step = threads // per_row
        """Rows, of all boxes, that the threads copy in one step."""
        row_of_all_boxes = (thread // per_row).named(f"{name}_copy_row")
        self.vector_idx = (thread % per_row).named(f"{name}_copy_vector")
        self.row: Value = row_of_all_boxes
        self.box: Value = Constant(I32, 0)
        if self._rows_per_step > tile.outer:
            self.row = (row_of_all_boxes % tile.outer).named(f"{name}_row_in_box")
            self.box = (row_of_all_boxes // tile.outer).named(f"{name}_box")
        offset = swizzled((thread * VECTOR_BYTES).with_name_hint("linear_offset"), tile.swizzle).to(U32)
        self._offset = offset.named(f"{name}_thread_smem_offset")

    def copy_steps(self) -> list[CopyStep]:
        """Return the steps in which this thread copies its vectors."""
        tile, steps = self.tile, []
        vectors = tile.bytes // VECTOR_BYTES
        for first in range(0, vectors, self._threads):
            rows = first // self._threads * self._rows_per_step
            row, box = rows % tile.outer, rows // tile.outer
            pred = None if first + self._threads <= vectors else self._thread < vectors - first
            steps.append(CopyStep(self._offset + first * VECTOR_BYTES, row, box, pred))
        return steps
