"""`gemmsmith tune`: measures configs on the GPU and keeps the fastest for later plans."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gemmsmith.arrays import Spec
from gemmsmith.core.errors import GemmsmithError
from gemmsmith.plans import Plan
from gemmsmith.tuner import tune as tune_problem
from gemmsmith.tuning.measure import ROUNDS
from gemmsmith.tuning.table import kept


@click.command()
@click.argument("shapes", nargs=-1, required=True)
@click.option("--dtype", default="bf16", show_default=True, help="Operands: bf16 or fp16.")
@click.option("--most", type=int, default=ROUNDS[0][0], show_default=True, help="Configs that are tried for a shape.")
@click.option("--again", is_flag=True, help="Also shapes that are tuned already.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a shape.")
def tune(shapes: tuple[str, ...], dtype: str, most: int, again: bool, as_json: bool) -> None:
    """Tunes SHAPES, each MxNxK, with a column-major B; stopped, it goes on where it was."""
    console = Console(stderr=True)
    for shape in shapes:
        try:
            m, n, k = (int(x) for x in shape.split("x"))
        except ValueError:
            raise click.BadParameter(f"{shape!r}; use MxNxK, such as 512x4096x4096") from None
        a, b = Spec((m, k), dtype), Spec((k, n), dtype, (1, max(k, 1)))
        try:
            found = kept().get(Plan(a, b).problem)
            if found and not again:
                console.print(f"{shape}: {found}, tuned before")
                continue
            rows = _tuned(a, b, most, shape, console)
        except GemmsmithError as error:
            raise click.ClickException(str(error)) from None
        if as_json:
            click.echo(json.dumps({"m": m, "n": n, "k": k, "configs": rows}))
        elif rows:
            best = rows[0]
            click.echo(f"{shape}: {best['us']:.1f} us, {2e-6 * m * n * k / best['us']:.0f} TFLOP/s, {best['name']}")


def _tuned(a: Spec, b: Spec, most: int, shape: str, console: Console) -> list[dict[str, Any]]:
    total = sum(min(most, count) for count, _ in ROUNDS)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        tasks = {
            "compile": progress.add_task(f"{shape} compile", total=most),
            "measure": progress.add_task(f"{shape} measure", total=total),
        }
        measured = tune_problem(a, b, most=most, step=lambda what: progress.advance(tasks[what]))
    return [{"name": str(x.config), "us": x.us, "config": vars(x.config)} for x in measured]
