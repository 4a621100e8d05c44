"""Which builder records now: a context variable, so that values and instructions need no handle."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from gemmsmith.core.errors import KernelError

RECORDING: ContextVar[Any] = ContextVar("gemmsmith_builder", default=None)


def recorder() -> Any:
    """The Builder being recorded into; KernelError outside of one. The builder is made of values, which need this file,
    so it has no type here: `builder.current` is the same with its type."""
    builder = RECORDING.get()
    if builder is None:
        raise KernelError("kernel code runs only while a Builder records it: `with Builder(...) as k:`")
    return builder
