"""Every rung in the simulator against float64: ragged sizes, any layout, every dtype; and compiled without spills."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.simulated.test_dtypes import matrix, poisoned

from gemmsmith.arrays import ArrayInfo, describe
from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.sim.run import run
from gemmsmith.core.chip import CHIPS, HOPPER
from gemmsmith.core.dtypes import FP32, INT8, INT32
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.problem import Matrix
from gemmsmith.ladder.launches import LADDER_KERNELS, ladder_launches

EACH = [(name, dtype) for name, rung in LADDER_KERNELS.items() for dtype in rung.dtypes]
SIZES = {"naive": (19, 33, 21), "naive_m": (19, 33, 21), "block_tile": (35, 41, 37), "mma_naive": (67, 73, 21),
         "wmma_naive": (48, 32, 32),
         "dp4a": (70, 37, 45), "wmma": (130, 37, 77)}  # fmt: skip


def seen(x: ArrayInfo) -> Matrix:
    rows, columns = x.strides
    return Matrix(x.dtype, *x.shape, rows, columns, alignment=x.alignment).canonical()


def simulated(name: str, a: Any, b: Any, d: Any, chip: str, seed: int = 0) -> list[Any]:
    arrays = {"a": describe(a), "b": describe(b), "d": describe(d)}
    found = ladder_launches(name, *(seen(x) for x in arrays.values()), CHIPS[chip])
    return run(found, arrays, seed, None).hazards


@pytest.mark.slow
@pytest.mark.parametrize("turned", [0, 1, 2])
@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_rungs(name: str, dtype: Any, turned: int, rng: np.random.Generator) -> None:
    m, n, k = SIZES.get(name, (131, 21, 19))
    plain = name == "wmma_naive"  # one layout
    turns = (False, True, False) if plain else [(False, False, False), (True, True, True), (False, True, False)][turned]
    pad = 0 if plain else (0, 3, 5)[turned]
    a, b = matrix(rng, (m, k), dtype.numpy, turns[0], pad, 0), matrix(rng, (k, n), dtype.numpy, turns[1], pad, 0)
    output = LADDER_KERNELS[name].output(dtype)
    d = poisoned((m, n), str(output), turns[2])
    assert simulated(name, a, b, d, ("sm_80", "sm_90", "sm_86")[turned], turned) == []
    if dtype == INT8:
        np.testing.assert_array_equal(d, a.astype(np.int64) @ b.astype(np.int64))
        return
    exact, size = (f(a).astype(float) @ f(b).astype(float) for f in (np.asarray, np.abs))
    error = size * (k + 2) * FP32.roundoff * 2 + abs(exact) * output.roundoff
    assert (abs(d.astype(float) - exact) <= error).all()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_compiled(name: str, dtype: Any) -> None:
    for chip in (CHIPS["sm_80"], HOPPER):
        kernel = LADDER_KERNELS[name].make(dtype, chip)
        r = compile_source(kernel.source, kernel.name, chip.target).resources
        assert (r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes, r.advisories) == (0, 0, 0, ())


def test_what_is_refused() -> None:
    x = Matrix(INT32, 16, 16, 16, 1)
    with pytest.raises(ArgumentError, match="naive: got int32; use fp32 or fp16"):
        ladder_launches("naive", x, x, x, HOPPER)
    f = Matrix(LADDER_KERNELS["wmma"].dtypes[0], 16, 16, 16, 1)
    with pytest.raises(ArgumentError, match="wmma_naive: got 16x16x16; use multiples of 16, A and D row-major"):
        ladder_launches("wmma_naive", f, f, Matrix(FP32, 16, 16, 16, 1), HOPPER)
