"""Quantizing: reads a matrix once, and writes it in 8 bits with its scales, transposed too where asked.

A CTA holds a tile in registers, finds the largest magnitude of each group that shares a scale, and writes the elements
over their scales. Groups that do not fit a tile are found in tiles one after the other, which are then read again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Literal

from gemmsmith import hw
from gemmsmith.core.dtypes import BF16, FP16, FP32, DType
from gemmsmith.core.pointer import Pointer
from gemmsmith.core.problem import Matrix
from gemmsmith.epilogue.device.addressed import Addressed
from gemmsmith.kernels.groups import ColumnGroup, Group, RowGroup, packed
from gemmsmith.kernels.held import BLOCK, CHUNK, CHUNKS, THREADS, HeldTile, Threads, each_tile, held_tile, pitch_of
from gemmsmith.lang.builder import Builder, current
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32, I32, U16, U32, U64
from gemmsmith.lang.values import Constant, Registers, Value

SLOTS = 1024
"""Partial results of `amax`, whose grid is no larger."""
_AMAX_CTAS = {BF16: 4, FP16: 4, FP32: 2}
Kind = Literal["row", "column", "tile", "all"]
"""What shares a scale: a row, a column, a tile, or the whole matrix, whose largest magnitude `amax` found."""


@dataclass(frozen=True)
class QuantizeSpec:
    """What is constant in a kernel.

    `along`: what shares a scale of the copy that is laid out as the source (a row, a tile, all), None without one;
    `across`: the same of the transposed copy (a column, a tile, all). `whole`: a row or a column is the matrix's, not a
    tile's; then there is one copy. `columns`: of a tile. `chunked`: the source's rows are whole 16-byte chunks.
    """

    source: DType
    values: DType
    scales: DType
    along: Kind | None
    across: Kind | None
    whole: bool = False
    columns: int = BLOCK
    chunked: bool = True

    @property
    def copies(self) -> dict[str, Kind]:
        """What shares a scale, by the copies' names."""
        return {way: kind for way, kind in (("along", self.along), ("across", self.across)) if kind}

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        copies = [f"{way}_{'whole_' * self.whole}{kind}" for way, kind in self.copies.items()]
        parts = [self.source, self.values, self.scales, *copies, self.columns, *["unaligned"] * (not self.chunked)]
        return "_".join(map(str, ["quantize", *parts]))

    @property
    def resident(self) -> int:
        """CTAs of an SM that have registers without spilling any."""
        if not self.chunked:
            return 1
        if self.across or self.source == FP32 or self.scales != FP32:
            return 2
        return 3 if self.whole else 4

    @property
    def walk(self) -> str | None:
        """The tiles that one CTA goes through, where its groups do not fit a tile: those of "columns" or of "rows"."""
        return ("columns" if self.along else "rows") if self.whole else None


@dataclass(frozen=True)
class BoundQuantize:
    """`arrays`: a matrix, "source", and its copies "along" and "across" with "along_scales" and "across_scales", which
    lie at the Pointers of these names. `slots`: where the results of `amax` lie."""

    arrays: Mapping[str, Matrix]
    columns: int = BLOCK
    walk: str | None = None
    slots: Pointer | int = 0

    @property
    def source(self) -> Matrix:
        return self.arrays["source"]

    @property
    def tiles(self) -> tuple[int, int]:
        """How many tiles lie one below the other, and how many abreast."""
        return -(-self.source.rows // Threads(self.columns).rows), -(-self.source.cols // self.columns)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Batches, tiles below one another, and tiles abreast, as CTAs take them."""
        down, abreast = self.tiles
        return self.source.batch, 1 if self.walk == "rows" else down, 1 if self.walk == "columns" else abreast


@lru_cache(maxsize=256)
def quantize(spec: QuantizeSpec) -> Kernel:
    """The kernel of a spec."""
    with Builder(spec.name, threads=THREADS, resident=spec.resident) as k:
        k.header += [f"gemmsmith: {spec.name}", "8-bit copies of a matrix, over scales"]
        k.grid = lambda p: max(prod(p.grid), 1)
        held = held_tile(spec.source, spec.columns, chunked=spec.chunked)
        copies = [_Copy(way, kind, spec, held.extents) for way, kind in spec.copies.items()]
        steps = k.parameter("steps", bind=lambda p: p.tiles[p.walk == "columns"]) if spec.whole else None
        groups = {kind: _group(kind, held.threads) for kind in dict.fromkeys(spec.copies.values())}
        stage = k.shared(BLOCK * BLOCK, name="transposed")[0].address if spec.across else None
        if "all" in groups:
            slots = k.pointer("slots", lambda p: p.slots)
            hw.grid_dependency_wait()
            _settle_all(groups["all"], slots, spec, copies)
        else:
            hw.grid_dependency_wait()
        with each_tile() as (batch, i, j):

            def first(step: Value) -> tuple[Value, Value]:
                """The first row and column of a tile."""
                down, right = step if spec.walk == "rows" else i, step if spec.walk == "columns" else j
                return (down * held.threads.rows).named("row"), (right * spec.columns).named("column")

            found = {kind: group for kind, group in groups.items() if kind != "all"}
            for group in found.values():
                group.clear()
            with _times(steps, "step") as step:
                held.load(batch, *first(step))
                for group in found.values():
                    group.add(held)
            for kind, group in found.items():
                if group.exchange is not None and not spec.across:
                    hw.sync_threads()  # the last tile's has been read, which the transposed copy's barriers say too
                sharing = [copy for copy in copies if copy.kind == kind]
                group.settle(spec.values, spec.scales, partial(_store_scales, sharing, batch, i, j))
            with _times(steps, "back") as back:
                at = first(step if steps is None else steps - 1 - back)
                if steps is not None:
                    with k.when(back > 0):  # the last tile is still held
                        held.load(batch, *at)
                for copy in copies:
                    held.forget()
                    if copy.way == "along":
                        copy.write(held, groups[copy.kind], batch, *at)
                    else:
                        copy.write_transposed(held, groups[copy.kind], stage, batch, *at)
        return k.finish()


@lru_cache(maxsize=16)
def amax(source: DType, chunked: bool) -> Kernel:
    """The largest magnitude of a matrix, as the maximum of SLOTS numbers; NaN where it has one."""
    with Builder(
        f"amax_{source}{'_unaligned' * (not chunked)}", threads=THREADS, resident=_AMAX_CTAS[source] if chunked else 1
    ) as k:
        k.header += ["gemmsmith: amax", f"the largest magnitude of a matrix, as {SLOTS} partial results"]
        k.grid = lambda p: min(max(prod(p.grid), 1), SLOTS)
        held = held_tile(source, BLOCK, chunked=chunked)
        slots = k.pointer("slots", lambda p: p.slots)
        group = RowGroup(1, THREADS)
        hw.grid_dependency_wait()
        group.clear()
        with each_tile() as (batch, i, j):
            held.load(batch, i * BLOCK, j * BLOCK)
            group.add(held)
        one = k.registers(F32, 1, "largest")
        one[0] = group.combined()
        with k.range((SLOTS - 1) // THREADS + 1, name="round") as round:
            slot = (round * THREADS + k.thread) * hw.grid_size() + hw.block_index()
            hw.store_global(one, slots + (slot * 4).to(U64), slot < SLOTS)
        return k.finish()


def _group(kind: Kind, threads: Threads) -> Group:
    if kind == "column":
        return ColumnGroup()
    return RowGroup(threads.thread_rows, threads.lanes) if kind == "row" else RowGroup(1, THREADS)


def _times(count: Value | None, name: str) -> AbstractContextManager[Value]:
    """A loop, or its body alone for a single turn."""
    return current().unroll(1) if count is None else current().range(count, name=name)


def _settle_all(group: Group, slots: Value, spec: QuantizeSpec, copies: list[_Copy]) -> None:
    """The scale of everything, from the partial results of `amax`; the first CTA stores it."""
    k = current()
    four = k.registers(F32, 4, "partial")
    hw.load_global(four, slots + (k.thread * 16).to(U64), True)
    group.amax[0] = hw.maximum_nan(hw.maximum_nan(four[0], four[1]), hw.maximum_nan(four[2], four[3]))
    first = hw.block_index() == 0
    zero = Constant(I32, 0)
    group.settle(
        spec.values,
        spec.scales,
        lambda slot, x, chosen: _store_scales(copies, zero, zero, zero, slot, x, chosen & first),
    )


def _store_scales(
    copies: list[_Copy], batch: Value, i: Value, j: Value, slot: Value, scale: Value, chosen: Value
) -> None:
    """The scale of group `slot` of tile (i, j) of each copy, in the chosen threads."""
    for copy in copies:
        copy.store_scale(batch, i, j, slot, scale, chosen)


class _Copy:
    """One of the copies, and its scales."""

    def __init__(self, way: str, kind: Kind, spec: QuantizeSpec, extents: tuple[Value, Value]) -> None:
        self.way, self.kind, self.spec, self.extents = way, kind, spec, extents
        self.values = Addressed(way, way, spec.values, m=True, n=True)
        self.scales = Addressed(f"{way}_scales", f"{way}_scales", spec.scales, m=True, n=True)

    def store_scale(self, batch: Value, i: Value, j: Value, slot: Value, scale: Value, chosen: Value) -> None:
        """The scale of group `slot` of tile (i, j), in the chosen threads."""
        rows, columns = self.extents
        if self.kind == "row":
            i = i * Threads(self.spec.columns).rows + slot
            chosen = chosen & (i < rows)
        elif self.kind == "column":
            j = j * BLOCK + slot
            chosen = chosen & (j < columns)
        where = self.scales.at(batch, i, j) if self.way == "along" else self.scales.at(batch, j, i)
        if self.spec.scales == FP32:
            hw.store_global_word(where, scale, chosen, "scale")
        else:
            hw.store_global_narrow(where, scale.to(U16), chosen, 8)

    def write(self, held: HeldTile, group: Group, batch: Value, row: Value, column: Value) -> None:
        """The tile that begins there, 8 bytes a thread and chunk; a row's last ones may lie in its padding."""
        k, (rows, columns), threads = current(), self.extents, held.threads
        top, left = (row + threads.row(0)).named("top"), (column + threads.column(0)).named("left")
        where, pitch = k.var(U64, self.values.at(batch, top, left), "where"), pitch_of(self.values)
        with k.unroll(threads.thread_rows, name="below") as below:
            with k.unroll(threads.parts, name="part") as part:
                chunk, right = below * threads.parts + part, part * (threads.lanes * CHUNK)
                words = self._words([held.element(chunk, i) * group.inverse(chunk, i) for i in range(CHUNK)])
                hw.store_global(words, where.get() + right.to(U64), (top + below < rows) & (left + right < columns))
            where.set(where.get() + pitch)

    def _words(self, x: list[Value]) -> Registers:
        """Eight values in 8 bits each."""
        words = current().registers(U32, 2, "words")
        words[0], words[1] = packed(x[:4], self.spec.values), packed(x[4:], self.spec.values)
        return words

    def write_transposed(
        self, held: HeldTile, group: Group, stage: Value | None, batch: Value, row: Value, column: Value
    ) -> None:
        """The same tile through shared memory: 8 rows of a column are a unit of 8 bytes, whose place in the column is
        XORed with what makes the threads of a store write to different banks."""
        assert stage is not None
        k, (rows, columns), lanes = current(), self.extents, BLOCK // CHUNK
        if self.spec.whole or self.kind == "all":
            hw.sync_threads()  # the last tile's has been read, which the exchange of its groups says too
        for i in range(CHUNK):
            words = self._words([held.element(chunk, i) * group.inverse(chunk, i) for chunk in range(CHUNKS)])
            hw.store_shared(words, stage + _unit(k.thread % lanes * CHUNK + i, k.thread // lanes))
        hw.sync_threads()
        pairs = lanes // 2
        with k.unroll(0, BLOCK, THREADS // pairs, name="start") as start:
            c, pair = start + k.thread // pairs, k.thread % pairs
            four = k.registers(U32, 4, "four")
            for half in range(2):
                words = k.registers(U32, 2, "words")
                hw.load_shared(words, stage + _unit(c, pair * 2 + half))
                four[2 * half], four[2 * half + 1] = words[0], words[1]
            r = row + pair * 16
            inside = (column + c < columns) & (r < rows)
            hw.store_global(four, self.values.at(batch, column + c, r), inside)


def _unit(column: Value, unit: Value) -> Value:
    """Where rows 8 * unit to 8 * unit + 7 of a column lie in shared memory."""
    return (column * BLOCK + (unit ^ (column // CHUNK)) * CHUNK).to(U32)
