"""Text tables."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a text table; the first row is the header. Text is left-aligned, numbers right-aligned."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    is_text = [not all(cell[:1].isdigit() for cell in column[1:] if cell) for column in columns]
    justify = [str.ljust if text else str.rjust for text in is_text]
    lines = ([f(cell, width) for f, cell, width in zip(justify, row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)
