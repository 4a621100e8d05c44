"""`gemmsmith raster`: DRAM traffic by raster order."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import click

from gemmsmith.arrays import Spec
from gemmsmith.binding.request import Request
from gemmsmith.cli import options
from gemmsmith.cli.progress import progress_bar
from gemmsmith.core.config import Config
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.integers import ceil_div
from gemmsmith.host.plans import Plan
from gemmsmith.tuning.l2 import L2_MODEL_K_STEP, plot_waves, simulate_traffic

RASTER_GROUPS = (1, 2, 4, 8, 16, 32)
"""Raster groups that are compared: widths in tiles."""
MAX_TILE_READS = 1 << 25
"""Limit of tiles times steps along K, which the L2 model visits one by one: a minute or two."""


@click.command()
@options.sizes(minimum=1, m=4096, n=4096, k=4096)
@options.picture
@options.as_json
def raster(m: int, n: int, k: int, picture: Path | None, as_json: bool) -> None:
    """Show the DRAM reads of each raster order, from a model of the L2.

    "selected" is the order of a plan, for bf16 operands and a column-major B. The picture numbers the tiles and colors
    them by waves.

    \b
    Example: gemmsmith raster --m 4096 --n 14336 --picture raster.png
    """
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
