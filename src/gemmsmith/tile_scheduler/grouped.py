"""The tile schedulers of grouped GEMMs: along M, whose groups have as many tiles as they need, and along K.

The grid depends on the extents only; which tiles there are follows from the table, which is on the device.
"""

from __future__ import annotations

from dataclasses import replace

from gemmsmith import hw
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.problem import MAX_EXTENT, Problem
from gemmsmith.core.scalars import ceil_div
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.values import Value
from gemmsmith.tile_scheduler.group_table import GroupTable, group_extent
from gemmsmith.tile_scheduler.tiles import ZERO, OperandCoord, TileScheduler, WorkRange, WorkTile


class RowGroupedTileScheduler(TileScheduler):
    """Assigns the tiles of one group after the other, in the raster order within a group.

    A group's first tile begins at its first row, and a cluster's tile has rows of one group only. Rows of a tile past
    the end of its group are loaded, but not stored. If the groups divide the columns of the kernel's D (grouping.role
    is "b"), for "rows" read "columns"; the tiles of a group then have equal widths, since wgmma multiplies any multiple
    of 8 columns.

    Kernel arguments: those of GroupTable; cluster_tiles_m or cluster_tiles_n, along which there are no groups; k_tiles.
    """

    def __init__(self, spec: KernelSpec) -> None:
        assert spec.grouping
        self.grouping, self._axis = spec.grouping, 0 if spec.grouping.role == "a" else 1
        super().__init__(spec)
        cluster = spec.config.cluster[self._axis]
        tile_rows, even_tiles = spec.config.tile[self._axis] * cluster, cluster if self.grouping.has_even_tiles else 0
        self.table = self._table = GroupTable(spec.grouping, tile_rows, even_tiles=even_tiles)

    def _declare_grid(self) -> None:
        k, other = current_builder(), 1 - self._axis
        self._other_tiles = k.parameter(f"cluster_tiles_{'mn'[other]}", compute=lambda p: self.grid(p)[other])
        self.k_tiles = k.parameter("k_tiles", compute=self.k_tiles_of)

    # -- computed by the host for a problem ----------------------------------------------------------------
    def grid(self, p: Problem) -> tuple[int, int]:
        """Return the most tiles of clusters along M and along N that the groups can have, whatever the table holds."""
        tiles, rows = list(super().grid(p)), group_extent(p)
        cluster_rows = self.spec.config.tile[self._axis] * self.spec.config.cluster[self._axis]
        if self.grouping.is_masked:
            tiles[self._axis] = p.groups * ceil_div(rows, cluster_rows)
        else:  # each group may fill one tile partly
            tiles[self._axis] = min(rows // cluster_rows + p.groups, rows)
        return tiles[0], tiles[1]

    def tiles_of(self, p: Problem) -> int:
        """Return the most tiles that the clusters can have. Raises ArgumentError if int32 cannot count them."""
        m, n = self.grid(p)
        if max(m * n, p.groups * group_extent(p) if self.grouping.is_masked else 0) > MAX_EXTENT:
            raise ArgumentError(f"{p}: more tiles or rows than an int32 can count; use fewer groups")
        return m * n

    # -- recorded in the kernel ----------------------------------------------------------------------------
    def finish_prologue(self) -> None:
        """Wait until the table is in shared memory."""
        current_builder().comment("wait until the table of the groups is read")
        hw.sync_threads()

    def first_work_tile(self) -> WorkTile | None:
        """Return None: the table may be written by the kernel before, for which the prologue has not waited yet."""
        return None

    def persistent_range(self) -> WorkRange:
        """Return the range of the tile loop."""
        tiles = (self._table.tiles * self._other_tiles).named("tiles")
        return WorkRange(self.cluster_idx, tiles, self.cluster_count, self.work_tile)

    def work_tile(self, tile: Value) -> WorkTile:
        """Return this CTA's part of the cluster's tile number `tile`, counted over all groups in their order."""
        axis, (tile_m, tile_n, _) = self._axis, self.spec.config.tile
        group = self._table.group_of((tile // self._other_tiles).named("tile_along_groups"))
        first_tile, begin = self._table.first_tile(group), self._table.begin(group)
        end, group_tiles = self._table.begin(group + 1), self._table.first_tile(group + 1) - first_tile
        index = (tile - first_tile * self._other_tiles).named("tile_in_group")
        tiles = (group_tiles, self._other_tiles) if axis == 0 else (self._other_tiles, group_tiles)
        if self.spec.config.raster == "m":
            coord = self._in_bands(index, *tiles[::-1])[::-1]
        else:
            coord = self._in_bands(index, *tiles)
        cluster, position = self.spec.config.cluster, (self.position.m, self.position.n)
        heights: list[Value | int] = [tile_m, tile_n]
        if self.grouping.has_even_tiles:
            heights[axis] = self._table.tile_height(group)
        origin = [(coord[i] * cluster[i] + position[i]) * height for i, height in enumerate(heights)]
        batch: Value = ZERO
        if self.grouping.is_masked:
            batch, end = group, end - begin
        else:
            origin[axis] = origin[axis] + begin
        if self.grouping.has_even_tiles:
            end = current_builder().minimum(end, origin[axis] + heights[axis])
        m, n, end = origin[0].named("m_offset"), origin[1].named("n_offset"), end.named("tile_end")
        operands = [OperandCoord(m, group), OperandCoord(n, group)]
        operands[axis] = OperandCoord(origin[axis], batch, group_end=end)
        a, b = operands
        return WorkTile(a, b, m, n, batch, group, self.k_tiles)

    def _in_bands(self, index: Value, minor_tiles: Value, major_tiles: Value) -> tuple[Value, Value]:
        """Return the position (minor, major) of tile number `index` of a group, in the raster order.

        The order runs along the major axis in bands of `raster_group` tiles of the minor axis: within a band the minor
        index changes first.
        """
        k, width = current_builder(), self.spec.config.raster_group
        if width == 1:
            minor = (index // major_tiles).named("band")
            return minor, index - minor * major_tiles
        band = (index // (major_tiles * width)).named("band")
        index_in_band = (index - band * (major_tiles * width)).named("index_in_band")
        band_width = k.minimum(minor_tiles - band * width, width).named("band_width")
        major = (index_in_band // band_width).named("tile_major")
        return band * width + (index_in_band - major * band_width), major


class KGroupedTileScheduler(TileScheduler):
    """Assigns the tiles of D (G, M, N), of which each group sums its own slice of K.

    Kernel arguments: those of TileScheduler and of GroupTable.
    """

    def __init__(self, spec: KernelSpec) -> None:
        assert spec.grouping
        super().__init__(spec)
        end_multiple = spec.grouping.end_multiple(spec.mma.a)
        self.table = self._table = GroupTable(spec.grouping, spec.config.tile[2], end_multiple)

    finish_prologue = RowGroupedTileScheduler.finish_prologue
    first_work_tile = RowGroupedTileScheduler.first_work_tile

    def persistent_range(self) -> WorkRange:
        """Return the range of the tile loop."""
        tiles = current_builder().select(self._table.is_invalid, 0, self.tiles)
        return WorkRange(self.cluster_idx, tiles.named("tiles"), self.cluster_count, self.work_tile)

    def work_tile(self, tile: Value) -> WorkTile:
        """Return this CTA's part of the cluster's tile number `tile`, with the slice of K of its group."""
        work = self._work_tile(tile, self.k_tiles)
        begin = self._table.begin(work.batch)
        k_extent = (self._table.begin(work.batch + 1) - begin).named("k_extent")
        k_tiles = (k_extent + (self.spec.config.tile[2] - 1)) // self.spec.config.tile[2]
        if not self.spec.design.uses_tma:  # whose copies run ahead across tiles, and need a k-tile, of zeros, for each
            k_tiles = current_builder().maximum(k_tiles, 1)
        k_tiles = k_tiles.named("group_k_tiles")
        first_k_tile, k_begin = ZERO, begin
        if self.spec.promoted and "block_scales" in self.spec.design.supported_options:  # which are by k-tile
            first_k_tile, k_begin = (begin // self.spec.config.tile[2]).named("first_k_tile"), ZERO
        a, b = (OperandCoord(x, ZERO, k_begin) for x in (work.m, work.n))
        return replace(work, a=a, b=b, k_tiles=k_tiles, k_tile_begin=first_k_tile, group_k_extent=k_extent)
