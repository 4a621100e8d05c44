"""Checks of bool arguments."""

from __future__ import annotations

import numpy as np

from gemmsmith.core.errors import ArgumentError


def as_bools(**arguments: object) -> tuple[bool, ...]:
    """Return the arguments, in order, as bools.

    Raises ArgumentError for a value that is not a bool, even if Python accepts it as one: "no", 1, None.
    """
    for name, x in arguments.items():
        if not isinstance(x, (bool, np.bool_)):
            raise ArgumentError(f"{name}: got {x!r}; use True or False")
    return tuple([bool(x) for x in arguments.values()])
