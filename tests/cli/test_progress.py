"""Progress of commands that take seconds: on a terminal's stderr, and nowhere else."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
from click.testing import CliRunner

from gemmsmith.cli import main
from gemmsmith.cli.options import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar() as progress:
        progress("counting", 0.25)
        progress("counting", 0.5)
        progress("plotting")
    assert "counting" in sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "plotting" in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_a_file_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setitem(sys.modules, "rich.progress", None)  # nor is rich imported
    with progress_bar() as progress:
        progress("counting", 0.5)
    assert not sys.stderr.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("module", "words", "steps"),
    [
        ("commands", ["show", "64x64x64"], ["choosing a config", "printing"]),
        ("commands", ["show", "64x64x64", "--resources"], ["choosing a config", "compiling"]),
        ("ladder", ["ladder", "512x512x512", "--rung", "naive", "--rung", "tma"], ["counting"]),
        ("raster", ["raster", "512x512x512"], ["simulating the L2"]),
    ],
)
def test_commands_say_what_they_do(
    module: str, words: list[str], steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, float | None]] = []

    @contextmanager
    def recorded() -> Iterator[Any]:
        yield lambda step, fraction=None: told.append((step, fraction))

    monkeypatch.setattr(import_module(f"gemmsmith.cli.{module}"), "progress_bar", recorded)
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert list(dict.fromkeys(step for step, _ in told)) == steps
    fractions = [x for _, x in told if x is not None]
    assert fractions == sorted(fractions)
    assert all(0 <= x <= 1 for x in fractions)
