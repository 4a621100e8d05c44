"""Copies of frozen dataclasses."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def changed(x: T, **fields: Any) -> T:
    """Return a copy of a frozen dataclass with some fields changed, without calling `__post_init__`.

    It takes a fifth of the time of `dataclasses.replace`. The class must not have cached properties: their values would
    be copied with the fields, and would not fit the changed ones.
    """
    copy = object.__new__(type(x))
    copy.__dict__.update(x.__dict__, **fields)
    return copy
