"""Integers: arithmetic of sizes, with CUTLASS's names, and checks of arguments."""

from __future__ import annotations

import operator
from typing import Any

from gemmsmith.core.errors import ArgumentError


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `a`."""
    return ceil_div(a, multiple) * multiple


def as_integer(name: str, x: Any) -> int:
    """Return an argument as an int. Raises ArgumentError for a bool, and for what is not an integer."""
    try:
        number = None if isinstance(x, bool) else operator.index(x)
    except TypeError:
        number = None
    if number is None:
        raise ArgumentError(f"{name}: got {x!r}; use an integer")
    return number
