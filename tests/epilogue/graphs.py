"""Random epilogue graphs of up to 20 nodes, drawn by hypothesis, and data for them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from benchmarks import random_epilogues
from gemmsmith.core.graph import EpilogueGraph

M, N = 12, 32


@st.composite
def graphs(draw: st.DrawFn, reductions: bool = True) -> EpilogueGraph:
    return random_epilogues.drawn(lambda options: draw(st.sampled_from(options)), reductions=reductions)


def data(rng: np.random.Generator, graph: EpilogueGraph, shape: tuple[int, int] = (M, N)) -> dict[str, Any]:
    """Values for a graph's operands."""
    m, n = shape
    shapes: dict[str, tuple[int, ...]] = {"device_scalar": (), "row": (n,), "column": (m, 1), "matrix": (m, n)}
    made: dict[str, Any] = {}
    for o in graph.operands:
        if o.dtype is None:
            made[o.name] = float(rng.standard_normal())
        else:
            made[o.name] = rng.standard_normal(shapes[o.name]).astype(np.float32).astype(o.dtype.numpy)
    return made
