"""Matrix results leaving the kernel: through swizzled shared memory by TMA, or element by element."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.dtypes import E4M3, FP32, DType
from gemmsmith.core.tile import Tile
from gemmsmith.epilogue.inputs import Addressed, Part, Spot
from gemmsmith.lang.builder import current
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import F32, U16
from gemmsmith.lang.values import Value


def result_argument(name: str) -> str:
    """The kernel argument of a matrix result."""
    return name if name == "out" else f"out_{name}"


class TmaStores:
    """All results that TMA writes: buffers for `round` x `sets` pieces a warpgroup.

    A round's pieces are written, one thread issues their stores, and the next round waits only for its own set: the
    last stores drain under the next tile's mainloop.
    """

    def __init__(self, stores: tuple[tuple[str, Tile], ...], widths: dict[str, int], round: int, sets: int,
                 consumers: int) -> None:  # fmt: skip
        k = current()
        self.stores, self.widths, self.round, self.sets = stores, widths, round, sets
        self.maps = {name: k.tensor_map(result_argument(name)) for name, _ in stores}
        self.buffers = {name: k.shared(tile, stages=round * sets * consumers, name=name) for name, tile in stores}

    def buffer(self, name: str, part: Part, turn: int, i: int) -> SharedView:
        """Piece i of round `turn`."""
        buffer = self.buffers[name]
        size = self.round * self.sets * buffer.slot_bytes  # of a warpgroup's buffers
        return buffer[turn % self.sets * self.round + i].at(part.warpgroup, size)

    def acquire(self, turn: int, turns: int) -> None:
        """In the leader: until the round's set has been read.

        After an odd number of rounds a tile begins with the set that the last one ended with.
        """
        hw.bulk_wait_read(0 if turn == 0 and turns % self.sets else self.sets - 1)

    def issue(self, part: Part, turn: int, i: int, block: int, column: int) -> None:
        """In the leader: the stores of piece i of a round, whose first column in the tile is `column`."""
        for name, tile in self.stores:
            n = part.work.n // self.widths[name] + column // self.widths[name]
            for box in range(tile.boxes):
                place = self.buffer(name, part, turn, i).at(box * tile.box_bytes)
                hw.tma_store(self.maps[name], n + box * tile.box_inner, part.m + block * 64, part.work.batch, place)


class ScaleStore:
    """The scales of a quantised result: one a row and piece, fp32."""

    def __init__(self, name: str, columns: int) -> None:
        self.array, self.columns = Addressed(result_argument(name), FP32, m=True, n=True), columns

    def write(self, part: Part, block: int, column: int, scales: list[Value]) -> None:
        """The scales of the rows of a piece, one lane a row."""
        k = current()
        first = part.work.n + column
        for half, scale in enumerate(scales):
            row = part.row(block, half)
            one = k.registers(F32, 1, "scale")
            one[0] = scale
            inside = (k.lane % 4 == 0) & (row < part.rows_in_all) & (first < part.columns_in_all)
            hw.store_global(one, self.array.at(part.work.batch, row, first // self.columns), inside)


class DirectStore:
    """A result that TMA cannot write: each thread stores its elements inside the matrix, any strides, any alignment."""

    def __init__(self, name: str, dtype: DType, width: int) -> None:
        self.array, self.dtype, self.width = Addressed(result_argument(name), dtype, m=True, n=True), dtype, width

    def write(self, part: Part, spot: Spot, j: int, half: int, pair: tuple[Value, Value]) -> None:
        k = current()
        row = part.row(spot.block, half)
        first = part.work.n // self.width + spot.column + (spot.chunk + j) * 8 + (k.lane % 4) * 2
        last = part.columns_in_all // self.width
        packed = None
        if self.dtype.bits == 16:
            packed = hw.pack(*pair, self.dtype)
        elif self.dtype != FP32:
            packed = hw.pack_fp8(*pair, "e4m3" if self.dtype == E4M3 else "e5m2")
        for i in range(2):
            inside = (row < part.rows_in_all) & (first + i < last)
            where = self.array.at(part.work.batch, row, first + i)
            if self.dtype == FP32:
                one = k.registers(F32, 1, "value")
                one[0] = pair[i]
                hw.store_global(one, where, inside)
            elif self.dtype.bits == 16 and packed is not None:
                hw.store_global_16(where, (packed >> 16 * i).to(U16), inside)
            elif packed is not None:
                hw.store_global_8(where, packed >> 8 * i, inside)
