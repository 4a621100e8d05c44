"""Tables of commands, as text and for JSON: the simulator's counts of a kernel, and annotated PTX or SASS."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gemmsmith.backends.cuda.listing import INSTRUCTION_CLASSES, UNANNOTATED_CLASSES, Listing
from gemmsmith.backends.sim.execute.counters import Count
from gemmsmith.core.chip import Occupancy, occupancy
from gemmsmith.lang.kernel import Kernel


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a text table; the first row is the header. Text is left-aligned, numbers right-aligned."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    is_text = [not all(cell[:1].isdigit() for cell in column[1:] if cell) for column in columns]
    justify = [str.ljust if text else str.rjust for text in is_text]
    lines = ([f(cell, width) for f, cell, width in zip(justify, row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


MAX_COLUMNS = 100
"""Longest line of text that is printed, but for tables, listings and paths."""


def wrapped(text: str, indentation: int = 0) -> str:
    """Return text wrapped to MAX_COLUMNS columns.

    Its first line is printed after `indentation` columns of something else; the others are indented by as many.
    """
    width, below = MAX_COLUMNS - indentation, " " * indentation
    lines = (textwrap.wrap(x, width, subsequent_indent="  ", break_long_words=False) or [""] for x in text.split("\n"))
    return f"\n{below}".join(x for parts in lines for x in parts)


def print_outcome(value: Any, text: str, picture: Path | None, as_json: bool) -> None:
    """Print what a command has found: `value` as JSON, or `text` and the path of the picture if there is one."""
    if as_json:
        click.echo(json.dumps(value, indent=2))
        return
    click.echo(text)
    if picture:
        click.echo(f"picture: {picture}")


ACCESS_COUNTS = ("instructions", "wavefronts", "ideal_wavefronts", "sectors", "ideal_sectors")
TMA_BOX_COUNTS = ("lines", "ideal_lines")
TITLES = ("line", "access", "instructions", "wavefronts", "ideal", "sectors", "ideal", "lines", "ideal")


@dataclass(frozen=True)
class KernelCounts:
    """A kernel's counts by line, its registers per thread as compiled by NVRTC, and its occupancy."""

    kernel: Kernel
    lines: list[Count]
    registers: int
    occupancy: Occupancy

    @classmethod
    def from_kernel(cls, kernel: Kernel, lines: list[Count]) -> KernelCounts:
        """Compile the kernel, and return its counts with its registers and occupancy."""
        from gemmsmith.backends.cuda.compiler import compile_source

        r = compile_source(kernel.source, kernel.name, kernel.chip.target).resources
        limits = occupancy(kernel.chip, kernel.threads, r.registers, r.shared_bytes + kernel.shared_bytes)
        return cls(kernel, lines, r.registers, limits)

    def to_json(self) -> dict[str, Any]:
        o = self.occupancy
        lines = [vars(x) | {"location": f"{x.location}"} for x in self.lines]
        return {"kernel": self.kernel.name, "threads": self.kernel.threads, "registers": self.registers,
                "shared_bytes": self.kernel.shared_bytes,
                "occupancy": {"ctas": o.ctas_per_sm, "warps": o.warps_per_sm, "limit": o.limit, "limits": o.limits},
                "lines": lines}  # fmt: skip

    def to_text(self) -> str:
        """Return a table below the kernel's name and occupancy; counts of zero are empty."""
        rows: list[tuple[str, ...]] = [TITLES]
        for x in self.lines:
            counts = [getattr(x, name) for name in (*ACCESS_COUNTS, *TMA_BOX_COUNTS)]
            rows.append((f"{x.location}", x.access, *(f"{count or ''}" for count in counts)))
        return f"{self.kernel.name}: {self.registers} registers, {self.occupancy}\n{format_table(rows)}"


MAX_INSTRUCTION_CHARS = 60
"""Printed width of an instruction; longer ones are truncated."""


def format_listing(listing: Listing) -> str:
    """Return a table with one row per instruction, and a table of counts by class.

    A row has the instruction's address, its class, whether a mainloop executes it in "each" k-tile or in "some", its
    text and its Python line. The counts are those of the whole kernel and of each mainloop.
    """
    frequency = dict.fromkeys((i for loop in listing.mainloops for i in loop.body), "some")
    frequency |= dict.fromkeys((i for loop in listing.mainloops for i in loop.unconditional), "each")
    rows = [("address", "class", "k-tile", "instruction", "line")]
    for i, x in enumerate(listing.instructions):
        code = f"{x.guard:<5} {x.text}"
        code = code if len(code) <= MAX_INSTRUCTION_CHARS else code[: MAX_INSTRUCTION_CHARS - 2] + " …"
        kind = "" if x.kind in UNANNOTATED_CLASSES else x.kind
        if x.label:
            rows.append((f"{x.label}:", "", "", "", ""))
        rows.append((x.address, kind, frequency.get(i, ""), code, str(x.location or "")))
    counts = [listing.count()]
    for loop in listing.mainloops:
        counts += [listing.count(loop.unconditional), listing.count(loop.conditional)]
    header = ("class", "whole kernel", *("each k-tile", "some k-tiles") * len(listing.mainloops))
    names = [x.name for x in INSTRUCTION_CLASSES if counts[0][x.name]]
    count_rows = [(name, *(str(count[name]) for count in counts)) for name in names]
    return f"{format_table(rows)}\n\n{format_table([header, *count_rows])}"


def listing_to_json(listing: Listing) -> dict[str, Any]:
    """Return what `format_listing` prints, as a dict that can be written as JSON."""
    instructions = [
        {"address": x.address, "class": x.kind, "text": f"{x.guard} {x.text}".strip(),
         "line": x.location and str(x.location)}
        for x in listing.instructions
    ]  # fmt: skip
    mainloops = [
        {"each_k_tile": listing.count(loop.unconditional), "some_k_tiles": listing.count(loop.conditional)}
        for loop in listing.mainloops
    ]
    return {"instructions": instructions, "whole_kernel": listing.count(), "mainloops": mainloops}
