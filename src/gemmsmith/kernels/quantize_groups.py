"""Kernel that quantizes the transpose of a matrix whose rows are divided into groups, each filled to whole blocks.

A CTA does what it does for a whole matrix (kernels/quantize.py) for each tile of 128 rows of one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod

from gemmsmith import hw
from gemmsmith.core.arguments import Pointer
from gemmsmith.core.grouping import Grouping
from gemmsmith.core.scalars import ceil_div
from gemmsmith.kernels.quantize import QuantizedOutput, QuantizeSpec
from gemmsmith.kernels.register_tile import QUANTIZATION_BLOCK, THREADS, BoundTiles, RegisterTile
from gemmsmith.kernels.scale_groups import ColumnScaleGroup
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import I32, U64
from gemmsmith.lang.values import Constant
from gemmsmith.tile_scheduler.group_table import GroupTable

FILLED = Pointer("filled_ends")
"""The ends of the filled groups, int32; -1 if the table is invalid."""
INVALID_END = -1
"""End of each filled group if the table is invalid: a negative end makes the table of filled groups invalid, too."""


def filled_rows(rows: int, groups: int) -> int:
    """Return the most rows of `groups` groups, with `rows` rows in all, when each is filled to a multiple of 128.

    At most as many groups as there are rows are not empty, and each of these gets at most 127 rows.
    """
    block = QUANTIZATION_BLOCK
    return (rows + (block - 1) * min(rows, groups)) // block * block


@dataclass(frozen=True)
class BoundQuantizeGroups(BoundTiles):
    """Launch arguments: the matrices "source", "columnwise" and "columnwise_scales", and the number of groups."""

    grouping: Grouping
    groups: int

    @property
    def m(self) -> int:
        """What the groups divide."""
        return self.source.rows

    @property
    def bound_operands(self) -> Mapping[str, tuple[None, Pointer]]:
        """The table of the groups, by name, as GroupTable reads it from a problem."""
        return {self.grouping.table: (None, Pointer(self.grouping.table))}

    @property
    def grid(self) -> tuple[int, int]:
        """The most tiles along the filled rows, and tiles along N."""
        rows = filled_rows(self.m, self.groups)
        return rows // QUANTIZATION_BLOCK, ceil_div(self.source.cols, QUANTIZATION_BLOCK)


@lru_cache(maxsize=256)
def quantize_groups(spec: QuantizeSpec, grouping: Grouping) -> Kernel:
    """Build the kernel, which writes the transpose of a matrix with its rows' groups filled to multiples of 128 rows.

    `spec`: its output is columnwise, with a scale for each column of a tile. The rows that are filled in are zeros.
    """
    name = f"{spec.name}_{grouping.table}_{grouping.capacity}"
    with Builder(name, threads=THREADS, min_ctas_per_sm=spec.ctas_per_sm) as k:
        k.header += [f"gemmsmith: {name}", "quantizes the groups of rows of a matrix, transposed, to 8 bits"]
        k.work_clusters, k.persistent = lambda p: max(prod(p.grid), 1), True
        tile = RegisterTile(spec.source_dtype, spec.columns, vectorizable=spec.vectorizable)
        rows = k.parameter("filled_rows", compute=lambda p: filled_rows(p.m, p.groups))
        tiles_n = k.parameter("tiles_n", compute=lambda p: p.grid[1])
        output = QuantizedOutput("columnwise", "column", spec, (rows, tile.extents[1]))
        columns = ColumnScaleGroup()
        buffer = k.shared(QUANTIZATION_BLOCK * QUANTIZATION_BLOCK, name="transposed")[0].address
        table, batch = GroupTable(grouping, QUANTIZATION_BLOCK), Constant(I32, 0)
        k.comment("a warp has waited for the kernel before, and read the table")
        hw.sync_threads()
        _store_filled_ends(table)
        with k.range(hw.block_index(), table.tiles * tiles_n, hw.grid_size(), name="tile") as index:
            tile_m, tile_n = (index // tiles_n).named("tile_m"), (index % tiles_n).named("tile_n")
            group = table.group_of(tile_m)
            source_row = table.begin(group) + (tile_m - table.first_tile(group)) * QUANTIZATION_BLOCK
            column = (tile_n * QUANTIZATION_BLOCK).named("tile_column")
            columns.clear()
            tile.load(batch, source_row.named("source_row"), column, end=table.begin(group + 1))
            columns.add(tile)
            store_scale = partial(output.store_scale, batch, tile_m, tile_n)
            columns.compute_scales(spec.value_dtype, spec.scale_dtype, store_scale)
            tile.prevent_reuse()
            row = (tile_m * QUANTIZATION_BLOCK).named("tile_row")
            output.store_transposed(tile, columns, buffer, batch, row, column)
        return k.finish()


def _store_filled_ends(table: GroupTable) -> None:
    """Store the end of each filled group, in the first CTA; INVALID_END for each if the table is invalid."""
    k = current_builder()
    ends, groups = k.pointer(FILLED.name, lambda p: FILLED), table.groups
    with k.when(hw.block_index() == 0), k.range(0, groups, THREADS, name="first_group") as first:
        group = (first + k.thread).named("group")
        with k.when(group < groups):
            tiles = k.select(table.is_invalid, 0, table.first_tile(group + 1))
            end = k.select(table.is_invalid, INVALID_END, tiles * QUANTIZATION_BLOCK)
            hw.store_global_word(ends + (group * 4).to(U64), end, True, "end")
