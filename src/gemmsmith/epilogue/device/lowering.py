"""What a design calls to finish a tile: a graph lowered onto the accumulator, piece by piece.

The constructor declares shared memory and arguments; `pipelines` have barriers to initialize, `maps` are prefetched. In
the math warpgroups `start` comes before the tiles; `load` before a tile's mainloop, which hides it, starts the loads of
its operands; `store` takes the accumulator, after the shares of other CTAs are added to it; `finish` comes after the
last tile. The bare product is the graph with one node.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.cluster_sums import partial_sums
from gemmsmith.collective.mainloop import Mainloop
from gemmsmith.collective.multistage import MultistageMainloop
from gemmsmith.collective.pipeline import Initialized
from gemmsmith.core.graph import Operand
from gemmsmith.core.mma import WARPGROUP
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.device.inputs import DirectMatrix, Part, Position, Scalar, TmaMatrices, Vector
from gemmsmith.epilogue.device.layout import layout
from gemmsmith.epilogue.device.outputs import ScaleStore, Stores
from gemmsmith.epilogue.device.piece import Piece
from gemmsmith.epilogue.device.reductions import Reduction, representatives
from gemmsmith.epilogue.device.rows import WHOLE_ROWS
from gemmsmith.epilogue.evaluate import lowerings
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import I32
from gemmsmith.lang.values import Constant, Value
from gemmsmith.schedule.tiles import TileScheduler, WorkTile


class Epilogue:
    """See the module."""

    def __init__(self, spec: KernelSpec, scheduler: TileScheduler, mainloop: Mainloop | MultistageMainloop) -> None:
        """Its stores lie in the mainloop's stages if the config aliases them."""
        k, self._mainloop = current(), mainloop
        self.spec, self.graph = spec, spec.epilogue.graph
        self.layout = layout(spec)
        self.extents = self.graph.extents()
        self.chosen = lowerings(self.graph, spec.epilogue.exact)
        consumers, plan = spec.config.consumers, self.layout
        of_operands = {o.name: o.extent for o in self.graph.operands}
        self.stored = {r.name: self.extents[r.node] for r in self.graph.results}
        tma = dict(plan.loads)
        loads = [o for o in self.graph.operands if o.name not in tma]
        self.matrices = None
        if plan.loads:
            self.matrices = TmaMatrices(plan.loads, of_operands, plan.slots, plan.pieces, plan.parts, consumers)
        self.alias_epilogue = spec.config.alias_epilogue and bool(plan.stores)
        self._barriers = k.named_barriers(consumers)  # one a warpgroup
        self._all_math = k.named_barriers(1) if self.alias_epilogue else 0
        over = mainloop.stages if self.alias_epilogue else None
        self.stores = Stores(spec, plan, self.stored, over) if plan.stores else None
        self.inputs = {o.name: self._input(o) for o in loads}
        self.reductions: list[Reduction] = []
        self.scales: list[tuple[int, ScaleStore]] = []
        own = representatives(self.graph, spec.epilogue.atomic)
        for r in self.graph.results:
            node = self.graph.nodes[r.node]
            if own.get(r.name) == r.name:
                kind, axis = node.value
                self.reductions.append(Reduction(r, kind, axis, self.extents[node.inputs[0]], spec, plan))
            elif node.op == "scale" and r.dtype:
                self.scales.append((r.node, ScaleStore(r.name, r.dtype, plan.columns)))
        copied = self.stores.arrays if self.stores else {}
        bounded = [*copied, *self.scales, *self.reductions, *self.inputs, *self._whole_rows()]
        self.m = k.parameter("m", bind=lambda p: p.m) if bounded else Constant(I32, 0)
        self.n = k.parameter("n", bind=lambda p: p.n) if bounded else Constant(I32, 0)
        self._sums = partial_sums(spec, scheduler)

    def _whole_rows(self) -> list[str]:
        return [node.op for node in self.graph.nodes if node.op in WHOLE_ROWS]

    def _input(self, operand: Operand) -> Scalar | Vector | DirectMatrix:
        if operand.extent.is_matrix:
            return DirectMatrix(operand)
        count = dict(self.layout.vectors).get(operand.name)
        return Vector(operand, count, self.spec.config.consumers) if count else Scalar(operand)

    @property
    def pipelines(self) -> tuple[Initialized, ...]:
        return (*([self.matrices] if self.matrices else []), *self._sums.pipelines)

    @property
    def maps(self) -> list[Value]:
        """The tensor maps of what it loads and stores."""
        return [x for matrices in (self.matrices, self.stores) if matrices for x in matrices.maps.values()]

    def start(self, warpgroup: Value, first_row: Value | int, first_column: Value | int = 0) -> None:
        """In the math warpgroups, before their first tile; the warpgroup's rows start `first_row` below a tile's, its
        columns `first_column` behind them."""
        self._warpgroup, self._first_row, self._first_column = warpgroup, first_row, first_column
        if self.maps:  # who starts copies
            self.leader = ((current().warp_index % 4 == 0) & hw.elect_one()).named("epilogue_leader")
        if self.reductions:
            hw.grid_dependency_launch()  # the second step's CTAs wait where this grid's have ended
        if self.matrices:
            self.matrices.prepare()
        self._sums.start()

    def load(self, tile: WorkTile) -> None:
        """Starts what the tile's epilogue will read."""
        work = self._sums.reduced(tile)
        if not isinstance(self._first_column, int):
            work = replace(work, n=(work.n + self._first_column).named("first_column"))
        self.part = Part(work, (work.m + self._first_row).named("first_row"), self._warpgroup, self.m, self.n)
        for x in self.inputs.values():
            x.begin(self.part)
        if self.matrices:
            self.matrices.begin(self.part, self.leader)

    def store(self, accumulator: Accumulator, tile: WorkTile) -> None:
        """Adds what other CTAs have summed of the tile, and computes and stores the warpgroup's part of it; or hands
        its sums to the CTA that does."""
        with self._thread(), self._sums.finished(accumulator, tile, self._warpgroup) as whole:
            self._store(whole)
        self._mainloop.release_alias(tile)

    def _thread(self) -> AbstractContextManager[None]:
        """With promoted sums, which take most registers, what depends on the thread alone is computed for each tile.
        Otherwise the compiler would hold it in registers during the mainloop, and spill."""
        if not self.spec.promoted:
            return nullcontext()
        k = current()
        return k.thread_numbered(hw.opaque(k.lane).named("own_lane"), hw.opaque(k.warp_index).named("own_warp"))

    def _store(self, accumulator: Accumulator) -> None:
        k, plan, part = current(), self.layout, self.part
        barrier = (part.warpgroup + self._barriers).named("epilogue_barrier")
        k.comment("epilogue")
        for x in self.inputs.values():
            x.settle(part)
        for reduction in self.reductions:
            reduction.begin_tile()
        by_tma = self.stores and self.stores.maps
        if self.alias_epilogue:  # nobody reads the stages any more
            hw.barrier_sync(self._all_math, WARPGROUP * self.spec.config.consumers)
        elif plan.vectors and not self.stores:
            hw.barrier_sync(barrier, WARPGROUP)
        with k.unroll(plan.rounds, name="round") as round_index:
            only = self._position(round_index, Constant(I32, 0)) if plan.round == 1 else None
            pieces = partial(self._pieces, round_index, only)
            if self.stores and not (self.alias_epilogue and plan.rounds == 1):
                # With alias_epilogue the barrier above was the first round's.
                with k.when(round_index > 0) if self.alias_epilogue else nullcontext():
                    if by_tma:
                        with k.when(self.leader):
                            self.stores.acquire(round_index, plan.rounds)
                    hw.barrier_sync(barrier, WARPGROUP)
            with pieces() as position:
                Piece(self, accumulator, position).run()
            if by_tma:
                hw.fence_proxy_async()
            if self.stores or self.matrices:
                hw.barrier_sync(barrier, WARPGROUP)
            if by_tma or (self.matrices and plan.slots < plan.pieces):
                with k.when(self.leader):
                    if self.stores and by_tma:
                        with pieces() as position:
                            self.stores.issue(part, position)
                        hw.bulk_commit()
                    if self.matrices:  # rounds are of one piece then
                        self.matrices.load_next(part, round_index)
            if self.stores and self.stores.arrays:
                with pieces() as position:
                    self.stores.copy(part, position)
        if plan.vectors and not (self.stores or self.matrices):
            hw.barrier_sync(barrier, WARPGROUP)
        for reduction in self.reductions:
            reduction.end_tile(part)
        if self.matrices:
            self.matrices.end_of_tile()
        if self.stores and self.alias_epilogue:
            self._drain(self.stores)

    @contextmanager
    def _pieces(self, round_index: Value, only: Position | None) -> Iterator[Position]:
        """The pieces of a round: `only` one, or several, of which the last round may have fewer."""
        k, plan = current(), self.layout
        if only:
            yield only
            return
        with k.unroll(plan.round, name="piece" if plan.rounds == 1 else "piece_of_round") as i:
            inside = round_index * plan.round + i < plan.pieces
            with k.when(inside) if plan.pieces % plan.round else nullcontext():
                yield self._position(round_index, i)

    def _position(self, round_index: Value, i: Value) -> Position:
        plan = self.layout
        piece = round_index * plan.round + i
        block: Value = Constant(I32, 0)
        column = piece
        if plan.blocks > 1:
            block, column = (piece // plan.parts).named("block"), piece % plan.parts
        index = (round_index % plan.sets * plan.round + i).named("buffer_index")
        buffers = self.stores.of_piece(self.part, index) if self.stores else {}
        return Position(piece, block, (column * plan.columns).named("column"), buffers)

    def _drain(self, stores: Stores) -> None:
        """Until what this warp has put into the stages has left them."""
        if stores.maps:
            with current().when(self.leader):
                hw.bulk_wait_read(0)
        if stores.arrays:
            hw.fence_proxy_async()
        hw.sync_warp()

    def finish(self) -> None:
        """Shared memory must outlive the stores that read it."""
        if self.stores and self.stores.maps and not self.alias_epilogue:
            with current().when(self.leader):
                hw.bulk_wait_read(0)
        self._sums.finish(self._warpgroup)
