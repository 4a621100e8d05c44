"""Operands of an epilogue inside the kernel: scalar, row and column broadcasts; matrices by TMA or by threads.

Each has three steps (CUTLASS EVT: begin, previsit, visit). `issue_loads` starts its loads before the tile's mainloop,
which hides them, and returns a `TileInput`: its `stage_to_smem` stores a broadcast vector in shared memory after the
mainloop; its `load_fragment` reads the elements of a subtile into registers, before any of them is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from gemmsmith import hw
from gemmsmith.collective.global_array import GlobalArray, RowIndices
from gemmsmith.collective.tma_operand import make_tensor_map
from gemmsmith.core.arguments import Pointer, TensorMap
from gemmsmith.core.graph import BroadcastDims, Operand
from gemmsmith.core.grouping import GATHER
from gemmsmith.core.mma import (
    FRAGMENT_HALF_ROWS,
    N8_COLUMNS,
    THREADS_PER_WARPGROUP,
    WGMMA_M,
    fragment_column,
    fragment_row,
)
from gemmsmith.core.problem import BoundProblem
from gemmsmith.core.scalars import ceil_div
from gemmsmith.core.tile import Tile
from gemmsmith.epilogue import fragment
from gemmsmith.epilogue.epilogue_plan import EpiloguePlan
from gemmsmith.hw.tma import EVICT_NORMAL
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.shared import SharedBuffer
from gemmsmith.lang.types import F32, PRED, U32
from gemmsmith.lang.values import Constant, RegisterArray, Value, Variable
from gemmsmith.tile_scheduler.tiles import WorkTile


@dataclass
class WarpgroupTile:
    """A warpgroup's rows and columns of a CTA's tile, from row `m` and column `work.n` of the problem on.

    `warpgroup`: its index. `problem_m`, `problem_n`: the end of the rows and of the columns: the problem's, or that of
    the tile's group.

    The methods return indices of an operand's (or result's) values, of which there is one per `rows_per_value` (1 or 2)
    rows and `columns_per_value` columns of the problem. `epi_m` is a subtile's group of 64 rows, and `row_half` one of
    the two halves of a warp's 16 rows of it.
    """

    work: WorkTile
    m: Value
    warpgroup: Value
    problem_m: Value
    problem_n: Value

    def origin(self, dims: BroadcastDims) -> tuple[Value, Value]:
        """Return the first row and column in a value with these broadcast dims."""
        return self.m // dims.rows_per_value, self.work.n // dims.columns_per_value

    def row(self, epi_m: Value, row_half: Value | int, rows_per_value: int) -> Value:
        """Return this thread's row in a half of the warp's rows."""
        return (self.m // rows_per_value + self.row_in_wg_tile(epi_m, row_half, rows_per_value)).named("row")

    def row_in_wg_tile(self, epi_m: Value, row_half: Value | int, rows_per_value: int) -> Value:
        """Return this thread's row in a half of the warp's rows, counted from the warpgroup's first row.

        If rows are paired (`rows_per_value` 2), the warp's rows have values in one half only, so `row_half` is 0.
        """
        k = current_builder()
        first = epi_m * (WGMMA_M // rows_per_value) + row_half * FRAGMENT_HALF_ROWS
        row: Value = fragment_row(k.warp_index % 4, k.lane, rows_per_value) + first
        return row

    def columns(self, coord: VisitCoord, n8_offset: int) -> tuple[Value, Value]:
        """Return this thread's two columns in the `n8_offset`-th group of 8 columns of a visit."""
        first = self.first_column(coord.columns_per_value) + coord.column + (coord.n8 + n8_offset) * N8_COLUMNS
        return first.with_name_hint("column"), first + 1

    def first_column(self, columns_per_value: int) -> Value:
        """Return this thread's first column of the tile."""
        column: Value = self.work.n // columns_per_value + fragment_column(current_builder().lane)
        return column

    def columns_in_bounds(self, coord: VisitCoord, n8_offset: int) -> tuple[Value, Value]:
        """Return whether each of the two `columns` is in bounds; a visit computes it once per group.

        It compares the column in the tile, a constant in unrolled loops, with the number of columns that remain from
        the thread's first on. That number is the same for all columns of the thread and takes one register.
        """
        if n8_offset not in coord.bounds:
            first = (coord.column + fragment.n8_plus(coord.n8, n8_offset) * N8_COLUMNS).named("n8_column")
            columns = self.problem_n // coord.columns_per_value
            columns_remaining = (columns - self.first_column(coord.columns_per_value)).named("columns_remaining")
            in_bounds = first < columns_remaining, first + 1 < columns_remaining
            coord.bounds[n8_offset] = in_bounds
            for x in in_bounds:
                x.with_name_hint("column_in_bounds")
        return coord.bounds[n8_offset]

    def row_in_bounds(self, epi_m: Value, row_half: int, rows_per_value: int) -> Value:
        """Return whether this thread's `row` is in bounds."""
        return (self.row(epi_m, row_half, rows_per_value) < self.problem_m // rows_per_value).named("row_in_bounds")


@dataclass
class SubtileCoord:
    """Position of a subtile: its index in the tile, its group of 64 rows `epi_m` and its first column in the tile.

    `acc_column`: the column of the accumulator's registers that holds the first column's values. It is 0 in a run-time
    loop, which moves each subtile there, else `column`. `buffers`: the shared-memory addresses through which the
    subtile's results are stored, by the results' names.
    """

    index: Value
    epi_m: Value
    column: Value
    acc_column: Value
    buffers: dict[str, Value]


@dataclass
class VisitCoord:
    """What one step of a subtile visits: `n8_in_step` groups of 8 columns, from group `n8` of the subtile on.

    Columns and groups are counted in the values of an operand or result that has one value per `columns_per_value`
    columns.
    """

    epi_m: Value
    column: Value
    n8: Value
    n8_in_step: int
    columns_per_value: int
    bounds: dict[int, tuple[Value, Value]] = field(default_factory=dict)
    """Results of `WarpgroupTile.columns_in_bounds` for this visit, by n8 offset."""


def operand_argument(name: str) -> str:
    """Return the name of the kernel argument for the operand `name`.

    Operands have names that users choose. The few prefixes, none of which is a prefix of another, keep them from
    colliding with each other, other arguments and C++ keywords.
    """
    return f"in_{name}"


class TileInput(NamedTuple):
    """An operand's elements of a warpgroup's tile, whose loads have been issued.

    `load_fragment(epi_m, column, n8_count)`: loads this thread's elements of `n8_count` groups of 8 columns of a
    subtile, from `column` of the tile on. `stage_to_smem()`: called after the mainloop; stores in shared memory what
    this thread has loaded for all threads of the warpgroup.
    """

    load_fragment: Callable[[Value, Value, int], fragment.LoadPair]
    stage_to_smem: Callable[[], None] = lambda: None


class ScalarBroadcast:
    """A Python number, passed as a kernel argument, or an element in global memory, one per batch or one in total."""

    def __init__(self, operand: Operand) -> None:
        argument = operand_argument(operand.name)
        self._source: Value | GlobalArray
        if operand.dtype is None:
            self._source = current_builder().parameter(argument, F32, lambda p: Pointer(argument))
        else:
            self._source = GlobalArray(
                argument, operand.name, operand.dtype, varies_along_m=False, varies_along_n=False
            )

    def issue_loads(self, wg_tile: WarpgroupTile) -> TileInput:
        x = self._source
        scalar: RegisterArray | tuple[Value]
        if isinstance(x, Value):
            scalar = (x,)
        else:
            scalar = current_builder().registers(F32, 1, f"{x.name}_scalar")
            scalar[0] = x.load(x.element_address(wg_tile.work.group), Constant(PRED, True))

        def pair(n8: Value, row_half: int) -> tuple[Value, Value]:
            value = scalar[0]
            return value, value

        return TileInput(lambda epi_m, column, n8_count: pair)


class VectorBroadcast:
    """A row broadcast (N,) or column broadcast (M, 1): loaded once per tile, as fp32.

    Kept in the warpgroup's shared memory, not in registers: otherwise ptxas hoists work of later subtiles and spills.
    """

    def __init__(self, operand: Operand, values_per_tile: int, consumers: int, gathers: bool = False) -> None:
        """Allocate the shared memory. `gathers`: the operand has the rows of the array a, which are gathered."""
        assert operand.dtype is not None
        self.values_per_tile, self.dims, self.name = values_per_tile, operand.broadcast_dims, operand.name
        along_m, along_n = self.dims.varies_along_m, self.dims.varies_along_n
        self.array = GlobalArray(
            operand_argument(operand.name), operand.name, operand.dtype, varies_along_m=along_m, varies_along_n=along_n
        )
        self.buffer: SharedBuffer = current_builder().shared(4 * values_per_tile, stages=consumers, name=operand.name)
        self.loads_per_thread = ceil_div(values_per_tile, THREADS_PER_WARPGROUP)
        self._indices = RowIndices(GATHER, operand_argument(operand.name), self._values) if gathers else None

    def _values(self, p: BoundProblem) -> int:
        """Return the length of the vector, which is a row or a column."""
        return max(p.arrays[self.name].rows, p.arrays[self.name].cols)

    def _element(self, load: Value) -> tuple[Value, Value]:
        """Return (index, is in the tile) of the `load`-th element of the tile's vector that this thread loads."""
        warpgroup_thread = current_builder().thread % THREADS_PER_WARPGROUP
        index = (warpgroup_thread + load * THREADS_PER_WARPGROUP).with_name_hint("index")
        is_multiple = self.values_per_tile % THREADS_PER_WARPGROUP == 0
        return index, Constant(PRED, True) if is_multiple else index < self.values_per_tile

    def issue_loads(self, wg_tile: WarpgroupTile) -> TileInput:
        k, dims = current_builder(), self.dims
        along_m = wg_tile.m, wg_tile.problem_m, dims.rows_per_value, "row"
        along_n = wg_tile.work.n, wg_tile.problem_n, dims.columns_per_value, "column"
        first, extent, per_value, name = along_n if dims.varies_along_n else along_m
        registers = k.registers(F32, self.loads_per_thread, f"{self.name}_prefetched")
        with k.unroll(self.loads_per_thread, name="load") as load:
            index, in_tile = self._element(load)
            position = (first // per_value + index).with_name_hint(name)
            in_bounds = (position < extent // per_value) & in_tile
            if self._indices:
                position = self._indices.load(position, in_bounds)
                in_bounds = position >= 0
            address = self.array.element_address(wg_tile.work.group, row=position, column=position)
            registers[load] = self.array.load(address, in_bounds)
        return TileInput(
            partial(self._load_fragment, wg_tile), partial(self._stage_to_smem, wg_tile.warpgroup, registers)
        )

    def _stage_to_smem(self, warpgroup: Value, registers: RegisterArray) -> None:
        k = current_builder()
        with k.unroll(self.loads_per_thread, name="load") as load:
            index, in_tile = self._element(load)
            with k.when(in_tile):
                hw.store_shared(registers.slice(load, 1), self.buffer[warpgroup].address + (index * 4).to(U32))

    def _load_fragment(self, wg_tile: WarpgroupTile, epi_m: Value, column: Value, n8_count: int) -> fragment.LoadPair:
        """Load the elements of a subtile that this thread needs; see `TileInput`."""
        k, rows_per_value, name = current_builder(), self.dims.rows_per_value, self.name
        address = self.buffer[wg_tile.warpgroup].address.with_name_hint(f"{name}_buffer")
        if not self.dims.varies_along_n:
            halves = 2 // rows_per_value
            rows = k.registers(F32, halves, f"{name}_frag")
            with k.unroll(halves, name="row_half") as row_half:
                row = wg_tile.row_in_wg_tile(epi_m, row_half, rows_per_value)
                hw.load_shared(rows.slice(row_half, 1), address + (row * 4).to(U32))
            return lambda n8, row_half: (rows[row_half], rows[row_half])
        registers = k.registers(F32, 2 * n8_count, f"{name}_frag")
        with k.unroll(n8_count, name="n8") as n8:
            thread_column = n8 * N8_COLUMNS + column + fragment_column(k.lane)
            hw.load_shared(registers.slice(n8 * 2, 2), address + (thread_column * 4).to(U32))
        return lambda n8, row_half: (registers[n8 * 2], registers[n8 * 2 + 1])


class GmemAuxLoad:
    """An (M, N) matrix that TMA cannot read: each thread loads its own elements, with any strides."""

    def __init__(self, operand: Operand) -> None:
        assert operand.dtype is not None
        self.array = GlobalArray(operand_argument(operand.name), operand.name, operand.dtype)
        self.dims = operand.broadcast_dims

    def issue_loads(self, wg_tile: WarpgroupTile) -> TileInput:
        """Issue none yet: a subtile's elements are loaded when they are needed."""
        return TileInput(partial(self._load_fragment, wg_tile))

    def _load_fragment(self, wg_tile: WarpgroupTile, epi_m: Value, column: Value, n8_count: int) -> fragment.LoadPair:
        """Load this thread's elements of a subtile from global memory, 0 outside the matrix; see `TileInput`."""
        k, (_, rows_per_value, columns_per_value) = current_builder(), self.dims
        halves = 2 // rows_per_value
        registers = k.registers(F32, 2 * halves * n8_count, f"{self.array.name}_frag")
        column_end = wg_tile.problem_n // columns_per_value
        with k.unroll(n8_count, name="n8") as n8:
            for row_half in range(halves):
                row = wg_tile.row(epi_m, row_half, rows_per_value)
                in_bounds = wg_tile.row_in_bounds(epi_m, row_half, rows_per_value)
                first = wg_tile.work.n // columns_per_value + column + n8 * N8_COLUMNS + fragment_column(k.lane)
                first.with_name_hint("column")
                for i in range(2):
                    address = self.array.element_address(wg_tile.work.batch, row, first + i)
                    element = self.array.load(address, in_bounds & (first + i < column_end))
                    registers[n8 * (2 * halves) + (2 * row_half + i)] = element
        return fragment.pairs_from_registers(registers, halves)


def _tensor_map_with_tile_boxes(name: str, tile: Tile, p: BoundProblem) -> TensorMap:
    """Return the tensor map of a matrix operand.

    Its boxes are as high as the tile even if the matrix has fewer rows, so that each load has the same number of bytes,
    for which a barrier waits.
    """
    return make_tensor_map(p.arrays[name], tile, tile.outer, Pointer(operand_argument(name)))


def box_at(tile: Tile, m: Value, n: Value, box: Value) -> tuple[Value, Value]:
    """Return the (inner, outer) TMA coordinates of box number `box` of a subtile at row `m`, column `n` of a matrix."""
    inner, outer = (n, m) if tile.major == "K" else (m, n)
    return inner + box * tile.box_inner, outer


class TmaAuxLoad:
    """All (M, N) matrices that TMA reads, one subtile per load stage (CUTLASS: StagesC) of each warpgroup.

    The warpgroup's leader issues the copies: those of the first subtiles before the mainloop, the others as stages are
    freed. A stage's barrier completes once per subtile that is loaded into it.
    """

    def __init__(self, plan: EpiloguePlan, operand_dims: dict[str, BroadcastDims], consumers: int) -> None:
        """Declare tensor maps, buffers and barriers. `consumers`: math warpgroups of a CTA."""
        k, self.loads, self.operand_dims = current_builder(), plan.loads, operand_dims
        self.load_stages, self.subtiles, self.subtiles_n = plan.load_stages, plan.subtiles, plan.subtiles_n
        self.maps = {name: k.tensor_map(operand_argument(name), partial(_tensor_map_with_tile_boxes, name, tile))
                     for name, tile in self.loads}  # fmt: skip
        stages = plan.load_stages * consumers
        self.buffers = {name: k.shared(tile, stages=stages, name=name) for name, tile in self.loads}
        self.barriers = k.shared(8, stages=stages, alignment=8, name="epilogue_load_barrier")
        self.bytes = sum(tile.bytes for _, tile in self.loads)

    def init(self) -> None:
        with current_builder().unroll(self.barriers.count, name="stage") as stage:
            hw.mbarrier_init(self.barriers[stage], 1)

    def start_parity(self) -> Variable | None:
        """Declare, before the tile loop, the parity by which barriers differ between tiles; None if none does.

        A stage's barrier completes a phase per subtile. If a stage loads an odd number of subtiles of a tile, the next
        tile starts with the other parity. So this bit flips per tile, and `wait` xors it into such stages' parity.
        """
        some_stage_is_odd = self.subtiles % self.load_stages or self.subtiles // self.load_stages % 2
        return current_builder().var(U32, 0, "epilogue_load_tile_parity") if some_stage_is_odd else None

    def issue_loads(self, wg_tile: WarpgroupTile, leader: Value, tile_parity: Variable | None) -> TileAuxLoad:
        """Issue the loads of the first subtiles, as many as there are stages, if this CTA stores the tile."""
        tile, split = TileAuxLoad(self, wg_tile, tile_parity), wg_tile.work.split
        k = current_builder()
        stores_tile = leader if split is None else leader & split.runs_epilogue
        with k.when(stores_tile), k.unroll(self.load_stages, name="subtile") as subtile:
            tile.load(subtile)
        return tile


class TileAuxLoad:
    """The subtiles of a warpgroup's tile that TMA loads; `tile_parity` is that of `TmaAuxLoad.start_parity`."""

    def __init__(self, matrices: TmaAuxLoad, wg_tile: WarpgroupTile, tile_parity: Variable | None) -> None:
        self._matrices, self._wg_tile, self._tile_parity = matrices, wg_tile, tile_parity
        self._subtiles, self._load_stages = matrices.subtiles, matrices.load_stages

    def _base_and_load_stage(self, subtile: Value) -> tuple[Value, Value]:
        """Return the warpgroup's first stage (all have stages in one array), and a subtile's stage relative to it."""
        base, stage = self._wg_tile.warpgroup * self._load_stages, subtile
        if self._load_stages < self._subtiles:
            stage = (subtile % self._load_stages).with_name_hint("load_stage")
        return base, stage

    def load(self, subtile: Value) -> None:
        """Issue the TMA loads of a subtile. Called in the leader."""
        matrices, (base, stage) = self._matrices, self._base_and_load_stage(subtile)
        base.with_name_hint("first_stage")
        barrier = matrices.barriers[stage].at(base, 8)
        epi_m = (subtile // matrices.subtiles_n).with_name_hint("epi_m")
        epi_n = (subtile % matrices.subtiles_n).with_name_hint("epi_n")
        hw.mbarrier_arrive_expect_tx(barrier, matrices.bytes)
        for name, tile in matrices.loads:
            buffer = matrices.buffers[name]
            m, n = self._wg_tile.origin(matrices.operand_dims[name])
            with current_builder().unroll(tile.boxes, name="box") as box:
                coords = box_at(tile, m + epi_m * tile.mn, n + epi_n * tile.k, box)
                address = buffer[stage].at(base, buffer.slot_bytes).at(box, tile.box_bytes)
                # EVICT_FIRST would evict lines of which the next subtile reads the other half (tries-subtiles-h100).
                hw.tma_load(matrices.maps[name], *coords, self._wg_tile.work.batch, address, barrier, EVICT_NORMAL)

    def refill_stage(self, subtile: Value) -> None:
        """Issue the loads of the subtile that reuses the stage of `subtile`, if there is one. Called in the leader."""
        if self._load_stages < self._subtiles:
            with current_builder().when(subtile + self._load_stages < self._subtiles):
                self.load((subtile + self._load_stages).with_name_hint("next_subtile"))

    def wait(self, subtile: Value) -> None:
        """Wait until a subtile is loaded: until its stage's barrier has completed the phase of that load."""
        base, stage = self._base_and_load_stage(subtile)
        per_stage, extra = divmod(self._subtiles, self._load_stages)  # the first `extra` stages load one subtile more
        parity: Value = Constant(U32, 0)
        if self._load_stages < self._subtiles:
            parity = (subtile // self._load_stages % 2).to(U32).with_name_hint("load_parity")
        if self._tile_parity is not None:
            # the stages that load an odd number of subtiles of a tile, see `start_parity`
            flips_per_tile = Constant(PRED, True) if not extra else stage >= extra if per_stage % 2 else stage < extra
            parity = current_builder().select(flips_per_tile, self._tile_parity.get() ^ parity, parity)
        hw.mbarrier_wait(self._matrices.barriers[stage].at(base, 8), parity)

    def load_fragment(self, name: str, subtile: Value, first: int, n8_count: int) -> fragment.LoadPair:
        """Load this thread's elements of a subtile of the matrix `name` from its stage.

        They are in `n8_count` groups of 8 columns, from group `first` on.
        """
        base, stage = self._base_and_load_stage(subtile)
        buffer, tile = self._matrices.buffers[name], dict(self._matrices.loads)[name]
        address = buffer[stage].at(base, buffer.slot_bytes).address.with_name_hint(f"{name}_buffer")
        return fragment.read(tile, address, first, n8_count, name)

    def end(self) -> None:
        """Flip the parity for the next tile; see `TmaAuxLoad.start_parity`."""
        if self._tile_parity is not None:
            self._tile_parity.set(self._tile_parity.get() ^ 1)
