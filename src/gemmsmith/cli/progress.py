"""Progress of long commands, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn


class Tell(Protocol):
    """Told what is being done, and the fraction of it that is, where that is known."""

    def __call__(self, what: str, fraction: float | None = None) -> None: ...


@contextmanager
def shown() -> Iterator[Tell]:
    """A line for each thing that is told, with its percentage; nothing where stderr is no terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        tasks = {}

        def tell(what: str, fraction: float | None = None) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=None if fraction is None else 1)
            progress.update(tasks[what], completed=fraction)

        yield tell
