"""Arguments that are True or False."""

from __future__ import annotations

import numpy as np

from gemmsmith.core.errors import ArgumentError


def switches(**given: object) -> tuple[bool, ...]:
    """What is given, in order. ArgumentError for what is no bool, though Python takes it for one: "no", 1, None."""
    for name, x in given.items():
        if not isinstance(x, (bool, np.bool_)):
            raise ArgumentError(f"{name}: got {x!r}; use True or False")
    return tuple([bool(x) for x in given.values()])
