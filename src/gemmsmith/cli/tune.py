"""`gemmsmith tune`: measures configs on the GPU and keeps the fastest for later plans."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import click

from gemmsmith import api
from gemmsmith.arrays import Spec
from gemmsmith.binding import bind
from gemmsmith.cli import options
from gemmsmith.cli.progress import shown
from gemmsmith.tuning.measure import ROUNDS
from gemmsmith.tuning.search import require_gpu
from gemmsmith.tuning.table import kept


@click.command()
@click.argument("shapes", nargs=-1, required=True, type=options.Sizes(3, "512x4096x4096"), metavar="MxNxK...")
@options.dtype
@options.accumulate
@click.option("--most", type=click.IntRange(min=1), default=ROUNDS[0][0], show_default=True,
              help="Configs that are tried for a shape.")  # fmt: skip
@click.option("--again", is_flag=True, help="Also shapes that are tuned already.")
@options.as_json
def tune(
    shapes: tuple[tuple[int, int, int], ...], dtype: str, precision: str | None, accumulate: str | None, most: int,
    again: bool, as_json: bool,
) -> None:  # fmt: skip
    """Measures configs on the GPU and keeps the fastest.

    Later plans take it. B is column-major. Shapes that are tuned already are passed over, so it can be stopped and
    started again. With --json there is a line for each shape, an object with its configs, fastest first.

    \b
    Example: gemmsmith tune 512x4096x4096 1024x4096x4096
    """
    arithmetic: dict[str, Any] = {"accumulate": accumulate, "precision": precision}
    for m, n, k in shapes:
        a, b = Spec((m, k), dtype), Spec((k, n), dtype, (1, max(k, 1)))
        problem = bind(a, b, **arithmetic).problem
        chip = require_gpu()
        shape, flops = f"{m}x{n}x{k}", 2 * m * n * k
        before = None if again else kept().get(problem, chip)
        rows: list[dict[str, Any]] = [] if before is None else [{"name": f"{before}", "config": vars(before)}]
        if not before:
            for config, us in _measured(a, b, arithmetic, most, shape):
                rows.append({"name": f"{config}", "config": vars(config), "time_us": us, "tflops": flops / us / 1e6})
        if as_json:
            click.echo(json.dumps({"m": m, "n": n, "k": k, "operands": dtype, "tuned_before": bool(before),
                                   "configs": rows}))  # fmt: skip
        elif before:
            click.echo(f"{shape}: {before}, tuned before")
        elif rows:
            click.echo(f"{shape}: {rows[0]['time_us']:.1f} us, {rows[0]['tflops']:.0f} TFLOP/s, {rows[0]['name']}")


def _measured(a: Spec, b: Spec, arithmetic: dict[str, Any], most: int, shape: str) -> Any:
    """(config, microseconds) of those that ran, fastest first."""
    totals = {"compile": most, "measure": sum(min(most, count) for count, _ in ROUNDS)}
    done: Counter[str] = Counter()
    with shown() as tell:

        def step(what: str) -> None:
            done[what] += 1
            tell(f"{shape} {what}", done[what] / totals[what])

        return api.tune(a, b, **arithmetic, most=most, step=step)
