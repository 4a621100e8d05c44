"""An operand of the mainloop: its stages of shared memory, and TMA copies that bring its tiles into them."""

from __future__ import annotations

from functools import partial

from gemmsmith import hw
from gemmsmith.core.pointer import Pointer
from gemmsmith.core.problem import BoundProblem, Matrix, Source
from gemmsmith.core.tensor_map import TensorMap
from gemmsmith.core.tile import ATOM_ROWS, Tile
from gemmsmith.hw.tma import EVICT_NORMAL
from gemmsmith.lang.builder import current
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import I32, U16
from gemmsmith.lang.values import Constant, Value, as_value


class Operand:
    """A tile of an operand in each of `stages` stages. Kernel arguments: `name`, its tensor map; where CTAs share the
    tile, `name`_part, the rows of the boxes that each of them brings; `name`_low, the map of its low part, if it has
    one. `policy`: the L2's."""

    def __init__(
        self, name: str, tile: Tile, stages: int, source: Source, policy: Constant = EVICT_NORMAL,
        low: Source | None = None,
    ) -> None:  # fmt: skip
        self.name, self.tile, self.policy, self._source = name, tile, policy, source
        self.map = current().tensor_map(name, partial(self._map_of, source))
        self.low = current().tensor_map(f"{name}_low", partial(self._map_of, low)) if low else None
        self.stages = current().shared(tile, stages=stages, name=name.upper(), partial_writes=True)
        self._parts = 1
        self._part: Value | int = 0
        self._part_rows: Value | int = 0
        self._mask: Value | int = 1

    def multicast(self, parts: int, part: Value | int, mask: Value | int) -> None:
        """`parts` CTAs of the cluster need the same tile: each brings one part of its rows, `part` being this CTA's, to
        all the CTAs of `mask`."""
        if parts > 1:
            self._parts, self._part, self._mask = parts, part, mask
            self._part_rows = current().parameter(f"{self.name}_part", bind=self._rows_of_part)

    @property
    def copies(self) -> int:
        """How many copies bring a whole tile."""
        return self._parts * self.tile.boxes

    @property
    def maps(self) -> list[Value]:
        """The operand's tensor maps."""
        return [x for x in (self.map, self.low) if x is not None]

    def load(
        self, stage: Value, barrier: SharedView, mn: Value, k: Value, batch: Value, *, alone: bool = False,
        low: Value | None = None,
    ) -> None:  # fmt: skip
        """Starts the copies of the tile at rows `mn`, depth `k`, into a stage; `alone`: all parts, into this CTA's;
        `low`: whether of its low part. Recorded in one thread."""
        copy = partial(self._copy, stage, barrier, mn, k, batch, alone=alone)
        if low is None or self.low is None:
            copy(self.map)
            return
        with current().when(low):
            copy(self.low)
        with current().otherwise():
            copy(self.map)

    def _copy(
        self, stage: Value, barrier: SharedView, mn: Value, k: Value, batch: Value, map: Value, *, alone: bool
    ) -> None:
        tile = self.tile
        for part in range(self._parts) if alone else [self._part]:
            first = as_value(part * self._part_rows, I32).named("first_row")
            for box in range(tile.boxes):
                inner, outer = (k, mn) if tile.major == "K" else (mn, k)
                destination = self.stages[stage].at(box * tile.box_bytes).at(first, tile.pitch)
                where = (map, inner + box * tile.box_inner, outer + first, batch, destination, barrier)
                if alone or self._parts == 1:
                    hw.tma_load(*where, self.policy)
                else:
                    mask = self._mask if isinstance(self._mask, int) else self._mask.to(U16)
                    hw.tma_load_multicast(*where, mask, self.policy)

    # -- what the host computes of a problem ---------------------------------------------------------------
    def bytes_of_stage(self, p: BoundProblem) -> int:
        """What the copies of all parts bring into a stage."""
        rows = self._box_rows(self._source(p)[0])
        return rows * self.tile.pitch * self.copies if p.k else 0

    def _rows_of_part(self, p: BoundProblem) -> int:
        return part_rows(self.tile, self._source(p)[0].rows, self._parts)

    def _map_of(self, source: Source, p: BoundProblem) -> TensorMap:
        matrix, address = source(p)
        if not p.k:  # no k-tile is ever loaded, and extents of zero cannot be encoded
            return TensorMap(0, matrix.dtype, (16, 1, 1), (64, 0), (16, 1, 1), 0)
        return tensor_map(matrix, self.tile, self._box_rows(matrix), address, p.batch)

    def _box_rows(self, matrix: Matrix) -> int:
        return box_rows(self.tile, matrix.rows, part_rows(self.tile, matrix.rows, self._parts))


def part_rows(tile: Tile, extent: int, parts: int) -> int:
    """Rows of a tile's boxes that each of `parts` CTAs brings, for an operand of `extent` rows: its share of those that
    there are, in whole swizzle atoms."""
    if tile.major == "MN" or extent >= tile.outer:
        return tile.outer // parts
    return min(-(-extent // (parts * ATOM_ROWS)) * ATOM_ROWS, tile.outer // parts)


def box_rows(tile: Tile, extent: int, part: int) -> int:
    """Rows of the boxes in which a part is read, no more than the operand has. Those outside of a tensor take the copy
    engine about 5 cycles each to fill with zeros; what lies in their place instead reaches only what is never stored.
    Where rows count depth they must be zeros."""
    return part if tile.major == "MN" else min(part, extent)


def tensor_map(matrix: Matrix, tile: Tile, rows: int, address: Pointer, batch: int) -> TensorMap:
    """The tensor map of a (M or N) x K matrix, read or written in a tile's boxes, of so many rows."""
    inner, outer, stride = matrix.cols, matrix.rows, matrix.row_stride
    if tile.major == "MN":
        inner, outer, stride = matrix.rows, matrix.cols, matrix.col_stride
    size = matrix.dtype.bytes
    return TensorMap(
        address, matrix.dtype, (inner, outer, batch), (stride * size, matrix.batch_stride * size),
        (tile.box_inner, rows, 1), tile.swizzle,
    )  # fmt: skip
