"""The `gemmsmith` command."""

from __future__ import annotations

from gemmsmith.cli.group import main

__all__ = ["main"]
