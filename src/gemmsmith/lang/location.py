"""The source line of a design, or of a user's own kernel, that a statement comes from."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

_hidden_paths: tuple[str, ...] = (str(Path(__file__).parent), str(Path(contextlib.__file__).parent), "<")
"""Files that start with these are no user's: this package, the standard library, and generated code."""


class SourceLocation(NamedTuple):
    """The source line (of a design, or of a user's own kernel) that emitted a statement."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"


def hide_frames(file: str) -> None:
    """Attribute statements that a module emits, or a package whose `__init__.py` is given, to the lines calling it."""
    global _hidden_paths
    _hidden_paths += (file.removesuffix("__init__.py"),)


def current_location() -> SourceLocation:
    """Return the innermost source line that is not hidden, or the caller's if all are."""
    frame = fallback = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_hidden_paths):
            return SourceLocation(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return SourceLocation(fallback.f_code.co_filename, fallback.f_lineno)


def error_location(trace: TracebackType | None) -> SourceLocation:
    """Return the innermost source line of a traceback that is not hidden, or the innermost one if all are."""
    frames = []
    while trace is not None:
        frames.append(SourceLocation(trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return ([frame for frame in frames if not frame.file.startswith(_hidden_paths)] or frames)[-1]
