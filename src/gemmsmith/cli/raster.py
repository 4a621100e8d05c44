"""`gemmsmith raster`: the order in which tiles run, and what it costs in DRAM traffic."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import click

from gemmsmith.arrays import Spec
from gemmsmith.cli import options
from gemmsmith.cli.progress import shown
from gemmsmith.core.config import Config
from gemmsmith.core.errors import ArgumentError
from gemmsmith.plans import Plan
from gemmsmith.tuning.l2 import CHUNK, traffic
from gemmsmith.tuning.l2 import picture as draw

WIDTHS = (1, 2, 4, 8, 16, 32)
MOST_READS = 1 << 25
"""Limit of tiles times chunks of K, which the model visits one by one: a minute or two."""


@click.command()
@options.sizes(least=1, m=4096, n=4096, k=4096)
@options.picture
@options.as_json
def raster(m: int, n: int, k: int, picture: Path | None, as_json: bool) -> None:
    """Shows what each order of the tiles reads from DRAM.

    A model of the L2 says so; "taken" is the order of a plan, for bf16 operands and a column-major B. The picture
    numbers the tiles and colors them by waves.

    \b
    Example: gemmsmith raster --m 4096 --n 14336 --picture raster.png
    """
    plan = Plan(Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, max(k, 1))))
    reads = math.prod(-(-size // step) for size, step in zip((m, n, k), (*plan.config.tile[:2], CHUNK), strict=True))
    if reads > MOST_READS:
        raise ArgumentError(f"--m, --n, --k: {m} x {n} x {k} is too much to walk over; use smaller ones, such as 32768")
    choices = [(order, width) for order in "mn" for width in WIDTHS]
    rows: list[dict[str, Any]] = []
    with shown() as tell:

        def walked(i: int, done: float) -> None:
            tell("walking", (i + done) / len(choices))

        for i, (order, width) in enumerate(choices):
            evict = plan.config.evict[:: 1 if order == plan.config.raster else -1]  # of the operand that is read once
            config: Config = plan.config.replace(raster=order, raster_group=width, evict=evict)
            found = traffic(plan.problem, config, progress=partial(walked, i))
            rows.append({"raster": order, "raster_group": width, "dram_bytes": found.dram, "l2_bytes": found.l2,
                         "hit_rate": found.hit_rate, "taken": config == plan.config})  # fmt: skip
        if picture:
            tell("drawing")
            draw(plan.problem, plan.config, picture)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    click.echo(f"{plan.config}\n")
    click.echo("raster  bands of  MB from DRAM  MB from the L2  hit rate")
    for row in rows:
        click.echo(
            f"{row['raster']:<6}  {row['raster_group']:<8}  {row['dram_bytes'] / 1e6:<12.0f}"
            f"  {row['l2_bytes'] / 1e6:<14.0f}  {row['hit_rate']:<8.1%}" + "  taken" * row["taken"]
        )
    if picture:
        click.echo(f"picture: {picture}")
