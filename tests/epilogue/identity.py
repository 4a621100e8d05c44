"""Epilogues of a product that is known exactly: x @ I, in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import gemmsmith
from gemmsmith import Config

TILE = Config(tile=(64, 48, 32), cluster=(1, 1), consumers=1, stages=2)


def small(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float16) -> np.ndarray:
    """Integers and halves, exact in 16 bits, and so are sums of a few."""
    return (rng.integers(-16, 17, shape) / 2).astype(dtype)


def through(x: np.ndarray, epilogue: Callable[..., Any], config: Config = TILE, **more: Any) -> Any:
    """What `epilogue` makes of the accumulator x, an fp16 matrix; operands are given by name."""
    options = {name: more.pop(name) for name in ("out", "out_dtype") if name in more}
    done = gemmsmith.simulate(
        x, np.eye(x.shape[1], dtype=x.dtype), epilogue=epilogue, operands=more, config=config, **options
    )
    assert done.hazards == []
    return done.result
