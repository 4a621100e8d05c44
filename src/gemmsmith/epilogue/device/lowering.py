"""What a design calls to finish a tile: a graph lowered onto the accumulator, piece by piece.

The constructor declares shared memory and arguments; `pipelines` have barriers to initialise, `maps` are prefetched. In
the math warpgroups `start` comes before the tiles; `load` before a tile's mainloop, which hides it, starts the loads of
its operands; `store` takes the accumulator, after the shares of other CTAs are added to it; `finish` comes after the
last tile. The bare product is the graph with one node.
"""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.cluster_sums import partial_sums
from gemmsmith.collective.mainloop import Mainloop
from gemmsmith.collective.pipeline import Initialised
from gemmsmith.core.graph import Operand
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.device.inputs import DirectMatrix, Part, Scalar, TmaMatrices, Vector
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

    def __init__(self, spec: KernelSpec, scheduler: TileScheduler, mainloop: Mainloop) -> None:
        """Its stores lie in the mainloop's stages if the config aliases them."""
        k, self._mainloop = current(), mainloop
        self.spec, self.graph = spec, spec.epilogue.graph
        self.layout = layout(spec)
        self.extents = self.graph.extents()
        self.chosen = lowerings(self.graph, spec.epilogue.exact)
        consumers, plan = spec.config.consumers, self.layout
        self.widths: dict[str, int] = {r.name: self.extents[r.node].width for r in self.graph.results}
        self.widths.update({o.name: o.extent.width for o in self.graph.operands})
        tma = dict(plan.loads)
        loads = [o for o in self.graph.operands if o.name not in tma]
        self.matrices = None
        if plan.loads:
            self.matrices = TmaMatrices(plan.loads, self.widths, plan.slots, plan.pieces, plan.parts, consumers)
        self.alias_epilogue = spec.config.alias_epilogue and bool(plan.stores)
        self._barriers = k.named_barriers(consumers)  # one a warpgroup
        self._all_math = k.named_barriers(1) if self.alias_epilogue else 0
        over = mainloop.stages if self.alias_epilogue else None
        self.stores = Stores(spec, plan, self.widths, over) if plan.stores else None
        self.inputs = {o.name: self._input(o) for o in loads}
        self.reductions: list[Reduction] = []
        self.scales: list[tuple[int, ScaleStore]] = []
        own = representatives(self.graph, spec.epilogue.atomic)
        for r in self.graph.results:
            node = self.graph.nodes[r.node]
            if own.get(r.name) == r.name:
                kind, axis = node.value
                self.reductions.append(Reduction(r, kind, axis, self.extents[node.inputs[0]].width, spec, plan))
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
    def pipelines(self) -> tuple[Initialised, ...]:
        return (*([self.matrices] if self.matrices else []), *self._sums.pipelines)

    @property
    def maps(self) -> list[Value]:
        """The tensor maps of what it loads and stores."""
        return [x for matrices in (self.matrices, self.stores) if matrices for x in matrices.maps.values()]

    def start(self, warpgroup: Value, first_row: Value | int) -> None:
        """In the math warpgroups, before their first tile; the warpgroup's rows start `first_row` below a tile's."""
        self._warpgroup, self._first_row = warpgroup, first_row
        self.leader = ((current().warp_index % 4 == 0) & hw.elect_one()).named("epilogue_leader")
        if self.reductions:
            hw.grid_dependency_launch()  # the second step's CTAs wait where this grid's have ended
        if self.matrices:
            self.matrices.prepare()
        self._sums.start()

    def load(self, tile: WorkTile) -> None:
        """Starts what the tile's epilogue will read."""
        work = self._sums.reduced(tile)
        self.part = Part(work, (work.m + self._first_row).named("first_row"), self._warpgroup, self.m, self.n)
        for x in self.inputs.values():
            x.begin(self.part)
        if self.matrices:
            self.matrices.begin(self.part, self.leader)

    def store(self, accumulator: Accumulator, tile: WorkTile) -> None:
        """Adds what other CTAs have summed of the tile, and computes and stores the warpgroup's part of it; or hands
        its sums to the CTA that does."""
        with self._sums.finished(accumulator, tile, self._warpgroup) as whole:
            self._store(whole)
        self._mainloop.release_alias(tile)

    def _store(self, accumulator: Accumulator) -> None:
        k, plan, part = current(), self.layout, self.part
        barrier = (part.warpgroup + self._barriers).named("epilogue_barrier")
        turns = plan.rounds
        k.comment("epilogue")
        for x in self.inputs.values():
            x.settle(part)
        for reduction in self.reductions:
            reduction.begin_tile()
        for turn in range(turns):
            by_tma = self.stores and self.stores.maps
            enters = turn == 0 and self.alias_epilogue
            if self.stores and by_tma and not enters:
                with k.when(self.leader):
                    self.stores.acquire(turn, turns)
            if enters:  # nobody reads the stages any more
                hw.barrier_sync(self._all_math, 128 * self.spec.config.consumers)
            elif self.stores or (turn == 0 and plan.vectors):
                hw.barrier_sync(barrier, 128)
            pieces = range(turn * plan.round, min((turn + 1) * plan.round, plan.pieces))
            for piece in pieces:
                Piece(self, accumulator, piece, turn).run()
            if by_tma:
                hw.fence_proxy_async()
            if self.stores or self.matrices or (turn == turns - 1 and plan.vectors):
                hw.barrier_sync(barrier, 128)
            upcoming = [p + plan.slots for p in pieces if self.matrices and p + plan.slots < plan.pieces]
            if by_tma or upcoming:
                with k.when(self.leader):
                    self._leave(turn, pieces, upcoming)
            if self.stores and self.stores.arrays:
                for i, piece in enumerate(pieces):
                    block, column = divmod(piece, plan.parts)
                    self.stores.copy(part, turn, i, block, column * plan.columns)
        for reduction in self.reductions:
            reduction.end_tile(part)
        if self.matrices:
            self.matrices.end_of_tile()
        if self.stores and self.alias_epilogue:
            self._drain(self.stores)

    def _drain(self, stores: Stores) -> None:
        """Until what this warp has put into the stages has left them."""
        if stores.maps:
            with current().when(self.leader):
                hw.bulk_wait_read(0)
        if stores.arrays:
            hw.fence_proxy_async()
        hw.sync_warp()

    def _leave(self, turn: int, pieces: range, upcoming: list[int]) -> None:
        """In the leader: the stores of a round, and the loads into the slots it has freed."""
        if self.stores and self.stores.maps:
            for i, piece in enumerate(pieces):
                block, column = divmod(piece, self.layout.parts)
                self.stores.issue(self.part, turn, i, block, column * self.layout.columns)
            hw.bulk_commit()
        for piece in upcoming:
            assert self.matrices
            self.matrices.load(self.part, piece)

    def finish(self) -> None:
        """Shared memory must outlive the stores that read it."""
        if self.stores and self.stores.maps and not self.alias_epilogue:
            with current().when(self.leader):
                hw.bulk_wait_read(0)
        self._sums.finish(self._warpgroup)
