"""What a design calls to finish a tile: a graph lowered onto the accumulator, piece by piece.

Five hooks: the constructor declares shared memory and arguments; `pipelines` have barriers to initialise; `prepare`
comes before the tiles; `begin` before a tile's mainloop starts the loads of its operands, which hides them; `consume`
takes the accumulator; `finish` comes after the last tile. The bare product is the graph with one node.
"""

from __future__ import annotations

from functools import partial

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.core.dtypes import DType
from gemmsmith.core.graph import Operand
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue import fragment
from gemmsmith.epilogue.evaluate import Evaluation, Source, lowerings
from gemmsmith.epilogue.inputs import Column, DirectMatrix, Part, Row, Scalar, Spot, TmaMatrices
from gemmsmith.epilogue.layout import layout
from gemmsmith.epilogue.outputs import DirectStore, TmaStores
from gemmsmith.epilogue.reductions import Reduction
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import I32
from gemmsmith.lang.values import Constant, Value
from gemmsmith.schedule.tiles import WorkTile

_FIRST_BARRIER = 1
"""Named barrier 0 is __syncthreads."""


class Epilogue:
    """See the module."""

    def __init__(self, spec: KernelSpec) -> None:
        k = current()
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
        self.stores = TmaStores(plan.stores, self.widths, plan.round, plan.sets, consumers) if plan.stores else None
        self.inputs = {o.name: self._input(o) for o in loads}
        self.reductions: list[Reduction] = []
        self.direct: list[tuple[int, DirectStore]] = []
        for r in self.graph.results:
            node = self.graph.nodes[r.node]
            if node.op == "reduce":
                kind, axis = node.value
                self.reductions.append(Reduction(r, kind, axis, self.extents[node.inputs[0]].width, spec, plan))
            elif r.name not in spec.epilogue.tma and r.dtype:
                self.direct.append((r.node, DirectStore(r.name, r.dtype, self.widths[r.name])))
        unlike = [*self.direct, *self.reductions, *self.inputs]
        self.m = k.parameter("m") if unlike else Constant(I32, 0)
        self.n = k.parameter("n") if unlike else Constant(I32, 0)

    def _input(self, operand: Operand) -> Scalar | Column | Row | DirectMatrix:
        extent = operand.extent
        if extent.is_matrix:
            return DirectMatrix(operand)
        if extent.width:
            return Row(operand, self.spec.config.tile[1] // extent.width, self.spec.config.consumers)
        return Column(operand, self.layout.blocks) if extent.m else Scalar(operand)

    @property
    def pipelines(self) -> tuple[TmaMatrices, ...]:
        return (self.matrices,) if self.matrices else ()

    def prepare(self) -> None:
        """In the math warpgroups, before their first tile."""
        self.leader = (current().thread % 128 == 0).named("epilogue_leader")
        if self.matrices:
            self.matrices.prepare()

    def begin(self, work: WorkTile, warpgroup: Value, first_row: Value | int) -> None:
        """Starts what the tile's epilogue will read; the warpgroup's rows start `first_row` below the tile's."""
        self.part = Part(work, work.m + first_row, warpgroup, self.m, self.n)
        for x in self.inputs.values():
            x.begin(self.part)
        if self.matrices:
            self.matrices.begin(self.part, self.leader)

    def consume(self, accumulator: Accumulator) -> None:
        """Computes and stores the warpgroup's part of the tile."""
        k, plan, part = current(), self.layout, self.part
        barrier = part.warpgroup + _FIRST_BARRIER
        turns = plan.pieces // plan.round
        for x in self.inputs.values():
            x.settle(part)
        for reduction in self.reductions:
            reduction.begin_tile()
        for turn in range(turns):
            if self.stores:
                with k.when(self.leader):
                    self.stores.acquire(turn, turns)
            if self.stores or (turn == 0 and plan.vectors):
                hw.barrier_sync(barrier, 128)
            pieces = range(turn * plan.round, (turn + 1) * plan.round)
            for piece in pieces:
                self._piece(accumulator, piece, turn)
            if self.stores:
                hw.fence_proxy_async()
            if self.stores or self.matrices or (turn == turns - 1 and plan.vectors):
                hw.barrier_sync(barrier, 128)
            upcoming = [p + plan.slots for p in pieces if self.matrices and p + plan.slots < plan.pieces]
            if self.stores or upcoming:
                with k.when(self.leader):
                    self._leave(turn, pieces, upcoming)
        for reduction in self.reductions:
            reduction.end_tile(part)
        if self.matrices:
            self.matrices.end_of_tile()

    def _leave(self, turn: int, pieces: range, upcoming: list[int]) -> None:
        """In the leader: the stores of a round, and the loads into the slots it has freed."""
        if self.stores:
            for i, piece in enumerate(pieces):
                block, column = divmod(piece, self.layout.parts)
                self.stores.issue(self.part, turn, i, block, column * self.layout.columns)
            hw.bulk_commit()
        for piece in upcoming:
            assert self.matrices
            self.matrices.load(self.part, piece)

    def finish(self) -> None:
        """Shared memory must outlive the stores that read it."""
        if self.stores:
            with current().when(self.leader):
                hw.bulk_wait_read(0)

    # -- one piece -----------------------------------------------------------------------------------
    def _piece(self, accumulator: Accumulator, piece: int, turn: int) -> None:
        k, plan = current(), self.layout
        block, part_index = divmod(piece, plan.parts)
        column, chunks = part_index * plan.columns, plan.columns // 8
        gated = any(node.op == "chunk" for node in self.graph.nodes)
        step = next(s for s in ((4, 2) if gated else (2, 1)) if chunks % s == 0)
        if self.matrices:
            self.matrices.wait(self.part, piece)
        for reduction in self.reductions:
            reduction.begin_piece()
        fetched = {
            i: self._fetched(node.value, self.extents[i].width or 1, piece, block, column)
            for i, node in enumerate(self.graph.nodes)
            if node.op == "operand"
        }
        with k.unroll(0, chunks, step, name="chunk") as chunk:
            self._step(accumulator, fetched, piece, turn, block, column, chunk, step)
        for reduction in self.reductions:
            reduction.end_piece(self.part, block, column // reduction.width)

    def _fetched(self, name: str, width: int, piece: int, block: int, column: int) -> fragment.Pair:
        """An operand's elements in a piece, by (chunk, half)."""
        x = self.inputs.get(name)
        if x is None:
            assert self.matrices
            return self.matrices.fetch(name, self.part, piece)
        if isinstance(x, (Scalar, Column)):
            return partial(_repeated, x, self.part, block)
        return x.fetch(self.part, block, column // width, self.layout.columns // width // 8)

    def _step(
        self, accumulator: Accumulator, fetched: dict[int, fragment.Pair], piece: int, turn: int, block: int,
        column: int, chunk: Value, step: int,
    ) -> None:  # fmt: skip
        """`step` chunks of a piece: everything the graph gives at them."""
        plan, part = self.layout, self.part

        def spot(width: int) -> Spot:
            return Spot(block, column // width, chunk // width if width > 1 else chunk, step // width)

        sources: dict[int, Source] = {}
        for i, node in enumerate(self.graph.nodes):
            if node.op == "accumulator":
                sources[i] = partial(_product, accumulator, block, chunk + column // 8)
            elif node.op == "operand":
                sources[i] = partial(_at, fetched[i], spot(self.extents[i].width or 1).chunk)
        here = Evaluation(self.graph, self.chosen, sources)
        tiles = dict(plan.stores)
        for r in self.graph.results:
            if r.name not in tiles or self.stores is None or r.dtype is None:
                continue
            s = spot(self.widths[r.name])
            raw = self.graph.nodes[r.node].op == "accumulator"
            buffer = self.stores.buffer(r.name, part, turn, piece % plan.round).address
            for first in range(0, s.count, 2):
                pair = partial(_shifted, here, r.node, first)
                packed: partial[Value] = partial(_packed, pair, r.dtype)
                if raw:
                    packed = partial(_packed_product, accumulator, block, s.chunk + (column // 8 + first), r.dtype)
                fragment.write(tiles[r.name], buffer, s.chunk + first, min(2, s.count - first), pair, packed)
        for index, store in self.direct:
            s = spot(store.width)
            for j in range(s.count):
                for half in range(2):
                    store.write(part, s, j, half, here.pair(index, j, half))
        for reduction in self.reductions:
            index = self.graph.nodes[reduction.result.node].inputs[0]
            s = spot(reduction.width)
            for j in range(s.count):
                for half in range(2):
                    reduction.add(part, s, j, half, here.pair(index, j, half))


def _product(accumulator: Accumulator, block: int, chunk: Value, j: int, half: int) -> tuple[Value, Value]:
    i = (chunk + j) * 2 + half
    return accumulator.element(block, i, 0), accumulator.element(block, i, 1)


def _at(pair: fragment.Pair, chunk: Value, j: int, half: int) -> tuple[Value, Value]:
    return pair(chunk + j, half)


def _repeated(x: Scalar | Column, part: Part, block: int, chunk: Value, half: int) -> tuple[Value, Value]:
    value = x.element(part, block, half)
    return value, value


def _shifted(here: Evaluation, node: int, first: int, j: int, half: int) -> tuple[Value, Value]:
    return here.pair(node, first + j, half)


def _packed(pair: fragment.Pair, dtype: DType, j: int, half: int) -> Value:
    low, high = pair(j, half)
    return hw.pack(low, high, dtype)


def _packed_product(accumulator: Accumulator, block: int, chunk: Value, dtype: DType, j: int, half: int) -> Value:
    """The product itself, which may be packed already."""
    return accumulator.pair(block, (chunk + j) * 2 + half, dtype)
