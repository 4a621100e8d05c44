"""Copies of frozen dataclasses."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def changed(x: T, **fields: Any) -> T:
    """Return a copy of a frozen dataclass without cached properties, with some fields changed and nothing checked.

    It takes a fifth of the time of `dataclasses.replace`.
    """
    copy = object.__new__(type(x))
    copy.__dict__.update(x.__dict__, **fields)
    return copy
