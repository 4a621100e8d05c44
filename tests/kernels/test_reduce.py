"""The second step of a reduction, alone: partial results of every kind, number and shape."""

from __future__ import annotations

import numpy as np
import pytest

from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.core.dtypes import BF16, FP16, FP32, DType
from gemmsmith.core.pointer import Pointer
from gemmsmith.epilogue.reductions import PartialsShape
from gemmsmith.kernels.reduce import LOADS_IN_FLIGHT, BoundReduction, launch_shape, reduce_kernel

SIMPLE = {"sum": np.sum, "mean": np.sum, "max": np.max, "min": np.min}


def reduced(
    kind: str, states: list[np.ndarray], grid: int = 1, dtype: DType = FP32, scale: float = 1, offset: float = 0
) -> np.ndarray:
    """The (batch, elements) results of states (batch, parts, elements); nothing is written behind them."""
    partials = PartialsShape(kind, *states[0].shape)
    bound = BoundReduction(partials, Pointer("partials"), Pointer("out"), scale, offset)
    kernel = reduce_kernel(kind, dtype, *launch_shape(partials))
    out = np.full(bound.total + 5, 99, dtype.numpy)
    out[: bound.total] = np.nan
    memory, source = GlobalMemory(), np.stack(states).astype(np.float32)
    places = {"partials": memory.add_buffer(source, "partials", writable=False), "out": memory.add_buffer(out, "out")}
    done = simulate(kernel, grid, {**kernel.arguments(bound), **places}, memory)
    assert done.hazards == []
    assert (out[bound.total :].astype(np.float32) == 99).all()
    return out[: bound.total].astype(np.float64).reshape(partials.batch, partials.num_outputs)


@pytest.mark.parametrize("kind", SIMPLE)
@pytest.mark.parametrize(("batch", "parts", "elements"), [(1, 1, 40), (2, 9, 33), (3, 70, 11), (1, 300, 7), (1, 37, 1)])
def test_partials_are_combined(kind: str, batch: int, parts: int, elements: int, rng: np.random.Generator) -> None:
    """Integers, whose sums are exact in any order."""
    x = rng.integers(-50, 50, (batch, parts, elements))
    np.testing.assert_array_equal(reduced(kind, [x]), SIMPLE[kind](x, axis=1))


@pytest.mark.parametrize("grid", [1, 2, 5])
def test_every_cta_takes_its_elements(grid: int, rng: np.random.Generator) -> None:
    x = rng.integers(-50, 50, (2, 3, 70))
    np.testing.assert_array_equal(reduced("sum", [x], grid), x.sum(1))


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_results_are_scaled_and_rounded_once(dtype: DType, rng: np.random.Generator) -> None:
    x = rng.integers(-50, 50, (1, 20, 40))
    want = (x.sum(1).astype(np.float32) * np.float32(0.25) + np.float32(1.5)).astype(dtype.numpy)
    np.testing.assert_array_equal(reduced("sum", [x], dtype=dtype, scale=0.25, offset=1.5), want.astype(np.float64))


def test_logsumexp_has_a_maximum_and_a_sum(rng: np.random.Generator) -> None:
    """An element with nothing in it is minus infinity."""
    largest, total = rng.uniform(-200, 200, (2, 20, 9)), rng.uniform(1, 30, (2, 20, 9))
    largest[0, :, 4], total[0, :, 4] = -3.4e38, 0
    found = reduced("logsumexp", [largest, total])
    assert found[0, 4] == -np.inf
    found[0, 4] = total[0, :, 4] = 1
    top = largest.max(1)
    want = top + np.log((total * np.exp(largest - top[:, None])).sum(1))
    want[0, 4] = 1
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-4)


def test_nan_is_not_lost() -> None:
    x = np.zeros((1, 12, 5))
    x[0, 7, 2] = np.nan
    for kind in SIMPLE:
        np.testing.assert_array_equal(np.isnan(reduced(kind, [x])[0]), np.arange(5) == 2)


@pytest.mark.parametrize(
    ("parts", "elements", "columns", "threads"),
    [
        (5000, 1, 1, 1024),
        (0, 9, 32, 1),
        (LOADS_IN_FLIGHT, 9, 32, 1),
        (LOADS_IN_FLIGHT + 1, 9, 32, 2),
        (8 * LOADS_IN_FLIGHT, 9, 32, 8),
        (8 * LOADS_IN_FLIGHT + 1, 9, 8, 16),
        (10_000, 9, 8, 32),
    ],
)
def test_an_element_has_as_many_threads_as_have_something_to_load(
    parts: int, elements: int, columns: int, threads: int
) -> None:
    assert launch_shape(PartialsShape("sum", 1, parts, elements, tiles_per_batch=parts * (threads == 1024))) == (
        columns,
        threads,
    )
