"""Reductions in an epilogue: each warp reduces its part of a tile in registers and writes a partial result.

A second kernel (kernels/reduce.py) combines the partials in a fixed order, so that a result does not depend on which
CTA computed which tile. Partials lie as (state, batch, part, element) in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from gemmsmith import hw
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import Extent, Graph, Result, over
from gemmsmith.core.mma import CHUNK, OF_COLUMN, OF_QUAD, QUAD, WARP_ROWS, WGMMA_M, fragment_column
from gemmsmith.core.pointer import Pointer
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.device.inputs import Part, Spot
from gemmsmith.epilogue.device.layout import Layout
from gemmsmith.epilogue.device.outputs import result_argument
from gemmsmith.epilogue.functions import LN_2, fast_exp
from gemmsmith.lang.builder import current
from gemmsmith.lang.types import F32, I32, I64, U64
from gemmsmith.lang.values import Constant, Registers, Value, ValueLike

LOWEST = -float(np.finfo(np.float32).max)
"""A finite stand-in for -Inf, as its negative is for Inf: differences to them are never NaN."""
State = tuple[Value, ...]
MOST_PARTIALS = 2**31 - 2**14
"""Parts, or elements, of all batches: kernels count them in int32, and up to 2^13 further."""


def _merge_logsumexp(a: State, b: State) -> State:
    """(m, s) stands for m + log(s). Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018."""
    m = hw.maximum_nan(a[0], b[0])
    return m, hw.fma(a[1], fast_exp(a[0] - m), b[1] * fast_exp(b[0] - m))


@dataclass(frozen=True)
class Monoid:
    """How partial results combine: `neutral` is a masked element, `identity` an empty state."""

    neutral: float
    identity: tuple[float, ...]
    lift: Callable[[Value], State]
    merge: Callable[[State, State], State]
    finish: Callable[[State], Value]


def _simple(identity: float, merge: Callable[[Value, Value], Value]) -> Monoid:
    return Monoid(identity, (identity,), lambda x: (x,), lambda a, b: (merge(a[0], b[0]),), lambda s: s[0])


_SUM = _simple(0.0, lambda a, b: a + b)
MONOIDS: dict[str, Monoid] = {
    "sum": _SUM,
    "mean": _SUM,
    "max": _simple(-math.inf, hw.maximum_nan),
    "min": _simple(math.inf, hw.minimum_nan),
    "logsumexp": Monoid(
        -math.inf, (LOWEST, 0.0), lambda x: (_within(x), fast_exp(x - _within(x))), _merge_logsumexp,
        lambda s: hw.fma(hw.approximate("lg2.approx.ftz", s[1]), LN_2, s[0]),
    ),
}  # fmt: skip


def _within(x: Value) -> Value:
    """x as a finite number, from which it differs by nothing, or by an infinity."""
    return hw.minimum_nan(hw.maximum_nan(x, LOWEST), -LOWEST)


def states(kind: str) -> int:
    """fp32 numbers in a state."""
    return len(MONOIDS[kind].identity)


class _Cells:
    """`count` states in registers."""

    def __init__(self, monoid: Monoid, count: int, name: str) -> None:
        self.monoid = monoid
        self.arrays: list[Registers] = [current().registers(F32, count, name) for _ in monoid.identity]
        with current().unroll(count) as i:
            for array, identity in zip(self.arrays, monoid.identity, strict=True):
                array[i] = identity

    def get(self, i: ValueLike) -> State:
        return tuple(array[i] for array in self.arrays)

    def set(self, i: ValueLike, state: State) -> None:
        for array, x in zip(self.arrays, state, strict=True):
            array[i] = x

    def add(self, i: ValueLike, x: Value) -> None:
        self.set(i, self.monoid.merge(self.get(i), self.monoid.lift(x)))

    def fence(self) -> None:
        """Sums what was added so far here: the compiler would keep hundreds of summands for later, and spill."""
        for array in self.arrays:
            hw.compiler_fence(array)

    def across(self, i: ValueLike, masks: tuple[int, ...]) -> None:
        """Combines the cell over lanes whose numbers differ in these bits; all of them get the result."""
        state = self.get(i)
        for mask in masks:
            state = self.monoid.merge(state, tuple(hw.shuffle_xor_fp32(x, mask) for x in state))
        self.set(i, state)


class Reduction:
    """One reduction result. Kernel arguments: `partial_` and the result's name, where its partials go, or the result
    itself where sums are atomic; `parts_`, `elements_` and `state_stride_`, the extents of `Partials`; `columns_` of a
    matrix. `axis`: the index along which a tile is reduced, "n" or "m"; "mn" for both, "" for none."""

    def __init__(self, result: Result, kind: str, axis: str, of_what: Extent, spec: KernelSpec, layout: Layout) -> None:
        k, of = current(), partial(partials, result, spec)
        self.result, self.spec, self.layout = result, spec, layout
        self.axis, self._over_batch = over(axis).removeprefix("b"), over(axis).startswith("b")
        self.height, self.width = max(of_what.height, 1), max(of_what.width, 1)
        self.halves = 2 // self.height
        self.monoid = MONOIDS[kind]
        self.atomic = is_atomic(result, spec)
        argument = partials_argument(result.name)
        if self.atomic:
            self.address = k.pointer(argument, lambda p: Pointer(result_argument(result.name)))
        else:
            self.address = k.scratch(argument, lambda p: of(p).bytes)
        self.parts = k.parameter(f"parts_{result.name}", bind=lambda p: of(p).tiles_n or of(p).parts)
        self.elements = k.parameter(f"elements_{result.name}", bind=lambda p: of(p).tiles or of(p).elements)
        self.stride = k.parameter(f"state_stride_{result.name}", I64, lambda p: of(p).state)  # between states
        if not self.axis:
            self.columns = k.parameter(f"columns_{result.name}", bind=lambda p: p.n // self.width)

    def begin_tile(self) -> None:
        if self.axis in ("n", "mn"):
            count = self.halves * self.layout.blocks if self.axis == "n" else 1
            self.cells = _Cells(self.monoid, count, f"reduced_{self.result.name}")

    def begin_columns(self, first: int, chunks: int) -> None:
        """Before so many chunks of a piece, from its chunk `first` on; both count the reduced value's own."""
        if self.axis == "m":
            self.first, self.chunks = first, chunks
            self.cells = _Cells(self.monoid, 2 * chunks, f"reduced_{self.result.name}")

    def add(self, part: Part, spot: Spot, j: int, half: int, pair: tuple[Value, Value]) -> None:
        """Two neighboring elements, masked along what is reduced; results outside the matrix are not written."""
        columns, row = part.columns_inside(spot, j, self.width), part.inside(spot.block, half, self.height)
        if not self.axis:
            self._write_elements(part, spot, j, half, pair)
            return
        for i, x in enumerate(pair):
            inside = {"n": columns[i], "m": row, "mn": columns[i] & row}[self.axis]
            kept = current().select(inside, x, self.monoid.neutral)
            self.cells.add(self._cell(spot, j, half, i), kept)

    def fence(self) -> None:
        """What was added so far is summed here."""
        if self.axis:
            self.cells.fence()

    def _write_elements(self, part: Part, spot: Spot, j: int, half: int, pair: tuple[Value, Value]) -> None:
        """Two neighboring elements: all that this tile has of theirs, and of no other."""
        row = part.row(spot.block, half, self.height)
        inside = zip(part.columns_inside(spot, j, self.width), part.columns(spot, j, self.width), pair, strict=True)
        for column_inside, column, x in inside:
            within = column_inside & part.inside(spot.block, half, self.height)
            self._write(part, Constant(I32, 0), row * self.columns + column, self.monoid.lift(x), within)

    def _cell(self, spot: Spot, j: int, half: int, i: int) -> ValueLike:
        """The cell of an element."""
        if self.axis == "n":
            return self.halves * spot.block + half
        return (spot.chunk + (j - self.first)) * 2 + i if self.axis == "m" else 0

    def end_columns(self, part: Part, block: Value, column: Value) -> None:
        """After them, of a piece that begins at `column`: sums over the 8 lanes of each column, 16 rows a warp."""
        if self.axis != "m":
            return
        k = current()
        slab = (part.m + block * WGMMA_M) // WARP_ROWS + k.warp_index % 4
        with k.unroll(self.chunks, name="chunk") as chunk:
            n = part.work.n // self.width + column + (chunk + self.first) * CHUNK + fragment_column(k.lane)
            for i in range(2):
                self.cells.across(chunk * 2 + i, OF_COLUMN)
                inside = (k.lane < QUAD) & (slab < self.parts) & (n + i < self.elements)
                self._write(part, slab, n + i, self.cells.get(chunk * 2 + i), inside)

    def end_tile(self, part: Part) -> None:
        k = current()
        if self.axis == "n":
            tile = part.work.n // self.spec.slice_columns
            for i in range(self.halves * self.layout.blocks):
                self.cells.across(i, OF_QUAD)
                row = part.row(Constant(I32, i // self.halves), i % self.halves, self.height)
                inside = (k.lane % QUAD == 0) & (row < self.elements) & (tile < self.parts)
                self._write(part, tile, row, self.cells.get(i), inside)
        elif self.axis == "mn":
            self.cells.across(0, OF_QUAD + OF_COLUMN)
            self._write(part, self._warp_of_all(part), 0, self.cells.get(0), k.lane == 0)

    def _warp_of_all(self, part: Part) -> Value:
        """A number for this warp's part of this tile, among all tiles of all batches."""
        k = current()
        m, n, warps = self.spec.config.tile[0], self.spec.slice_columns, 4 * self.spec.config.warpgroups[0]
        tile = part.work.batch * self.elements + part.work.m // m * self.parts + part.work.n // n
        warpgroup = part.warpgroup if self.spec.config.warpgroups[0] > 1 else 0
        return tile * warps + warpgroup * 4 + k.warp_index % 4

    def _write(self, part: Part, piece: Value, element: ValueLike, state: State, inside: Value) -> None:
        """A part's state of an element; of a scalar's the piece's number among those of all batches. Atomic sums have
        no parts: they go to the element of the result."""
        k = current()
        if self.axis == "mn":
            offset = piece.to(I64)
            if self.atomic:
                offset = (Constant(I32, 0) if self._over_batch else part.work.batch).to(I64)
        else:
            parts, batch = 1 if self.atomic else self.parts, part.work.batch
            if self.atomic:
                piece, batch = Constant(I32, 0), Constant(I32, 0) if self._over_batch else batch
            offset = (batch * parts + piece).to(I64) * self.elements.to(I64)
            offset = offset + (element.to(I64) if isinstance(element, Value) else element)
        if self.atomic:
            with k.when(inside):
                hw.reduce_add(self.address + (offset * 4).to(U64), state[0])
            return
        for i, x in enumerate(state):
            hw.store_global_word(self.address + ((offset + self.stride * i) * 4).to(U64), x, inside, "partial")


def representatives(graph: Graph, atomic: bool) -> dict[str, str]:
    """For every reduced result whose value is not known the one whose partials it uses: the first that reduces the
    same value over the same axis by the same rule, as a sum and a mean do. Atomic ones have none to share."""
    first: dict[tuple[int, str, Monoid], str] = {}
    found = {}
    for r in graph.results:
        node = graph.nodes[r.node]
        if node.op == "reduce" and graph.known(r) is None:
            kind, axis = node.value
            same = first.setdefault((node.inputs[0], axis, MONOIDS[kind]), r.name)
            found[r.name] = r.name if atomic else same
    return found


def is_atomic(result: Result, spec: KernelSpec) -> bool:
    """Whether warps add to the result itself, which is zero before. Only sums in fp32 can; others take two steps."""
    kind, _ = spec.epilogue.graph.nodes[result.node].value
    return spec.epilogue.atomic and kind == "sum" and result.dtype == FP32


def partials_argument(name: str) -> str:
    """The kernel argument that says where a reduction's partials go."""
    return f"partial_{name}"


@dataclass(frozen=True)
class Partials:
    """What the host must know of a reduction: its partials' shape. `tiles` and `tiles_n`: of the padded grid, in all
    and along N, where each warp of each tile has a part of the one result that a batch has; else 0."""

    kind: str
    batch: int
    parts: int
    elements: int
    tiles: int = 0
    tiles_n: int = 0

    @property
    def bytes(self) -> int:
        return 4 * states(self.kind) * self.state

    @property
    def state(self) -> int:
        """Elements of one state's array."""
        return self.batch * self.parts * self.elements


def combined(shape: Partials, axis: str) -> Partials:
    """The partials as the second step sees them: where the batch is reduced, too, its parts are parts of one."""
    return replace(shape, batch=1, parts=shape.batch * shape.parts) if "b" in over(axis) else shape


def partials(result: Result, spec: KernelSpec, p: Problem) -> Partials:
    """The partials of a reduction. ArgumentError where they are more than kernels count."""
    graph, config = spec.epilogue.graph, spec.config
    node = graph.nodes[result.node]
    (kind, axis), extent = node.value, graph.extents()[node.inputs[0]]
    m, n = p.m // max(extent.height, 1), p.n // max(extent.width, 1)
    match over(axis).removeprefix("b"):
        case "n":
            shape = Partials(kind, p.batch, -(-p.n // spec.slice_columns), m)
        case "m":
            shape = Partials(kind, p.batch, -(-p.m // WARP_ROWS), n)
        case "mn":
            rows = -(-p.m // (config.tile[0] * config.cluster[0])) * config.cluster[0]
            across = config.cluster[1] * spec.slices * config.warpgroups[1]
            columns = -(-p.n // (spec.slice_columns * across)) * across
            parts = rows * columns * 4 * config.warpgroups[0]
            shape = Partials(kind, p.batch, parts, 1, rows * columns, columns)
        case _:
            shape = Partials(kind, p.batch, 1, m * n)
    count = shape.batch * max(shape.parts, shape.elements)
    if count > MOST_PARTIALS:
        raise ArgumentError(
            f"{result.name}: got {p}, whose {kind} takes {count} partial results, and kernels count up to "
            f"{MOST_PARTIALS}; reduce a part of the product at a time"
        )
    return shape
