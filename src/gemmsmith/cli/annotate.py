"""gemmsmith show --annotate: PTX or SASS with the class and the Python line of each instruction, and their counts."""

from __future__ import annotations

from typing import Any

from gemmsmith.backends.cuda.listing import Listing
from gemmsmith.backends.cuda.mnemonics import CLASSES, UNMARKED
from gemmsmith.cli.table import table

WIDEST = 60
"""Characters that an instruction is printed with; longer ones are cut."""


def text_of(listing: Listing) -> str:
    """A row an instruction: its address, its class, whether it is executed in each k-tile or in some, itself, its
    Python line. Below, how many there are of each class, in the whole kernel and in each mainloop."""
    executed = dict.fromkeys((i for loop in listing.mainloops for i in loop.body), "some")
    executed |= dict.fromkeys((i for loop in listing.mainloops for i in loop.each), "each")
    rows = [("address", "class", "k-tile", "instruction", "line")]
    for i, x in enumerate(listing.lines):
        code = f"{x.guard:<5} {x.text}"
        code = code if len(code) <= WIDEST else code[: WIDEST - 2] + " …"
        kind = "" if x.kind in UNMARKED else x.kind
        rows += [(f"{x.label}:", "", "", "", "")] * bool(x.label)
        rows.append((x.address, kind, executed.get(i, ""), code, str(x.where or "")))
    counts = [listing.count(), *(listing.count(part) for loop in listing.mainloops for part in (loop.each, loop.some))]
    header = ("class", "whole kernel", *("each k-tile", "some k-tiles") * len(listing.mainloops))
    named = [(row.name, *(str(count[row.name]) for count in counts)) for row in CLASSES if counts[0][row.name]]
    return f"{table(rows)}\n\n{table([header, *named])}"


def facts(listing: Listing) -> dict[str, Any]:
    """What `text_of` shows, for JSON."""
    instructions = [
        {"address": x.address, "class": x.kind, "text": f"{x.guard} {x.text}".strip(), "line": x.where and str(x.where)}
        for x in listing.lines
    ]
    mainloops = [
        {"each_k_tile": listing.count(loop.each), "some_k_tiles": listing.count(loop.some)}
        for loop in listing.mainloops
    ]
    return {"instructions": instructions, "whole_kernel": listing.count(), "mainloops": mainloops}
