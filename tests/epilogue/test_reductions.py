"""Reductions over every set of the product's indices, in the simulator and by the reference, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmsmith
from gemmsmith import Config, Spec
from gemmsmith.core.arguments import Pointer
from gemmsmith.epilogue.partials import partials_shape

TILE = Config(tile=(64, 32, 32), cluster=(1, 1), stages=2, consumers=1)
DIMS = [0, 1, 2, (0, 1), (0, 2), (1, 2), (0, 1, 2), (-1, -2), (-3, -1)]
REDUCTIONS: dict[str, Any] = {
    "sum": np.sum, "mean": np.mean, "amax": np.max, "amin": np.min,
    "logsumexp": lambda x, axis, keepdims: np.log(np.exp(x).sum(axis=axis, keepdims=keepdims)),
}  # fmt: skip


def factors(rng: np.random.Generator, batch: int, n: int = 40) -> tuple[np.ndarray, np.ndarray]:
    a, b = rng.standard_normal((batch, 70, 20)), rng.standard_normal((20, n))
    return a.astype(np.float16), b.astype(np.float16)


def check(a: Any, b: Any, dim: Any, keepdim: bool, every: Any, product: Any, **options: Any) -> None:
    """`every`: an epilogue that reduces `product` by every kind."""
    for backend in ("reference", "sim"):
        found = gemmsmith.gemm(a, b, epilogue=every, backend=backend, config=TILE, **options)
        for kind, got in found.items():
            want = REDUCTIONS[kind](product, axis=dim, keepdims=keepdim)
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4 * np.sqrt(product.size))


@pytest.mark.slow
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", DIMS, ids=str)
def test_every_set_of_indices(dim: Any, keepdim: bool, rng: np.random.Generator) -> None:
    """The kernels' sums end in ragged tiles."""

    def every(acc: Any) -> Any:
        x = acc * 0.5
        return {
            "sum": x.sum(dim, keepdim=keepdim), "mean": x.mean(dim, keepdim=keepdim),
            "amax": x.amax(dim, keepdim=keepdim), "amin": x.amin(dim, keepdim=keepdim),
            "logsumexp": x.logsumexp(dim, keepdim=keepdim),
        }  # fmt: skip

    a, b = factors(rng, 3)
    check(a, b, dim, keepdim, every, a.astype(np.float64) @ b.astype(np.float64) * 0.5)


@pytest.mark.parametrize("dim", DIMS[:7], ids=str)
def test_atomic_sums_of_halves(dim: Any, rng: np.random.Generator) -> None:
    """Added where they belong, batch by batch."""

    def up(acc: Any) -> Any:
        return {"sum": gemmsmith.deinterleave(acc)[1].sum(dim)}

    a, b = factors(rng, 3, 64)
    product = a.astype(np.float64) @ b.astype(np.float64)
    halves = product.reshape(3, 70, 4, 2, 8)[..., 1, :].reshape(3, 70, 32)
    for deterministic in (True, False):
        check(a, b, dim, False, up, halves, deterministic=deterministic)


@pytest.mark.parametrize("dim", [0, (0, 1), (0, 2)], ids=str)
def test_batches_of_nothing(dim: Any, rng: np.random.Generator) -> None:
    a, b = factors(rng, 0)
    for backend in ("reference", "sim"):
        found = gemmsmith.gemm(a, b, epilogue=lambda acc: acc.sum(dim), backend=backend)
        assert found.shape == {0: (70, 40), (0, 1): (40,), (0, 2): (70,)}[dim]
        assert not found.any()


def test_a_transposed_result(rng: np.random.Generator) -> None:
    """D is column-major: the kernel computes the transposed product, but not where the batch gives a matrix."""
    a, b = factors(rng, 3)
    product = a.astype(np.float64) @ b.astype(np.float64)
    for dim in (0, (0, 1), (0, 2), (1, 2)):
        d = np.zeros((3, 40, 70), np.float16).swapaxes(1, 2)
        found = gemmsmith.gemm(a, b, epilogue=lambda acc, dim=dim: (acc, acc.sum(dim)), backend="sim", out={"out": d})
        for got, want in zip(found, (product, product.sum(dim)), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize(("axis", "cluster", "shape", "nbytes"), [
    (-1, (1, 1), (1, 2, 100, 0, 0), 800), (-2, (1, 1), (1, 7, 60, 0, 0), 1680),
    ((-1, -2), (1, 1), (1, 16, 1, 4, 2), 64), ((-1, -2), (4, 1), (1, 32, 1, 8, 2), 128),
    ((-1, -2), (2, 4), (1, 32, 1, 8, 4), 128),
])  # fmt: skip
def test_partial_results(axis: Any, cluster: tuple[int, int], shape: tuple[int, ...], nbytes: int) -> None:
    """Of 100 x 60 by tiles of 64 x 32: one per row and tile, one per column and 16 rows, one per warp and tile, those
    of a cluster's outside of D too."""
    a, b = Spec((100, 64), "bf16"), Spec((64, 60), "bf16")
    config = TILE.replace(cluster=cluster)
    plan = gemmsmith.plan(a, b, epilogue=lambda acc: (acc, acc.sum(axis)), config=config)
    found = partials_shape(plan._planned.spec.epilogue.graph.results[1], plan._planned.spec, plan.problem)
    assert (found.batch, found.num_partials, found.num_outputs, found.tiles_per_batch, found.tiles_n) == shape
    assert found.bytes == nbytes
    pair = gemmsmith.plan(a, b, epilogue=lambda acc: (acc, acc.logsumexp(axis)), config=config)
    spec = pair._planned.spec
    assert partials_shape(spec.epilogue.graph.results[1], spec, pair.problem).bytes == 2 * nbytes


@pytest.mark.slow
def test_second_steps_with_counters_after_a_gemm_with_flags(rng: np.random.Generator) -> None:
    """Both use the same words, one after the other: they are zero in between."""
    a = rng.integers(-4, 5, (16 * 257, 96)).astype(np.float16)
    b = rng.integers(-4, 5, (96, 24)).astype(np.float16)
    given, config = (a, b), TILE.replace(splits=0)
    plan = gemmsmith.plan(*given, epilogue=sums_and_products, config=config)
    gemm, second = plan._planned.launches.all
    counters = second.arguments["arrivals_0"]
    assert gemm.arguments["flags"] == counters == Pointer("flags")
    product = a.astype(np.float64) @ b.astype(np.float64)
    for seed in (0, 1):
        result = gemmsmith.simulate(*given, epilogue=sums_and_products, config=config, seed=seed)
        assert not result.hazards
    found = gemmsmith.gemm(*given, epilogue=sums_and_products, config=config, backend="sim")
    np.testing.assert_array_equal(found[0], product.sum(0))
    np.testing.assert_allclose(found[1], product.sum(1).astype(np.float32))
    np.testing.assert_array_equal(found[2], product.max(0))


def sums_and_products(acc: Any) -> Any:
    return acc.sum(0), acc.sum(1), acc.amax(0)
