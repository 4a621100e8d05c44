"""Operands of an epilogue inside the kernel: scalars, rows, columns, matrices by TMA or element by element.

Each has three steps. `begin` starts its loads before the tile's mainloop, which hides them; `settle` puts a row into
shared memory once the mainloop is over; `fetch` reads what a piece needs, before any of it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gemmsmith import hw
from gemmsmith.collective.operand import tensor_map
from gemmsmith.core.graph import Extent, Operand
from gemmsmith.core.mma import CHUNK, HALF_ROWS, WARPGROUP, WGMMA_M, fragment_column, fragment_row
from gemmsmith.core.pointer import Pointer
from gemmsmith.core.problem import BoundProblem
from gemmsmith.core.tensor_map import TensorMap
from gemmsmith.core.tile import Tile
from gemmsmith.epilogue.device import fragment
from gemmsmith.epilogue.device.addressed import Addressed
from gemmsmith.hw.tma import EVICT_FIRST
from gemmsmith.lang.builder import current
from gemmsmith.lang.shared import SharedBuffer
from gemmsmith.lang.types import F32, PRED, U32
from gemmsmith.lang.values import Constant, Value
from gemmsmith.schedule.tiles import WorkTile


@dataclass
class Part:
    """A warpgroup's part of a tile, and the matrix's extents: element (m + row, n + column)."""

    work: WorkTile
    m: Value
    warpgroup: Value
    rows_in_all: Value
    columns_in_all: Value

    def origin(self, extent: Extent) -> tuple[Value, Value]:
        """The part's first row and column, counted in those of a value."""
        return self.m // extent.height, self.work.n // extent.width

    def row(self, block: Value, half: int, height: int) -> Value:
        """This thread's row of a block's half."""
        return (self.m // height + self.row_of_part(block, half, height)).named("row")

    def row_of_part(self, block: Value, half: int, height: int) -> Value:
        """The same, counted in the part."""
        k = current()
        row: Value = fragment_row(k.warp_index % 4, k.lane, height) + (block * (WGMMA_M // height) + HALF_ROWS * half)
        return row

    def columns(self, spot: Spot, j: int, width: int) -> tuple[Value, Value]:
        """This thread's two columns of chunk j of a spot."""
        first = self.first_column(width) + spot.column + (spot.chunk + j) * CHUNK
        return first, first + 1

    def first_column(self, width: int) -> Value:
        """This thread's first column of the tile."""
        column: Value = self.work.n // width + fragment_column(current().lane)
        return column

    def columns_inside(self, spot: Spot, j: int, width: int) -> tuple[Value, Value]:
        """Whether they lie in the matrix: numbers known at build time beside one that is the same for all columns."""
        first = (spot.column + (spot.chunk + j) * CHUNK).named("column")
        left = (self.columns_in_all // width - self.first_column(width)).named("columns_left")
        return first < left, first + 1 < left

    def inside(self, block: Value, half: int, height: int) -> Value:
        return (self.row(block, half, height) < self.rows_in_all // height).named("row_inside")


@dataclass
class Position:
    """A piece's number in the tile, its block of 64 rows, its first column, and the shared memory through which its
    results leave, by their names."""

    piece: Value
    block: Value
    column: Value
    buffers: dict[str, Value]


@dataclass
class Spot:
    """Where in a piece a step works: `count` chunks of the operand's own columns from `chunk` on; `column` is the
    piece's first column in the tile. Both count the operand's columns (half as many for width 2)."""

    block: Value
    column: Value
    chunk: Value
    count: int


def operand_argument(name: str) -> str:
    """The kernel argument of an operand. A user's name stands behind one of a few words, none of which begins another,
    in all names of a kernel: so no two of them meet, nor one of the kernel's own, nor a word of C++."""
    return f"in_{name}"


class Scalar:
    """A Python number, which is an argument, or an element in memory, one a batch or one in all."""

    def __init__(self, operand: Operand) -> None:
        argument, dtype = operand_argument(operand.name), operand.dtype
        self.number = current().parameter(argument, F32, lambda p: Pointer(argument)) if dtype is None else None
        self.array = None if dtype is None else Addressed(argument, operand.name, dtype, m=False, n=False)

    def begin(self, part: Part) -> None:
        if self.array:
            self.held = current().registers(F32, 1, "scalar")
            self.held[0] = self.array.load(self.array.at(part.work.batch), Constant(PRED, True))

    def settle(self, part: Part) -> None:
        """Nothing."""

    def element(self, part: Part, block: Value, half: int) -> Value:
        return self.number if self.number is not None else self.held[0]


class Vector:
    """One value a column (N) or a row (M, 1): loaded once a tile, kept as fp32 in the warpgroup's shared memory.

    Registers that a thread kept from before the mainloop would let ptxas compute on later pieces before earlier ones
    are stored, for which there are no registers.
    """

    def __init__(self, operand: Operand, count: int, consumers: int) -> None:
        assert operand.dtype is not None
        self.count, self.extent, self.name = count, operand.extent, f"held_{operand.name}"
        self.width = operand.extent.width
        argument = operand_argument(operand.name)
        self.array = Addressed(argument, operand.name, operand.dtype, m=not self.width, n=bool(self.width))
        self.buffer: SharedBuffer = current().shared(4 * count, stages=consumers, name=operand.name)
        self.rounds = -(-count // WARPGROUP)

    def _element(self, round_index: int) -> Value:
        """The element, of the tile's or the warpgroup's, that this thread brings."""
        return current().thread % WARPGROUP + WARPGROUP * round_index

    def begin(self, part: Part) -> None:
        self.held = current().registers(F32, self.rounds, self.name)
        for round_index in range(self.rounds):
            element, here = self._element(round_index), part.work.batch
            if self.width:
                column = part.work.n // self.width + element
                where, inside = self.array.at(here, column=column), column < part.columns_in_all // self.width
            else:
                row = (part.m // self.extent.height + element).named("row")
                where, inside = self.array.at(here, row), row < part.rows_in_all // self.extent.height
            self.held[round_index] = self.array.load(where, inside & (element < self.count))

    def settle(self, part: Part) -> None:
        k = current()
        for round_index in range(self.rounds):
            one = k.registers(F32, 1, "element")
            one[0] = self.held[round_index]
            with k.when(self._element(round_index) < self.count):
                hw.store_shared(one, self.buffer[part.warpgroup].address + (self._element(round_index) * 4).to(U32))

    def fetch(self, part: Part, block: Value, column: Value, chunks: int) -> fragment.Pair:
        k = current()
        address = self.buffer[part.warpgroup].address
        if not self.width:
            halves = 2 // self.extent.height
            rows = k.registers(F32, halves, self.name)
            for half in range(halves):
                one, row = k.registers(F32, 1, "element"), part.row_of_part(block, half, self.extent.height)
                hw.load_shared(one, address + (row * 4).to(U32))
                rows[half] = one[0]
            return lambda chunk, half: (rows[half], rows[half])
        held = k.registers(F32, 2 * chunks, self.name)
        with k.unroll(chunks, name="chunk") as chunk:
            two = k.registers(F32, 2, "pair")
            hw.load_shared(two, address + ((chunk * CHUNK + column + fragment_column(k.lane)) * 4).to(U32))
            for i in range(2):
                held[chunk * 2 + i] = two[i]
        return lambda chunk, half: (held[chunk * 2], held[chunk * 2 + 1])


class DirectMatrix:
    """An (M, N) matrix that TMA cannot read: each thread loads its own elements, any strides."""

    def __init__(self, operand: Operand) -> None:
        assert operand.dtype is not None
        self.array = Addressed(operand_argument(operand.name), operand.name, operand.dtype, m=True, n=True)
        self.height, self.width = operand.extent.height, operand.extent.width

    def begin(self, part: Part) -> None:
        """Nothing: the elements are loaded where they are used."""

    def settle(self, part: Part) -> None:
        """Nothing."""

    def fetch(self, part: Part, block: Value, column: Value, chunks: int) -> fragment.Pair:
        k = current()
        halves = 2 // self.height
        held = k.registers(F32, 2 * halves * chunks, "loaded")
        last = part.columns_in_all // self.width
        with k.unroll(chunks, name="chunk") as chunk:
            for half in range(halves):
                row, inside = part.row(block, half, self.height), part.inside(block, half, self.height)
                first = part.work.n // self.width + column + chunk * CHUNK + fragment_column(k.lane)
                for i in range(2):
                    where = self.array.at(part.work.batch, row, first + i)
                    held[chunk * (2 * halves) + (2 * half + i)] = self.array.load(where, inside & (first + i < last))
        return fragment.held_pairs(held, halves)


def _whole_boxes(name: str, tile: Tile, p: BoundProblem) -> TensorMap:
    """The map of a matrix operand, read in whole tiles: what is loaded is counted so."""
    return tensor_map(p.arrays[name], tile, tile.outer, Pointer(operand_argument(name)), p.batch)


def boxes_at(tile: Tile, m: Value, n: Value) -> list[tuple[Value, Value]]:
    """The (inner, outer) coordinates of the boxes of a piece that begins at row m, column n of a matrix."""
    inner, outer = (n, m) if tile.major == "K" else (m, n)
    return [(inner + box * tile.box_inner, outer) for box in range(tile.boxes)]


class TmaMatrices:
    """All (M, N) matrices that TMA reads, piece by piece into slots of the warpgroup's own.

    The warpgroup's leader starts the copies: the first pieces before the mainloop, the others as slots are freed.
    A slot's barrier completes once for each piece it brings.
    """

    def __init__(self, loads: tuple[tuple[str, Tile], ...], extents: dict[str, Extent], slots: int, pieces: int,
                 parts: int, consumers: int) -> None:  # fmt: skip
        k = current()
        self.loads, self.extents = loads, extents
        self.slots, self.pieces, self.parts, self.consumers = slots, pieces, parts, consumers
        self.maps = {name: k.tensor_map(operand_argument(name), partial(_whole_boxes, name, tile))
                     for name, tile in loads}  # fmt: skip
        self.buffers = {name: k.shared(tile, stages=slots * consumers, name=name) for name, tile in loads}
        self.bytes = sum(tile.bytes for _, tile in loads)

    def init(self) -> None:
        """The barriers come behind all tiles, which want aligned places."""
        count = self.slots * self.consumers
        self.barriers = current().shared(8, stages=count, alignment=8, name="loaded")
        for i in range(self.slots * self.consumers):
            hw.mbarrier_init(self.barriers[i], 1)

    def prepare(self) -> None:
        """Before the tiles: the parity of the first piece in this tile of a slot that brings an odd number of them."""
        odd = self.pieces % self.slots or self.pieces // self.slots % 2
        self.flip = current().var(U32, 0, "tile_parity") if odd else None

    def _slot(self, part: Part, piece: Value) -> tuple[Value, Value]:
        return part.warpgroup * self.slots, piece % self.slots if self.slots < self.pieces else piece

    def load(self, part: Part, piece: Value) -> None:
        """Starts the copies of a piece. Recorded in the leader."""
        base, slot = self._slot(part, piece)
        barrier = self.barriers[slot].at(base, 8)
        block, column = piece // self.parts, piece % self.parts
        hw.mbarrier_arrive_expect_tx(barrier, self.bytes)
        for name, tile in self.loads:
            buffer = self.buffers[name]
            m, n = part.origin(self.extents[name])
            for box, where in enumerate(boxes_at(tile, m + block * tile.mn, n + column * tile.k)):
                address = buffer[slot].at(base, buffer.slot_bytes).at(box * tile.box_bytes)
                # It is read once.
                hw.tma_load(self.maps[name], *where, part.work.batch, address, barrier, EVICT_FIRST)

    def begin(self, part: Part, leader: Value) -> None:
        share = part.work.share
        k = current()
        with k.when(leader if share is None else leader & share.reduces), k.unroll(self.slots, name="piece") as piece:
            self.load(part, piece)

    def load_next(self, part: Part, piece: Value) -> None:
        """Starts the copies of what takes the slot of a piece, if there is more. Recorded in the leader."""
        if self.slots < self.pieces:
            with current().when(piece + self.slots < self.pieces):
                self.load(part, piece + self.slots)

    def wait(self, part: Part, piece: Value) -> None:
        base, slot = self._slot(part, piece)
        each, more = divmod(self.pieces, self.slots)  # the first `more` slots bring one piece more
        parity = (piece // self.slots % 2).to(U32) if self.slots < self.pieces else Constant(U32, 0)
        if self.flip is not None:
            odd = Constant(PRED, True) if not more else slot >= more if each % 2 else slot < more
            parity = current().select(odd, self.flip.get() ^ parity, parity)
        hw.mbarrier_wait(self.barriers[slot].at(base, 8), parity)

    def end_of_tile(self) -> None:
        if self.flip is not None:
            self.flip.set(self.flip.get() ^ 1)

    def fetch(self, name: str, part: Part, piece: Value, first: int, chunks: int) -> fragment.Pair:
        base, slot = self._slot(part, piece)
        buffer, tile = self.buffers[name], dict(self.loads)[name]
        return fragment.read(tile, buffer[slot].at(base, buffer.slot_bytes).address, first, chunks)
