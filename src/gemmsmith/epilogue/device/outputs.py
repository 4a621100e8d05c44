"""Matrix results leaving the kernel: through swizzled shared memory by TMA, or element by element."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from gemmsmith import hw
from gemmsmith.collective.operand import box_rows, tensor_map
from gemmsmith.collective.swizzle import CHUNK_BYTES, Chunks
from gemmsmith.core.dtypes import FP32, DType
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.graph import Extent
from gemmsmith.core.mma import QUAD, WARPGROUP
from gemmsmith.core.pointer import Pointer
from gemmsmith.core.problem import BoundProblem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.core.tensor_map import TensorMap
from gemmsmith.core.tile import Tile
from gemmsmith.epilogue.device import fragment
from gemmsmith.epilogue.device.addressed import Addressed
from gemmsmith.epilogue.device.inputs import Part, Position, boxes_at
from gemmsmith.epilogue.device.layout import Layout
from gemmsmith.hw.tma import EVICT_FIRST
from gemmsmith.lang.builder import current
from gemmsmith.lang.shared import SharedBuffer
from gemmsmith.lang.types import F32, I32, U16, U32
from gemmsmith.lang.values import Value


def result_argument(name: str) -> str:
    """The kernel argument of a matrix result."""
    return name if name == "out" else f"out_{name}"


def _boxes(name: str, tile: Tile, p: BoundProblem) -> TensorMap:
    """The map of a matrix result, written in boxes of no more rows than it has."""
    matrix = p.arrays[name]
    rows = box_rows(tile, matrix.rows, tile.outer)
    return tensor_map(matrix, tile, rows, Pointer(result_argument(name)), p.batch)


class Stores:
    """Matrix results: buffers for `round` x `sets` pieces a warpgroup, from which they go out.

    By TMA: one thread issues the stores of a round's pieces, and the next round waits only for its own set, so the
    last stores drain under the next tile's mainloop. Without it all threads copy, 16 bytes each where TMA could; else
    element by element, lanes along whichever index is contiguous.
    """

    def __init__(self, spec: KernelSpec, plan: Layout, extents: dict[str, Extent], over: range | None) -> None:
        """The buffers lie in `over`, if it is given: bytes of shared memory."""
        k, consumers = current(), spec.config.consumers
        self.stores, self.extents, self.round, self.sets = plan.stores, extents, plan.round, plan.sets
        self._streaming = spec.config.streaming_stores
        self.column_major, self._in_chunks = spec.epilogue.column_major, spec.epilogue.tma - spec.tma
        self.maps: dict[str, Value] = {}
        self.arrays: dict[str, Addressed] = {}
        for name, tile in self.stores:
            if name in spec.tma:
                self.maps[name] = k.tensor_map(result_argument(name), partial(_boxes, name, tile))
            else:
                self.arrays[name] = Addressed(result_argument(name), name, tile.dtype, m=True, n=True)
        slots = self.round * self.sets * consumers
        self.buffers: dict[str, SharedBuffer] = {}
        offset = over.start if over else None
        for name, tile in self.stores:
            buffer = self.buffers[name] = k.shared(tile, stages=slots, name=name, offset=offset)
            offset = buffer.offset + buffer.bytes if over else None
        if over and offset not in range(over.stop + 1):
            raise ConfigError(
                f"alias_epilogue: results need {offset} bytes of stages that have {over.stop}; use more stages"
            )

    def of_piece(self, part: Part, number: Value) -> dict[str, Value]:
        """The addresses of the warpgroup's buffers of that number."""
        size = self.round * self.sets  # a warpgroup's buffers
        found = {name: b[number].at(part.warpgroup, size * b.slot_bytes) for name, b in self.buffers.items()}
        return {name: view.address.named(f"{name}_buffer") for name, view in found.items()}

    def acquire(self, round_index: Value, rounds: int) -> None:
        """In the leader: until the round's set has been read.

        After an odd number of rounds a tile begins with the set that the last one ended with.
        """
        k = current()
        if rounds % self.sets:
            with k.when(round_index == 0):
                hw.bulk_wait_read(0)
            with k.otherwise():
                hw.bulk_wait_read(self.sets - 1)
        else:
            hw.bulk_wait_read(self.sets - 1)

    def issue(self, part: Part, at: Position) -> None:
        """In the leader: the TMA stores of a piece."""
        for name, tile in self.stores:
            if name not in self.maps:
                continue
            for box, where in enumerate(boxes_at(tile, *self._origin(name, tile, part, at))):
                store = self.maps[name], *where, part.work.batch, at.buffers[name] + box * tile.box_bytes
                if self._streaming:
                    hw.tma_store_hint(*store, EVICT_FIRST)
                else:
                    hw.tma_store(*store)

    def copy(self, part: Part, at: Position) -> None:
        """In all threads: the other results of a piece."""
        for name, tile in self.stores:
            if name in self.arrays:
                (self._copy_chunks if name in self._in_chunks else self._copy)(self.arrays[name], tile, at, part)

    def _origin(self, name: str, tile: Tile, part: Part, at: Position) -> tuple[Value, Value]:
        """Where a piece begins in its matrix."""
        extent = self.extents[name]
        m, n = part.origin(extent)
        return m + at.block * tile.mn, n + at.column // extent.width

    def _copy_chunks(self, array: Addressed, tile: Tile, at: Position, part: Part) -> None:
        """Rows (columns, if MN-major) are whole chunks."""
        k, extent, chunks = current(), self.extents[array.name], Chunks(tile, current().thread % WARPGROUP, WARPGROUP)
        (m, n), buffer = self._origin(array.name, tile, part, at), at.buffers[array.name]
        rows, columns = part.rows_in_all // extent.height, part.columns_in_all // extent.width
        for turn in chunks.turns():
            along = (chunks.box + turn.box) * tile.box_inner + chunks.chunk * (CHUNK_BYTES // tile.dtype.bytes)
            row, col = (chunks.row + turn.row, along) if tile.major == "K" else (along, chunks.row + turn.row)
            inside = (m + row < rows) & (n + col < columns)
            with nullcontext() if turn.inside is None else k.when(turn.inside):
                values = k.registers(U32, CHUNK_BYTES // 4, "values")
                hw.load_shared(values, buffer + turn.offset)
                hw.store_global(values, array.at(part.work.batch, m + row, n + col), inside)

    def _copy(self, array: Addressed, tile: Tile, at: Position, part: Part) -> None:
        """Each warp takes a quarter of the rows (of the columns, if `column_major`), a lane the elements along it."""
        k, extent, column_major = current(), self.extents[array.name], array.name in self.column_major
        across, along = (tile.k, tile.mn) if column_major else (tile.mn, tile.k)
        share = -(-across // 4)
        first = (k.warp_index % 4) * share
        (m, n), buffer = self._origin(array.name, tile, part, at), at.buffers[array.name]
        batch = next(n for n in (4, 2, 1) if share % n == 0)
        with (
            k.range(share // batch, name="group") as group,
            k.unroll(batch, name="line") as line,
            k.unroll(0, along, 32, name="start") as start,
        ):
            other = first + group * batch + line
            row, col = (start + k.lane, other) if column_major else (other, start + k.lane)
            inside = (m + row < part.rows_in_all // extent.height) & (n + col < part.columns_in_all // extent.width)
            if along % 32 or across % 4:
                inside = inside & (row < tile.mn) & (col < tile.k)
            where = array.at(part.work.batch, m + row, n + col)
            inside_col = col if along % 32 == 0 else k.minimum(col, tile.k - 1)
            _move(buffer + fragment.element_offset(tile, row, inside_col), where, inside, tile.dtype)


def _move(address: Value, where: Value, inside: Value, dtype: DType) -> None:
    if dtype.bits == 32:
        one = current().registers(F32 if dtype == FP32 else I32, 1, "element")
        hw.load_shared(one, address)
        hw.store_global(one, where, inside)
        return
    value = hw.load_shared_narrow(address, dtype.bits)
    hw.store_global_narrow(where, value, inside, dtype.bits)


def store_rounded(value: Value, where: Value, inside: Value, dtype: DType) -> None:
    """An fp32 value, rounded to fp32, fp16 or bf16, or an int32 as it is, at a global address where `inside`."""
    if dtype.bits == 32:
        hw.store_global_word(where, value, inside, "stored")
    else:
        hw.store_global_narrow(where, hw.pack(value, value, dtype).to(U16), inside, 16)


class ScaleStore:
    """The scales of a quantized result: one a row and piece."""

    def __init__(self, name: str, dtype: DType, columns: int) -> None:
        self.array, self.columns = Addressed(result_argument(name), name, dtype, m=True, n=True), columns

    def write(self, part: Part, block: Value, column: Value, scales: list[Value]) -> None:
        """The scales of the rows of a piece, one lane a row."""
        k = current()
        first = part.work.n + column
        for half, scale in enumerate(scales):
            row = part.row(block, half, 1)
            inside = (k.lane % QUAD == 0) & (row < part.rows_in_all) & (first < part.columns_in_all)
            where = self.array.at(part.work.batch, row, first // self.columns)
            store_rounded(scale, where, inside, self.array.dtype)
