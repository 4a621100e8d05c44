"""Integer arithmetic of sizes, with CUTLASS's names, and checks of integer arguments."""

from __future__ import annotations

import operator

from gemmsmith.core.errors import ArgumentError


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `a`."""
    return ceil_div(a, multiple) * multiple


def as_integers(least: int, **arguments: object) -> tuple[int, ...]:
    """Return the arguments, in order, as ints.

    Raises ArgumentError for a value that is not an integer, such as 2.0 and True, or is less than `least`.
    """
    for name, x in arguments.items():
        if isinstance(x, bool) or not hasattr(x, "__index__") or operator.index(x) < least:
            raise ArgumentError(f"{name}: got {x!r}; use an integer from {least} on")
    return tuple([operator.index(x) for x in arguments.values()])  # type: ignore[arg-type]
