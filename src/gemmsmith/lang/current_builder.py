"""The active Builder: a context variable, so that values and instructions need no handle."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from gemmsmith.core.errors import KernelError

if TYPE_CHECKING:  # the builder is made of values, which need this module
    from gemmsmith.lang.builder import Builder

ACTIVE_BUILDER: ContextVar[Builder | None] = ContextVar("gemmsmith_builder", default=None)


def current_builder() -> Builder:
    """Return the active Builder. Raises KernelError if there is none."""
    builder = ACTIVE_BUILDER.get()
    if builder is None:
        raise KernelError("kernel code runs only while a Builder records it: `with Builder(...) as k:`")
    return builder
