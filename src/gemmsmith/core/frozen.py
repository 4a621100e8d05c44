"""Copies of frozen dataclasses."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar

from gemmsmith.core.cached_property import cached_property

T = TypeVar("T")


def changed(x: T, **fields: Any) -> T:
    """Return a copy of a frozen dataclass with some fields changed, without calling `__post_init__`.

    It takes a fifth of the time of `dataclasses.replace`. Cached properties are computed anew.
    """
    copy = object.__new__(type(x))
    values = copy.__dict__
    values.update(x.__dict__, **fields)
    kind: Any = type(x)
    for name in _cached_properties(kind):
        values.pop(name, None)
    return copy


@lru_cache(maxsize=64)
def _cached_properties(kind: Any) -> tuple[str, ...]:
    return tuple(name for base in kind.__mro__ for name, x in vars(base).items() if isinstance(x, cached_property))
