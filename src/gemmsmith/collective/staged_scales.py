"""Block scales of one operand on their way into shared memory, mostly the mainloop's stages: one number for 1 or 128
rows (of M or N) and 128 of K.

Each CTA brings its own, also where A and B are multicast: so those who read them hand them back to their own CTA only,
which takes no wider scope. What lies in the place of a row beyond the operand's multiplies only what is never stored.
"""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.pipeline import PipelineTmaAsync
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.pointer import Pointer
from gemmsmith.core.problem import BoundProblem, Matrix, Scale
from gemmsmith.core.spec import SCALE_BOX, KernelSpec, ScaleSpec
from gemmsmith.core.tensor_map import TensorMap
from gemmsmith.hw.tma import EVICT_NORMAL
from gemmsmith.lang.builder import current
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import F32, I32, I64, U32, U64, Type
from gemmsmith.lang.values import Constant, Registers, Value
from gemmsmith.schedule.tiles import Coordinates, WorkTile

WARP = 32


class StagedScales:
    """The scales of the operand number `index` for a tile, fp32, in each stage. `readers`: as of the Mainloop."""

    def __init__(self, index: int, scale: ScaleSpec, rows: int, stages: int, readers: int = 1) -> None:
        self.index, self.scale, self.count, self.name = index, scale, scale.count(rows), f"scale_{'ab'[index]}"
        self.slots, nbytes, alignment = scale.slots(stages), scale.staged_bytes(rows), 128 if scale.by_tma else 16
        self.stages = current().shared(nbytes, stages=self.slots, alignment=alignment, name=f"scales of {'ab'[index]}")

    def start(self) -> None:
        """In a math warpgroup, before its first tile. Only BoxedScales, which have barriers of their own, do anything
        here and in the next four."""

    def skip(self, k_tiles: Value, tiles: Value | int) -> None:
        """Those of other warpgroups' tiles."""

    def begin_tile(self, tile: WorkTile) -> None:
        """Before a tile."""

    def wait(self) -> None:
        """Until a k-tile's are there, whose stage is full."""

    def release(self) -> None:
        """Behind the last `read` of a k-tile's, by all lanes of a warp."""

    def read(self, stage: Value, number: Value | int, count: int = 1) -> Registers:
        """Loads `count` of them from the `number`-th on."""
        held = current().registers(F32, count, "scale")
        hw.load_shared(held, self.stages[stage].at(number, 4).address)
        return held


class LoadedScales(StagedScales):
    """By TMA, as the mainloop's operands are: those of single rows, contiguous along them. Kernel argument: `scale_a`
    or `scale_b`, a tensor map."""

    def __init__(self, index: int, scale: ScaleSpec, rows: int, stages: int, readers: int = 1) -> None:
        super().__init__(index, scale, rows, stages)
        self.map = current().tensor_map(self.name, self._map)

    def early(self, k_tiles: Value, tile: WorkTile) -> Value:
        """How many of the first tile's first k-tiles `load` may start `alone`."""
        return k_tiles

    def start_producer(self, started: Value) -> None:
        """Before `load` in the producer, behind the k-tiles that are `started`."""

    def load(
        self, stage: Value, full: SharedView, tile: WorkTile, k_tile: Value, number: Value, *, alone: bool
    ) -> None:
        """Starts the copy for a tile's k-tile, the `number`-th of K, into a stage; `alone`: in place of the producer,
        for the very first ones. Recorded in one thread."""
        at = tile.operands[self.index]
        hw.tma_load(self.map, at.row, number, at.batch, self.stages[stage], full, EVICT_NORMAL)

    def bytes_of_stage(self, p: BoundProblem) -> int:
        """What a copy brings."""
        return self.count * 4 if p.k else 0

    def _map(self, p: BoundProblem) -> TensorMap:
        x = scale_of(p, self.index)
        return _map_of(x.name, x.matrix.T, p, (self.count, 1, 1))


class BoxedScales(LoadedScales):
    """By TMA likewise: those of single rows that are contiguous along K. A box has those of SCALE_BOX k-tiles: TMA
    brings at least 16 bytes, and from multiples of 16 on. Boxes are read for longer than a stage, so they have barriers
    of their own. Each tile begins with a new box."""

    def __init__(self, index: int, scale: ScaleSpec, rows: int, stages: int, readers: int = 1) -> None:
        super().__init__(index, scale, rows, stages)
        self.pipe = PipelineTmaAsync(
            self.slots, transaction_bytes=SCALE_BOX * self.count * 4, readers=readers, name=f"boxes of {'ab'[index]}"
        )

    def bytes_of_stage(self, p: BoundProblem) -> int:
        return 0

    def _map(self, p: BoundProblem) -> TensorMap:
        x = scale_of(p, self.index)
        return _map_of(x.name, x.matrix, p, (SCALE_BOX, self.count, 1))

    def early(self, k_tiles: Value, tile: WorkTile) -> Value:
        return current().minimum(k_tiles, SCALE_BOX - tile.k_tile(Constant(I32, 0)) % SCALE_BOX)  # those of one box

    def start_producer(self, started: Value) -> None:
        self._write = self.pipe.producer_start_state(current().select(started > 0, 1, 0))

    def load(
        self, stage: Value, full: SharedView, tile: WorkTile, k_tile: Value, number: Value, *, alone: bool
    ) -> None:
        k, at, first = current(), tile.operands[self.index], k_tile == 0
        with k.when(first if alone else first | _is_edge(tile, number, 0)):
            box = k_tile if alone else self._write.index
            if alone:
                self.pipe.producer_begin(box)
            else:
                self.pipe.producer_acquire(self._write)
            where = self.map, number - number % SCALE_BOX, at.row, at.batch
            hw.tma_load(*where, self.stages[box], self.pipe.barrier(box), EVICT_NORMAL)
            if not alone:
                self._write.advance()

    def start(self) -> None:
        self._read, self._k_tile = self.pipe.consumer_start_state(), current().var(I32, 0, "scaled_k_tile")

    def skip(self, k_tiles: Value, tiles: Value | int) -> None:
        self._read.skip((k_tiles + (SCALE_BOX - 1)) // SCALE_BOX * tiles)

    def begin_tile(self, tile: WorkTile) -> None:
        self._tile = tile
        self._k_tile.set(0)

    def wait(self) -> None:
        self.pipe.consumer_wait(self._read)
        self._number = self._tile.k_tile(self._k_tile.get())

    def read(self, stage: Value, number: Value | int, count: int = 1) -> Registers:
        k, box = current(), self.stages[self._read.index].at(self._number % SCALE_BOX, 4)
        held = k.registers(F32, count, "scale")
        for i in range(count):
            one = k.registers(F32, 1, "one")
            hw.load_shared(one, box.at(number + i, 4 * SCALE_BOX).address)
            held[i] = one[0]
        return held

    def release(self) -> None:
        k, following = current(), self._k_tile.get() + 1
        with k.when((following == self._tile.k_tiles) | _is_edge(self._tile, self._number, SCALE_BOX - 1)):
            self.pipe.consumer_release(self._read)
            self._read.advance()
        self._k_tile.set(following)


def _is_edge(tile: WorkTile, number: Value, edge: int) -> Value:
    """Whether a k-tile is the one at the `edge` of its box, or, where the tile goes backwards, at the other."""
    if tile.backwards is None:
        return number % SCALE_BOX == edge
    return number % SCALE_BOX == current().select(tile.backwards, SCALE_BOX - 1 - edge, edge)


class CopiedScales(StagedScales):
    """Element by element, by the lanes of a warp of its own, so that they may lie in any layout. Kernel arguments:
    `scale_a` or `scale_b`, where they lie, how many there are along the operand's rows, and strides."""

    def __init__(self, index: int, scale: ScaleSpec, rows: int, stages: int, readers: int = 1) -> None:
        def parameter(what: str, attribute: str, type: Type = I64) -> Value:
            return k.parameter(f"{self.name}_{what}", type, lambda p: getattr(scale_of(p, index).matrix, attribute))

        super().__init__(index, scale, rows, stages)
        k = current()
        self._address = k.pointer(self.name, lambda p: Pointer(scale_of(p, index).name))
        self._rows = parameter("rows", "rows", I32)
        self._row_stride = parameter("row_stride", "row_stride")
        self._k_stride = parameter("k_stride", "col_stride")
        self._batch_stride = parameter("batch_stride", "batch_stride")

    def begin(self, at: Coordinates, tile: WorkTile) -> None:
        """Before the copies for a tile, whose part of the operand is there. Recorded in a warp."""
        k, nbytes = current(), self.scale.dtype.bytes
        row, block = at.row // self.scale.rows + k.lane, tile.k_tile(Constant(I32, 0))
        start = at.batch.to(I64) * self._batch_stride + row.to(I64) * self._row_stride + block.to(I64) * self._k_stride
        self._left = (self._rows - row).named("rows_left")
        self._at = k.var(I64, self._address.to(I64) + start * nbytes, "scale_at")
        step = self._k_stride * nbytes
        self._step = step if tile.backwards is None else k.select(tile.backwards, -step, step).named("step")

    def bring(self, stage: Value) -> None:
        """Starts the copies of the next k-block into a stage."""
        k, at = current(), self._at.get()
        begin = hw.opaque(at)  # or each copy's address would have registers of its own
        with k.unroll(0, self.count, WARP, name="first") as first:
            source = (begin + first.to(I64) * self._row_stride * self.scale.dtype.bytes).to(U64)
            with k.when(first + k.lane < self.count):
                self._copy(self.stages[stage].at(first + k.lane, 4), source, first < self._left)
        self._at.set(at + self._step)

    def _copy(self, to: SharedView, source: Value, exists: Value) -> None:
        k = current()
        if self.scale.dtype == FP32:
            hw.cp_async_copy(to.address, source, k.select(exists, 4, 0).to(U32), 4)
        else:
            one = k.registers(F32, 1, "scale")
            one[0] = hw.unpack_ue8m0(hw.load_global_narrow(source, exists, 8).to(U32))
            hw.store_shared(one, to.address)


def _map_of(name: str, matrix: Matrix, p: BoundProblem, box: tuple[int, int, int]) -> TensorMap:
    """The map of a row-major matrix of scales."""
    if not p.k:
        return TensorMap(0, FP32, (16, 1, 1), (64, 0), (16, 1, 1), 0)
    extents, strides = (matrix.cols, matrix.rows, p.batch), (matrix.row_stride * 4, matrix.batch_stride * 4)
    return TensorMap(Pointer(name), FP32, extents, strides, box, 0)


def staged(spec: KernelSpec, readers: int = 1) -> list[StagedScales]:
    """Those of the operands that have some; first those that are aligned to more."""
    found = [(i, scale) for i, scale in enumerate(spec.scales) if scale]
    found.sort(key=lambda x: not x[1].by_tma)
    kinds = {"MN": LoadedScales, "K": BoxedScales, None: CopiedScales}
    return [kinds[x.by_tma](i, x, spec.config.tile[i], spec.config.stages, readers) for i, x in found]


def scale_of(p: BoundProblem, index: int) -> Scale:
    """The block scales of an operand that has some."""
    found = p.scales[index]
    assert found
    return found
