"""The command `gemmsmith`: its subcommands, imported when they are needed; every exception is one line."""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from typing import Any

import click

import gemmsmith
from gemmsmith.core.errors import GemmsmithError

FAILED = 1
"""Exit code for a wrong result or a hazard."""
REFUSED = 2
"""Exit code for a request that cannot be served, and for any other error."""


COMMANDS = {"run": "commands", "simulate": "commands", "show": "commands", "bundle": "export", **{
    x: x for x in ("bench", "cache", "doctor", "explain", "export", "ladder", "layout", "raster", "table", "tune")
}}  # fmt: skip
"""The module of gemmsmith.cli of each command."""


def find_command(name: str) -> click.Command:
    """Return a command of COMMANDS."""
    command: click.Command = getattr(import_module(f"gemmsmith.cli.{COMMANDS[name]}"), name)
    return command


class ErrorReportingGroup(click.Group):
    """Command group that reports errors in one line on stderr, or, with --json, as one object on stdout.

    The object is {"error": {"type": …, "message": …}}.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, whose module is imported now."""
        return find_command(cmd_name) if cmd_name in COMMANDS else None

    def main(self, args: Any = None, *others: Any, **named: Any) -> Any:
        """Run a command and exit with its code. An exception is reported in one line, and the code is REFUSED."""
        words = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(words, *others, **{**named, "standalone_mode": False})
        except Exception as error:
            _print_error(error, "--json" in words)
            code = REFUSED
        sys.exit(code if isinstance(code, int) else 0)


def _print_error(error: Exception, as_json: bool) -> None:
    kind, message = _describe_error(error)
    try:
        if as_json:
            click.echo(json.dumps({"error": {"type": kind, "message": message}}))
        else:
            click.echo(f"Error: {message}", err=True)
    except BrokenPipeError:  # stdout is closed: flushing its buffer at exit must not raise either
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _describe_error(error: Exception) -> tuple[str, str]:
    kind, message = type(error).__name__, str(error)
    match error:
        case click.ClickException():
            message = error.format_message()
            if isinstance(error, click.UsageError) and error.ctx:
                message = f"{message.rstrip('.')}; see {error.ctx.command_path} --help"
        case click.Abort():
            kind, message = "KeyboardInterrupt", "interrupted"
        case GemmsmithError():
            pass
        case OSError():
            message = f"{error.filename or 'output'}: {error.strerror}; use a writable file or folder"
        case MemoryError():
            message = f"out of memory; use smaller sizes ({error})"
        case _:
            *_, last = traceback.extract_tb(error.__traceback__)
            location = f"{last.filename}:{last.lineno}"
            message = f"{kind}: {message} at {location}; internal error in gemmsmith; please report it"
    return kind, " ".join(message.split())


@click.group(
    "gemmsmith",
    cls=ErrorReportingGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(gemmsmith.__version__)
@click.pass_context
def main(ctx: click.Context) -> None:
    """Make GEMM kernels for Hopper GPUs, and execute them on any machine.

    \b
    Example: gemmsmith run 256x256x256 --backend sim
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
