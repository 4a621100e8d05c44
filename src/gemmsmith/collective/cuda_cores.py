"""A warpgroup's product on CUDA cores: each thread multiplies its rows of A by its columns of B. They are those that it
has of the fragment of core/mma.py, so that one epilogue serves these kernels too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.core.mma import CHUNK, HALF_ROWS, QUAD, WARP_ROWS, WGMMA_M
from gemmsmith.core.problem import Source
from gemmsmith.core.spec import DEPTH_PADDING, KernelSpec
from gemmsmith.core.tile import Tile
from gemmsmith.lang.builder import current
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import F32, I32, I64, U32, U64
from gemmsmith.lang.values import Constant, Registers, Value, ValueLike, as_value
from gemmsmith.schedule.tiles import Coordinates

VECTOR, WORD, WARP, BANKED, ALONG = 4, 4, 32, 8, 16
"""Elements that a thread reads at once, and bytes of each; threads of a warp; depths of which a place lies in as many
banks; and elements of a row of K that lanes copy side by side, at most: an SM's L1 takes each line apart."""
MOST_AHEAD = 40
"""Rows and columns of a thread that are loaded ahead: those of a tile 256 wide, with its sums, are too many."""


class VectorOrder:
    """Which row of A, or column of B, lies where among those of its tile in shared memory: a thread's own are vectors,
    and those of neighboring lanes lie side by side, so that no two lanes meet in a bank. The two columns of a pair lie
    the other way round: FFMA reads a column and its sum from different banks of registers, even and odd ones."""

    def __init__(self, spec: KernelSpec, name: str) -> None:
        self.of_a = name == "a"
        blocks, self._columns = spec.warpgroup_rows // WGMMA_M, spec.warpgroup_columns
        self.own = 2 * blocks if self.of_a else self._columns // CHUNK * 2
        """A thread's rows, or columns."""
        self.width = min(VECTOR, self.own)
        self.lanes = 32 // QUAD if self.of_a else QUAD
        """Lanes of a warp that have different rows, or columns."""

    def at(self, place: ValueLike) -> Value:
        """The row, or column, of the tile that lies at a place."""
        of_group, of_vectors = self.lanes * self.own, self.lanes * self.width
        place = as_value(place, I32)
        group, lane = place // of_group, place % of_vectors // self.width
        number = place % of_group // of_vectors * self.width + place % self.width
        if self.of_a:
            return number // 2 * WGMMA_M + group * WARP_ROWS + number % 2 * HALF_ROWS + lane
        return group * self._columns + number // 2 * CHUNK + lane * 2 + (number + 1) % 2

    def vector(self, group: Value, lane: Value, number: Value) -> Value:
        """The place of a lane's vector of that number: of the group, which is its warp for A, its warpgroup for B."""
        own = lane // QUAD if self.of_a else lane % QUAD
        return group * (self.lanes * self.own) + number * (self.lanes * self.width) + own * self.width

    def turn(self, tile: Tile, depth: Value) -> Value:
        """What places of a depth are combined with by xor: every other 8 depths of a deep K-major tile have the halves
        of their vectors the other way round, so that what lanes copy of a row lies in different banks."""
        deep = tile.major == "K" and tile.k > BANKED
        return depth // BANKED % 2 * (self.width // 2) if deep else Constant(I32, 0)


class CopiedWords:
    """A tile of an fp32 operand in each of `stages` stages, copied word by word from any strides: row after row of K.
    What lies outside of the operand becomes zeros. Kernel arguments: `name`, where it lies; its rows; its strides."""

    def __init__(self, spec: KernelSpec, name: str, tile: Tile, stages: int, source: Source, threads: int) -> None:
        k, self.tile, self._threads = current(), tile, threads
        self._address = k.pointer(name, lambda p: source(p)[1])
        self.rows: Value = k.parameter(f"{name}_rows", bind=lambda p: source(p)[0].rows)
        self._row: Value = Constant(I64, WORD)
        if tile.major == "K":
            self._row = k.parameter(f"{name}_row", I64, lambda p: source(p)[0].row_stride * WORD)
        self._k = k.parameter(f"{name}_k", I64, lambda p: source(p)[0].col_stride * WORD)
        self._batch = k.parameter(f"{name}_batch", I64, lambda p: source(p)[0].batch_stride * WORD)
        self.stages = k.shared(tile.k * _pitch(tile), stages=stages, alignment=128, name=name.upper())
        self._order = VectorOrder(spec, name)

    def start(self) -> None:
        """Before the first tile: which element of a k-tile is this thread's first. Lanes go along what is contiguous,
        half a line of K, and along places in shared memory; no two of a warp write to one bank."""
        k, tile, name = current(), self.tile, self.stages.name.lower()
        k_major = tile.major == "K"
        along = min(tile.k, ALONG) if k_major else min(max(WARP, self._threads // tile.k), tile.mn)
        near, far, lines = (k.thread % along).named("near"), (k.thread // along).named("far"), self._threads // along
        first, self._depth = (far, near) if k_major else (near, far)
        self._turns = (lines, along) if k_major else (along, lines)
        """Rows, and elements of K, that the threads copy in one turn."""
        self._mn = self._order.at(first).named("own_row")
        own_place = first ^ self._order.turn(tile, self._depth)
        self._place = (self._depth * _pitch(tile) + own_place * WORD).to(U32).named("place")
        self._source = k.var(U64, self._address, f"{name}_source")
        self._left = k.var(I32, 0, f"{name}_left")  # rows of the operand from this thread's first on

    def begin(self, at: Coordinates, first_k: Value) -> None:
        """The next copies are those of a tile, from element `first_k` on."""
        offset = (at.row + self._mn).to(I64) * self._row + (first_k + self._depth).to(I64) * self._k
        self._source.set(self._address + (at.batch.to(I64) * self._batch + offset).to(U64))
        self._left.set(self.rows - at.row - self._mn)

    def copies(self, stage: Value, k_left: Value | None) -> list[Callable[[], None]]:
        """What starts this thread's copies of a k-tile, of whose elements of K there are `k_left`; None: all is
        inside."""
        rows, depth = self._turns
        return [
            partial(self._copy, stage, k_left, deep, down)
            for deep in range(0, self.tile.k, depth)
            for down in range(0, self.tile.mn, rows)
        ]

    def _copy(self, stage: Value, k_left: Value | None, deep: int, down: int) -> None:
        k, tile = current(), self.tile
        place = self.stages[stage].address + self._place + (deep * _pitch(tile) + down * WORD)
        # `down` is a multiple of a power of two, and the thread's first place is less: so their rows differ by
        below = as_value(self._order.at(down) - self._order.at(0), I32)
        where = self._source.get() + (below.to(I64) * self._row + self._k * deep).to(U64)
        count: Value = Constant(U32, WORD)
        if k_left is not None:
            count = k.select((self._left.get() > below) & (self._depth + deep < k_left), count, 0)
        hw.cp_async_copy(place, where, count, WORD)

    def advance(self) -> None:
        """The next copies are those of the next k-tile."""
        self._source.set(self._source.get() + (self._k * self.tile.k).to(U64))


class ThreadTiles:
    """A thread's rows of A and columns of B at two depths: one is multiplied while the other is loaded, `ahead`; or,
    where they are more than `MOST_AHEAD`, a few columns at one depth. They are those of the fragment's lane whose bits
    1 and 2 are exchanged, until `settle`: so neighbors by 1 load the same of A, and neighbors by 2 the same of B, and
    more lanes are served at once (backends/sim/counters.py)."""

    def __init__(self, spec: KernelSpec, warpgroup: Value) -> None:
        k, self._tiles = current(), spec.tiles
        self._orders = VectorOrder(spec, "a"), VectorOrder(spec, "b")
        a, b = self._orders
        self.ahead = a.own + b.own <= MOST_AHEAD
        self._a, self._b = (
            k.register_rows(F32, 1 + self.ahead, count, f"of_{name}")
            for count, name in ((a.own, "a"), (b.own if self.ahead else b.width, "b"))
        )
        self._groups, lane = (k.warp_index % 4, warpgroup), k.lane
        self._lane = (lane // 8 * 8 + lane // 2 % 2 * 4 + lane // 4 % 2 * 2 + lane % 2).named("lane_of_fragment")

    def load(self, stage: list[SharedView], depth: Value, buffer: ValueLike) -> None:
        """Those of a depth of a stage."""
        for of_b, held in enumerate((self._a, self._b)):
            order = self._orders[of_b]
            with current().unroll(order.own // order.width, name="vector") as vector:
                self._load(of_b, stage, depth, vector, held[buffer], vector)

    def load_and_multiply(self, accumulator: Accumulator, stage: list[SharedView], depth: Value) -> None:
        """accumulator += the product of a depth of a stage: of all rows and a vector of columns at a time."""
        k, (a, b) = current(), self._orders
        with k.unroll(a.own // a.width, name="vector") as vector:
            self._load(0, stage, depth, vector, self._a[0], vector)
        with k.unroll(b.own // b.width, name="vector") as vector:
            self._load(1, stage, depth, vector, self._b[0], 0)
            self._multiply(accumulator, 0, vector * b.width, b.width)

    def multiply(self, accumulator: Accumulator, buffer: ValueLike) -> None:
        """accumulator += the product of a depth."""
        self._multiply(accumulator, buffer, 0, self._orders[1].own)

    def _load(
        self, of_b: int, stage: list[SharedView], depth: Value, vector: Value, held: Registers, into: ValueLike
    ) -> None:
        """A vector of rows of A, or of columns of B, of a depth of a stage, as vector `into` of the registers."""
        tile, order, group = self._tiles[of_b], self._orders[of_b], self._groups[of_b]
        place = depth * _pitch(tile) + order.vector(group, self._lane, vector) * WORD
        values = current().registers(F32, order.width, "values")
        hw.load_shared(values, stage[of_b].address + place.to(U32))
        for i in range(order.width):
            held[into * order.width + (order.turn(tile, depth) ^ i)] = values[i]

    def _multiply(self, accumulator: Accumulator, buffer: ValueLike, first: ValueLike, columns: int) -> None:
        """Every other row is multiplied backwards: each FFMA has the row or the column of the last one, which then is
        not read again."""
        k = current()
        with (
            k.unroll(len(accumulator.blocks), name="block") as block,
            k.unroll(2, name="half") as half,
            k.unroll(columns, name="step") as step,
        ):
            column = step ^ half * (columns - 1)
            element = (first + column) // 2 * 4 + half * 2 + column % 2
            sums = accumulator.blocks[block]
            sums[element] = hw.fma(self._a[buffer][block * 2 + half], self._b[buffer][column ^ 1], sums[element])

    def settle(self, accumulator: Accumulator) -> None:
        """After the last product: each lane gets the sums of its place in the fragment."""
        with current().unroll(len(accumulator.blocks), name="block") as block:
            sums = accumulator.blocks[block]
            with current().unroll(sums.count, name="i") as i:
                sums[i] = hw.as_float(hw.shuffle_index(hw.as_unsigned(sums[i]), self._lane.to(U32)))


def _pitch(tile: Tile) -> int:
    """Bytes from a depth of a tile to the next one."""
    return tile.mn * WORD + DEPTH_PADDING
