"""Block scales of one operand on their way into the mainloop's stages: one number for 1 or 128 rows (of M or N) and 128
of K.

Each CTA brings its own, also where A and B are multicast: so those who read them hand them back to their own CTA only,
which takes no wider scope. What lies in the place of a row beyond the operand's multiplies only what is never stored.
"""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.pointer import Pointer
from gemmsmith.core.problem import BoundProblem, Scale
from gemmsmith.core.spec import KernelSpec, ScaleSpec
from gemmsmith.core.tensor_map import TensorMap
from gemmsmith.hw.tma import EVICT_NORMAL
from gemmsmith.lang.builder import current
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import F32, I32, I64, U32, U64, Type
from gemmsmith.lang.values import Constant, Registers, Value
from gemmsmith.schedule.tiles import Coordinates, WorkTile

WARP = 32


class StagedScales:
    """The scales of the operand number `index` for a tile, fp32, in each stage."""

    def __init__(self, index: int, scale: ScaleSpec, rows: int, stages: int) -> None:
        self.index, self.scale, self.count, self.name = index, scale, scale.count(rows), f"scale_{'ab'[index]}"
        nbytes, alignment = scale.staged_bytes(rows), 128 if scale.by_tma else 16
        self.stages = current().shared(nbytes, stages=stages, alignment=alignment, name=f"scales of {'ab'[index]}")

    def read(self, stage: Value, number: Value | int, count: int = 1) -> Registers:
        """Loads `count` of them from the `number`-th on."""
        held = current().registers(F32, count, "scale")
        hw.load_shared(held, self.stages[stage].at(number, 4).address)
        return held


class LoadedScales(StagedScales):
    """By TMA, as the mainloop's operands are: those of single rows, contiguous along them. Kernel argument: `scale_a`
    or `scale_b`, a tensor map."""

    def __init__(self, index: int, scale: ScaleSpec, rows: int, stages: int) -> None:
        super().__init__(index, scale, rows, stages)
        self.map = current().tensor_map(self.name, self._map)

    def load(self, stage: Value, full: SharedView, at: Coordinates, k_tile: Value) -> None:
        """Starts the copy of a k-tile's into a stage. Recorded in one thread."""
        hw.tma_load(self.map, at.row, k_tile, at.batch, self.stages[stage], full, EVICT_NORMAL)

    def bytes_of_stage(self, p: BoundProblem) -> int:
        """What a copy brings."""
        return self.count * 4 if p.k else 0

    def _map(self, p: BoundProblem) -> TensorMap:
        if not p.k:
            return TensorMap(0, FP32, (16, 1, 1), (64, 0), (16, 1, 1), 0)
        x = scale_of(p, self.index)
        extents, strides = (x.matrix.rows, x.matrix.cols, p.batch), (x.matrix.col_stride * 4, x.matrix.batch_stride * 4)
        return TensorMap(Pointer(x.name), FP32, extents, strides, (self.count, 1, 1), 0)


class CopiedScales(StagedScales):
    """Element by element, by the lanes of a warp of its own, so that they may lie in any layout. Kernel arguments:
    `scale_a` or `scale_b`, where they lie, how many there are along the operand's rows, and strides."""

    def __init__(self, index: int, scale: ScaleSpec, rows: int, stages: int) -> None:
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
        with k.unroll(0, self.count, WARP, name="first") as first:
            source = (at + first.to(I64) * self._row_stride * self.scale.dtype.bytes).to(U64)
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


def staged(spec: KernelSpec) -> list[StagedScales]:
    """Those of the operands that have some; first those that are aligned to more."""
    found = [(i, scale) for i, scale in enumerate(spec.scales) if scale]
    found.sort(key=lambda x: not x[1].by_tma)
    kinds = {True: LoadedScales, False: CopiedScales}
    return [kinds[x.by_tma](i, x, spec.config.tile[i], spec.config.stages) for i, x in found]


def scale_of(p: BoundProblem, index: int) -> Scale:
    """The block scales of an operand that has some."""
    found = p.scales[index]
    assert found
    return found
