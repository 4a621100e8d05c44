"""A TMA operand of the mainloop: its stages of shared memory, and the TMA loads that fill them."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from gemmsmith import hw
from gemmsmith.core.arguments import INTERLEAVED_ROWS, Pointer, TensorMap
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.problem import BoundProblem, Matrix, OperandFn
from gemmsmith.core.scalars import round_up
from gemmsmith.core.spec import MmaOperand
from gemmsmith.core.tile import ATOM_ROWS, Tile
from gemmsmith.hw.tma import EVICT_FIRST, EVICT_LAST, EVICT_NORMAL
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import I32, U16
from gemmsmith.lang.values import Constant, Value, as_value
from gemmsmith.tile_scheduler.tiles import OperandCoord

EVICTION_POLICIES = {"first": EVICT_FIRST, "normal": EVICT_NORMAL, "last": EVICT_LAST}
"""The L2 eviction policies of an operand's `evict`."""


class TmaOperand:
    """An operand with a tile in each of `stages` stages, which TMA loads.

    Kernel arguments: its tensor map, of its name. If CTAs multicast the tile to one another: name_multicast_slice_m (n
    for B, k if MN-major), the rows of a box that each of them loads (see `multicast_slice_rows`). With 3xTF32:
    name_residual, the tensor map of the residuals x - tf32(x) of the elements x (CUTLASS: small). If it `skips_rows`:
    name_tail and name_residual_tail, the maps of its last slice, name_tail_row, its first row, and name_tail_rows.
    """

    def __init__(self, operand: MmaOperand, stages: int, *, skips_rows: bool = False) -> None:
        """Allocate the stages.

        `skips_rows`: the last slice of a K-major operand ends with its rows. TMA would fill more with zeros, which is
        slower than to load them: 277 x 2560 x 6848 with tiles of 112 rows takes 33 us, not 21 (tail-h200).
        """
        k, name = current_builder(), operand.name
        self.name, self.role, self.tile, self._source = name, operand.role, operand.tile, operand.source
        self._policy, self._interleaved = EVICTION_POLICIES[operand.evict], operand.interleaved
        self.skips_rows = skips_rows and operand.tile.major == "K"
        if self.skips_rows:
            self._tail_row = k.parameter(f"{name}_tail_row", compute=lambda p: self._source(p)[0].rows - self._tail(p))
            self._tail_rows = k.parameter(f"{name}_tail_rows", compute=self._tail)
        self._maps = self._declare_maps(name, operand.source)
        self.map = self._maps[0]
        self._residual_maps = self._declare_maps(f"{name}_residual", operand.residual) if operand.residual else []
        self.stages = k.shared(operand.tile, stages=stages, name=name.upper(), allow_uninitialized_reads=True)
        self._multicast_ctas = 1
        self._multicast_slice: Value | int = 0
        self._multicast_slice_extent: Value | int = 0
        self._mask: Value | int = 1

    def enable_multicast(self, ctas: int, slice_idx: Value | int, cta_mask: Value | int) -> None:
        """Let each of `ctas` CTAs of the cluster, which need the same tile, load one slice of its rows.

        This CTA loads slice `slice_idx` and multicasts it to the CTAs whose cluster rank is a set bit of `cta_mask`.
        """
        if ctas > 1:
            self._multicast_ctas, self._multicast_slice, self._mask = ctas, slice_idx, cta_mask
            self._multicast_slice_extent = current_builder().parameter(
                f"{self.name}_multicast_slice_{self._slice_dim}",
                compute=lambda p: self._multicast_slice_rows(self._source(p)[0]),
            )

    @property
    def _slice_dim(self) -> str:
        """The dimension that is divided into slices, for a name: that of the rows of a box."""
        return "k" if self.tile.major == "MN" else "m" if self.role == "a" else "n"

    @property
    def loads_per_tile(self) -> int:
        """TMA loads of all CTAs per tile."""
        return self._multicast_ctas * self.tile.boxes

    @property
    def maps(self) -> list[Value]:
        """The operand's tensor maps."""
        return [*self._maps, *self._residual_maps]

    def _declare_maps(self, name: str, source: OperandFn) -> list[Value]:
        """Return the tensor map of a source, and that of its last slice if the operand `skips_rows`."""
        return [
            current_builder().tensor_map(name + "_tail" * is_tail, partial(self._tensor_map, source, is_tail=is_tail))
            for is_tail in (False, True)[: 1 + self.skips_rows]
        ]

    def loaded_bytes(self, coord: OperandCoord) -> Value:
        """Return the bytes that the loads of all slices of a tile write to a stage."""
        k = current_builder()
        slice_rows = self._multicast_slice_extent if self._multicast_ctas > 1 else self.tile.outer
        rows: Value = Constant(I32, 0)
        for i in range(self._multicast_ctas):
            rows += k.select(self._is_whole(coord.mn + i * slice_rows), slice_rows, self._tail_rows)
        return rows * (self.tile.pitch * self.tile.boxes)

    def _is_whole(self, row: Value) -> Value:
        """Return whether a slice of a box at any `row` is loaded as a whole; TMA fills rows past the end with zeros."""
        return row < self._tail_row

    def load(
        self, stage: Value, barrier: SharedView, coord: OperandCoord, k: Value, *, multicast: bool = True,
        is_tf32_residual: Value | None = None,
    ) -> None:  # fmt: skip
        """Issue the loads of a tile into a stage. One thread executes it.

        Args:
            stage: Index of the stage.
            barrier: The stage's full barrier.
            coord: The tile's first row (column of B), and its batch.
            k: First element along K of the tile.
            multicast: Load this CTA's slice and multicast it. Otherwise load all slices into this CTA's stage only.
            is_tf32_residual: Whether to load the tile of the residuals x - tf32(x) instead; None without 3xTF32.
        """
        tile, builder, maps = self.tile, current_builder(), self._maps
        if is_tf32_residual is not None and self._residual_maps:
            maps = [builder.select(is_tf32_residual, *x) for x in zip(self._residual_maps, maps, strict=True)]
        own_slice, all_slices = nullcontext(self._multicast_slice), builder.unroll(self._multicast_ctas, name="slice")
        with own_slice if multicast else all_slices as slice_idx:
            slice_offset = as_value(slice_idx * self._multicast_slice_extent, I32)
            slice_offset.named(f"{self.name}_slice_{self._slice_dim}_offset")
            inner, outer = (k, coord.mn) if tile.major == "K" else (coord.mn, k)
            row = (outer + slice_offset).with_name_hint(f"{self.name}_row")

            map = builder.select(self._is_whole(row), *maps) if self.skips_rows else maps[0]
            map.with_name_hint(f"{self.name}_map")
            with builder.unroll(tile.boxes, name="box") as box:
                destination = self.stages[stage].at(slice_offset, tile.pitch).at(box, tile.box_bytes)
                if interleaved := self._interleaved:
                    row = (row // INTERLEAVED_ROWS).with_name_hint("row_group")
                coords = inner + box * tile.box_inner, row, coord.batch
                if multicast and self._multicast_ctas > 1:
                    mask = self._mask if isinstance(self._mask, int) else self._mask.to(U16)
                    hw.tma_load_multicast(
                        map, *coords, destination, barrier, mask, self._policy, interleaved=interleaved
                    )
                else:
                    hw.tma_load(map, *coords, destination, barrier, self._policy, interleaved=interleaved)

    # -- computed by the host for a problem ----------------------------------------------------------------
    def stage_bytes(self, p: BoundProblem) -> int:
        """Return the bytes that the loads of all slices write to a stage: 0 without K, since nothing is loaded then."""
        rows = self._box_rows(self._source(p)[0])
        return rows * self.tile.pitch * self.loads_per_tile if p.k else 0

    def _multicast_slice_rows(self, matrix: Matrix) -> int:
        """Return how many rows of each box this CTA loads of an operand `matrix`: its slice."""
        rows = INTERLEAVED_ROWS if self._interleaved else ATOM_ROWS
        return multicast_slice_rows(self.tile, matrix.rows, self._multicast_ctas, rows)

    def _tensor_map(self, source: OperandFn, p: BoundProblem, *, is_tail: bool) -> TensorMap:
        """Return the tensor map of the matrix that `source` returns, with its address, for a problem."""
        matrix, address = source(p)
        if not p.k:  # no k-tile is ever loaded, and extents of zero cannot be encoded
            shape, interleave_stride = ((16, 16, 1), 64) if self._interleaved else ((16, 1, 1), 0)
            return TensorMap(0, matrix.dtype, shape, (64, 0), shape, 0, interleave_stride)
        return make_tensor_map(matrix, self.tile, self._box_rows(matrix, is_tail), address)

    def _box_rows(self, matrix: Matrix, is_tail: bool = False) -> int:
        """Return the rows of a slice of a box, or of the operand's last slice."""
        rows = box_rows(self.tile, matrix.rows, self._multicast_slice_rows(matrix))
        return matrix.rows % rows or rows if is_tail else rows

    def _tail(self, p: BoundProblem) -> int:
        return self._box_rows(self._source(p)[0], is_tail=True)


def multicast_slice_rows(tile: Tile, extent: int, ctas: int, multiple: int = ATOM_ROWS) -> int:
    """Return how many rows of each box of a tile one of `ctas` CTAs loads, for an operand of `extent` rows.

    A box's rows run along K if the tile is MN-major: then each CTA loads an equal part of them. Otherwise the rows that
    exist, at most the tile's, are divided equally, so that no CTA loads rows past the operand's end only. Slices are
    multiples of `multiple` rows, by default whole swizzle atoms.
    """
    part = tile.outer // ctas
    return part if tile.major == "MN" else min(round_up(extent, ctas * multiple) // ctas, part)


def box_rows(tile: Tile, extent: int, slice_rows: int) -> int:
    """Return the rows of a TMA box that loads a slice of `slice_rows` rows of an operand of `extent` rows.

    A K-major operand's box is not higher than the operand: rows past its end only reach outputs that are never stored.
    Those of an MN-major tile run along K, where all elements are summed, so they must be filled with zeros.
    """
    return slice_rows if tile.major == "MN" else min(slice_rows, extent)


def make_tensor_map(matrix: Matrix, tile: Tile, rows: int, address: Pointer) -> TensorMap:
    """Return the tensor map by which TMA loads or stores boxes of `rows` rows of a tile.

    Raises ArgumentError if the matrix, a batch of (M or N) x K, is not contiguous along the rows of the boxes.
    """
    inner, outer, stride, inner_stride = matrix.cols, matrix.rows, matrix.row_stride, matrix.col_stride
    if tile.major == "MN":
        inner, outer, stride, inner_stride = matrix.rows, matrix.cols, matrix.col_stride, matrix.row_stride
    if inner_stride != 1 < inner:
        raise ArgumentError(f"{address.name}: got a stride of {inner_stride}; its tiles are {tile.major}-major, use 1")
    size = matrix.dtype.bytes
    return TensorMap(
        address, matrix.dtype, (inner, outer, matrix.batch), (stride * size, matrix.batch_stride * size),
        (tile.box_inner, rows, 1), tile.swizzle, abs(matrix.interleave_stride) * size,
    )  # fmt: skip
