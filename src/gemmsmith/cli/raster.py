"""`gemmsmith raster`: DRAM traffic by raster order; the tiles of a grouped GEMM."""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from gemmsmith.arrays import Spec
from gemmsmith.binding.request import Request
from gemmsmith.cli import options
from gemmsmith.cli.group_tiles import group_tiles, plot_group_tiles, tile_rows
from gemmsmith.cli.progress import progress_bar
from gemmsmith.core.config import Config
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.grouping import Grouping
from gemmsmith.core.integers import ceil_div
from gemmsmith.host.plans import Plan
from gemmsmith.tuning.l2 import L2_MODEL_K_STEP, plot_waves, simulate_traffic

RASTER_GROUPS = (1, 2, 4, 8, 16, 32)
"""Raster groups that are compared: widths in tiles."""
MAX_TILE_READS = 1 << 25
"""Limit of tiles times steps along K, which the L2 model visits one by one: a minute or two."""


@click.command()
@options.sizes(minimum=1, m=4096, n=4096, k=4096)
@click.option(
    "--groups",
    type=options.GroupSizes(),
    metavar="M,M,...",
    help="Show the tiles of a grouped GEMM instead, by the rows of its groups; --m is their sum unless given.",
)
@options.picture
@options.as_json
@click.pass_context
def raster(
    ctx: click.Context, m: int, n: int, k: int, groups: tuple[int, ...] | None, picture: Path | None, as_json: bool
) -> None:
    """Show the DRAM reads of each raster order, from a model of the L2.

    "selected" is the order of a plan, for bf16 operands and a column-major B. The picture numbers the tiles and colors
    them by waves. With --groups, it labels the tiles with their clusters and colors them by groups.

    \b
    Example: gemmsmith raster --m 4096 --n 14336 --picture raster.png
    """
    if groups is not None:
        is_default = ctx.get_parameter_source("m") is ParameterSource.DEFAULT
        _show_groups(groups, sum(groups) if is_default else m, n, k, picture, as_json)
        return
    plan = Plan(Request(Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, max(k, 1)))))
    steps = (*plan.config.tile[:2], L2_MODEL_K_STEP)
    reads = math.prod(ceil_div(size, step) for size, step in zip((m, n, k), steps, strict=True))
    if reads > MAX_TILE_READS:
        raise ArgumentError(
            f"--m, --n, --k: {m} x {n} x {k} is too large for the L2 model; use smaller ones, such as 32768"
        )
    choices = [(order, group) for order in "mn" for group in RASTER_GROUPS]
    rows: list[dict[str, Any]] = []
    with progress_bar() as progress:

        def on_progress(i: int, fraction: float) -> None:
            progress("simulating the L2", (i + fraction) / len(choices))

        for i, (order, group) in enumerate(choices):
            # (A, B): the operand that is read once is evicted first; in the other raster order that is the other one.
            evict = plan.config.evict if order == plan.config.raster else plan.config.evict[::-1]
            config: Config = plan.config.replace(raster=order, raster_group=group, evict=evict)
            traffic = simulate_traffic(plan.problem, config, on_progress=partial(on_progress, i))
            rows.append({"raster": order, "raster_group": group, "dram_bytes": traffic.dram_bytes,
                         "l2_bytes": traffic.l2_bytes, "hit_rate": traffic.hit_rate,
                         "selected": config == plan.config})  # fmt: skip
        if picture:
            progress("plotting")
            plot_waves(plan.problem, plan.config, picture)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    click.echo(f"{plan.config}\n")
    click.echo("raster  group of  MB from DRAM  MB from the L2  hit rate")
    for row in rows:
        click.echo(
            f"{row['raster']:<6}  {row['raster_group']:<8}  {row['dram_bytes'] / 1e6:<12.0f}"
            f"  {row['l2_bytes'] / 1e6:<14.0f}  {row['hit_rate']:<8.1%}" + ("  selected" if row["selected"] else "")
        )
    if picture:
        click.echo(f"picture: {picture}")


def _show_groups(sizes: tuple[int, ...], m: int, n: int, k: int, picture: Path | None, as_json: bool) -> None:
    """Print how the rows of a grouped GEMM's D are divided into tiles."""
    if sum(sizes) > m:
        raise ArgumentError(f"--groups: got {sum(sizes)} rows in all, and --m {m}; use a larger --m")
    a, b, table = Spec((m, k), "bf16"), Spec((len(sizes), k, n), "bf16", (n * k, 1, k)), Spec((len(sizes),), "int32")
    config = Plan(Request(a, b, operands={"sizes": table}, grouping=Grouping("sizes"))).config
    tiles, rows, begin = Counter(x.group for x in group_tiles(sizes, n, config)), [], 0
    for group, size in enumerate(sizes):
        rows.append({"group": group, "first_row": begin, "rows": size, "tiles": tiles[group],
                     "tile_rows": tile_rows(size, config)})  # fmt: skip
        begin += size
    if picture:
        plot_group_tiles(sizes, m, n, config, picture)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    click.echo(f"{config}\n")
    click.echo("group  first row  rows    tiles of clusters  rows of a tile")
    for x in rows:
        click.echo(f"{x['group']:<5}  {x['first_row']:<9}  {x['rows']:<6}  {x['tiles']:<17}  {x['tile_rows']}")
    if picture:
        click.echo(f"picture: {picture}")
