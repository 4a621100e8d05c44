"""HTML of the representations in notebooks, escaped. It names no color, so that it reads on light and on dark pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

MAX_OPEN_LINES = 12
"""Lines of a text that is shown; a longer one is folded."""


def html_table(rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """Return a table whose first column has the titles of its rows."""
    head = f"<tr>{''.join(f'<th>{escape(x)}</th>' for x in header)}</tr>" if header else ""
    left = ' style="text-align: left"'
    body = (
        f"<tr><th{left}>{escape(str(title))}</th>{''.join(f'<td{left}>{escape(str(x))}</td>' for x in cells)}</tr>"
        for title, *cells in rows
    )
    return f"<table>{head}{''.join(body)}</table>"


def html_section(title: str, text: str) -> str:
    """Return text as it is, below a title that folds it."""
    is_open = " open" if text.count("\n") < MAX_OPEN_LINES else ""
    return f"<details{is_open}><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
