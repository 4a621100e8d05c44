"""`gemmsmith cache`: the compiled kernels on disk."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import click
from rich.filesize import decimal

from gemmsmith.backends.cuda import cache as cubin_cache
from gemmsmith.cli import options
from gemmsmith.cli.commands import plan_of_words
from gemmsmith.cli.options import progress_bar
from gemmsmith.core.errors import GemmsmithError
from gemmsmith.lang.kernel import Kernel
from gemmsmith.tuning.search import compile_all


@click.command()
@click.option("--list", "lists", is_flag=True, help="List the kernels, the oldest first.")
@click.option("--clear", is_flag=True, help="Delete the kernels; measured configs stay.")
@click.option("--warm", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Compile the kernels of a file, whose lines are MxNxK and options of `gemmsmith show`.")  # fmt: skip
@options.as_json
def cache(lists: bool, clear: bool, warm: Path | None, as_json: bool) -> None:
    """Show how many compiled kernels are kept, and where; list, delete or add some.

    Kernels in the folder are not compiled again, by any process. --warm compiles those of a deployment ahead of time,
    in parallel and without a GPU.

    \b
    Example: gemmsmith cache --list
    """
    if lists + clear + bool(warm) > 1:
        raise click.UsageError("--list, --clear, --warm: got several; use one")
    if warm:
        _compile(list(_kernels_of(warm)))
    entries = cubin_cache.entries()
    if clear:
        for entry in entries:
            entry.path.unlink(missing_ok=True)
        entries = cubin_cache.entries()
    size = sum(x.bytes for x in entries)
    summary = {"folder": f"{cubin_cache.directory()}", "kernels": len(entries), "bytes": size}
    if as_json:
        listed = [{"file": f"{x.path}", "bytes": x.bytes, "written": x.written} for x in entries]
        click.echo(json.dumps(summary | ({"entries": listed} if lists else {}), indent=2))
        return
    for x in entries if lists else []:
        click.echo(f"{datetime.fromtimestamp(x.written):%Y-%m-%d %H:%M}  {decimal(x.bytes):>9}  {x.path}")
    click.echo(f"{len(entries)} kernels, {decimal(size)}, in {cubin_cache.directory()}")


def _kernels_of(file: Path) -> Iterator[Kernel]:
    """Yield the kernels of the problems in a file. Raises UsageError, which names the line, for one that is refused."""
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
            for launch in plan_of_words(words).launches.all if words else []:
                yield launch.kernel
        except (GemmsmithError, click.UsageError, ValueError) as error:  # ValueError: a quotation that does not end
            message = error.format_message() if isinstance(error, click.UsageError) else error
            raise click.UsageError(f"--warm: {file}, line {number}: {message}") from error


def _compile(kernels: list[Kernel]) -> None:
    done = 0
    with progress_bar() as progress:

        def on_progress() -> None:
            nonlocal done
            done += 1
            progress("compiling", done / len(kernels))

        compile_all(((x.source, x.name, x.chip.target) for x in kernels), on_progress)
