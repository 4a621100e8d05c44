"""Stores of matrix results: through swizzled shared memory by TMA, or by threads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Literal

from gemmsmith import hw
from gemmsmith.collective.global_array import GlobalArray, Scatter
from gemmsmith.collective.swizzle import VECTOR_BYTES, ThreadCopyPartition, has_whole_steps
from gemmsmith.collective.tma_operand import box_rows, make_tensor_map
from gemmsmith.core.arguments import Pointer, TensorMap
from gemmsmith.core.dtypes import BF16, FP16, FP32, DType
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.graph import BroadcastDims
from gemmsmith.core.mma import LANES_PER_QUAD, THREADS_PER_WARPGROUP
from gemmsmith.core.problem import BoundProblem
from gemmsmith.core.scalars import ceil_div
from gemmsmith.core.spec import KernelSpec
from gemmsmith.core.tile import Tile
from gemmsmith.epilogue import fragment
from gemmsmith.epilogue.epilogue_plan import EpiloguePlan
from gemmsmith.epilogue.inputs import SubtileCoord, WarpgroupTile, box_at
from gemmsmith.hw.tma import EVICT_FIRST
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.shared import SharedBuffer
from gemmsmith.lang.types import F32, I32, U16, U32
from gemmsmith.lang.values import RegisterArray, Value


def result_argument(name: str) -> str:
    """Return the name of the kernel argument of the result `name`: "out", "out1" ..., else with the prefix "out_"."""
    is_unnamed = name == "out" or (name.startswith("out") and name[3:].isdecimal())
    return name if is_unnamed else f"out_{name}"


def _tensor_map_with_clipped_boxes(name: str, tile: Tile, p: BoundProblem) -> TensorMap:
    """Return the tensor map of a matrix result. If the matrix has fewer rows than the tile, so have the boxes."""
    matrix = p.arrays[name]
    rows = box_rows(tile, matrix.rows, tile.outer)
    return make_tensor_map(matrix, tile, rows, Pointer(result_argument(name)))


class Stores:
    """Matrix results, with buffers for `subtiles_per_store` x `store_stages` subtiles per warpgroup.

    By TMA, one thread issues the stores of a group of subtiles, and the next group waits only for its own stage, so
    the last stores drain during the next tile's mainloop. Without TMA all threads copy: 16 bytes each if rows are
    aligned as TMA needs them, otherwise single elements, with the lanes along the contiguous index.
    """

    def __init__(
        self, spec: KernelSpec, plan: EpiloguePlan, result_dims: dict[str, BroadcastDims],
        stages: Sequence[SharedBuffer] = (), scatter: Scatter | None = None,
    ) -> None:  # fmt: skip
        """Declare the buffers, tensor maps and arrays. Raises ConfigError if the buffers do not fit in `stages`.

        `stages`: with alias_epilogue the mainloop's buffers, in whose memory these are. `scatter`: says to which rows
        of their arrays the results' rows are scattered, by threads, not TMA.
        """
        k, self._spec, self._plan, self.result_dims = current_builder(), spec, plan, result_dims
        self.consumers = spec.config.consumers
        is_grouped = spec.grouping is not None
        self._scatter, self._adds = scatter, spec.adds_rows
        self.maps: dict[str, Value] = {}
        self.arrays: dict[str, GlobalArray] = {}
        """The results that threads store: those without a tensor map; all of a grouped GEMM, where groups end."""
        for name, tile in plan.stores:
            if name in spec.tma_names:
                self.maps[name] = k.tensor_map(
                    result_argument(name), partial(_tensor_map_with_clipped_boxes, name, tile)
                )
            if name not in self.maps or is_grouped:
                argument = f"{result_argument(name)}_ptr" if name in self.maps else result_argument(name)
                self.arrays[name] = GlobalArray(argument, name, tile.dtype, Pointer(result_argument(name)))
        count = plan.subtiles_per_store * plan.store_stages * self.consumers
        self.buffers = {name: k.shared(tile, stages=count, name=name, over=stages) for name, tile in plan.stores}
        needed, given = (sum(x.bytes for x in buffers) for buffers in (self.buffers.values(), stages))
        if stages and needed > given:
            raise ConfigError(f"alias_epilogue: results need {needed} bytes, the stages have {given}; use more stages")

    def subtile_buffers(self, wg_tile: WarpgroupTile, index: Value) -> dict[str, Value]:
        """Return the addresses of the warpgroup's buffers number `index`, each for a subtile of a result, by result."""
        size = self._plan.subtiles_per_store * self._plan.store_stages  # a warpgroup's buffers
        views = {name: b[index].at(wg_tile.warpgroup, size * b.slot_bytes) for name, b in self.buffers.items()}
        return {name: view.address.named(f"{name}_buffer") for name, view in views.items()}

    def acquire(self, store_group: Value) -> None:
        """Wait until the TMA stores from the stage of a group have read it, so that it can be written.

        Called in the leader, which has committed one bulk group per store group: the last `stages` - 1 of them use
        other stages. If a tile's groups are not a multiple of the stages, the next tile starts with the stage that the
        previous tile used last; so its first group waits for all.
        """
        k, stages = current_builder(), self._plan.store_stages
        if self._plan.store_groups % stages:
            with k.when(store_group == 0):
                hw.bulk_wait_read(0)
            with k.otherwise():
                hw.bulk_wait_read(stages - 1)
        else:
            hw.bulk_wait_read(stages - 1)

    def issue(self, wg_tile: WarpgroupTile, coord: SubtileCoord) -> None:
        """Issue the TMA stores of a subtile. Called in the leader."""
        for name, tile in self._plan.stores:
            if name not in self.maps:
                continue
            with current_builder().unroll(tile.boxes, name="box") as box:
                coords = box_at(tile, *self._origin(name, tile, wg_tile, coord), box)
                buffer = coord.buffers[name] + (box * tile.box_bytes).to(U32)
                store = self.maps[name], *coords, wg_tile.work.batch, buffer
                if self._spec.config.streaming_stores:
                    hw.tma_store_hint(*store, EVICT_FIRST)
                else:
                    hw.tma_store(*store)

    @property
    def arrays_without_tma(self) -> list[str]:
        """The results that have no tensor map."""
        return [name for name in self.arrays if name not in self.maps]

    def store_with_threads(self, wg_tile: WarpgroupTile, coord: SubtileCoord, names: Collection[str]) -> None:
        """Store the results `names` of a subtile by all threads of the warpgroup, but no elements out of bounds."""
        for name, tile in self._plan.stores:
            if name in names:
                is_vectorized = name in self._spec.epilogue.tma_eligible and has_whole_steps(
                    tile, THREADS_PER_WARPGROUP
                )
                store = self._store_vectors if is_vectorized else self._store_elements
                store(self.arrays[name], tile, coord, wg_tile)

    def _origin(self, name: str, tile: Tile, wg_tile: WarpgroupTile, coord: SubtileCoord) -> tuple[Value, Value]:
        dims = self.result_dims[name]
        m, n = wg_tile.origin(dims)
        return m + coord.epi_m * tile.mn, n + coord.column // dims.columns_per_value

    def _store_vectors(self, array: GlobalArray, tile: Tile, coord: SubtileCoord, wg_tile: WarpgroupTile) -> None:
        """Store a subtile by vectors of 16 bytes, one per thread and step.

        Rows (columns, if MN-major) of the matrix are multiples of 16 bytes, so that a vector is in bounds as a whole.
        """
        k, dims = current_builder(), self.result_dims[array.name]
        thread = (k.thread % THREADS_PER_WARPGROUP).with_name_hint("warpgroup_thread")
        partition = ThreadCopyPartition(tile, thread, THREADS_PER_WARPGROUP, "out")
        (m, n), buffer = self._origin(array.name, tile, wg_tile, coord), coord.buffers[array.name]
        m.with_name_hint("subtile_m")
        n.with_name_hint("subtile_n")
        rows, columns = wg_tile.problem_m // dims.rows_per_value, wg_tile.problem_n // dims.columns_per_value
        vector_elements = VECTOR_BYTES // tile.dtype.bytes
        for step in partition.copy_steps():
            inner = (partition.box + step.box) * tile.box_inner + partition.vector_idx * vector_elements
            outer = partition.row + step.row
            row, col = (outer, inner) if tile.major == "K" else (inner, outer)
            row.with_name_hint("row_in_subtile")
            col.with_name_hint("column_in_subtile")
            in_bounds = (m + row < rows) & (n + col < columns)
            with nullcontext() if step.pred is None else k.when(step.pred):
                values = k.registers(F32 if self._adds and tile.dtype == FP32 else U32, VECTOR_BYTES // 4, "values")
                hw.load_shared(values, buffer + step.offset)
                address, in_bounds = _destination(array, self._scatter, wg_tile, m + row, n + col, in_bounds)
                if self._adds:
                    _add_vector(values, address, in_bounds, tile.dtype)
                else:
                    hw.store_global(values, address, in_bounds)

    def _store_elements(self, array: GlobalArray, tile: Tile, coord: SubtileCoord, wg_tile: WarpgroupTile) -> None:
        """Store a subtile by elements, a quarter per warp, whose lanes are along a row (a column, if column-major)."""
        k, dims = current_builder(), self.result_dims[array.name]
        column_major = array.name in self._spec.epilogue.column_major
        outer_extent, inner_extent = (tile.k, tile.mn) if column_major else (tile.mn, tile.k)
        outer_per_warp = ceil_div(outer_extent, 4)
        first = (k.warp_index % 4) * outer_per_warp
        (m, n), buffer = self._origin(array.name, tile, wg_tile, coord), coord.buffers[array.name]
        # the loop over rows (columns) is unrolled by up to 4
        lines_per_group = next(n for n in (4, 2, 1) if outer_per_warp % n == 0)
        with (
            k.range(outer_per_warp // lines_per_group, name="group") as group,
            k.unroll(lines_per_group, name="line") as line,
            k.unroll(0, inner_extent, 32, name="start") as start,
        ):
            outer = (first + group * lines_per_group + line).with_name_hint("line_idx")
            row, col = (start + k.lane, outer) if column_major else (outer, start + k.lane)
            in_bounds = (m + row < wg_tile.problem_m // dims.rows_per_value) & (
                n + col < wg_tile.problem_n // dims.columns_per_value
            )
            if inner_extent % 32 or outer_extent % 4:
                in_bounds = in_bounds & (row < tile.mn) & (col < tile.k)
            address, in_bounds = _destination(array, self._scatter, wg_tile, m + row, n + col, in_bounds)
            # lanes past the tile's width read its last column, and store nothing
            clamped_col = col if inner_extent % 32 == 0 else k.minimum(col, tile.k - 1)
            source = buffer + fragment.element_offset(tile, row, clamped_col)
            _move_element(source, address, in_bounds, tile.dtype, self._adds)


def _destination(
    array: GlobalArray, scatter: Scatter | None, wg_tile: WarpgroupTile, row: Value, column: Value, in_bounds: Value
) -> tuple[Value, Value]:
    """Return (address, whether to store there) of the element of a result at (row, column) of D."""
    if scatter:
        row, column, in_bounds = scatter.locate(row, column, in_bounds)
    return array.element_address(wg_tile.work.batch, row, column), in_bounds


def _move_element(smem_address: Value, gmem_address: Value, in_bounds: Value, dtype: DType, adds: bool) -> None:
    """Copy an element from shared to global memory if it is `in_bounds`.

    `adds`: add it by an atomic to the element that is there.
    """
    k = current_builder()
    if dtype.bits == 32:
        element = k.registers(F32 if dtype == FP32 else I32, 1, "element")
        hw.load_shared(element, smem_address)
        if adds:
            _add_vector(element, gmem_address, in_bounds, dtype)
        else:
            hw.store_global(element, gmem_address, in_bounds)
        return
    value = hw.load_shared_u8_or_u16(smem_address, dtype.bits)
    if not adds:
        hw.store_global_u8_or_u16(gmem_address, value, in_bounds, dtype.bits)
        return
    with k.when(in_bounds):
        hw.red_add_16(gmem_address, value, "f16" if dtype == FP16 else "bf16")


_ADDED_REGISTERS: dict[DType, Literal["f32", "f16x2", "bf16x2"]] = {FP32: "f32", FP16: "f16x2", BF16: "bf16x2"}


def _add_vector(values: RegisterArray, address: Value, in_bounds: Value, dtype: DType) -> None:
    """Add registers to global memory by atomics: by one vector instruction, or one by one on chips before sm_90."""
    k = current_builder()
    step = len(values) if k.chip.supports("sm_90") else 1
    with k.when(in_bounds):
        for i in range(0, len(values), step):
            hw.red_add_vector(values.slice(i, step), address + 4 * i, _ADDED_REGISTERS[dtype])


def store_rounded(value: Value, address: Value, in_bounds: Value, dtype: DType, name: str = "value") -> None:
    """Store an fp32 value, rounded to fp32, fp16 or bf16, or an int32, at a global address if `in_bounds`."""
    if dtype.bits == 32:
        hw.store_global_word(address, value, in_bounds, name)
    else:
        hw.store_global_u8_or_u16(address, hw.pack(value, value, dtype).to(U16), in_bounds, 16)


class ScaleStore:
    """Stores the scales of a quantized result: one per row and subtile, which has `columns` columns."""

    def __init__(self, name: str, dtype: DType, columns: int, scatter: Scatter | None = None) -> None:
        self.array, self.columns, self._scatter = GlobalArray(result_argument(name), name, dtype), columns, scatter

    def write(self, wg_tile: WarpgroupTile, epi_m: Value, column: Value, scales: list[Value]) -> None:
        """Store the scales of a subtile's rows, with one lane per row. `scales`: of the thread's two rows."""
        k = current_builder()
        first = (wg_tile.work.n + column).with_name_hint("first_column")
        for row_half, scale in enumerate(scales):
            row = wg_tile.row(epi_m, row_half, 1)
            in_bounds = (k.lane % LANES_PER_QUAD == 0) & (row < wg_tile.problem_m) & (first < wg_tile.problem_n)
            column_of_scales = first // self.columns
            address, in_bounds = _destination(self.array, self._scatter, wg_tile, row, column_of_scales, in_bounds)
            store_rounded(scale, address, in_bounds, self.array.dtype, "dequantization_scale")
