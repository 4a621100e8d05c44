"""Source locations in the user's code, for error messages and for graph nodes."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from types import FrameType, TracebackType
from typing import Any

from gemmsmith.core.errors import EpilogueError

_LIBRARY_PACKAGES = ("gemmsmith", "torch", "numpy")
"""Packages whose frames are not the user's."""


def format_location(file: str, number: int, module: dict[str, Any] | None = None) -> str:
    """Return "file.py:12: text of the line"."""
    text = linecache.getline(file, number, module).strip()
    return f"{os.path.basename(file)}:{number}: {text}".removesuffix(": ")


def user_source_line(trace: TracebackType | None = None) -> str:
    """Return the location of the innermost frame of the user's code, in the current stack or the traceback `trace`."""
    if trace:
        *_, (innermost, number) = traceback.walk_tb(trace)
        user_frames = [(frame, n) for frame, n in traceback.walk_tb(trace) if _is_user_frame(frame)]
        frame, number = user_frames[-1] if user_frames else (innermost, number)
        return format_location(frame.f_code.co_filename, number, frame.f_globals)
    frame = sys._getframe(1)
    while frame.f_back and not _is_user_frame(frame):
        frame = frame.f_back
    return format_location(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)


def user_stacklevel() -> int:
    """Return the `stacklevel` with which a warning, issued by the caller, points to the user's innermost frame."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and not _is_user_frame(frame):
        frame, level = frame.f_back, level + 1
    return level


def _is_user_frame(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARY_PACKAGES


def epilogue_error(
    message: str, location: str | None = None, error_type: type[EpilogueError] = EpilogueError
) -> EpilogueError:
    """Return the exception for code that cannot be fused. `location`: where it is; None: the user's source line."""
    return error_type(f"{location or user_source_line()}\n    {message}")
