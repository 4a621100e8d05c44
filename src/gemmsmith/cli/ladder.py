"""`gemmsmith ladder`: the counts of every rung, and their roofline."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import shorten
from typing import Any

import click

from gemmsmith.cli import options
from gemmsmith.cli.options import progress_bar
from gemmsmith.cli.tables import ACCESS_COUNTS, KernelCounts, format_table, print_outcome
from gemmsmith.core import pictures
from gemmsmith.core.errors import ArgumentError
from gemmsmith.ladder.rungs import RUNG_CASES, RUNG_NAMES, RungCase, Sizes, simulate_rung
from gemmsmith.tuning.roofline import RESOURCES, compute_roofline

COUNT_KEYS = (
    "ctas", "warps", "registers", "multiplications", "bound_us", "bound_tflops", "bound_of_roofline", "limit", "line",
    "access",
)  # fmt: skip
"""Keys of a rung's counts, in addition to ACCESS_COUNTS."""
MEASURED_KEYS = ("us", "tflops", "of_cublas", "of_roofline")
"""Keys of a rung's measurement, as benchmarks/ladder/speed.py writes them."""
COLORS = dict(zip(RESOURCES, pictures.PALETTE, strict=False))


@click.command()
@options.sizes(1)
@click.option("--rung", "names", multiple=True, type=click.Choice(RUNG_NAMES), help="Show only this rung (repeatable).")
@click.option("--measured", "measured_file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Show measurements, as benchmarks/ladder/speed.py writes them, next to the counts.")  # fmt: skip
@click.option("--from-json", "counts_file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Reuse the counts of an earlier --json output.")  # fmt: skip
@options.picture
@options.as_json
def ladder(
    sizes: options.PartialSizes, names: tuple[str, ...], measured_file: Path | None, counts_file: Path | None,
    picture: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Show every rung of the ladder, from one result per thread to Hopper's designs.

    The simulator counts the accesses and instructions of a tile; wavefronts, sectors and multiplications (warp
    instructions) are per million FLOPs. The bound on the time on an H200 is not a prediction: it assumes the peak rate
    of each resource, and includes neither latency nor power. The default sizes are 4096.

    \b
    Example: gemmsmith ladder --rung naive --rung cooperative
    """
    m_n_k, names = options.complete_sizes(sizes, (4096, 4096, 4096)), names or tuple(RUNG_NAMES)
    measurements = load_measurements(measured_file, m_n_k) if measured_file else {}
    if counts_file:
        rows = _load_rows("--from-json", counts_file, (*COUNT_KEYS, *ACCESS_COUNTS), m_n_k)
    else:
        cases, rows = [x for x in RUNG_CASES if x.name in names], []
        with progress_bar() as progress:
            for i, case in enumerate(cases):
                progress("counting", i / len(cases))
                rows.append(count_rung(case, m_n_k))
    rows = [x | measurements.get((x["rung"], x["dtype"]), {}) for x in rows if x["rung"] in names]
    if picture:
        plot(rows, picture)
    print_outcome(rows, format_rows(rows), picture, as_json)


def count_rung(case: RungCase, sizes: Sizes) -> dict[str, Any]:
    """Return a rung's row: its counts for a GEMM of `sizes` (m, n, k), and its roofline, by the keys of --json.

    "bound_us" is the time that the counts take the limiting resource. "bound_of_roofline" is the time of the roofline
    (DRAM traffic and math only) divided by that.
    """
    m, n, k = sizes
    kernel, lines = simulate_rung(case, sizes)
    a, b, d = m * k * case.dtype.bytes, k * n * case.dtype.bytes, m * n * case.out_dtype.bytes
    roofline, counts = compute_roofline(lines, a + b + d), KernelCounts.from_kernel(kernel, lines)
    occupancy = counts.occupancy
    return {
        "rung": case.name, "m": m, "n": n, "k": k, "dtype": case.dtype.name, "layout": case.layout,
        "config": f"{case.config or ''}", "registers": counts.registers,
        "ctas": occupancy.ctas_per_sm, "warps": occupancy.warps_per_sm, "occupancy_limit": occupancy.limit,
        **{name: sum(getattr(x, name) for x in lines) for name in ACCESS_COUNTS},
        "multiplications": sum(x.instructions for x in lines if x.macs),
        "bound_us": roofline.lower_bound_us, "bound_tflops": 2 * m * n * k / roofline.lower_bound_us / 1e6,
        "bound_of_roofline": roofline.speed_of_light_us / roofline.lower_bound_us,
        "limit": roofline.limiting_resource, "resources_us": roofline.us,
        "line": f"{roofline.limiting_line.location}", "access": roofline.limiting_line.access,
    }  # fmt: skip


def load_measurements(path: Path, sizes: Sizes) -> dict[tuple[str, str], dict[str, float]]:
    """Return the measurements of GEMMs of these sizes, by rung and dtype."""
    rows = _load_rows("--measured", path, MEASURED_KEYS, sizes)
    return {(x["rung"], x["dtype"]): {name: x[name] for name in MEASURED_KEYS} for x in rows}


def _load_rows(option: str, path: Path, keys: tuple[str, ...], sizes: Sizes) -> list[dict[str, Any]]:
    """Return a JSON file's rows of GEMMs of `sizes`.

    Raises ArgumentError, which names `option`, if the file has no such rows, or one of them lacks one of `keys`.
    """
    try:
        content = json.loads(path.read_text())
        rows = [dict(x) for x in (content["rows"] if isinstance(content, dict) else content)]
        sizes_of_rows = [(x["m"], x["n"], x["k"]) for x in rows]
        matches = [x for x, row_sizes in zip(rows, sizes_of_rows, strict=True) if row_sizes == sizes]
        _ = [x[name] for x in matches for name in ("rung", "dtype", *keys)]
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{option}: {path.name} is not a results file: {type(error).__name__} {error}") from None
    if not matches:
        available = " ".join(sorted({"x".join(map(str, x)) for x in sizes_of_rows})) or "none"
        requested = "x".join(map(str, sizes))
        raise ArgumentError(
            f"{option}: {path.name} has no rows of {requested}; use --m, --n, --k of one of {available}"
        )
    return matches


COUNT_TITLES = ("rung", "dtype", "CTAs", "warps", "registers", "wavefronts", "ideal", "sectors", "ideal", "multiply",
          "us", "TFLOP/s", "of roofline", "by", "at")  # fmt: skip
BOUND_COLUMN = COUNT_TITLES.index("us")
"""The first column of the bound, in the second table."""
MEASURED_TITLES = ("measured us", "TFLOP/s", "of cuBLAS", "of roofline")


def format_rows(rows: list[dict[str, Any]]) -> str:
    """Return the rows as two text tables: what the kernel needs and counts; the bound, its line, and what was measured.

    Counts are per million FLOPs.
    """
    cells = [COUNT_TITLES, *map(format_counts, rows)]
    counts, bounds = (
        [x[:BOUND_COLUMN] for x in cells],
        [(*x[:2], *x[BOUND_COLUMN:-1], shorten(x[-1], 40, placeholder=" …")) for x in cells],
    )
    tables = [format_table(counts), format_table(bounds)]
    if any("us" in x for x in rows):
        measured = [x[:2] + format_measurements(row) for x, row in zip(cells[1:], rows, strict=True)]
        tables.append(format_table([("rung", "dtype", *MEASURED_TITLES), *measured]))
    return "\n\n".join(tables)


def _microseconds(us: float) -> str:
    return f"{us:.0f}" if us >= 100 else f"{us:.3g}"


def format_counts(x: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a row's counts; wavefronts, sectors and multiplications are per million FLOPs."""
    million = 2e-6 * x["m"] * x["n"] * x["k"]
    counts = (f"{x[name] / million:.0f}" for name in (*ACCESS_COUNTS[1:], "multiplications"))
    values = (f"{x[name]}" for name in ("rung", "dtype", "ctas", "warps", "registers"))
    bound = _microseconds(x["bound_us"]), f"{x['bound_tflops']:.1f}", f"{x['bound_of_roofline']:.0%}"
    return *values, *counts, *bound, x["limit"], f"{x['line']} {x['access']}"


def format_measurements(x: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a row's measurement, empty if it has none."""
    if "us" not in x:
        return ("",) * len(MEASURED_KEYS)
    return _microseconds(x["us"]), f"{x['tflops']:.1f}", f"{x['of_cublas']:.0%}", f"{x['of_roofline']:.0%}"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot the rows of the ladder to a file: a mark per rung and a dot per measurement, in TFLOP/s.

    A mark is the upper bound by the counts, colored by the limiting resource.
    """
    sizes = " x ".join(str(rows[0][x]) for x in "mnk")
    title = f"{sizes} on an H200: the speed that the counts of each rung allow, colored by the limiting resource"
    measured = any("us" in x for x in rows)
    with pictures.drawing(
        path, 9, 1.6 + 0.3 * len(rows), f"{title}; and the measured speed" if measured else title
    ) as f:
        from matplotlib.lines import Line2D

        axes = f.subplots()
        positions = range(len(rows))[::-1]
        for x, y in zip(rows, positions, strict=True):
            color, bound = COLORS[x["limit"]], x["bound_tflops"]
            axes.plot([bound], [y], "|", color=color, markersize=15, markeredgewidth=4)
            if "us" in x:
                axes.plot([x["tflops"], bound], [y, y], color=color, linewidth=1.5, zorder=1)
                axes.plot([x["tflops"]], [y], "o", color=pictures.TEXT, markersize=6)
        axes.set_yticks(positions, [f"{x['rung']}, {x['dtype']}" for x in rows])
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(axis="x", color=pictures.TEXT, alpha=0.3, linewidth=0.6)
        axes.set_xlabel("TFLOP/s, logarithmic")
        dot = Line2D([], [], color=pictures.TEXT, marker="o", linestyle="", label="measured")
        limits = {r["limit"] for r in rows}
        pictures.legend(f, {f"bound by {x}": COLORS[x] for x in RESOURCES if x in limits}, *[dot] * measured)
