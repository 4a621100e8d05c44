"""The source line of a design, or of a user's own kernel, that a statement comes from, and the calls that led to it."""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Sequence
from functools import cache, total_ordering
from itertools import chain
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

_LANGUAGE = tuple(str(Path(__file__).parents[1] / name) for name in ("lang", "hw"))
_LANGUAGE += (str(Path(contextlib.__file__).parent), "<")
"""Files that start with these are on no stack: language, instructions, the standard library, and generated code."""
_hidden_paths: tuple[str, ...] = _LANGUAGE
"""Files that start with these are no user's."""


@cache
def _is_hidden(file: str) -> bool:
    return file.startswith(_hidden_paths)


_Calls = list[CodeType | int]
"""The code and the instruction offset of each function, innermost first."""


class Call(NamedTuple):
    """A line of a function that was executing when a statement was recorded."""

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """The line without its indentation; empty if there is no file."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line} in {self.function}"


@total_ordering
class SourceLocation:
    """The source line (of a design, or of a user's own kernel) that emitted a statement. Compares by file and line.

    `number`: the statement's number in the kernel, -1 for none. `calls`: the functions that were executing, innermost
    first, in parts (those around the line's function are shared by its statements).
    """

    __slots__ = ("calls", "file", "line", "number")

    def __init__(self, file: str, line: int, calls: Sequence[_Calls] = (), number: int = -1) -> None:
        self.file, self.line, self.calls, self.number = file, line, calls, number

    @property
    def stack(self) -> list[Call]:
        """The calls that led to the statement, innermost first, from the collective to the kernel's function.

        Calls in the language itself are left out.
        """
        flat: Any = [*chain(*self.calls)]
        pairs = zip(flat[::2], flat[1::2], strict=True)
        calls = (Call(code.co_filename, _line_of(code, offset), code.co_name) for code, offset in pairs)
        return [call for call in calls if not call.file.startswith(_LANGUAGE)]

    @property
    def call(self) -> Call:
        """The source line as a Call, which has its function; "?" if no call was recorded."""
        here = (self.file, self.line)
        return next((call for call in self.stack if call[:2] == here), Call(*here, "?"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SourceLocation) and (self.file, self.line) == (other.file, other.line)

    def __lt__(self, other: SourceLocation) -> bool:
        return (self.file, self.line) < (other.file, other.line)

    def __hash__(self) -> int:
        return hash((self.file, self.line))

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"

    __repr__ = __str__


def _line_of(code: CodeType, offset: int) -> int:
    """Return the source line of the bytecode instruction at `offset` in a function's code."""
    return next((line for first, end, line in code.co_lines() if first <= offset < end and line), code.co_firstlineno)


def hide_frames(file: str) -> None:
    """Attribute the statements that a module emits to the lines that call it.

    `file`: the module's file; an `__init__.py` stands for its whole package.
    """
    global _hidden_paths
    _hidden_paths += (file.removesuffix("__init__.py"),)
    _is_hidden.cache_clear()


class Recorder:
    """Finds the source line of each statement of one kernel, and numbers the statements.

    `_outermost`: the code of the function at which stacks end; `_shown`: the frame of the function to which the last
    statement was attributed; `_outer`: the calls that led to it, kept since they do not change while it executes.
    """

    def __init__(self) -> None:
        self._count = 0
        self._outermost: CodeType | None = None
        self._shown: FrameType | None = None
        self._outer: _Calls = []

    def begin(self) -> None:
        """Let stacks end at the function that calls the caller of this method: the one that opens the builder."""
        self._outermost = sys._getframe(2).f_code

    def end(self) -> None:
        """Let go of the functions that have recorded statements."""
        self._shown = None

    def locate(self) -> SourceLocation:
        """Return the location of the next statement, which is being recorded.

        It is the innermost source line that is not hidden (`hide_frames`), or the caller's line if all are.
        """
        frame = caller = sys._getframe(1)
        calls: _Calls = []
        while frame is not None:
            code = frame.f_code
            if not _is_hidden(code.co_filename):
                break
            calls += code, frame.f_lasti
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not self._shown:
            self._shown, self._outer = frame, self._outer_calls(frame)
        frame = frame or caller
        self._count += 1
        calls += frame.f_code, frame.f_lasti
        return SourceLocation(frame.f_code.co_filename, frame.f_lineno, (calls, self._outer), self._count - 1)

    def _outer_calls(self, frame: FrameType | None) -> _Calls:
        """Return the calls that have led to a function, up to the outermost one that is shown. `frame`: its frame."""
        calls: _Calls = []
        while frame is not None and frame.f_code is not self._outermost:
            frame = frame.f_back
            if frame and not (frame.f_code is self._outermost and _is_hidden(frame.f_code.co_filename)):
                calls += frame.f_code, frame.f_lasti
        return calls


def error_location(trace: TracebackType | None) -> SourceLocation:
    """Return where an error was raised: the innermost line of its traceback that is not hidden (`hide_frames`).

    If all lines are hidden, it is the innermost one.
    """
    frames = []
    while trace is not None:
        frames.append(SourceLocation(trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return ([frame for frame in frames if not _is_hidden(frame.file)] or frames)[-1]
