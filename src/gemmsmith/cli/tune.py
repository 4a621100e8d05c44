"""`gemmsmith tune`: measure configs on the GPU, and save the fastest for later plans."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import click

from gemmsmith import api
from gemmsmith.arrays import Spec
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.cli import options
from gemmsmith.cli.problem import matrix
from gemmsmith.cli.progress import progress_bar
from gemmsmith.tuning import measured_configs
from gemmsmith.tuning.search import HALVING_ROUNDS, require_gpu


@click.command()
@click.argument("shapes", nargs=-1, required=True, type=options.joined_sizes(3, "512x4096x4096"), metavar="MxNxK...")
@options.dtype
@options.accumulate
@options.layout
@click.option("--max-configs", type=click.IntRange(min=1), default=HALVING_ROUNDS[0][0], show_default=True,
              help="Configs that are measured per shape.")  # fmt: skip
@click.option("--force", is_flag=True, help="Re-tune shapes that already have an entry.")
@options.as_json
def tune(
    shapes: tuple[tuple[int, int, int], ...], dtype: str, precision: str | None, accumulate: str | None,
    layout: str, max_configs: int, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Measure configs on the GPU, and save the fastest for later plans.

    Shapes that already have an entry are skipped, so the command can be stopped and restarted. With --json it prints
    one line per shape, an object with its configs, fastest first.

    \b
    Example: gemmsmith tune 512x4096x4096 1024x4096x4096
    """
    precision_options: dict[str, Any] = {"accumulate": accumulate, "precision": precision}
    for m, n, k in shapes:
        a, b = matrix((m, k), dtype, layout[0]), matrix((k, n), dtype, layout[1])
        binding = bind(Request(a, b, **precision_options))
        key = measured_configs.key_of(binding.problem, binding.spec, require_gpu())
        shape_label, flops = f"{m}x{n}x{k}", 2 * m * n * k
        entry = None if force else measured_configs.find(key)
        before = entry and entry.config
        rows: list[dict[str, Any]] = [] if before is None else [{"name": f"{before}", "config": vars(before)}]
        if not before:
            for config, us in _tune_shape(a, b, precision_options, max_configs, shape_label):
                rows.append({"name": f"{config}", "config": vars(config), "time_us": us, "tflops": flops / us / 1e6})
        if as_json:
            click.echo(json.dumps({"m": m, "n": n, "k": k, "operands": dtype, "tuned_before": bool(before),
                                   "configs": rows}))  # fmt: skip
        elif before:
            click.echo(f"{shape_label}: {before}, tuned before")
        elif rows:
            best = rows[0]
            click.echo(f"{shape_label}: {best['time_us']:.1f} us, {best['tflops']:.0f} TFLOP/s, {best['name']}")


def _tune_shape(a: Spec, b: Spec, precision_options: dict[str, Any], max_configs: int, shape_label: str) -> Any:
    """Tune a GEMM, with progress on stderr; return (config, microseconds) of the configs that ran, fastest first.

    `precision_options`: keyword arguments of `gemmsmith.tune`. `shape_label`: what the progress calls the GEMM.
    """
    totals = {"compile": max_configs, "measure": sum(min(max_configs, count) for count, _ in HALVING_ROUNDS)}
    done: Counter[str] = Counter()
    with progress_bar() as progress:

        def on_progress(step: str) -> None:
            done[step] += 1
            progress(f"{shape_label} {step}", done[step] / totals[step])

        return api.tune(a, b, **precision_options, max_configs=max_configs, on_progress=on_progress)
