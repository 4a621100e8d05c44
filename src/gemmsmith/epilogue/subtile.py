"""One subtile of an epilogue: loads its operands, evaluates the graph 8 columns at a time, and writes the results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.core.dtypes import FP32, INT32, DType
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph
from gemmsmith.epilogue import fragment
from gemmsmith.epilogue.epilogue_plan import EpiloguePlan
from gemmsmith.epilogue.evaluate import Evaluation, Source, accumulator_consumers, row_function_inputs
from gemmsmith.epilogue.inputs import SubtileCoord, TileAuxLoad, TileInput, VisitCoord, WarpgroupTile
from gemmsmith.epilogue.outputs import ScaleStore
from gemmsmith.epilogue.reductions import RangeReduction, TileReduction
from gemmsmith.graph.functions import Lowering
from gemmsmith.graph.row_functions import QuantizeRows, RowFragment, RowFunction, RowsOfSubtile
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import F32
from gemmsmith.lang.values import RegisterArray, Value

MAX_N8_AT_ONCE = 8
"""Maximum groups of 8 columns for which operands are loaded, and columns reduced, at once. Wider subtiles (up to 32
groups) are processed in ranges of N8_PER_RANGE groups, since the largest accumulators leave no more registers. Chosen
so that fused kernels with tiles of up to 256 x 184 compile without spills."""
MAX_N8_AT_ONCE_ROW_FUNCTIONS = 16
"""Maximum groups of 8 columns processed at once in epilogues with row functions. Chosen to compile without spills."""
N8_PER_RANGE = 4
"""Groups of 8 columns that are processed at once in a wider subtile. Chosen to compile without spills."""
ALWAYS_TRUE_MARGIN = 4096
"""Columns: more than those by which a cluster's tile may start past the matrix's end, plus a tile's groups of 8
columns, so that `always_true` in `EpilogueSubtile.run` holds."""


class EpilogueContext(Protocol):
    """The attributes of an epilogue that its subtiles use."""

    graph: EpilogueGraph
    plan: EpiloguePlan
    broadcast_dims: tuple[BroadcastDims, ...]
    result_dims: dict[str, BroadcastDims]
    lowerings: dict[int, Lowering]
    scale_stores: list[tuple[int, ScaleStore]]


@dataclass(frozen=True)
class TileParts:
    """What an epilogue has begun for a warpgroup's tile."""

    wg_tile: WarpgroupTile
    inputs: Mapping[str, TileInput]
    tma_loads: TileAuxLoad | None
    reductions: Sequence[TileReduction]


class EpilogueSubtile:
    """64 rows x `epi_tile_n` columns of the accumulator (CUTLASS: epilogue subtile).

    It is computed in ranges of groups of 8 columns, for each of which operands are loaded into registers, and these in
    steps of `n8_per_step` groups.
    """

    def __init__(
        self, epilogue: EpilogueContext, tile: TileParts, accumulator: Accumulator, coord: SubtileCoord
    ) -> None:
        self.epilogue, self.tile, self.accumulator = epilogue, tile, accumulator
        self.graph, self.broadcast_dims, self.wg_tile = epilogue.graph, epilogue.broadcast_dims, tile.wg_tile
        self.index, self.epi_m, self.column, self.buffers = coord.index, coord.epi_m, coord.column, coord.buffers
        self.acc_column = coord.acc_column
        self.n8_count = epilogue.plan.epi_tile_n // 8
        self.n8_per_step = next(
            s for s in ((4, 2) if self.graph.has_interleaved_columns else (2, 1)) if self.n8_count % s == 0
        )
        self._row_function_nodes = list(row_function_inputs(self.graph))
        self.row_functions: dict[int, RowsOfSubtile] = {}
        """Functions of whole rows that have been computed, by node."""
        self.row_fragments: dict[int, RowFragment] = {}
        self.operand_fragments: dict[int, fragment.LoadPair] = {}
        self._loaded_n8_range = (0, 0)

    def run(self) -> None:
        """Compute the subtile's results and write them.

        Row functions come first, since results need whole rows of them. A wide subtile is computed range by range of
        N8_PER_RANGE groups of 8 columns, if operands or reductions take registers for each column.
        """
        tile, wg_tile = self.tile, self.wg_tile
        if tile.tma_loads:
            tile.tma_loads.wait(self.index)
        uses_registers_per_column = bool(self.graph.operands) or any(x.reduction.axis == "m" for x in tile.reductions)
        max_n8 = MAX_N8_AT_ONCE_ROW_FUNCTIONS if self._row_function_nodes else MAX_N8_AT_ONCE
        n8_per_range = N8_PER_RANGE if uses_registers_per_column and self.n8_count > max_n8 else self.n8_count
        n8_ranges = [
            (first, min(first + n8_per_range, self.n8_count)) for first in range(0, self.n8_count, n8_per_range)
        ]
        for i in self._row_function_nodes:
            self.row_functions[i] = self._compute_row_function(i, n8_ranges)
        for first, stop in n8_ranges:
            # A condition that is always true, which ptxas cannot know (ALWAYS_TRUE_MARGIN): the branch stops it from
            # interleaving the ranges and spilling.
            if tile.reductions:
                current_builder().comment("always true: keeps ptxas from interleaving these columns with the next ones")
            always_true = wg_tile.problem_n - wg_tile.work.n > self.index * self.n8_count + (first - ALWAYS_TRUE_MARGIN)
            with current_builder().when(always_true) if tile.reductions else nullcontext():
                self._compute(first, stop)
        for index, store in self.epilogue.scale_stores:
            store.write(self.wg_tile, self.epi_m, self.column, self._scales(index))

    def _scales(self, index: int) -> list[Value]:
        """Return the scales of a thread's two rows, of the "scale" node `index`."""
        quantized = self.row_functions[self.graph.nodes[index].inputs[0]]
        assert isinstance(quantized, QuantizeRows)
        return quantized.scales

    def _compute(self, first: int, stop: int) -> None:
        """Compute and write one range of the subtile: the groups of 8 columns from `first` to `stop`."""
        reductions = [RangeReduction(reduction, first, stop) for reduction in self.tile.reductions]
        self._load_operands([r.node for r in self.graph.results], first, stop)
        with current_builder().unroll(first, stop, self.n8_per_step, name="n8") as n8:
            self._write_results(n8, reductions)
        for reduction in reductions:
            reduction.end(self.epi_m, self.column)

    def _load_operands(self, roots: Iterable[int], first: int, stop: int) -> None:
        """Load the operands that the nodes `roots` need, in the groups of 8 columns from `first` to `stop`."""
        if self._loaded_n8_range != (first, stop):
            self.operand_fragments, self._loaded_n8_range = {}, (first, stop)
        needed: set[int] = set()
        stack = list(roots)
        while stack:
            if (i := stack.pop()) not in needed and i not in self.row_functions and i not in self.row_fragments:
                needed.add(i)
                stack += self.graph.nodes[i].inputs
        for i in sorted(needed):
            node = self.graph.nodes[i]
            if node.op == "operand" and i not in self.operand_fragments:
                self.operand_fragments[i] = self._load_operand(
                    node.attribute, self.broadcast_dims[i].column_divisor, first, stop
                )

    def _load_operand(self, name: str, columns_per_value: int, first: int, stop: int) -> fragment.LoadPair:
        """Load an operand's elements in the subtile's groups of 8 columns from `first` to `stop`.

        The result returns pairs by group of the operand, counted from the subtile's first.
        """
        tile, first_n8, count = self.tile, first // columns_per_value, (stop - first) // columns_per_value
        if x := tile.inputs.get(name):
            pair = x.load_fragment(self.epi_m, (self.column + first * 8) // columns_per_value, count)
        else:
            assert tile.tma_loads
            pair = tile.tma_loads.load_fragment(name, self.index, first_n8, count)
        return partial(_pair_in_range, pair, first_n8)

    def _visit_coord(self, n8: Value, columns_per_value: int) -> VisitCoord:
        """Return the step at group `n8` of 8 columns, counted in the values of an operand or a result."""
        operand_n8 = (n8 // columns_per_value).with_name_hint("operand_n8") if columns_per_value > 1 else n8
        n8_in_step = self.n8_per_step // columns_per_value
        return VisitCoord(self.epi_m, self.column // columns_per_value, operand_n8, n8_in_step, columns_per_value)

    def _evaluate_at(self, n8: Value) -> Evaluation:
        """Return the graph's evaluation in one step: `self.n8_per_step` groups of 8 columns, from group `n8` on."""
        in_registers = self.operand_fragments | {i: x.pair for i, x in self.row_functions.items()}
        in_registers |= {i: x.load_pair for i, x in self.row_fragments.items()}
        sources: dict[int, Source] = {}  # of nodes that are not computed from their inputs: functions that load a pair
        for i, node in enumerate(self.graph.nodes):
            first_n8 = self._visit_coord(n8, self.broadcast_dims[i].column_divisor).n8
            if i in in_registers:
                sources[i] = partial(_pair_at, in_registers[i], first_n8)
            elif node.op == "accumulator":
                first_n8 = (n8 + (self.acc_column // 8).with_name_hint("subtile_n8")).named("acc_n8")
                sources[i] = partial(_accumulator_pair, self.accumulator, self.epi_m, first_n8)
            elif node.op == "group_index":
                sources[i] = partial(_group_pair, self.wg_tile)
            elif node.op == "scale" and node.inputs[0] in self.row_functions:
                sources[i] = partial(_scale_pair, self._scales(i))
        columns = partial(self.wg_tile.columns, self._visit_coord(n8, 1))
        return Evaluation(self.graph, self.epilogue.lowerings, sources, columns)

    def _compute_row_function(self, index: int, n8_ranges: list[tuple[int, int]]) -> RowsOfSubtile:
        """Compute the row function of node `index`: evaluate its input in the whole subtile, then apply it.

        The input is evaluated one range, (first, stop) groups of 8 columns, of `n8_ranges` after the other, and kept in
        registers for all row functions of it.
        """
        k, node = current_builder(), self.graph.nodes[index]
        source, columns_per_value = node.inputs[0], self.broadcast_dims[index].column_divisor
        row_fragment = self.row_fragments.get(source)
        if not row_fragment:
            registers = None
            if accumulator_consumers(self.graph) == {source} and self.accumulator.dtype == FP32:
                registers = self.accumulator.fragments[self.epi_m]  # nothing else reads the accumulator any more
            first_register, stride = (self.acc_column // 2, columns_per_value) if registers else (0, 1)
            row_fragment = RowFragment(self.n8_count // columns_per_value, registers, first_register, stride)
        assert isinstance(node.operation, RowFunction)
        row_function = node.operation.device
        for first, stop in n8_ranges:
            self._load_operands([source], first, stop)
            with k.unroll(first, stop, self.n8_per_step, name="n8") as n8:
                values, coord = self._evaluate_at(n8), self._visit_coord(n8, columns_per_value)
                for n8_offset in range(coord.n8_in_step):
                    in_bounds = self.wg_tile.columns_in_bounds(coord, n8_offset)
                    for row_half in range(2):
                        target = fragment.n8_plus(coord.n8, n8_offset)
                        pair = values.pair(source, n8_offset, row_half)
                        row_fragment.store_pair(target, row_half, pair, in_bounds, row_function.masked_value)
        self.row_fragments[source] = row_fragment
        return row_function(node, row_fragment)

    def _write_results(self, n8: Value, reductions: list[RangeReduction]) -> None:
        """Write all results of one step: `self.n8_per_step` groups of 8 columns, from group `n8` on."""
        e, values = self.epilogue, self._evaluate_at(n8)
        tiles = dict(e.plan.stores)
        for r in self.graph.results:
            if r.name in tiles and r.dtype:
                coord = self._visit_coord(n8, e.result_dims[r.name].columns_per_value)
                buffer = self.buffers[r.name]
                for first in range(0, coord.n8_in_step, 2):
                    pair = partial(_value_pair, values, r.node, first)
                    pack: partial[None] = partial(_pack, pair, 2 // e.result_dims[r.name].rows_per_value, r.dtype)
                    if r.dtype == INT32:  # the accumulator itself, not rounded through fp32
                        first_n8 = (n8 + (self.acc_column // 8 + first)).with_name_hint("acc_n8")
                        pair = partial(_accumulator_pair, self.accumulator, self.epi_m, first_n8, as_int32=True)
                    if self.graph.nodes[r.node].op == "accumulator":
                        first_n8 = (n8 + (self.acc_column // 8 + first)).named("acc_n8")
                        pack = partial(_pack_accumulator, self.accumulator, self.epi_m, first_n8, r.dtype)
                    write_n8, count = fragment.n8_plus(coord.n8, first), min(2, coord.n8_in_step - first)
                    fragment.write(tiles[r.name], buffer, write_n8, count, pair, pack)
        for x in reductions:
            index = self.graph.nodes[x.reduction.result.node].inputs[0]
            coord = self._visit_coord(n8, x.reduction.columns_per_value)
            x.add(coord, partial(values.pair, index))


def _accumulator_pair(
    accumulator: Accumulator, epi_m: Value, n8: Value, n8_offset: int, row_half: int, as_int32: bool = False
) -> tuple[Value, Value]:
    """Return two adjacent elements of the accumulator as fp32, or if `as_int32`, as int32, without rounding."""
    i = ((n8 + n8_offset) * 2 + row_half).named("pair_idx")
    if as_int32:
        return accumulator.fragments[epi_m][2 * i], accumulator.fragments[epi_m][2 * i + 1]
    return accumulator.element(epi_m, i, 0), accumulator.element(epi_m, i, 1)


def _pair_in_range(pair: fragment.LoadPair, first_n8: int, n8: Value, row_half: int) -> tuple[Value, Value]:
    return pair((n8 - first_n8).with_name_hint("n8_in_range"), row_half)


def _pair_at(pair: fragment.LoadPair, n8: Value, n8_offset: int, row_half: int) -> tuple[Value, Value]:
    return pair(fragment.n8_plus(n8, n8_offset), row_half)


def _group_pair(wg_tile: WarpgroupTile, n8_offset: int, row_half: int) -> tuple[Value, Value]:
    index = wg_tile.work.group.to(F32).with_name_hint("group_index")
    return index, index


def _scale_pair(scales: list[Value], n8_offset: int, row_half: int) -> tuple[Value, Value]:
    return scales[row_half], scales[row_half]


def _value_pair(values: Evaluation, node: int, first: int, n8_offset: int, row_half: int) -> tuple[Value, Value]:
    return values.pair(node, first + n8_offset, row_half)


def _pack(pair: fragment.LoadPair, halves: int, dtype: DType, packed: RegisterArray) -> None:
    for i in range(len(packed)):
        packed[i] = hw.pack(*pair(i // halves, i % halves), dtype)


def _pack_accumulator(accumulator: Accumulator, epi_m: Value, n8: Value, dtype: DType, packed: RegisterArray) -> None:
    """Fill `packed` with pairs of the accumulator, from group `n8` of 8 columns on, rounded to `dtype`.

    An fp16 accumulator has packed pairs already.
    """
    with current_builder().unroll(len(packed)) as i:
        packed[i] = accumulator.packed_pair(epi_m, (n8 * 2 + i).named("pair_idx"), dtype)
