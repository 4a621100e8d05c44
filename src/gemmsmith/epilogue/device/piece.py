"""One piece of a tile: its operands are read, the graph is evaluated chunk by chunk, results are written."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from typing import Protocol

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.core.dtypes import FP32, INT32, DType
from gemmsmith.core.graph import Extent, Graph
from gemmsmith.epilogue.device import fragment
from gemmsmith.epilogue.device.held import last_of_product
from gemmsmith.epilogue.device.inputs import DirectMatrix, Part, Position, Scalar, Spot, TmaMatrices, Vector
from gemmsmith.epilogue.device.layout import Layout
from gemmsmith.epilogue.device.outputs import ScaleStore, Stores
from gemmsmith.epilogue.device.reductions import Reduction
from gemmsmith.epilogue.device.rows import WHOLE_ROWS, HeldRows, Quantized, TopKSoftmax
from gemmsmith.epilogue.evaluate import Evaluation, Source
from gemmsmith.epilogue.functions import Lowering
from gemmsmith.lang.builder import current
from gemmsmith.lang.values import Registers, Value

AT_ONCE, MOST_WITH_ROWS, SLAB = 8, 16, 4
"""Chunks of a piece whose vectors are read, and columns are summed, at once, up to so many, with functions of whole
rows up to the second number; of wider ones, which may have 32, so many at a time: registers hold no more beside the
largest accumulators."""

BEYOND = 4096
"""More columns than the tiles of a cluster may begin behind the matrix, and than a tile has pieces."""


class Lowered(Protocol):
    """What a piece needs of the epilogue that it is of."""

    graph: Graph
    layout: Layout
    extents: tuple[Extent, ...]
    stored: dict[str, Extent]
    chosen: dict[int, Lowering]
    inputs: dict[str, Scalar | Vector | DirectMatrix]
    matrices: TmaMatrices | None
    stores: Stores | None
    reductions: list[Reduction]
    scales: list[tuple[int, ScaleStore]]
    part: Part


class Piece:
    """64 rows by `columns` columns of the accumulator."""

    def __init__(self, epilogue: Lowered, accumulator: Accumulator, at: Position) -> None:
        self.epilogue, self.accumulator = epilogue, accumulator
        self.graph, self.extents, self.part = epilogue.graph, epilogue.extents, epilogue.part
        self.index, self.block, self.column, self.buffers = at.piece, at.block, at.column, at.buffers
        self.chunks = epilogue.layout.columns // 8
        self.step = next(s for s in ((4, 2) if self.graph.halves else (2, 1)) if self.chunks % s == 0)
        self._whole_rows_of = [i for i, node in enumerate(self.graph.nodes) if node.op in WHOLE_ROWS]
        self.rows: dict[int, Quantized | TopKSoftmax] = {}
        self.held: dict[int, HeldRows] = {}
        self.fetched: dict[int, fragment.Pair] = {}
        self._slab = (0, 0)

    def run(self) -> None:
        """Computes and writes the piece."""
        e, part = self.epilogue, self.part
        if e.matrices:
            e.matrices.wait(part, self.index)
        apart = bool(self.graph.operands) or any(x.axis == "m" for x in e.reductions)
        most = MOST_WITH_ROWS if self._whole_rows_of else AT_ONCE
        slab = SLAB if apart and self.chunks > most else self.chunks
        slabs = [(first, min(first + slab, self.chunks)) for first in range(0, self.chunks, slab)]
        for i in self._whole_rows_of:
            self.rows[i] = self._whole_rows(i, slabs)
        for first, stop in slabs:
            # Always true, and another for each slab. Without the branches ptxas starts on later ones before it has
            # added this one's elements, and spills.
            begins = part.columns_in_all - part.work.n > self.index * self.chunks + (first - BEYOND)
            with current().when(begins) if e.reductions else nullcontext():
                self._compute(first, stop)
        for index, scales in e.scales:
            quantized = self.rows[self.graph.nodes[index].inputs[0]]
            assert isinstance(quantized, Quantized)
            scales.write(self.part, self.block, self.column, quantized.scales)

    def _compute(self, first: int, stop: int) -> None:
        """The chunks from `first` to `stop`."""
        e = self.epilogue
        for reduction in e.reductions:
            reduction.begin_columns(first // reduction.width, (stop - first) // reduction.width)
        self._fetch([r.node for r in self.graph.results], first, stop)
        with current().unroll(first, stop, self.step, name="chunk") as chunk:
            self._write(chunk)
        for reduction in e.reductions:
            reduction.end_columns(self.part, self.block, self.column // reduction.width)

    def _fetch(self, roots: Iterable[int], first: int, stop: int) -> None:
        """What operands that these nodes need have in the chunks from `first` to `stop`; of those that a function of
        whole rows needs only its own."""
        if self._slab != (first, stop):
            self.fetched, self._slab = {}, (first, stop)
        needed: set[int] = set()
        stack = list(roots)
        while stack:
            if (i := stack.pop()) not in needed and i not in self.rows and i not in self.held:
                needed.add(i)
                stack += self.graph.nodes[i].inputs
        for i in sorted(needed):
            node = self.graph.nodes[i]
            if node.op == "operand" and i not in self.fetched:
                self.fetched[i] = self._fetched(node.value, self.extents[i].width or 1, first, stop)

    def _fetched(self, name: str, width: int, first: int, stop: int) -> fragment.Pair:
        """An operand's elements in the piece's chunks from `first` to `stop`, by (chunk, half)."""
        e = self.epilogue
        x, begin, count = e.inputs.get(name), first // width, (stop - first) // width
        if isinstance(x, Scalar):
            return partial(_repeated, x, self.part, self.block)
        if x is not None:
            pair = x.fetch(self.part, self.block, (self.column + first * 8) // width, count)
        else:
            assert e.matrices
            pair = e.matrices.fetch(name, self.part, self.index, begin, count)
        return partial(_from, pair, begin)

    def _spot(self, chunk: Value, width: int) -> Spot:
        own_chunk = chunk // width if width > 1 else chunk
        return Spot(self.block, self.column // width, own_chunk, self.step // width)

    def _evaluation(self, chunk: Value) -> Evaluation:
        """The graph at `step` chunks from `chunk` on."""
        sources: dict[int, Source] = {}
        for i, node in enumerate(self.graph.nodes):
            first_chunk = self._spot(chunk, self.extents[i].width or 1).chunk
            if i in self.held:
                sources[i] = partial(_at, self.held[i].get, first_chunk)
            elif node.op == "accumulator":
                first_chunk = (chunk + self.column // 8).named("chunk_of_tile")
                sources[i] = partial(_product, self.accumulator, self.block, first_chunk)
            elif i in self.fetched:
                sources[i] = partial(_at, self.fetched[i], first_chunk)
            elif i in self.rows:
                sources[i] = partial(_at, self.rows[i].pair, first_chunk)
            elif node.op == "scale" and node.inputs[0] in self.rows:
                quantized = self.rows[node.inputs[0]]
                assert isinstance(quantized, Quantized)
                sources[i] = partial(_scale, quantized)
        columns = partial(self.part.columns, self._spot(chunk, 1), width=1)
        return Evaluation(self.graph, self.epilogue.chosen, sources, columns)

    def _whole_rows(self, index: int, slabs: list[tuple[int, int]]) -> Quantized | TopKSoftmax:
        """Evaluates the input of a function of whole rows everywhere in the piece, slab by slab."""
        k, node = current(), self.graph.nodes[index]
        source, width = node.inputs[0], self.extents[index].width or 1
        held = self.held.get(source)
        if not held:
            registers = None
            if last_of_product(self.graph) == {source} and self.accumulator.dtype == FP32:
                registers = self.accumulator.blocks[self.block]  # nobody else reads it any more
            first, stride = (self.column // 2, width) if registers else (0, 1)
            held = HeldRows(self.chunks // width, registers, first, stride)
        rows: Quantized | TopKSoftmax = WHOLE_ROWS[node.op](node, held)
        for first, stop in slabs:
            self._fetch([source], first, stop)
            with k.unroll(first, stop, self.step, name="chunk") as chunk:
                here, spot = self._evaluation(chunk), self._spot(chunk, width)
                for j in range(spot.count):
                    inside = self.part.columns_inside(spot, j, width)
                    for half in range(2):
                        held.put(spot.chunk + j, half, here.pair(source, j, half), inside, rows.neutral)
        self.held[source] = held
        rows.settle()
        return rows

    def _write(self, chunk: Value) -> None:
        """`step` chunks: everything the graph gives at them."""
        e, part, here = self.epilogue, self.part, self._evaluation(chunk)
        tiles = dict(e.layout.stores)
        for r in self.graph.results:
            if r.name in tiles and e.stores and r.dtype:
                spot = self._spot(chunk, e.stored[r.name].width)
                buffer = self.buffers[r.name]
                for first in range(0, spot.count, 2):
                    pair = partial(_shifted, here, r.node, first)
                    pack: partial[None] = partial(_pack, pair, 2 // e.stored[r.name].height, r.dtype)
                    if r.dtype == INT32:  # the product as it is
                        pair = partial(_integers, self.accumulator, self.block, chunk + (self.column // 8 + first))
                    if self.graph.nodes[r.node].op == "accumulator":
                        first_chunk = (chunk + (self.column // 8 + first)).named("chunk_of_tile")
                        pack = partial(_pack_product, self.accumulator, self.block, first_chunk, r.dtype)
                    fragment.write(tiles[r.name], buffer, spot.chunk + first, min(2, spot.count - first), pair, pack)
        for reduction in e.reductions:
            index = self.graph.nodes[reduction.result.node].inputs[0]
            spot = self._spot(chunk, reduction.width)
            for j in range(spot.count):
                for half in range(reduction.halves):
                    reduction.add(part, spot, j, half, here.pair(index, j, half))
            reduction.fence()


def _product(accumulator: Accumulator, block: Value, chunk: Value, j: int, half: int) -> tuple[Value, Value]:
    i = ((chunk + j) * 2 + half).named("pair")
    return accumulator.element(block, i, 0), accumulator.element(block, i, 1)


def _integers(accumulator: Accumulator, block: Value, chunk: Value, j: int, half: int) -> tuple[Value, Value]:
    return accumulator.integers(block, ((chunk + j) * 2 + half).named("pair"))


def _from(pair: fragment.Pair, begin: int, chunk: Value, half: int) -> tuple[Value, Value]:
    return pair(chunk - begin, half)


def _at(pair: fragment.Pair, chunk: Value, j: int, half: int) -> tuple[Value, Value]:
    return pair(chunk + j, half)


def _scale(quantized: Quantized, j: int, half: int) -> tuple[Value, Value]:
    return quantized.scales[half], quantized.scales[half]


def _repeated(x: Scalar, part: Part, block: Value, chunk: Value, half: int) -> tuple[Value, Value]:
    value = x.element(part, block, half)
    return value, value


def _shifted(here: Evaluation, node: int, first: int, j: int, half: int) -> tuple[Value, Value]:
    return here.pair(node, first + j, half)


def _pack(pair: fragment.Pair, halves: int, dtype: DType, packed: Registers) -> None:
    for i in range(len(packed)):
        packed[i] = hw.pack(*pair(i // halves, i % halves), dtype)


def _pack_product(accumulator: Accumulator, block: Value, chunk: Value, dtype: DType, packed: Registers) -> None:
    """The product itself, which may be packed already."""
    with current().unroll(len(packed)) as i:
        packed[i] = accumulator.pair(block, (chunk * 2 + i).named("pair"), dtype)
