"""Products of small integers, which every order of summation gives exactly."""

from __future__ import annotations

import numpy as np

import gemmsmith
from gemmsmith import Config


def check(config: Config, m: int, n: int, k: int, rng: np.random.Generator, **more) -> None:
    """The kernel in the simulator is exact, stores every element and has no hazard, whichever unit goes first."""
    a = rng.integers(-3, 4, (m, k)).astype(np.float16)
    b = rng.integers(-3, 4, (n, k)).astype(np.float16).T
    out = np.full((m, n), np.nan, np.float16)
    done = gemmsmith.simulate(a, b, out=out, config=config, seed=int(rng.integers(1 << 30)), **more)
    assert done.hazards == []
    np.testing.assert_array_equal(out, a.astype(np.float64) @ b.astype(np.float64))
