"""Reductions in an epilogue: each warp reduces its rows and columns of a tile in registers and writes a partial result.

A second kernel (kernels/reduce.py) combines the partials in a fixed order, so that a result does not depend on which
CTA computed which tile. Partials are stored in fp32 as an array (component, batch, partial, output).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from gemmsmith import hw
from gemmsmith.core.arguments import Pointer
from gemmsmith.core.graph import BroadcastDims, Result, reduced_dims
from gemmsmith.core.mma import (
    COLUMN_XOR_MASKS,
    FRAGMENT_ROWS_PER_WARP,
    LANES_PER_QUAD,
    N8_COLUMNS,
    QUAD_XOR_MASKS,
    WGMMA_M,
    fragment_column,
)
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.epilogue_plan import EpiloguePlan
from gemmsmith.epilogue.inputs import VisitCoord, WarpgroupTile
from gemmsmith.epilogue.outputs import result_argument
from gemmsmith.epilogue.partials import (
    GroupPartials,
    PartialsShape,
    partials_argument,
    partials_shape,
    reduces_groups,
    rows_of_block,
)
from gemmsmith.graph.precision import uses_special_functions
from gemmsmith.graph.reductions import REDUCTIONS, ReductionState, State
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import F32, I32, I64, U64
from gemmsmith.lang.values import Constant, Value, ValueLike
from gemmsmith.tile_scheduler.group_table import GroupTable


class Reduction:
    """A reduction result.

    `axis` is the index that is reduced within a tile: "n", "m", "mn" for both, or "" for none (only the batch is
    reduced). Kernel arguments, followed by the result's name: `partials_`, the address of its partials (of the result
    itself if sums are atomic); `num_partials_`, the partials per element, and `num_elements_`, the elements of the
    result per batch, or with axis "mn" `tiles_n_`, the tiles along N, and `tiles_per_batch_`; `component_stride_`, the
    elements between the components of a partial, of which only logsumexp has several; `columns_` if no index of the
    tile is reduced; in a grouped GEMM `fill_lines_` and `fill_elements_`, see `fill`. A prefix, unlike a suffix, keeps
    them apart from the results' own arguments.
    """

    def __init__(
        self, result: Result, kind: str, axis: str, input_dims: BroadcastDims, spec: KernelSpec, plan: EpiloguePlan,
        table: GroupTable | None = None,
    ) -> None:  # fmt: skip
        k, shape_of = current_builder(), partial(partials_shape, result, spec)
        self.result, self.spec, self.plan = result, spec, plan
        self.axis, self._over_batch = reduced_dims(axis).removeprefix("b"), reduced_dims(axis).startswith("b")
        self.rows_per_value, self.columns_per_value = input_dims.row_divisor, input_dims.column_divisor
        self.halves = 2 // self.rows_per_value
        self.monoid = REDUCTIONS[kind].monoid
        # the compiler may make `condition ? f(x) : 0` a branch around f, which each element would take
        self.select = hw.select if uses_special_functions(spec.epilogue.graph, result.node) else k.select
        self._clips = spec.grouping is not None and spec.grouping.clips_rows
        self._by_group = reduces_groups(axis, spec)
        self.atomic = spec.epilogue.is_atomic(result)
        argument = partials_argument(result.name)
        if self.atomic:
            self.address = k.pointer(argument, lambda p: Pointer(result_argument(result.name)))
        else:
            self.address = k.scratch(argument, lambda p: shape_of(p).bytes)
        if self.axis == "mn":
            self.tiles_n = k.parameter(f"tiles_n_{result.name}", compute=lambda p: shape_of(p).tiles_n)
            self.tiles_per_batch = k.parameter(
                f"tiles_per_batch_{result.name}", compute=lambda p: shape_of(p).tiles_per_batch
            )
        else:
            self.num_partials = k.parameter(f"num_partials_{result.name}", compute=lambda p: shape_of(p).num_partials)
            self.num_elements = k.parameter(f"num_elements_{result.name}", compute=lambda p: shape_of(p).num_outputs)
        self.group_partials = None
        if table and spec.grouping and self._by_group and not self.atomic:
            rows, per_block = rows_of_block(self.axis, spec), self.tiles_n * self._warps if self.axis == "mn" else 1
            self.group_partials = GroupPartials(result.name, spec.grouping, table, rows, per_block)
        self.component_stride = k.parameter(
            f"component_stride_{result.name}", I64, lambda p: shape_of(p).component_stride
        )
        if spec.grouping:
            self.fill_lines = k.parameter(f"fill_lines_{result.name}", compute=lambda p: self._lines(shape_of(p)))
            self.fill_elements = k.parameter(f"fill_elements_{result.name}", compute=lambda p: shape_of(p).num_outputs)
        if not self.axis:
            self.columns = k.parameter(f"columns_{result.name}", compute=lambda p: p.n // self.columns_per_value)

    def _lines(self, shape: PartialsShape) -> int:
        """Return how many lines of `num_outputs` elements the partials have, or an atomic result."""
        if self.atomic:
            return 1 if self._over_batch else shape.batch
        return shape.batch * shape.num_partials

    def fill(self, table: GroupTable, thread: Value, threads: int) -> None:
        """Store zeros for the rows of no group, which no tile computes; for an invalid table NaN everywhere.

        Both are stored in the partials, or in the result if it is atomic. The `threads` consumer threads of each CTA
        execute it; CTAs share the lines.
        """
        k, is_invalid, grouping = current_builder(), table.is_invalid, self.spec.grouping
        assert grouping
        if self.group_partials:
            with k.when(hw.block_index() == 0):
                self.group_partials.store_ranges(thread, threads)
        with k.range(hw.block_index(), self.fill_lines, hw.grid_size(), name="line") as line:
            first: Value = self.fill_elements
            if self._clips and not self.atomic and not self._by_group:  # an atomic one is zeroed before
                group = line // self.num_partials
                first = table.begin(group + 1) - table.begin(group) if grouping.is_masked else table.end
            first = k.select(is_invalid, 0, first).named("first_element")
            value = k.select(is_invalid, Constant(F32, math.nan), 0.0).with_name_hint("fill")
            with k.range(first, self.fill_elements, threads, name="element") as element:
                index = (element + thread).named("fill_element")
                offset = line.to(I64) * self.fill_elements.to(I64) + index.to(I64)
                for i in range(1 if self.atomic else len(self.monoid.identity)):
                    address = self.address + ((offset + self.component_stride * i) * 4).to(U64)
                    hw.store_global_word(address, value, index < self.fill_elements, "fill_value")

    def is_written(self, element: Value, end_of_tile: Value) -> Value:
        """Return whether an element is before the result's end, or for clipped tiles before `end_of_tile`."""
        return element < (end_of_tile if self._clips else self.num_elements)

    def batch_of(self, wg_tile: WarpgroupTile) -> Value:
        """Return the batch at which the tile's results are stored.

        It is 0 for partials of groups, which follow one another; the group if there is one result for each group; else
        the tile's batch.
        """
        if self.group_partials:
            return Constant(I32, 0)
        return wg_tile.work.group if self._by_group else wg_tile.work.batch

    def make_states(self, count: int) -> ReductionState:
        """Declare `count` states in registers, and set them to the state of no elements."""
        return ReductionState(self.monoid, count, self.result.name)

    def state_index(self, index: Value) -> Value:
        """Return `index`, the index of a state, with a name for the kernel's text."""
        return index.with_name_hint(f"acc_{self.result.name}_idx")

    def global_warp_index(self, wg_tile: WarpgroupTile) -> Value:
        """Return the index of this warp and tile among all warps of all tiles of all batches (or groups)."""
        k, work = current_builder(), wg_tile.work
        m, n = self.spec.config.tile[0], self.spec.slice_columns
        if self.group_partials:
            tile = self.group_partials.block_of(wg_tile, work.m) * self.tiles_n + work.n // n
        else:
            tile = work.batch * self.tiles_per_batch + work.m // m * self.tiles_n + work.n // n
        warpgroup = wg_tile.warpgroup if self.spec.config.warpgroups[0] > 1 else 0
        return tile * self._warps + warpgroup * 4 + k.warp_index % 4

    @property
    def _warps(self) -> int:
        """Warps along the rows of a tile."""
        return 4 * self.spec.config.warpgroups[0]

    def write(
        self, wg_tile: WarpgroupTile, partial_index: Value, element: ValueLike, state: State, in_bounds: Value
    ) -> None:
        """Write `state` as partial `partial_index` of the output `element` of the tile's batch, if `in_bounds`.

        If the reduction is atomic, add it to the output instead. With axis "mn" `element` is not used.
        """
        k = current_builder()
        in_bounds.with_name_hint("in_bounds")
        if self.axis == "mn":
            offset = partial_index.to(I64)
            if self.atomic:
                offset = (Constant(I32, 0) if self._over_batch else self.batch_of(wg_tile)).to(I64)
        else:
            num_partials, batch = 1 if self.atomic else self.num_partials, self.batch_of(wg_tile)
            if self.atomic:
                partial_index, batch = Constant(I32, 0), Constant(I32, 0) if self._over_batch else batch
            offset = (batch * num_partials + partial_index).to(I64) * self.num_elements.to(I64)
            offset = offset + (element.to(I64) if isinstance(element, Value) else element)
        if self.atomic:
            with k.when(in_bounds):
                hw.red_add_f32(self.address + (offset * 4).to(U64), state[0])
            return
        for i, (x, name) in enumerate(zip(state, self.monoid.names_of("partial", ""), strict=True)):
            offset.with_name_hint("partial_offset")
            address = self.address + ((offset + self.component_stride * i) * 4).to(U64)
            hw.store_global_word(address, x, in_bounds, name)


class TileReduction:
    """A reduction of a tile's elements by one thread.

    Reductions over columns, or over rows and columns, have states for the whole tile. Those over rows have states for a
    range of columns at a time (`RangeReduction`), since states for all columns of a tile would need too many registers.
    """

    def __init__(self, reduction: Reduction, wg_tile: WarpgroupTile) -> None:
        self.reduction, self.wg_tile = reduction, wg_tile
        counts = {"n": reduction.halves * reduction.plan.subtiles_m, "mn": 1}
        self.states = reduction.make_states(counts[reduction.axis]) if reduction.axis in counts else None
        self.first_row_group: Value | None = None
        if reduction.group_partials and reduction.axis == "m":
            self.first_row_group = reduction.group_partials.block_of(wg_tile, wg_tile.m)

    def end(self) -> None:
        """Reduce the tile's states over the lanes that share a row, or over the warp, and write the partials."""
        k, reduction, wg_tile = current_builder(), self.reduction, self.wg_tile
        if self.states is None:
            return
        if reduction.axis == "mn":
            self.states.warp_reduce(0, QUAD_XOR_MASKS + COLUMN_XOR_MASKS)
            is_writer = k.lane == 0
            if reduction.group_partials:
                is_writer = is_writer & (wg_tile.work.m < wg_tile.problem_m)
            reduction.write(wg_tile, reduction.global_warp_index(wg_tile), 0, self.states.load(0), is_writer)
            return
        tile = (wg_tile.work.n // reduction.spec.slice_columns).with_name_hint("partial_idx")
        with (
            k.unroll(reduction.plan.subtiles_m, name="epi_m") as epi_m,
            k.unroll(reduction.halves, name="row_half") as row_half,
        ):
            index = reduction.state_index(epi_m * reduction.halves + row_half)
            self.states.warp_reduce(index, QUAD_XOR_MASKS)
            row = wg_tile.row(epi_m, row_half, reduction.rows_per_value)
            is_written = reduction.is_written(row, wg_tile.problem_m // reduction.rows_per_value)
            in_bounds = (k.lane % LANES_PER_QUAD == 0) & is_written & (tile < reduction.num_partials)
            reduction.write(wg_tile, tile, row, self.states.load(index), in_bounds)


class RangeReduction:
    """A reduction of some columns of a subtile: `n8_count` groups of 8 columns, from group `first_n8` on.

    Both count the columns of the reduced value, which may have one value per two columns of the accumulator.
    """

    def __init__(self, tile: TileReduction, first: int, stop: int) -> None:
        """Clear the states of a reduction over rows; others use the tile's. The range is in groups of 8 columns."""
        self.reduction, self.wg_tile, self._first_row_group = tile.reduction, tile.wg_tile, tile.first_row_group
        columns_per_value = tile.reduction.columns_per_value
        self.first_n8, self.n8_count = first // columns_per_value, (stop - first) // columns_per_value
        self.states = self.reduction.make_states(2 * self.n8_count) if self.reduction.axis == "m" else tile.states
        """The states to which elements are added; None if each is written."""

    def add(self, coord: VisitCoord, pair_at: Callable[[int, int], tuple[Value, Value]]) -> None:
        """Accumulate the elements of the step at `coord`, or write them if only the batch is reduced.

        Elements out of bounds along a reduced index count as the monoid's `masked_value`.
        """
        reduction = self.reduction
        steps = [(n8_offset, row_half) for n8_offset in range(coord.n8_in_step) for row_half in range(reduction.halves)]
        if self.states is None:
            for n8_offset, row_half in steps:
                self._write_elements(coord, n8_offset, row_half, pair_at(n8_offset, row_half))
            return
        of_states: dict[tuple[int, ...], list[Value]] = {}
        for n8_offset, row_half in steps:
            columns = self.wg_tile.columns_in_bounds(coord, n8_offset)
            row = self.wg_tile.row_in_bounds(coord.epi_m, row_half, reduction.rows_per_value)
            for i, x in enumerate(pair_at(n8_offset, row_half)):
                in_bounds = {"n": columns[i], "m": row, "mn": columns[i] & row}[reduction.axis]
                masked = reduction.select(in_bounds, x, reduction.monoid.masked_value).with_name_hint("masked_x")
                state = {"n": (row_half,), "m": (n8_offset, i), "mn": ()}[reduction.axis]
                of_states.setdefault(state, []).append(masked)
        for state, elements in of_states.items():
            self.states.accumulate(self._state_index(coord, *state), elements)
        self.states.fence()

    def end(self, epi_m: Value, column: Value) -> None:
        """Reduce each column over a warp's 16 rows and write the partials, if the reduction is over rows."""
        k, reduction, wg_tile = current_builder(), self.reduction, self.wg_tile
        if reduction.axis != "m" or self.states is None:
            return
        if self._first_row_group is None:
            row_group = (wg_tile.m + epi_m * WGMMA_M) // FRAGMENT_ROWS_PER_WARP + k.warp_index % 4
            is_row_group = row_group < reduction.num_partials
        else:
            in_tile = epi_m * (WGMMA_M // FRAGMENT_ROWS_PER_WARP) + k.warp_index % 4
            row_group = self._first_row_group + in_tile
            is_row_group = wg_tile.m + in_tile * FRAGMENT_ROWS_PER_WARP < wg_tile.problem_m
        row_group.with_name_hint("row_group")
        with k.unroll(self.n8_count, name="n8") as n8:
            first = wg_tile.work.n // reduction.columns_per_value + column // reduction.columns_per_value
            n = first + (n8 + self.first_n8) * N8_COLUMNS + fragment_column(k.lane)
            with k.unroll(2, name="i") as i:
                n_i = (n + i).with_name_hint("column")
                index = reduction.state_index(n8 * 2 + i)
                self.states.warp_reduce(index, COLUMN_XOR_MASKS)
                is_written = reduction.is_written(n_i, wg_tile.problem_n // reduction.columns_per_value)
                in_bounds = (k.lane < LANES_PER_QUAD) & is_row_group & is_written
                reduction.write(wg_tile, row_group, n_i, self.states.load(index), in_bounds)

    def _write_elements(self, coord: VisitCoord, n8_offset: int, row_half: int, pair: tuple[Value, Value]) -> None:
        """Write two adjacent elements, each as a partial of its own: only the batch is reduced."""
        reduction, wg_tile = self.reduction, self.wg_tile
        row = wg_tile.row(coord.epi_m, row_half, reduction.rows_per_value)
        columns_in_bounds = wg_tile.columns_in_bounds(coord, n8_offset)
        for column_in_bounds, column, x in zip(columns_in_bounds, wg_tile.columns(coord, n8_offset), pair, strict=True):
            in_bounds = column_in_bounds & wg_tile.row_in_bounds(coord.epi_m, row_half, reduction.rows_per_value)
            state = reduction.monoid.state_of_element(x)
            reduction.write(wg_tile, Constant(I32, 0), row * reduction.columns + column, state, in_bounds)

    def _state_index(self, coord: VisitCoord, *state: int) -> ValueLike:
        """Return the index of the state to which an element of a step is added.

        `state`: (row half,) over columns; (n8 offset, element of the pair) over rows; () over both.
        """
        match self.reduction.axis:
            case "n":
                return self.reduction.state_index(self.reduction.halves * coord.epi_m + state[0])
            case "m":
                return self.reduction.state_index((coord.n8 + (state[0] - self.first_n8)) * 2 + state[1])
        return 0
