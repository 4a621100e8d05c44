"""Partials of a reduction over the rows of groups: where those of each group are, which the second kernel combines."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.core.grouping import Grouping
from gemmsmith.core.problem import Problem
from gemmsmith.epilogue.inputs import WarpgroupTile
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import U64
from gemmsmith.lang.values import Value, ValueLike
from gemmsmith.tile_scheduler.group_table import GroupTable, group_extent

RANGE_BYTES = 8
"""The first partial of a group and the number of its partials, int32 each."""


def ranges_argument(name: str) -> str:
    """Return the name of the kernel argument that holds the address of a reduction's ranges of partials."""
    return f"ranges_{name}"


def max_blocks(p: Problem, rows: int) -> int:
    """Return the most blocks of `rows` rows that all groups together may have: each may have one that is not full.

    With a masked table each group has a matrix of `group_extent` rows; otherwise all groups share them.
    """
    assert p.grouping
    return group_extent(p) * (p.groups if p.grouping.is_masked else 1) // rows + p.groups


class GroupPartials:
    """Numbers the blocks of `rows` rows of groups, of which each has `partials_per_block` partials.

    The rows of a group are divided into blocks from its first row on. The first block of group g has the number
    begin(g) / rows + g, rounded down, where begin(g) is the number of rows of all groups before. As a group of s rows
    has at most s / rows + 1 blocks, groups do not overlap; and no prefix sum but `begin` is needed. Some numbers stay
    unused.

    Kernel arguments: `ranges_`, followed by the result's name: the address of what RANGE_BYTES describes, by group.
    """

    def __init__(
        self, name: str, grouping: Grouping, table: GroupTable, rows: int, partials_per_block: ValueLike = 1
    ) -> None:
        self._grouping, self._table, self._rows, self._partials_per_block = grouping, table, rows, partials_per_block
        self._ranges = current_builder().scratch(ranges_argument(name), lambda p: RANGE_BYTES * p.groups)

    def block_of(self, wg_tile: WarpgroupTile, row: Value) -> Value:
        """Return the number of the block that begins at `row`, a row of the tile's group."""
        group = wg_tile.work.group
        begin = self._table.begin(group)
        row_of_group = row if self._grouping.is_masked else row - begin
        return (begin // self._rows + group + row_of_group // self._rows).named("first_block")

    def store_ranges(self, thread: Value, threads: int) -> None:
        """Store the first partial and the number of partials of each group, for the second kernel.

        All `threads` consumer threads of one CTA execute it. If the table of groups is invalid, each group has one
        partial, which `Reduction.fill` sets to NaN.
        """
        k, table, is_invalid = current_builder(), self._table, self._table.is_invalid
        with k.range(0, table.groups, threads, name="first_group") as first_group:
            group = (first_group + thread).named("group_of_range")
            is_group = group < table.groups
            # threads past the last group must not read past the table
            of_table = k.minimum(group, self._grouping.capacity - 1)
            begin = table.begin(of_table)
            blocks = (table.begin(of_table + 1) - begin + (self._rows - 1)) // self._rows
            first = k.select(is_invalid, 0, (begin // self._rows + group) * self._partials_per_block)
            count = k.select(is_invalid, 1, blocks * self._partials_per_block)
            address = self._ranges + (group * RANGE_BYTES).to(U64)
            hw.store_global_word(address, first, is_group, "first_partial")
            hw.store_global_word(address + 4, count, is_group, "partial_count")
