"""`gemmsmith raster`: DRAM traffic by raster order; the tiles of a grouped GEMM.

Those whose rows are divided are in the order of RowGroupedTileScheduler.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from pathlib import Path
from typing import Any, NamedTuple

import click

from gemmsmith.arrays import Spec
from gemmsmith.binding.request import Request
from gemmsmith.cli import options
from gemmsmith.cli.options import progress_bar
from gemmsmith.cli.tables import format_table, print_outcome
from gemmsmith.core import pictures
from gemmsmith.core.config import Config
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.grouping import Grouping
from gemmsmith.core.scalars import ceil_div, round_up
from gemmsmith.host.planned_gemm import PlannedGemm
from gemmsmith.tuning.config_table import get_max_active_clusters
from gemmsmith.tuning.l2 import L2_MODEL_K_STEP, cluster_tile, plot_waves, simulate_traffic, tile_order

MAX_LABELS = 1024
"""Tiles of a picture that are labeled, at most."""
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
    """Return the rows of each tile of a group of `size` rows; the last tile may have fewer.

    With `swap_ab` a group is divided into tiles of equal heights, of a multiple of 8 rows for each CTA of the cluster.
    """
    rows = cluster_tile(config)[1 if config.swap_ab else 0]
    return round_up(ceil_div(size, ceil_div(size, rows)), 8 * config.cluster[1]) if config.swap_ab and size else rows


def group_tiles(sizes: Sequence[int], n: int, config: Config) -> Iterator[GroupTile]:
    """Yield the tiles of all groups, in the order of RowGroupedTileScheduler, for a row-major D of n columns.

    `sizes`: rows of each group. With `swap_ab` the kernel computes D^T, but tiles are returned as those of D.
    """
    columns, begin, number = cluster_tile(config)[0 if config.swap_ab else 1], 0, 0
    clusters = get_max_active_clusters(config.cluster[0] * config.cluster[1])
    for group, size in enumerate(sizes):
        rows, end = tile_rows(size, config), begin + size
        grid = ceil_div(size, rows), ceil_div(n, columns)
        for coord in tile_order(*(grid[::-1] if config.swap_ab else grid), config.raster, config.raster_group):
            i, j = coord[::-1] if config.swap_ab else coord
            row, column = begin + i * rows, j * columns
            height, width = min(rows, end - row), min(columns, n - column)
            yield GroupTile(group, number % clusters, row, height, column, width)
            number += 1
        begin = end


def plot_group_tiles(sizes: Sequence[int], m: int, n: int, config: Config, path: Path) -> None:
    """Plot D to a file: its tiles, colored by group, and labeled with their clusters if they are not too many."""
    tiles, ends = list(group_tiles(sizes, n, config)), list(accumulate(sizes))
    centered = dict[str, Any](ha="center", va="center", fontsize=7)
    least_rows = m / 60  # of a tile that has the height of its label
    with pictures.drawing(path, 10, 7, f"the cluster that computes each tile\n{config}") as figure:
        from matplotlib.patches import Rectangle

        axes = figure.subplots()
        for x in tiles:
            color = pictures.PALETTE[x.group % len(pictures.PALETTE)]  # next to each other they differ
            axes.add_patch(Rectangle((x.column, x.row), x.columns, x.rows, facecolor=color, edgecolor=pictures.EDGE))
            if len(tiles) <= MAX_LABELS and x.rows >= least_rows:
                axes.text(x.column + x.columns / 2, x.row + x.rows / 2, str(x.cluster), color="black", **centered)
        if m > ends[-1]:
            style = dict[str, Any](facecolor="none", edgecolor=pictures.TEXT)
            axes.add_patch(Rectangle((0, ends[-1]), n, m - ends[-1], hatch="//", **style))
        for end in ends:
            axes.axhline(end, color=pictures.TEXT, linewidth=1.5)
        sides = axes.secondary_yaxis("right")
        names = [f"group {i}: {size} rows" for i, size in enumerate(sizes)] if len(sizes) <= MAX_GROUP_LABELS else []
        centers = [end - size / 2 for end, size in zip(ends, sizes, strict=True)][: len(names)]
        if m > ends[-1]:
            names, centers = [*names, "no group: zeros"], [*centers, (ends[-1] + m) / 2]
        shown = _apart(centers, m / 40)
        sides.set_yticks([centers[i] for i in shown], [names[i] for i in shown], fontsize=9)
        sides.tick_params(length=0)
        axes.set_xlim(0, n)
        axes.set_ylim(m, 0)
        axes.set_xlabel("columns of D")
        axes.set_ylabel("rows of D")
        marks = sorted({0, *ends, m}) if names else [0, m]
        axes.set_yticks([marks[i] for i in _apart(marks, m / 40)])


def _apart(positions: Sequence[float], distance: float) -> list[int]:
    """Return the indices of ascending positions, without those that are too near the one before."""
    kept: list[int] = []
    for i, x in enumerate(positions):
        if not kept or x - positions[kept[-1]] >= distance:
            kept.append(i)
    return kept


RASTER_GROUPS = (1, 2, 4, 8, 16, 32)
"""Raster groups that are compared: widths in tiles."""
MAX_TILE_READS = 1 << 25
"""Limit of tiles times steps along K, which the L2 model visits one by one: a minute or two."""


@click.command()
@options.sizes(1)
@click.option(
    "--groups",
    type=options.GROUP_SIZES,
    metavar="M,M,...",
    help="Show the tiles of a grouped GEMM instead, by the rows of its groups; M is their sum unless given.",
)
@options.picture
@options.as_json
def raster(sizes: options.PartialSizes, groups: tuple[int, ...] | None, picture: Path | None, as_json: bool) -> None:
    """Show the DRAM reads of each raster order, from a model of the L2.

    "selected" is the order of a plan, for bf16 operands and a column-major B. The picture numbers the tiles and colors
    them by waves. With --groups, it labels the tiles with their clusters and colors them by groups. The
    default sizes are 4096.

    \b
    Example: gemmsmith raster 4096x14336x4096 --picture raster.png
    """
    m, n, k = options.complete_sizes(sizes, (4096, 4096, 4096), groups)
    if groups is not None:
        _show_groups(groups, m, n, k, picture, as_json)
        return
    plan = PlannedGemm(Request(Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, max(k, 1)))))
    steps = (*plan.config.tile[:2], L2_MODEL_K_STEP)
    reads = math.prod(ceil_div(size, step) for size, step in zip((m, n, k), steps, strict=True))
    if reads > MAX_TILE_READS:
        raise ArgumentError(
            f"--m, --n, --k: {m} x {n} x {k} is too large for the L2 model; use smaller ones, such as 32768"
        )
    rows: list[dict[str, Any]] = []
    with progress_bar() as progress:

        def on_progress(fraction: float) -> None:
            progress("simulating the L2", (len(rows) + fraction) / (2 * len(RASTER_GROUPS)))

        for order, group in product("mn", RASTER_GROUPS):
            # (A, B): the operand that is read once is evicted first; in the other raster order that is the other one.
            evict = plan.config.evict if order == plan.config.raster else plan.config.evict[::-1]
            config: Config = plan.config.replace(raster=order, raster_group=group, evict=evict)
            traffic = simulate_traffic(plan.problem, config, on_progress=on_progress)
            rows.append({"raster": order, "raster_group": group, "dram_bytes": traffic.dram_bytes,
                         "l2_bytes": traffic.l2_bytes, "hit_rate": traffic.hit_rate,
                         "selected": config == plan.config})  # fmt: skip
        if picture:
            progress("plotting")
            plot_waves(plan.problem, plan.config, picture)
    cells = [("raster", "group of", "MB from DRAM", "MB from the L2", "hit rate", "")]
    for x in rows:
        megabytes = (f"{x[name] / 1e6:.0f}" for name in ("dram_bytes", "l2_bytes"))
        selected = "selected" * x["selected"]
        cells.append((x["raster"], str(x["raster_group"]), *megabytes, f"{x['hit_rate']:.1%}", selected))
    print_outcome(rows, f"{plan.config}\n\n{format_table(cells)}", picture, as_json)


def _show_groups(sizes: tuple[int, ...], m: int, n: int, k: int, picture: Path | None, as_json: bool) -> None:
    """Print how the rows of a grouped GEMM's D are divided into tiles, and plot them to `picture` if it is given.

    D has m rows, which may be more than those of all groups.
    """
    a, b, table = Spec((m, k), "bf16"), Spec((len(sizes), k, n), "bf16", (n * k, 1, k)), Spec((len(sizes),), "int32")
    config = PlannedGemm(Request(a, b, operands={"sizes": table}, grouping=Grouping("sizes"))).config
    tiles, rows, begin = Counter(x.group for x in group_tiles(sizes, n, config)), [], 0
    for group, size in enumerate(sizes):
        rows.append({"group": group, "first_row": begin, "rows": size, "tiles": tiles[group],
                     "tile_rows": tile_rows(size, config)})  # fmt: skip
        begin += size
    if picture:
        plot_group_tiles(sizes, m, n, config, picture)
    titles = "group", "first row", "rows", "tiles of clusters", "rows of a tile"
    text = format_table([titles, *([str(x) for x in row.values()] for row in rows)])
    print_outcome(rows, f"{config}\n\n{text}", picture, as_json)
