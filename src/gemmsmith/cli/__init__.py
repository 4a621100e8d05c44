"""The `gemmsmith` command."""

from __future__ import annotations

from gemmsmith.cli.commands import main

__all__ = ["main"]
