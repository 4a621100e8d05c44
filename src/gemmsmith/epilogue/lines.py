"""The user's own line, for errors and for nodes."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from types import FrameType, TracebackType
from typing import Any

from gemmsmith.core.errors import EpilogueError

_INSIDE = ("gemmsmith", "torch", "numpy")


def line(file: str, number: int, module: dict[str, Any] | None = None) -> str:
    """ "file.py:12: text of the line"."""
    text = linecache.getline(file, number, module).strip()
    return f"{os.path.basename(file)}:{number}: {text}".removesuffix(": ")


def user_line(trace: TracebackType | None = None) -> str:
    """The line of the innermost frame outside this package, torch and numpy: of the caller, or of a traceback."""
    if trace:
        *_, (last, number) = traceback.walk_tb(trace)
        outside = [(frame, n) for frame, n in traceback.walk_tb(trace) if _outside(frame)]
        frame, number = outside[-1] if outside else (last, number)
        return line(frame.f_code.co_filename, number, frame.f_globals)
    frame = sys._getframe(1)
    while frame.f_back and not _outside(frame):
        frame = frame.f_back
    return line(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)


def user_level() -> int:
    """That frame's number above the function that calls this, as the `stacklevel` of a warning."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and not _outside(frame):
        frame, level = frame.f_back, level + 1
    return level


def _outside(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _INSIDE


def refused(message: str, where: str | None = None, kind: type[EpilogueError] = EpilogueError) -> EpilogueError:
    """The exception for something that cannot be fused, at `where` (default: the user's line)."""
    return kind(f"{where or user_line()}\n    {message}")
