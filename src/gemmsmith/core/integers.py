"""Integer arithmetic of sizes, with CUTLASS's names."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `a`."""
    return ceil_div(a, multiple) * multiple
