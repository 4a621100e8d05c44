"""The command group: it turns every exception into one line that says what went wrong and what would work."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import click

from gemmsmith.core.errors import GemmsmithError

FAILED, USAGE = 1, 2
"""Exit codes: a wrong result or an error; a command line that cannot be parsed."""


class Group(click.Group):
    """Errors are one line on stderr; with --json one object on stdout, {"error": {"type": …, "message": …}}."""

    def main(self, args: Any = None, *others: Any, **named: Any) -> Any:
        """Runs a command and exits with its code; raises nothing but SystemExit."""
        words = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(words, *others, **{**named, "standalone_mode": False})
        except Exception as error:
            _tell(error, "--json" in words)
            code = USAGE if isinstance(error, click.UsageError) else FAILED
        sys.exit(code if isinstance(code, int) else 0)


def _tell(error: Exception, as_json: bool) -> None:
    kind, message = _described(error)
    try:
        if as_json:
            click.echo(json.dumps({"error": {"type": kind, "message": message}}))
        else:
            click.echo(f"Error: {message}", err=True)
    except BrokenPipeError:  # stdout is closed: the rest of its buffer must not raise at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _described(error: Exception) -> tuple[str, str]:
    """The error's type, and its message in one line."""
    kind, found = type(error).__name__, str(error)
    match error:
        case click.ClickException():
            found = error.format_message()
            if isinstance(error, click.UsageError) and error.ctx:
                found = f"{found.rstrip('.')}; see {error.ctx.command_path} --help"
        case click.Abort():
            kind, found = "KeyboardInterrupt", "interrupted"
        case GemmsmithError():
            pass
        case OSError():
            found = f"{error.filename or 'output'}: {error.strerror}; use a file or folder that can be written"
        case MemoryError():
            found = f"out of memory; use smaller sizes ({error})"
        case _:
            *_, last = traceback.extract_tb(error.__traceback__)
            found = f"{kind}: {found} at {last.filename}:{last.lineno}; this is a fault of gemmsmith, please report it"
    return kind, " ".join(found.split())
