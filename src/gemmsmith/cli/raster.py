"""`gemmsmith raster`: the order in which tiles run, and what it costs in DRAM traffic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from gemmsmith.arrays import Spec
from gemmsmith.core.config import Config
from gemmsmith.plans import Plan
from gemmsmith.tuning.l2 import picture as draw
from gemmsmith.tuning.l2 import traffic

WIDTHS = (1, 2, 4, 8, 16, 32)


@click.command()
@click.option("--m", type=int, default=4096, show_default=True, help="Rows of the product.")
@click.option("--n", type=int, default=4096, show_default=True, help="Columns of the product.")
@click.option("--k", type=int, default=4096, show_default=True, help="What is summed.")
@click.option("--picture", type=click.Path(path_type=Path), help="Draws the order that the plan takes.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def raster(m: int, n: int, k: int, picture: Path | None, as_json: bool) -> None:
    """Shows what each raster order reads from DRAM, by a model of the L2, and which one a plan takes."""
    plan = Plan(Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, max(k, 1))))
    rows: list[dict[str, Any]] = []
    for order in "mn":
        for width in WIDTHS:
            evict = plan.config.evict[:: 1 if order == plan.config.raster else -1]  # what the walk reads once
            config: Config = plan.config.replace(raster=order, swizzle=width, evict=evict)
            found = traffic(plan.problem, config)
            rows.append({"raster": order, "swizzle": width, "dram_bytes": found.dram, "l2_bytes": found.l2,
                         "hit_rate": found.hit_rate, "taken": config == plan.config})  # fmt: skip
    if picture:
        draw(plan.problem, plan.config, picture)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table("raster", "bands of", "MB from DRAM", "MB from the L2", "hit rate", "", box=None)
    for row in rows:
        table.add_row(
            row["raster"], str(row["swizzle"]), f"{row['dram_bytes'] / 1e6:.0f}", f"{row['l2_bytes'] / 1e6:.0f}",
            f"{row['hit_rate']:.1%}", "taken" if row["taken"] else "",
        )  # fmt: skip
    console = Console()
    console.print(f"{plan.config}")
    console.print(table)
    if picture:
        console.print(f"picture: {picture}")
