"""`gemmsmith show --annotate`: PTX or SASS with the class and the Python line of each instruction, and counts."""

from __future__ import annotations

from typing import Any

from gemmsmith.backends.cuda.listing import Listing
from gemmsmith.backends.cuda.mnemonics import INSTRUCTION_CLASSES, UNANNOTATED_CLASSES
from gemmsmith.cli.table import format_table

MAX_INSTRUCTION_CHARS = 60
"""Printed width of an instruction; longer ones are truncated."""


def format_listing(listing: Listing) -> str:
    """Return a table with one row per instruction, and a table of counts by class.

    A row has the address, the class, whether the instruction executes in each k-tile or in some, its text and its
    Python line. Counts are of the whole kernel and of each mainloop.
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
        {
            "address": x.address,
            "class": x.kind,
            "text": f"{x.guard} {x.text}".strip(),
            "line": x.location and str(x.location),
        }
        for x in listing.instructions
    ]
    mainloops = [
        {"each_k_tile": listing.count(loop.unconditional), "some_k_tiles": listing.count(loop.conditional)}
        for loop in listing.mainloops
    ]
    return {"instructions": instructions, "whole_kernel": listing.count(), "mainloops": mainloops}
