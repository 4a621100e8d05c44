"""Every function at NaN, infinities, zeros, subnormal and the largest numbers: kernels give what the reference does;
where the special-function unit computes, what that does for zeros instead of subnormal numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmsmith
from gemmsmith import Config
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph, Node, Operand, Result
from gemmsmith.graph.functions import FUNCTIONS

LARGEST = 3.4028234663852886e38
NUMBERS = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 1.2e-38, LARGEST, -LARGEST, 2e21, -1e20,
            1.5, 1.0, -1.0, 3.0, -3.0, 6.0, -20.0, 20.5, 100.0, -100.0]  # fmt: skip
SIZE = len(NUMBERS)
X = np.repeat(np.array(NUMBERS, np.float32)[:, None], SIZE, 1)
ARRAYS = {"x": X, "y": np.ascontiguousarray(X.T), "z": np.roll(X, 3, 0)}
TILE = Config(tile=(64, 32, 32), cluster=(1, 1), stages=2, consumers=1)
CONDITIONS = ("and", "or", "not", "where")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - {"detach", "softplus_of_sigmoid"}))
def test_kernels_give_what_the_reference_does(name: str) -> None:
    arity = FUNCTIONS[name].arity
    given = dict(list(ARRAYS.items())[:arity])
    nodes = [Node("operand", (), key) for key in given]
    if name in CONDITIONS:  # of numbers that are above 1
        nodes.append(Node("constant", (), 1.0))
        nodes += [Node("gt", (i, arity)) for i in range(1 if name == "where" else arity)]
        inputs = (arity + 1, *(range(1, 3) if name == "where" else range(arity + 2, len(nodes))))
    else:
        inputs = tuple(range(arity))
    nodes.append(Node(name, inputs))
    operands = tuple(Operand(key, BroadcastDims(True, 1, 1), FP32) for key in given)
    graph = EpilogueGraph(tuple(nodes), operands, (Result("out", len(nodes) - 1, FP32),))

    def run(backend: Any, arrays: dict[str, Any], fast_math: bool = True) -> Any:
        a, b = np.zeros((SIZE, 16), np.float16), np.zeros((16, SIZE), np.float16)
        config = TILE if backend == "sim" else None
        return gemmsmith.gemm(
            a, b, epilogue=graph, operands=arrays, backend=backend, config=config, fast_math=fast_math
        )

    def alike(got: Any, want: Any) -> Any:
        got, want = (np.asarray(x, np.float64) for x in (got, want))
        with np.errstate(all="ignore"):
            near = np.abs(got - want) <= 2.0**-18 * np.maximum(np.abs(want), 1)
        return near | (got == want) | (np.isnan(got) & np.isnan(want))

    with np.errstate(all="ignore"):
        flushed = {key: np.where(np.abs(x) < 1.1754944e-38, np.copysign(0, x), x) for key, x in given.items()}
    want, without = run("reference", given), run("reference", {k: x.astype(np.float32) for k, x in flushed.items()})
    assert alike(run("sim", given, fast_math=False), want).all()
    found = run("sim", given)
    right = alike(found, want) | (alike(found, without) if not FUNCTIONS[name].is_predicate else False)
    assert right.all(), [([float(x[tuple(i)]) for x in given.values()], found[tuple(i)], want[tuple(i)])
                         for i in np.argwhere(~right)[:4]]  # fmt: skip
