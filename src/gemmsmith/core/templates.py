"""Pages of HTML in one file, which need no network, C with comments in place of parts, and HTML of notebooks.

The last is escaped, and names no color, so that it reads on light and on dark pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path


def fill_template(path: Path, parts: Mapping[str, str]) -> str:
    """Return a file's text with each part, in order, in place of the comment <!-- name -->."""
    text = path.read_text("utf-8")
    for name, part in parts.items():
        text = text.replace(f"<!-- {name} -->", part)
    return text


def make_html_page(folder: Path, **parts: str) -> str:
    """Return a folder's page.html with its page.css (style), page.js (script) and `parts` in place of comments."""
    files = {"style": "page.css", "script": "page.js"}
    return fill_template(folder / "page.html", {x: (folder / y).read_text("utf-8") for x, y in files.items()} | parts)


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
