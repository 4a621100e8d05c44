"""Progress of long commands, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class ProgressCallback(Protocol):
    """Progress callback: the current step, and the completed fraction if known."""

    def __call__(self, step: str, fraction: float | None = None) -> None:
        """Report progress."""


@contextmanager
def progress_bar() -> Iterator[ProgressCallback]:
    """Display one line per step, with its percentage; nothing if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda step, fraction=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as display:
        tasks = {}

        def progress(step: str, fraction: float | None = None) -> None:
            if step not in tasks:
                tasks[step] = display.add_task(step, total=None if fraction is None else 1)
            display.update(tasks[step], completed=fraction)

        yield progress
