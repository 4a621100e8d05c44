"""`gemmsmith layout`: a tile in shared memory: swizzle, TMA boxes, descriptor, fragments, bank conflicts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from gemmsmith.backends.sim.execute.counters import BANK_BYTES, BANKS
from gemmsmith.cli import options
from gemmsmith.cli.tables import format_table, print_outcome
from gemmsmith.cli.tile_layout import ACCESSES, KINDS, describe, make_tile
from gemmsmith.core.dtypes import as_dtype
from gemmsmith.core.mma import WARP_THREADS, Major
from gemmsmith.core.templates import make_html_page
from gemmsmith.core.tile import ATOM_ROWS, SWIZZLES

CELLS = 8
"""Cells of a row of a table, at most."""


@click.command()
@click.argument("shape", type=options.joined_sizes(2, "64x64"), metavar="MNxK")
@click.option("--dtype", type=click.Choice(options.OPERANDS), default="bf16", show_default=True, help="Data type.")
@click.option("--major", type=click.Choice(["K", "MN"]), default="K", show_default=True,
              help="The contiguous dimension: K, or M or N.")  # fmt: skip
@click.option("--swizzle", type=click.Choice([*map(str, SWIZZLES), "0"]),
              help="Bytes; 0: none.  [default: that of the kernels, the widest that divides a row]")  # fmt: skip
@click.option("--fragment", type=click.Choice(KINDS),
              help="Show which thread and register hold each element.")  # fmt: skip
@click.option("--access", type=click.Choice(ACCESSES),
              help="Count bank conflicts of a warp that reads 16 bytes of each of 32 rows, or a fragment.")  # fmt: skip
@click.option("--html", type=click.Path(dir_okay=False, writable=True, path_type=Path),
              help="Write a page for a browser, one file.")  # fmt: skip
@options.as_json
def layout(
    shape: tuple[int, int], dtype: str, major: Major, swizzle: str | None, fragment: str | None, access: str | None,
    html: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Show a tile of M or N x K elements in shared memory.

    Its 16-byte units are shown without and with the swizzle; then TMA's boxes, wgmma's matrix descriptor, a fragment
    and the bank conflicts of an access. In the page, an element is marked in both layouts.

    \b
    Example: gemmsmith layout 64x64 --fragment ldmatrix --access fragment
    """
    tile = make_tile(*shape, as_dtype(dtype, allow_integers=True), major, None if swizzle is None else int(swizzle))
    shown = describe(tile, fragment, access)
    if html:
        html.write_text(make_page(shown), "utf-8")
    text = "\n\n".join(_sections(shown)) + (f"\n\npage: {html}" if html else "")
    print_outcome(shown, text, None, as_json)


def make_page(shown: dict[str, Any]) -> str:
    """Return a page of HTML, with its style, script and data, that shows what `describe` has found."""
    data = json.dumps(_packed(shown), separators=(",", ":"))
    return make_html_page(Path(__file__).with_name("layout_page"), data=data)


def _packed(x: Any) -> Any:
    """Return what JSON may hold with each array of numbers as its steps from row to row, which compress well."""
    if isinstance(x, dict):
        return {name: _packed(value) for name, value in x.items()}
    if not isinstance(x, list) or not isinstance(np.ravel(x)[0], np.integer):
        return [_packed(value) for value in x] if isinstance(x, list) else x
    array = np.array(x)
    rows = array.reshape(-1, array.shape[-1] if array.ndim > 1 else 1)
    return {"shape": array.shape, "steps": np.diff(rows, axis=0, prepend=0).reshape(-1).tolist()}


def _table(title: str, rows: list[list[str]]) -> str:
    return f"{click.style(title, bold=True)}\n{format_table(rows)}"


def _sections(shown: dict[str, Any]) -> Iterator[str]:
    tile, boxes, atom = shown["tile"], shown["boxes"], shown["atom"]
    text = f"{tile['mn']} x {tile['k']} {tile['dtype']}, {tile['major']}-major: {tile['bytes']} bytes, "
    text += f"swizzle of {atom['row_bytes']} bytes" if atom else "no swizzle"
    text += " (the kernels' default)" * (tile["swizzle"] == tile["default_swizzle"])
    if atom:
        text += f"\nswizzle atoms: {atom['count']} of 8 rows of {atom['row_bytes']} bytes, {atom['bytes']} bytes each"
    size = f"{boxes['rows']} x {boxes['columns']} elements"
    yield f"{text}\nTMA boxes: {boxes['count']} of {size}, {boxes['bytes']} bytes each"
    for name in ("without", "with") if atom else ("without",):
        title = f"byte:bank of 16-byte units, {name} the swizzle; rows are indices of {shown['rows']['of']}:"
        yield _table(title, _unit_cells(shown["units"][name][:ATOM_ROWS], boxes["row_bytes"] // 16))
    yield f"These are the first 8 rows of a box; the next 8 are the same, {8 * boxes['row_bytes']} bytes on."
    descriptor = shown["descriptor"]
    yield _descriptor_text(**descriptor) if "value" in descriptor else f"no matrix descriptor: {descriptor['reason']}"
    if shown["fragment"]:
        yield from _fragment_texts(shown["fragment"])
    if access := shown["access"]:
        titles = ["access of warp 0", "bytes of a lane", "ideal", "without the swizzle", "with it", "conflicts with it"]
        rows = [titles]
        for x in access["instructions"]:
            conflicts = "none" if (ways := max(x["with"]["ways"])) == 1 else f"{ways}-way"
            counts = x["with"]["ideal"], x["without"]["wavefronts"], x["with"]["wavefronts"]
            rows.append([x["name"], f"{x['bytes']}", *map(str, counts), conflicts])
        totals = [str(access["wavefronts"][x]) for x in ("ideal", "without", "with")]
        yield _table("wavefronts of shared memory:", [*rows, ["all", "", *totals, ""]])


def _unit_cells(units: list[list[int]], per_row: int) -> list[list[str]]:
    """Return a table of rows of units of the first box, `per_row` in each, CELLS in a line."""
    width = min(per_row, CELLS)
    cells = [["", *(f"unit {i}" for i in range(width))]]
    for row, line in enumerate(units):
        for first in range(0, per_row, width):
            texts = [f"{x}:{x // BANK_BYTES % BANKS}" for x in line[first : min(first + width, per_row)]]
            cells.append([f"+ {first}" if first else f"{row}", *texts, *[""] * (width - len(texts))])
    return cells


def _descriptor_text(fields: list[dict[str, Any]], k_steps: list[str], source: str, value: str) -> str:
    """Return the fields of the matrix descriptor, and its value for each k-step. `value`: that of k-step 0."""
    rows = [["field", "bits", "value", "binary", "meaning"]]
    for x in fields:
        bits = f"{x['first_bit'] + x['bits'] - 1}-{x['first_bit']}"
        rows.append([x["name"], bits, str(x["value"]), x["binary"], x["meaning"]])
    steps = "\n".join(f"k-step {i}: {x}" for i, x in enumerate(k_steps))
    return f"{_table(f'matrix descriptor of wgmma, {value}:', rows)}\n{steps}\n({source})"


def _fragment_texts(fragment: dict[str, Any]) -> Iterator[str]:
    """Yield a table from elements to threads and registers, of 16 rows at most, and one from those to elements."""
    size, kind = fragment["elements_per_register"], fragment["kind"]
    run = max(size, 2 if kind.endswith("-d") else 1)  # neighbors of one thread
    columns = range(0, min(fragment["columns"], CELLS * run), run)
    rows = [["row", *(f"{x}-{x + run - 1}" if run > 1 else f"{x}" for x in columns)]]
    for row, line in enumerate(fragment["holders"][:16]):
        ends = [(*line[x][:2], line[x + run - 1][1]) for x in columns]
        rows.append([f"{row}", *(f"T{thread} R{a}" + f"-{b}" * (b > a) for thread, a, b in ends)])
    yield _table(f"{kind}, {fragment['rows']} x {fragment['columns']}: thread and register of each element:", rows)
    names = [f"R{i // size}" + f".{i % size}" * (size > 1) for i in range(len(fragment["elements"][0]))]
    rows = [["thread", *names[:CELLS]]]
    for thread, elements in enumerate(fragment["elements"][:WARP_THREADS]):
        rows.append([f"T{thread}", *(f"{row},{column}" for row, column in elements[:CELLS])])
    yield _table("row,column of each register:", rows)
    if fragment["note"]:
        yield fragment["note"]
