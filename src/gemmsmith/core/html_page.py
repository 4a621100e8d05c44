"""A page of HTML in one file, which needs no network."""

from __future__ import annotations

from pathlib import Path


def make_html_page(folder: Path, **parts: str) -> str:
    """Return a folder's page.html with its page.css and page.js, and with `parts`, in place of comments.

    The comments are <!-- style -->, <!-- script -->, and the names of the parts.
    """
    files = {"style": "page.css", "script": "page.js"}
    text = (folder / "page.html").read_text("utf-8")
    for name, part in ({name: (folder / file).read_text("utf-8") for name, file in files.items()} | parts).items():
        text = text.replace(f"<!-- {name} -->", part)
    return text
