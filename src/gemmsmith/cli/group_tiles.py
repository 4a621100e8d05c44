"""The tiles of a grouped GEMM whose rows are divided, in the order of RowGroupedTileScheduler, and their picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gemmsmith.core.config import Config
from gemmsmith.core.integers import ceil_div, round_up
from gemmsmith.tuning.config_table import get_max_active_clusters
from gemmsmith.tuning.l2 import cluster_tile, tile_order

MAX_LABELS = 1024
"""Tiles of a picture that are labeled."""
MAX_GROUP_LABELS = 32


class GroupTile(NamedTuple):
    """A cluster's tile of D, clipped to its group and to D."""

    group: int
    cluster: int
    """The cluster that computes it; consecutive tiles are those of consecutive clusters."""
    row: int
    rows: int
    column: int
    columns: int


def tile_rows(size: int, config: Config) -> int:
    """Return the rows of each tile of a group but the last, which may have fewer.

    With `swap_ab` the tiles of a group have even heights, a multiple of 8 for each CTA of the cluster.
    """
    rows = cluster_tile(config)[1 if config.swap_ab else 0]
    return round_up(ceil_div(size, ceil_div(size, rows)), 8 * config.cluster[1]) if config.swap_ab and size else rows


def group_tiles(sizes: Sequence[int], n: int, config: Config) -> Iterator[GroupTile]:
    """Yield the tiles of all groups, for a D of n columns that is row-major."""
    columns, begin, number = cluster_tile(config)[0 if config.swap_ab else 1], 0, 0
    clusters = get_max_active_clusters(config.cluster[0] * config.cluster[1])
    for group, size in enumerate(sizes):
        rows, end = tile_rows(size, config), begin + size
        grid = ceil_div(size, rows), ceil_div(n, columns)
        for coord in tile_order(*(grid[::-1] if config.swap_ab else grid), config.raster, config.raster_group):
            i, j = coord[::-1] if config.swap_ab else coord
            row, column = begin + i * rows, j * columns
            yield GroupTile(
                group, number % clusters, row, min(rows, end - row), column, min(columns, n - column)
            )  # fmt: skip
            number += 1
        begin = end


def plot_group_tiles(sizes: Sequence[int], m: int, n: int, config: Config, path: Path) -> None:
    """Plot D to a file: its tiles, colored by group, and labeled with their clusters if they are not too many."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    tiles, ends = list(group_tiles(sizes, n, config)), [sum(sizes[: i + 1]) for i in range(len(sizes))]
    figure, axes = plt.subplots(figsize=(10, 7))
    colors = plt.get_cmap("Pastel1").colors  # type: ignore[attr-defined]
    for x in tiles:
        color = colors[x.group % len(colors)]
        axes.add_patch(
            Rectangle((x.column, x.row), x.columns, x.rows, facecolor=color, edgecolor="gray", linewidth=0.5)
        )
        if len(tiles) <= MAX_LABELS:
            axes.text(
                x.column + x.columns / 2, x.row + x.rows / 2, str(x.cluster), ha="center", va="center", fontsize=7
            )
    if m > ends[-1]:
        axes.add_patch(Rectangle((0, ends[-1]), n, m - ends[-1], facecolor="white", edgecolor="gray", hatch="//"))
        axes.text(
            n / 2, (ends[-1] + m) / 2, "rows of no group: zeros", ha="center", va="center", backgroundcolor="white"
        )
    for end in ends:
        axes.axhline(end, color="black", linewidth=1.5)
    sides = axes.secondary_yaxis("right")
    labels = [f"group {i}: {size} rows" for i, size in enumerate(sizes)] if len(sizes) <= MAX_GROUP_LABELS else []
    sides.set_yticks([end - size / 2 for end, size in zip(ends, sizes, strict=True)][: len(labels)], labels, fontsize=9)
    sides.tick_params(length=0)
    axes.set_xlim(0, n)
    axes.set_ylim(m, 0)
    axes.set_xlabel("columns of D")
    axes.set_ylabel("rows of D")
    axes.set_yticks(sorted({0, *ends, m}) if labels else [0, m])
    axes.set_title(f"the cluster that computes each tile\n{config}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
