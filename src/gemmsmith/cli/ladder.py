"""`gemmsmith ladder`: every rung, what it asks of memory and of the multipliers, and what that bounds its speed by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from gemmsmith.cli import options
from gemmsmith.cli.counters import NUMBERS, Counted
from gemmsmith.cli.progress import shown
from gemmsmith.cli.table import table
from gemmsmith.core.errors import ArgumentError
from gemmsmith.ladder import NAMES, STEPS, Sizes, Step, counted
from gemmsmith.tuning.limits import RESOURCES, limits

COUNTED = ("ctas", "warps", "registers", "multiplications", "bound_us", "bound_tflops", "bound_of_floor", "limit",
           "line", "access")  # fmt: skip
MEASURED = ("us", "tflops", "of_cublas", "of_floor")
COLORS = dict(zip(RESOURCES, ("#9d755d", "#72b7b2", "#f58518", "#eeca3b", "#4c78a8"), strict=True))


@click.command()
@options.sizes(least=1, m=4096, n=4096, k=4096)
@click.option("--rung", "names", multiple=True, type=click.Choice(NAMES), help="These alone.")
@click.option("--rows", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Measured rows, as benchmarks/ladder.py writes them, to be shown beside.")  # fmt: skip
@click.option("--counted", "kept", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="What --json printed before, to be shown without counting again.")  # fmt: skip
@options.picture
@options.as_json
def ladder(
    m: int, n: int, k: int, names: tuple[str, ...], rows: Path | None, kept: Path | None, picture: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Shows every rung of the ladder, from one thread a result to Hopper's designs.

    The simulator counts what a tile takes; wavefronts, sectors and multiplications (instructions of warps) are for a
    million FLOPs. What they bound the time by on an H200 is no forecast: it takes each resource to be as fast as it can
    be, and counts neither latency nor power.

    \b
    Example: gemmsmith ladder --rung naive --rung cooperative
    """
    beside = measured(rows, (m, n, k)) if rows else {}
    found = _kept(kept, (m, n, k)) if kept else _counted((m, n, k), [x for x in STEPS if x.name in (names or NAMES)])
    found = [x | beside.get((x["rung"], x["dtype"]), {}) for x in found if x["rung"] in (names or NAMES)]
    if picture:
        draw(found, picture)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    click.echo(text(found))
    if picture:
        click.echo(f"picture: {picture}")


def _counted(sizes: Sizes, steps: list[Step]) -> list[dict[str, Any]]:
    found = []
    with shown() as tell:
        for i, step in enumerate(steps):
            tell("counting", i / len(steps))
            found.append(row(step, sizes))
    return found


def _kept(path: Path, sizes: Sizes) -> list[dict[str, Any]]:
    return _rows("--counted", path, (*COUNTED, *NUMBERS), sizes)


def row(step: Step, sizes: Sizes) -> dict[str, Any]:
    """A rung's counts for a product of `sizes`, and the microseconds that they take at least."""
    m, n, k = sizes
    kernel, lines = counted(step, sizes)
    a, b, d = m * k * step.dtype.bytes, k * n * step.dtype.bytes, m * n * step.output.bytes
    found, of_kernel = limits(lines, a + b + d), Counted.of(kernel, lines)
    o = of_kernel.occupancy
    return {
        "rung": step.name, "m": m, "n": n, "k": k, "dtype": step.dtype.name, "layout": step.layout,
        "config": f"{step.config or ''}", "registers": of_kernel.registers, "ctas": o.ctas, "warps": o.warps,
        "occupancy_limit": o.limit, **{name: sum(getattr(x, name) for x in lines) for name in NUMBERS},
        "multiplications": sum(x.instructions for x in lines if x.products),
        "bound_us": found.bound, "bound_tflops": 2 * m * n * k / found.bound / 1e6,
        "bound_of_floor": found.floor / found.bound, "limit": found.limit, "resources_us": found.us,
        "line": f"{found.line.where}", "access": found.line.access,
    }  # fmt: skip


def measured(path: Path, sizes: Sizes) -> dict[tuple[str, str], dict[str, float]]:
    """What was measured of products of these sizes, by rung and dtype."""
    mine = _rows("--rows", path, MEASURED, sizes)
    return {(x["rung"], x["dtype"]): {name: x[name] for name in MEASURED} for x in mine}


def _rows(option: str, path: Path, names: tuple[str, ...], sizes: Sizes) -> list[dict[str, Any]]:
    """The rows of a file that are of these sizes; `names`: what each must have. Raises ArgumentError."""
    try:
        found = json.loads(path.read_text())
        rows = [dict(x) for x in (found["rows"] if isinstance(found, dict) else found)]
        of_sizes = [(x["m"], x["n"], x["k"]) for x in rows]
        mine = [x for x, has in zip(rows, of_sizes, strict=True) if has == sizes]
        _ = [x[name] for x in mine for name in ("rung", "dtype", *names)]
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{option}: {path.name} is no such file: {type(error).__name__} {error}") from None
    if not mine:
        there = " ".join(sorted({"x".join(map(str, has)) for has in of_sizes})) or "none"
        wanted = "x".join(map(str, sizes))
        raise ArgumentError(f"{option}: {path.name} has no rows of {wanted}; use --m, --n, --k of one of {there}")
    return mine


TITLES = ("rung", "dtype", "CTAs", "warps", "registers", "wavefronts", "ideal", "sectors", "ideal", "multiply",
          "us", "TFLOP/s", "of floor", "by", "at")  # fmt: skip
MEASURED_TITLES = ("measured us", "TFLOP/s", "of cuBLAS", "of floor")


def text(rows: list[dict[str, Any]]) -> str:
    """The table."""
    some = any("us" in x for x in rows)
    return table([TITLES + MEASURED_TITLES * some, *(cells(x) + measured_cells(x) * some for x in rows)])


def cells(x: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table, without what was measured."""
    million = 2e-6 * x["m"] * x["n"] * x["k"]
    counts = (f"{x[name] / million:.0f}" for name in (*NUMBERS[1:], "multiplications"))
    held = (f"{x[name]}" for name in ("rung", "dtype", "ctas", "warps", "registers"))
    bound = f"{x['bound_us']:.0f}", f"{x['bound_tflops']:.1f}", f"{x['bound_of_floor']:.0%}"
    return *held, *counts, *bound, x["limit"], f"{x['line']} {x['access']}"


def measured_cells(x: dict[str, Any]) -> tuple[str, ...]:
    if "us" not in x:
        return ("",) * len(MEASURED)
    return f"{x['us']:.0f}", f"{x['tflops']:.1f}", f"{x['of_cublas']:.0%}", f"{x['of_floor']:.0%}"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A bar for each rung: the bound, colored by what it comes from; and a dot where one was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.32 * len(rows)), layout="constrained")
    places = range(len(rows))[::-1]
    axes.barh(places, [x["bound_tflops"] for x in rows], color=[COLORS[x["limit"]] for x in rows], height=0.7)
    dots = [(x["tflops"], place) for x, place in zip(rows, places, strict=True) if "us" in x]
    legend: list[Any] = [Patch(color=COLORS[x], label=x) for x in RESOURCES if x in {r["limit"] for r in rows}]
    if dots:
        legend.append(axes.scatter(*zip(*dots, strict=True), color="black", zorder=2, label="measured"))
    axes.set_yticks(places, [f"{x['rung']}, {x['dtype']}" for x in rows])
    axes.set_xscale("log")
    axes.set_xlabel("TFLOP/s that the counts allow on an H200, colored by what limits")
    axes.legend(handles=legend, loc="upper right", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
