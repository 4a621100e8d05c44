"""Tables of text."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows below one another, the first of which has the titles: columns of words begin on the left, those of numbers
    alone end on the right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    words = [not all(cell[:1].isdigit() for cell in column[1:] if cell) for column in columns]
    lines = (
        (cell.ljust(width) if word else cell.rjust(width) for cell, width, word in zip(row, widths, words, strict=True))
        for row in rows
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)
