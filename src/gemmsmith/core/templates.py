"""Texts with comments in place of parts: pages of HTML in one file, which need no network, and sources in C and C++."""

from __future__ import annotations

from collections.abc import Mapping
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
