"""Quantization kernels: read a matrix once, write it in 8 bits with its scales, and optionally its transpose.

A CTA keeps a tile in registers, computes the amax of each group of elements that share a scale, and stores each element
divided by its group's scale. If a group is larger than a tile, the CTA visits its tiles serially and reads them twice.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Literal

from gemmsmith import hw
from gemmsmith.collective.global_array import GlobalArray
from gemmsmith.core.arguments import Pointer
from gemmsmith.core.dtypes import BF16, FP16, FP32, DType
from gemmsmith.core.scalars import ceil_div
from gemmsmith.kernels.register_tile import (
    QUANTIZATION_BLOCK,
    THREADS,
    VECTOR_ELEMENTS,
    VECTORS_PER_THREAD,
    BoundTiles,
    RegisterTile,
    ThreadLayout,
    grid_stride_tile_loop,
    row_pitch_bytes,
)
from gemmsmith.kernels.scale_groups import ColumnScaleGroup, RowScaleGroup, ScaleGroup, pack_4x8bit
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32, I32, U16, U32, U64
from gemmsmith.lang.values import Constant, RegisterArray, Value

MAX_AMAX_PARTIALS = 1024
"""Partial results that `amax` stores, and its maximum number of CTAs; chosen, not measured."""
_AMAX_CTAS_PER_SM = {BF16: 4, FP16: 4, FP32: 2}
"""CTAs of `amax` per SM by source dtype: the maximum without spills, as in `QuantizeSpec.ctas_per_sm`."""
ScaleGranularity = Literal["row", "column", "tile", "tensor"]
"""Elements that share a scale: a tile's row, a tile's column, a tile, or the tensor, whose amax `amax` computes."""


@dataclass(frozen=True)
class QuantizeSpec:
    """Compile-time parameters of a quantization kernel.

    Attributes:
        value_dtype: 8-bit dtype of the quantized elements.
        scale_dtype: Dtype of the scales, fp32 or ue8m0.
        rowwise: Granularity of the output in the source's layout (row, tile or tensor); None: no such output.
        columnwise: Granularity of the transposed output (column, tile or tensor); None: no such output.
        has_scale_per_row_or_column: A scale covers a full row or column of the matrix, not of a tile ("full" in the
            kernel's name). There can be one output only then.
        columns: Columns of a tile.
        vectorizable: The source's rows are whole aligned vectors of VECTOR_ELEMENTS elements.
    """

    source_dtype: DType
    value_dtype: DType
    scale_dtype: DType
    rowwise: ScaleGranularity | None
    columnwise: ScaleGranularity | None
    has_scale_per_row_or_column: bool = False
    columns: int = QUANTIZATION_BLOCK
    vectorizable: bool = True

    @property
    def granularities(self) -> dict[str, ScaleGranularity]:
        outputs = (("rowwise", self.rowwise), ("columnwise", self.columnwise))
        return {orientation: granularity for orientation, granularity in outputs if granularity}

    @property
    def name(self) -> str:
        full, unaligned = "full_" * self.has_scale_per_row_or_column, ["unaligned"] * (not self.vectorizable)
        outputs = [f"{orientation}_{full}{granularity}" for orientation, granularity in self.granularities.items()]
        parts = ["quantize", self.source_dtype, self.value_dtype, self.scale_dtype, *outputs, self.columns, *unaligned]
        return "_".join(map(str, parts))

    @property
    def ctas_per_sm(self) -> int:
        """CTAs per SM: the maximum for which ptxas does not spill (tests/kernels/test_quantize.py)."""
        if not self.vectorizable:
            return 1
        if self.columnwise or self.source_dtype == FP32 or self.scale_dtype != FP32:
            return 2
        return 3 if self.has_scale_per_row_or_column else 4

    @property
    def serial_axis(self) -> str | None:
        """Axis along which a CTA visits several tiles serially, since one scale covers them; None: a CTA has one tile.

        "columns": the tiles of one row of tiles; "rows": those of one column of tiles.
        """
        return ("columns" if self.rowwise else "rows") if self.has_scale_per_row_or_column else None


@dataclass(frozen=True)
class BoundQuantize(BoundTiles):
    """Launch arguments of a quantization kernel.

    `arrays`: the matrices "source", "rowwise", "columnwise", "rowwise_scales" and "columnwise_scales", as far as the
    kernel has them.
    """

    spec: QuantizeSpec
    amax_partials: Pointer | int = 0

    @property
    def tiles(self) -> tuple[int, int]:
        columns = self.spec.columns
        return ceil_div(self.source.rows, ThreadLayout(columns).rows), ceil_div(self.source.cols, columns)

    @property
    def grid(self) -> tuple[int, int, int]:
        """(Batches, units of work along M, and along N). A unit is a tile, or all tiles of the serial axis."""
        (tiles_m, tiles_n), serial_axis = self.tiles, self.spec.serial_axis
        units_m, units_n = 1 if serial_axis == "rows" else tiles_m, 1 if serial_axis == "columns" else tiles_n
        return self.source.batch, units_m, units_n


@lru_cache(maxsize=256)
def quantize(spec: QuantizeSpec) -> Kernel:
    """Build the quantization kernel of a spec, by a grid-stride loop over units of work (see BoundQuantize.grid).

    The tiles of a unit are visited twice if a scale covers several: to find the largest magnitudes, then, in reverse
    order, to store them, since the last tile is still in registers.
    """
    with Builder(spec.name, threads=THREADS, min_ctas_per_sm=spec.ctas_per_sm) as k:
        k.header += [f"gemmsmith: {spec.name}", "quantizes a matrix to 8 bits: values and scales"]
        k.work_clusters, k.persistent = lambda p: max(prod(p.grid), 1), True
        tile = RegisterTile(spec.source_dtype, spec.columns, vectorizable=spec.vectorizable)
        granularities = spec.granularities
        outputs = [QuantizedOutput(orientation, x, spec, tile.extents) for orientation, x in granularities.items()]
        serial_tiles = None
        if spec.has_scale_per_row_or_column:
            serial_tiles = k.parameter("serial_tiles", compute=lambda p: p.tiles[spec.serial_axis == "columns"])
        groups = {x: _make_group(x, tile.layout) for x in dict.fromkeys(granularities.values())}
        transpose_buffer = None
        if spec.columnwise:
            transpose_buffer = k.shared(QUANTIZATION_BLOCK * QUANTIZATION_BLOCK, name="transposed")[0].address
        if "tensor" in groups:
            amax_partials = k.pointer("amax_partials", lambda p: p.amax_partials)
            hw.grid_dependency_wait()
            _compute_tensor_scale(groups["tensor"], amax_partials, spec, outputs)
        else:
            hw.grid_dependency_wait()
        with grid_stride_tile_loop() as (batch, tile_m, tile_n):

            def tile_origin(step: Value) -> tuple[Value, Value]:
                """Return the first row and column of the unit's tile number `step` along the serial axis."""
                m = step if spec.serial_axis == "rows" else tile_m
                n = step if spec.serial_axis == "columns" else tile_n
                return (m * tile.layout.rows).named("tile_row"), (n * spec.columns).named("tile_column")

            tile_groups = {granularity: group for granularity, group in groups.items() if granularity != "tensor"}
            for group in tile_groups.values():
                group.clear()
            with _loop_or_once(serial_tiles, "step") as step:
                tile.load(batch, *tile_origin(step))
                for group in tile_groups.values():
                    group.add(tile)
            for granularity, group in tile_groups.items():
                if group.exchange is not None and not spec.columnwise:
                    # with columnwise output, the barriers of its transposition suffice
                    k.comment("all warps have read the exchange buffer, which the next maxima overwrite")
                    hw.sync_threads()
                same_granularity = [output for output in outputs if output.granularity == granularity]
                store = partial(_store_scales, same_granularity, batch, tile_m, tile_n)
                group.compute_scales(spec.value_dtype, spec.scale_dtype, store)
            with _loop_or_once(serial_tiles, "reverse_step") as reverse_step:
                origin = tile_origin(step if serial_tiles is None else serial_tiles - 1 - reverse_step)
                if serial_tiles is not None:
                    with k.when(reverse_step > 0):  # the last tile is still in registers
                        tile.load(batch, *origin)
                for output in outputs:
                    tile.prevent_reuse()
                    if output.orientation == "rowwise":
                        output.store(tile, groups[output.granularity], batch, *origin)
                    else:
                        output.store_transposed(tile, groups[output.granularity], transpose_buffer, batch, *origin)
        return k.finish()


@lru_cache(maxsize=16)
def amax(source: DType, vectorizable: bool) -> Kernel:
    """Build the kernel that computes the largest magnitude of a matrix as MAX_AMAX_PARTIALS partial maxima.

    Each CTA stores its maximum to several of the partials, so that all are written whatever the grid is. NaN
    propagates.
    """
    name, ctas_per_sm = f"amax_{source}", _AMAX_CTAS_PER_SM[source]
    if not vectorizable:
        name, ctas_per_sm = f"{name}_unaligned", 1
    with Builder(name, threads=THREADS, min_ctas_per_sm=ctas_per_sm) as k:
        k.header += ["gemmsmith: amax", f"largest magnitude of a matrix: {MAX_AMAX_PARTIALS} partial maxima"]
        k.work_clusters, k.persistent = lambda p: min(max(prod(p.grid), 1), MAX_AMAX_PARTIALS), True
        tile = RegisterTile(source, QUANTIZATION_BLOCK, vectorizable=vectorizable)
        amax_partials = k.pointer("amax_partials", lambda p: p.amax_partials)
        group = RowScaleGroup(1, THREADS)
        hw.grid_dependency_wait()
        group.clear()
        with grid_stride_tile_loop() as (batch, tile_m, tile_n):
            tile.load(batch, tile_m * QUANTIZATION_BLOCK, tile_n * QUANTIZATION_BLOCK)
            group.add(tile)
        result = k.registers(F32, 1, "amax")
        result[0] = group.reduce_amax()
        with k.range((MAX_AMAX_PARTIALS - 1) // THREADS + 1, name="round") as round:
            index = (round * THREADS + k.thread) * hw.grid_size() + hw.block_index()
            hw.store_global(result, amax_partials + (index * 4).to(U64), index < MAX_AMAX_PARTIALS)
        return k.finish()


def _make_group(granularity: ScaleGranularity, layout: ThreadLayout) -> ScaleGroup:
    """Return a thread's groups of elements that share a scale, for a granularity and a layout of the tile."""
    if granularity == "column":
        return ColumnScaleGroup()
    if granularity == "row":
        return RowScaleGroup(layout.rows_per_thread, layout.threads_per_row)
    return RowScaleGroup(1, THREADS)


def _loop_or_once(count: Value | None, name: str) -> AbstractContextManager[Value]:
    """Open a device loop of `count` iterations; with None only its body."""
    return current_builder().unroll(1) if count is None else current_builder().range(count, name=name)


def _compute_tensor_scale(
    group: ScaleGroup, amax_partials: Value, spec: QuantizeSpec, outputs: list[QuantizedOutput]
) -> None:
    """Compute the scale of the whole matrix from the partial maxima that the kernel `amax` has stored.

    Every CTA computes it, 4 partials per thread; the first CTA stores it to each output.
    """
    k = current_builder()
    partials = k.registers(F32, 4, "partials")
    hw.load_global(partials, amax_partials + (k.thread * 16).to(U64), True)
    pairs = hw.maximum_nan(partials[0], partials[1]), hw.maximum_nan(partials[2], partials[3])
    group.amax[0] = hw.maximum_nan(*pairs)
    is_first_cta, zero = hw.block_index() == 0, Constant(I32, 0)

    def store(index: Value, scale: Value, predicate: Value) -> None:
        _store_scales(outputs, zero, zero, zero, index, scale, predicate & is_first_cta)

    group.compute_scales(spec.value_dtype, spec.scale_dtype, store)


def _store_scales(
    outputs: list[QuantizedOutput], batch: Value, tile_m: Value, tile_n: Value, group: Value, scale: Value,
    predicate: Value,
) -> None:  # fmt: skip
    """Store the scale of group number `group` of tile (batch, tile_m, tile_n) to each output that has these groups."""
    for output in outputs:
        output.store_scale(batch, tile_m, tile_n, group, scale, predicate)


class QuantizedOutput:
    """The quantized matrix in one orientation, "rowwise" or "columnwise" (transposed), with its scales.

    The orientation names the array of its values in the kernel, and `orientation`_scales that of its scales.
    """

    def __init__(
        self, orientation: str, granularity: ScaleGranularity, spec: QuantizeSpec, extents: tuple[Value, Value]
    ) -> None:
        self.orientation, self.granularity, self.spec, self.extents = orientation, granularity, spec, extents
        self.values = GlobalArray(orientation, orientation, spec.value_dtype)
        self.scales = GlobalArray(f"{orientation}_scales", f"{orientation}_scales", spec.scale_dtype)

    def store_scale(
        self, batch: Value, tile_m: Value, tile_n: Value, group: Value, scale: Value, predicate: Value
    ) -> None:
        """Store the scale of group number `group` of a tile, in the threads where `predicate` holds."""
        (rows, columns), m, n = self.extents, tile_m, tile_n
        if self.granularity == "row":
            m = tile_m * ThreadLayout(self.spec.columns).rows + group
            predicate = predicate & (m < rows)
        elif self.granularity == "column":
            n = tile_n * QUANTIZATION_BLOCK + group
            predicate = predicate & (n < columns)
        address = self.scales.element_address(batch, *((m, n) if self.orientation == "rowwise" else (n, m)))
        if self.spec.scale_dtype == FP32:
            hw.store_global_word(address, scale, predicate, "scale")
        else:
            hw.store_global_u8_or_u16(address, scale.to(U16), predicate, 8)

    def store(self, tile: RegisterTile, group: ScaleGroup, batch: Value, row: Value, column: Value) -> None:
        """Store the tile that begins at (row, column) of the matrix, divided by the scales of its groups.

        Threads store vectors of 8 bytes; the last one of a row may also write to the padding after the row.
        """
        k, (rows, columns), layout = current_builder(), self.extents, tile.layout
        first_row = (row + layout.row(0)).named("first_row")
        first_column = (column + layout.column(0)).named("first_column")
        address = k.var(U64, self.values.element_address(batch, first_row, first_column), "address")
        row_pitch = row_pitch_bytes(self.values)
        with k.unroll(layout.rows_per_thread, name="row_offset") as row_offset:
            with k.unroll(layout.vectors_per_row_per_thread, name="vector_in_row") as vector_in_row:
                vector = row_offset * layout.vectors_per_row_per_thread + vector_in_row
                column_offset = vector_in_row * (layout.threads_per_row * VECTOR_ELEMENTS)
                scaled = [tile.element(vector, i) * group.reciprocal(vector, i) for i in range(VECTOR_ELEMENTS)]
                words = self._pack(scaled)
                in_bounds = (first_row + row_offset < rows) & (first_column + column_offset < columns)
                hw.store_global(words, address.get() + column_offset.to(U64), in_bounds)
            address.set(address.get() + row_pitch)

    def _pack(self, x: list[Value]) -> RegisterArray:
        words = current_builder().registers(U32, 2, "words")
        words[0], words[1] = pack_4x8bit(x[:4], self.spec.value_dtype), pack_4x8bit(x[4:], self.spec.value_dtype)
        return words

    def store_transposed(
        self, tile: RegisterTile, group: ScaleGroup, buffer: Value | None, batch: Value, row: Value, column: Value
    ) -> None:
        """Store the transposed tile, divided by the scales of its groups, through shared memory at `buffer`.

        8 rows of a column form a unit of 8 bytes. A unit's index in its column is XORed with the column's vector index,
        so that the threads of a store write to different banks.
        """
        assert buffer is not None
        k, (rows, columns) = current_builder(), self.extents
        threads_per_row = QUANTIZATION_BLOCK // VECTOR_ELEMENTS
        if self.spec.has_scale_per_row_or_column or self.granularity == "tensor":
            # otherwise the exchange of the groups' maxima has synchronized since the last reads
            k.comment("all threads have read the previous tile's buffer, which is overwritten now")
            hw.sync_threads()
        for i in range(VECTOR_ELEMENTS):
            words = self._pack([tile.element(v, i) * group.reciprocal(v, i) for v in range(VECTORS_PER_THREAD)])
            column_in_tile = k.thread % threads_per_row * VECTOR_ELEMENTS + i
            hw.store_shared(words, buffer + _transposed_offset(column_in_tile, k.thread // threads_per_row))
        k.comment("all threads have written the transposed tile that is read now")
        hw.sync_threads()
        threads_per_column = threads_per_row // 2  # a thread stores two units, 16 bytes
        with k.unroll(0, QUANTIZATION_BLOCK, THREADS // threads_per_column, name="start") as start:
            c, pair = start + k.thread // threads_per_column, k.thread % threads_per_column
            vector = k.registers(U32, 4, "vector")
            with k.unroll(2, name="half") as half:
                hw.load_shared(vector.slice(half * 2, 2), buffer + _transposed_offset(c, pair * 2 + half))
            r = row + pair * 16
            in_bounds = (column + c < columns) & (r < rows)
            hw.store_global(vector, self.values.element_address(batch, column + c, r), in_bounds)


def _transposed_offset(column: Value, unit: Value) -> Value:
    """Return the offset in shared memory of rows 8 * unit to 8 * unit + 7 of a column."""
    return (column * QUANTIZATION_BLOCK + (unit ^ (column // VECTOR_ELEMENTS)) * VECTOR_ELEMENTS).to(U32)
