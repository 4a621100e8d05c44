"""The table of a grouped GEMM in the kernel: one warp reads it once and leaves its sums in shared memory."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.grouping import Grouping
from gemmsmith.core.mma import WARP_THREADS
from gemmsmith.core.problem import Problem, operand_getter
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.shared import SharedBuffer
from gemmsmith.lang.types import I32, PRED, U32, U64
from gemmsmith.lang.values import Constant, RegisterArray, Value, ValueLike, Variable

READING_WARP = 2
"""The warp that reads the table; meanwhile warp 0 initializes barriers and warp 1 prefetches tensor maps."""
MAX_SUM = 2**31 - 1
"""Sums of sizes are limited to it: the sizes of an invalid table could make them overflow."""


def group_extent(p: Problem) -> int:
    """Return the extent that the groups divide: K, or the rows of the grouped operand.

    Masked groups have matrices of their own, all with this number of rows.
    """
    assert p.grouping
    if p.grouping.along == "k":
        return p.k
    return p.m if p.grouping.role == "a" else p.n


class GroupTable:
    """The groups of a grouped GEMM in the kernel: where each begins and ends, and how many tiles are before it.

    It is computed from a table of offsets, sizes or counts in global memory (Grouping.table). A table with a negative
    size, or with more rows than there are, is invalid: then there are no tiles.

    Kernel arguments: the table's name, its address; `groups`, its length; `group_extent`, see the function.
    """

    def __init__(self, grouping: Grouping, tile_rows: int, end_multiple: int = 1, even_tiles: int = 0) -> None:
        """Record the reading of the table.

        `tile_rows`: rows of a cluster's tile (columns if these are grouped; with groups along K, elements of K of a
        k-tile), by which a group's size is divided, rounded up. The ends of groups are multiples of `end_multiple` in a
        valid table. `even_tiles`: 0: a group's tiles have `tile_rows` rows, but the last one. Otherwise all its tiles
        have the same number of rows, as few as possible, of which each of `even_tiles` CTAs of a cluster gets a
        multiple of 8.
        """
        k, self._grouping, source = current_builder(), grouping, operand_getter(grouping.table)
        self._tile_rows, self._end_multiple = tile_rows, end_multiple
        self._table = k.pointer(grouping.table, lambda p: source(p)[1])
        self.groups = k.parameter("groups", compute=lambda p: p.groups)
        self._extent = k.parameter("group_extent", compute=group_extent)
        # Entry g has the sums of the groups before g: of their sizes, and of their tiles.
        self._begins, self._first_tiles = (
            k.shared(4 * (grouping.capacity + 1), name=name) for name in ("group_begins", "group_first_tiles")
        )
        self._even_tiles = even_tiles
        self._tile_heights = k.shared(4 * grouping.capacity, name="group_tile_heights") if even_tiles else None
        self._invalid = k.shared(4, name="table_is_invalid")
        with k.when(k.warp_index == READING_WARP):
            k.comment("read the table of the groups, which the kernel before may have written")
            hw.grid_dependency_wait()
            self._read()

    # -- in the reading warp -----------------------------------------------------------------------------
    def _read(self) -> None:
        """Read the table, a few consecutive groups in each lane, and store the sums of sizes and of tiles.

        It is a prefix sum in two levels: over the groups of a lane, and over the lanes.
        """
        k, per_lane = current_builder(), self._grouping.capacity // WARP_THREADS
        first = (k.lane * per_lane).named("first_group")
        sizes, invalid = k.registers(U32, per_lane, "group_sizes"), k.var(U32, 0, "is_invalid")
        self._load_sizes(first, sizes, invalid)
        begin, first_tile = k.var(U32, 0, "group_begin"), k.var(U32, 0, "first_tile")
        with k.unroll(per_lane, name="i") as i:
            begin.set(_saturated_sum(begin.get(), sizes[i]))
            first_tile.set(first_tile.get() + self._tiles(sizes[i]))
        for total in (begin, first_tile):
            total.set(hw.sum_of_lanes_before(total.get(), _saturated_sum))
        with k.unroll(per_lane, name="i") as i:
            begin.set(_saturated_sum(begin.get(), sizes[i]))
            tiles = self._tiles(sizes[i])
            first_tile.set(first_tile.get() + tiles)
            if self._tile_heights:
                height = _ceil_div(sizes[i], k.maximum(tiles * (8 * self._even_tiles), 1)) * 8
                _store(self._tile_heights, first + i, height)
            is_wrong: Value = Constant(PRED, False)
            if self._end_multiple > 1:
                is_wrong = begin.get() % self._end_multiple != 0
            if not self._grouping.is_masked:
                is_wrong = is_wrong | (begin.get() > self._extent.to(U32))
            _flag(invalid, is_wrong)
            for sums, value in ((self._begins, begin), (self._first_tiles, first_tile)):
                _store(sums, first + i + 1, value.get())
        for mask in (1, 2, 4, 8, 16):
            invalid.set(invalid.get() | hw.shuffle_xor(invalid.get(), mask))
        with k.when(k.lane == 0):
            for sums in (self._begins, self._first_tiles):
                _store(sums, 0, Constant(U32, 0))
            _store(self._invalid, 0, invalid.get())

    def _load_sizes(self, first: Value, sizes: RegisterArray, invalid: Variable) -> None:
        """Load the sizes of the groups from number `first` on, and set `invalid` to 1 if one of them is invalid.

        A negative size, and that of a group that does not exist, counts as 0.
        """
        k, is_end = current_builder(), self._grouping.table == "offsets"
        entries = k.registers(I32, len(sizes) + is_end, "entries")
        with k.unroll(len(entries), name="i") as i:
            group = first + i - int(is_end)
            address = self._table + (group * 4).to(U64)
            hw.load_global(entries.slice(i, 1), address, (group >= 0) & (group < self.groups))
        with k.unroll(len(sizes), name="i") as i:
            size, is_group = entries[i], first + i < self.groups
            if is_end:
                begin, end = (k.maximum(entries[i + j], -1) for j in range(2))
                size = end - begin
                _flag(invalid, is_group & ((size < 0) | (end < 0)))
            else:
                _flag(invalid, is_group & ((size < 0) | (size > self._extent)))
            sizes[i] = k.select(is_group, k.maximum(size, 0), 0).to(U32)

    def _tiles(self, size: Value) -> Value:
        return _ceil_div(size, self._tile_rows)

    # -- in every role, once all threads have waited for one another -----------------------------------------
    @property
    def is_invalid(self) -> Value:
        """Whether the table is invalid."""
        return (_load(self._invalid, 0, "table_is_invalid_flag") != 0).named("is_invalid")

    @property
    def tiles(self) -> Value:
        """The tiles of all groups; 0 if the table is invalid."""
        all_tiles = self.first_tile(Constant(I32, self._grouping.capacity))
        return current_builder().select(self.is_invalid, 0, all_tiles)

    @property
    def end(self) -> Value:
        """The end of the last group."""
        return self.begin(Constant(I32, self._grouping.capacity))

    def begin(self, group: Value) -> Value:
        """Return where a group begins; for the index after the last group, where it ends."""
        return _load(self._begins, group, "group_begin")

    def first_tile(self, group: Value) -> Value:
        """Return how many tiles the groups before have."""
        return _load(self._first_tiles, group, "group_first_tile")

    def tile_height(self, group: Value) -> Value:
        """Return the rows of a group's tiles, if they are even; the last one has fewer."""
        assert self._tile_heights
        return _load(self._tile_heights, group, "tile_height")

    def group_of(self, tile: Value) -> Value:
        """Return the group of tile number `tile` of all groups, by a binary search.

        It is the last group before which there are at most `tile` tiles.
        """
        k, capacity = current_builder(), self._grouping.capacity
        group = k.var(I32, 0, "group")
        for level in range(capacity.bit_length() - 2, -1, -1):
            middle = group.get() + (1 << level)
            group.set(k.select(self.first_tile(middle) <= tile, middle, group.get()))
        return group.get().named("group_idx")


def _flag(invalid: Variable, condition: Value) -> None:
    invalid.set(current_builder().select(condition, 1, invalid.get()))


def _ceil_div(x: Value, y: ValueLike) -> Value:
    return (x + y - 1) // y


def _saturated_sum(x: Value, y: Value) -> Value:
    """Return x + y, at most MAX_SUM, of two sums that are at most MAX_SUM."""
    return current_builder().minimum(x + y, MAX_SUM)


def _store(sums: SharedBuffer, index: Value | int, value: Value) -> None:
    hw.store_shared_word(sums[0].at(index, 4).address, value.to(I32), "entry")


def _load(sums: SharedBuffer, index: Value | int, name: str) -> Value:
    return hw.load_shared_word(sums[0].at(index, 4).address, I32, name)
