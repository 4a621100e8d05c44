"""The collective epilogue: an epilogue graph lowered onto the accumulator, subtile by subtile.

`Epilogue` declares shared memory and kernel arguments; its `pipelines` have barriers to initialize, and its `maps` are
prefetched. In a consumer warpgroup, `start` before the first tile returns a `WarpgroupEpilogue`. Its `load`, before a
tile's mainloop, which hides the loads of the operands, returns a `TileEpilogue`, which stores the accumulator; its
`finish` follows the last tile. A GEMM without an epilogue has a graph of one node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator, InterleaveOrder
from gemmsmith.collective.global_array import Scatter
from gemmsmith.collective.pipeline import HasBarriers
from gemmsmith.collective.split_reduction import make_split_reduction
from gemmsmith.core.graph import Operand
from gemmsmith.core.problem import SCALE_NAMES
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.epilogue_plan import plan_epilogue
from gemmsmith.epilogue.evaluate import select_lowerings
from gemmsmith.epilogue.inputs import (
    GmemAuxLoad,
    ScalarBroadcast,
    TileAuxLoad,
    TileInput,
    TmaAuxLoad,
    VectorBroadcast,
    WarpgroupTile,
)
from gemmsmith.epilogue.outputs import ScaleStore, Stores
from gemmsmith.epilogue.partials import shared_partials
from gemmsmith.epilogue.reductions import Reduction, TileReduction
from gemmsmith.epilogue.row_fill import RowFill
from gemmsmith.epilogue.store_strategies import (
    ClippedTmaStores,
    NoStores,
    StoreGroup,
    ThreadStores,
    TmaStores,
)
from gemmsmith.epilogue.subtile import EpilogueSubtile, TileParts
from gemmsmith.graph.row_functions import RowFunction
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.shared import SharedBuffer
from gemmsmith.lang.types import I32, PRED
from gemmsmith.lang.values import Constant, Value
from gemmsmith.tile_scheduler.tiles import TileScheduler, WorkTile


class Epilogue:
    """Lowers a kernel's epilogue graph: loads its operands, evaluates it and stores its results, tile by tile."""

    def __init__(self, spec: KernelSpec, scheduler: TileScheduler, stages: Sequence[SharedBuffer] = ()) -> None:
        """Declare shared memory and kernel arguments.

        Args:
            spec: The kernel's config and epilogue.
            scheduler: The kernel's tile scheduler, which has the table of a grouped GEMM.
            stages: The mainloop's buffers of A and B, which with alias_epilogue are the buffers of the stores, too.
        """
        k = current_builder()
        self.spec, self.graph = spec, spec.epilogue.graph
        self.plan = plan_epilogue(spec)
        self.broadcast_dims = self.graph.broadcast_dims
        self.lowerings = select_lowerings(self.graph, spec.epilogue.fast_math)
        consumers, plan = spec.config.consumers, self.plan
        operand_dims = {o.name: o.broadcast_dims for o in self.graph.operands}
        self.result_dims = {r.name: self.broadcast_dims[r.node] for r in self.graph.results}
        self.tma_loads = TmaAuxLoad(plan, operand_dims, consumers) if plan.loads else None
        self.alias_epilogue = spec.config.alias_epilogue and bool(plan.stores)
        self.warpgroup_barriers = k.named_barriers(consumers)  # one per warpgroup
        self.all_math_barrier = k.named_barriers(1) if self.alias_epilogue else 0
        aliased = stages if self.alias_epilogue else ()
        scatter = Scatter(spec.grouping) if spec.grouping and spec.grouping.scatters else None
        self.stores = Stores(spec, plan, self.result_dims, aliased, scatter) if plan.stores else None
        tma = dict(plan.loads)
        self.inputs = {o.name: self._make_input(o) for o in self.graph.operands if o.name not in tma}
        self.reductions: list[Reduction] = []
        self.scale_stores: list[tuple[int, ScaleStore]] = []
        shared = shared_partials(self.graph, spec.epilogue.deterministic)
        for r in self.graph.results:
            node = self.graph.nodes[r.node]
            if shared.get(r.name) == r.name:
                kind, axis = node.attribute
                dims = self.broadcast_dims[node.inputs[0]]
                self.reductions.append(Reduction(r, kind, axis, dims, spec, plan, scheduler.table))
            elif node.op == "scale" and r.dtype:
                self.scale_stores.append((r.node, ScaleStore(r.name, r.dtype, plan.epi_tile_n, scatter)))
        thread_stores = self.stores.arrays if self.stores else {}
        row_functions = [node.op for node in self.graph.nodes if isinstance(node.operation, RowFunction)]
        needs_bounds = [*thread_stores, *self.scale_stores, *self.reductions, *self.inputs, *row_functions]
        self.m = k.parameter("m", compute=lambda p: p.m) if needs_bounds else Constant(I32, 0)
        self.n = k.parameter("n", compute=lambda p: p.n) if needs_bounds else Constant(I32, 0)
        self.split_reduction = make_split_reduction(spec, scheduler)
        self.interleave_order = InterleaveOrder(spec.interleaved) if spec.interleaved else None
        table, scale_stores = scheduler.table, [x for _, x in self.scale_stores]
        self.row_fill = RowFill(spec, table, self.stores, scale_stores, self.reductions) if table else None

    def _make_input(self, operand: Operand) -> ScalarBroadcast | VectorBroadcast | GmemAuxLoad:
        """Return what loads an operand that TMA does not load: a scalar, a row or column, or a matrix."""
        if operand.broadcast_dims.is_matrix:
            return GmemAuxLoad(operand)
        count = dict(self.plan.broadcasts).get(operand.name)
        if not count:
            return ScalarBroadcast(operand)
        # of the operands, only a's scales have the rows of the array a; others have the rows of D
        grouping, has_rows_of_a = self.spec.grouping, operand.name == SCALE_NAMES["a"]
        gathers = grouping is not None and grouping.gathers and has_rows_of_a
        return VectorBroadcast(operand, count, self.spec.config.consumers, gathers)

    @property
    def pipelines(self) -> tuple[HasBarriers, ...]:
        """Objects with mbarriers to initialize."""
        return (*([self.tma_loads] if self.tma_loads else []), *self.split_reduction.pipelines)

    @property
    def maps(self) -> list[Value]:
        """Tensor maps of the matrices that are loaded and stored by TMA."""
        return [x for owner in (self.tma_loads, self.stores) if owner for x in owner.maps.values()]

    def start(self, warpgroup: Value, first_row: Value | int, first_column: Value | int = 0) -> WarpgroupEpilogue:
        """Declare the state of a consumer warpgroup, before its first tile.

        `warpgroup`: its index among the consumers. `first_row`, `first_column`: its first row and column in a tile.
        """
        return WarpgroupEpilogue(self, warpgroup, first_row, first_column)


class WarpgroupEpilogue:
    """The epilogue in a consumer warpgroup, from its first tile to its last."""

    def __init__(self, epilogue: Epilogue, warpgroup: Value, first_row: Value | int, first_column: Value | int) -> None:
        self.epilogue, self.warpgroup = epilogue, warpgroup
        self._first_row, self._first_column = first_row, first_column
        self.leader: Value = Constant(PRED, False)
        """Whether this is the thread that issues TMA copies, if there are any."""
        if epilogue.maps:
            self.leader = ((current_builder().warp_index % 4 == 0) & hw.elect_one()).named("epilogue_leader")
        if epilogue.reductions:
            hw.launch_dependent_grids()  # CTAs of the second step may start early: they wait for this grid's end
        self._load_parity = epilogue.tma_loads.start_parity() if epilogue.tma_loads else None
        epilogue.split_reduction.start()

    def load(self, tile: WorkTile) -> TileEpilogue:
        """Issue the loads of the operands that the tile's epilogue reads, before the mainloop, which hides them."""
        e = self.epilogue
        work = e.split_reduction.output_tile(tile)
        if not isinstance(self._first_column, int):
            work = replace(work, n=(work.n + self._first_column).named("first_column"))
        first_row = (work.m + self._first_row).named("first_row")
        wg_tile = WarpgroupTile(work, first_row, self.warpgroup, work.a.end(e.m), work.b.end(e.n))
        inputs = {name: x.issue_loads(wg_tile) for name, x in e.inputs.items()}
        tma_loads = e.tma_loads.issue_loads(wg_tile, self.leader, self._load_parity) if e.tma_loads else None
        return TileEpilogue(self, tile, wg_tile, inputs, tma_loads)

    def finish(self) -> None:
        """Do what follows the last tile.

        Wait until the last TMA stores have read shared memory, which is freed when the CTA exits; end the split-K
        reduction; fill the rows of no group.
        """
        e = self.epilogue
        if e.stores and e.stores.maps and not e.alias_epilogue:
            with current_builder().when(self.leader):
                hw.bulk_wait_read(0)
        e.split_reduction.tail(self.warpgroup)
        if e.row_fill:
            e.row_fill.store(self.warpgroup)


class TileEpilogue:
    """The epilogue of a warpgroup's tile, the loads of whose operands have been issued."""

    def __init__(
        self, warpgroup: WarpgroupEpilogue, work: WorkTile, wg_tile: WarpgroupTile, inputs: Mapping[str, TileInput],
        tma_loads: TileAuxLoad | None,
    ) -> None:  # fmt: skip
        """Take what `WarpgroupEpilogue.load` has begun. `work`: the CTA's tile; `wg_tile`: the warpgroup's part."""
        self._epilogue, self._leader = warpgroup.epilogue, warpgroup.leader
        self._work, self._wg_tile, self._inputs, self._tma_loads = work, wg_tile, inputs, tma_loads

    def store(self, accumulator: Accumulator) -> None:
        """Add the partial sums of other splits, then compute and store the warpgroup's tile."""
        split_reduction = self._epilogue.split_reduction
        with (
            self._rematerialized_thread_ids(),
            split_reduction.reduced_accumulator(accumulator, self._work, self._wg_tile.warpgroup) as reduced,
        ):
            self._store(reduced)

    def _rematerialized_thread_ids(self) -> AbstractContextManager[None]:
        """Return a context in which, with promoted sums, the lane and warp index are opaque copies.

        Addresses that depend on them are then computed for each tile. Otherwise ptxas would compute them once, keep
        them live across the mainloop, which uses most registers, and spill.
        """
        if not self._epilogue.spec.promoted:
            return nullcontext()
        k = current_builder()
        k.comment("opaque copies: keep ptxas from hoisting the epilogue's address computations")
        return k.with_lane_and_warp(
            hw.opaque(k.lane).named("opaque_lane"), hw.opaque(k.warp_index).named("opaque_warp")
        )

    def _store(self, accumulator: Accumulator) -> None:
        """Compute and store the tile, subtile by subtile, from the accumulator, which has the sums of all splits."""
        k, e, wg_tile = current_builder(), self._epilogue, self._wg_tile
        barrier = (wg_tile.warpgroup + e.warpgroup_barriers).named("epilogue_barrier")
        k.comment("epilogue")
        for x in self._inputs.values():
            x.stage_to_smem()
        if e.interleave_order:
            e.interleave_order.restore(accumulator)
        parts = TileParts(wg_tile, self._inputs, self._tma_loads, [TileReduction(x, wg_tile) for x in e.reductions])
        stores = self._store_strategy(barrier)
        stores.begin_tile()
        with self._groups(accumulator) as group, stores.when_inside(group):
            stores.begin_group(group)
            with group.subtiles() as coord:
                EpilogueSubtile(e, parts, accumulator, coord).run()
            stores.end_group(group)
        for reduction in parts.reductions:
            reduction.end()
        if self._tma_loads:
            self._tma_loads.end()
        stores.end_tile()

    @contextmanager
    def _groups(self, accumulator: Accumulator) -> Iterator[StoreGroup]:
        """Loop over the groups of subtiles: unrolled, or if the code would be too long, with a run-time loop along N.

        Registers can only be indexed by constants. So the run-time loop always reads the accumulator's first registers,
        and moves the other ones up after each subtile.
        """
        k, e, plan = current_builder(), self._epilogue, self._epilogue.plan
        if not plan.loops_over_columns:
            name = "subtile" if plan.subtiles_per_store == 1 else "store_group"
            with k.unroll(plan.store_groups, name=name) as index:
                yield StoreGroup(plan, e.stores, self._wg_tile, index)
            return
        with k.unroll(plan.subtiles_m, name="epi_m") as epi_m, k.range(plan.subtiles_n, name="epi_n") as epi_n:
            index = (epi_m * plan.subtiles_n + epi_n).named("subtile")
            yield StoreGroup(plan, e.stores, self._wg_tile, index, epi_m)
            accumulator.shift(epi_m, plan.epi_tile_n)

    def _store_strategy(self, barrier: Value) -> NoStores:
        """Return how the tile's results are stored. `barrier`: the named barrier of the warpgroup's threads."""
        e, parts = self._epilogue, (self._epilogue.plan, self._wg_tile, barrier, self._leader, self._tma_loads)
        if not e.stores:
            return NoStores(*parts)
        strategy: type[ThreadStores] = TmaStores if e.stores.maps else ThreadStores
        if e.stores.maps and e.spec.grouping and e.spec.grouping.clips_rows:
            strategy = ClippedTmaStores
        return strategy(*parts, e.stores, e.all_math_barrier)
