"""Integer arithmetic of sizes, with CUTLASS's names, and checks of integer and bool arguments."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any

from gemmsmith.core.errors import ArgumentError


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `a`."""
    return ceil_div(a, multiple) * multiple


def as_integer(name: str, x: Any, least: int | None = None) -> int:
    """Return an argument as an int.

    Raises ArgumentError for what is not an integer, such as 2.0 and True, or is less than `least`.
    """
    try:
        number = None if isinstance(x, bool) else operator.index(x)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        raise ArgumentError(f"{name}: got {x!r}; use an integer" + ("" if least is None else f" from {least} on"))
    return number


def as_integers(least: int, **arguments: Any) -> tuple[int, ...]:
    """Check each argument as `as_integer` does, with the same `least`, and return them in order."""
    return tuple([as_integer(name, x, least) for name, x in arguments.items()])


def is_number(x: Any) -> bool:
    """Return whether x is a real number; it may be a scalar of numpy or ml_dtypes, but no text and no time."""
    import numpy as np  # takes half a second

    others = np.complexfloating, np.flexible, np.datetime64, np.timedelta64
    return isinstance(x, (Real, np.generic)) and not isinstance(x, others)


def as_bools(**arguments: object) -> tuple[bool, ...]:
    """Return the arguments, in order, as bools.

    Raises ArgumentError for a value that is not a bool, even if Python accepts it as one: "no", 1, None.
    """
    import numpy as np  # takes half a second

    for name, x in arguments.items():
        if not isinstance(x, (bool, np.bool_)):
            raise ArgumentError(f"{name}: got {x!r}; use True or False")
    return tuple([bool(x) for x in arguments.values()])
