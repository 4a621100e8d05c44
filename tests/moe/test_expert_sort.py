"""The sort of slots by expert in the simulator, against numpy; its kernels compile without spills, and none of its
barriers is idle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.mutants.mutate import _changes

from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.sim import GlobalMemory, Hazard, simulate
from gemmsmith.lang.kernel import Kernel
from gemmsmith.moe.launch import sort_by_expert
from gemmsmith.moe.sort_by_expert import MAX_EXPERTS, SLOTS_PER_THREAD, BoundSort, SortSpec
from gemmsmith.moe.sort_by_expert import sort_by_expert as sort_kernel


def expected(experts: np.ndarray, weights: np.ndarray, count: int) -> dict[str, np.ndarray]:
    flat = experts.ravel()
    is_one = (flat >= 0) & (flat < count)
    order = np.argsort(np.where(is_one, flat, count), kind="stable")
    return {
        "offsets": np.cumsum(np.bincount(flat[is_one].astype(int), minlength=count)),
        "slot_of_row": order,
        "token_of_row": order // experts.shape[1],
        "row_of_slot": np.argsort(order),
        "row_weights": weights.ravel()[order],
    }


def inputs(rng: np.random.Generator, tokens: int, top_k: int, count: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Some experts are none of them: next to the first and the last, and beyond 32 bits."""
    experts = rng.integers(0, count, (tokens, top_k)).astype(dtype)
    limits = np.iinfo(dtype)
    others = np.array([-1, count, count + 1, limits.min, limits.max, *[2**32, 2**32 + 1] * (limits.bits == 64)], dtype)
    return np.where(rng.random(experts.shape) < 0.2, rng.choice(others, experts.shape), experts), rng.random(
        experts.shape, np.float32
    )


@pytest.mark.parametrize(
    ("tokens", "top_k", "count"),
    [(1, 1, 1), (1, 8, 128), (2, 1, 3), (7, 3, 3), (33, 1, 8), (128, 8, 128), (300, 4, 1), (300, 8, 256), (129, 6, 8),
     (300, 2, 1024), (128, 8, 1023), (1000, 8, 128)],
)  # fmt: skip
def test_against_numpy(rng: np.random.Generator, tokens: int, top_k: int, count: int) -> None:
    """The simulator reports no hazard; it would raise."""
    for dtype in (np.int32, np.int64):
        experts, weights = inputs(rng, tokens, top_k, count, dtype)
        want = expected(experts, weights, count)
        got = sort_by_expert(experts, weights, count, "sim")
        assert got.keys() == want.keys()
        for name, x in want.items():
            np.testing.assert_array_equal(got[name], x.astype(got[name].dtype), name)


@pytest.mark.parametrize("expert", [-1, 0, 4, 5])
def test_one_expert_has_all(expert: int) -> None:
    experts = np.full((1100, 1), expert, np.int64)
    got = sort_by_expert(experts, np.ones((1100, 1), np.float32), 5, "sim")
    assert got["offsets"].tolist() == [1100 * (0 <= expert <= e) for e in range(5)]
    for name in ("slot_of_row", "token_of_row", "row_of_slot"):
        assert got[name].tolist() == list(range(1100))


def simulated(kernel: Kernel, count: int, seed: int, limit: int = 20) -> tuple[list[Hazard], bool]:
    """The hazards of a kernel with one slot for each thread, and whether its results are right."""
    rng, memory = np.random.default_rng(seed), GlobalMemory()
    experts, weights = inputs(rng, 250, 4, count, np.int32)
    want, got = expected(experts, weights, count), {}
    places = {name: memory.add_buffer(x, name, writable=False) for name, x in (("experts", experts),
                                                                               ("weights", weights))}  # fmt: skip
    for name, x in want.items():
        got[name] = np.full(x.shape, -7, np.float32 if name == "row_weights" else np.int32)
        places[name] = memory.add_buffer(got[name], name)
    arguments = kernel.arguments(BoundSort(experts.size, 4)) | places
    found = simulate(kernel, 1, arguments, memory, seed=seed, is_dependent_launch=True, max_hazards=limit).hazards
    return found, all(np.array_equal(got[name], x) for name, x in want.items())


@pytest.mark.parametrize("seed", range(5))
def test_every_schedule_is_right(seed: int) -> None:
    assert simulated(sort_kernel(SortSpec(24, 4, 1)), 24, seed) == ([], True)
    assert simulated(sort_kernel(SortSpec(24, 4, 2)), 24, seed) == ([], True)


def test_every_barrier_is_needed() -> None:
    """Without one of them, or without the wait for the grid before, the simulator reports it."""
    spec, deletions = SortSpec(24, 4, 2), 0
    while True:
        kernel = sort_kernel.__wrapped__(spec)
        changes = [x for x in _changes(kernel) if x[0] == "delete"]
        if deletions == len(changes):
            break
        _, target, where, apply = changes[deletions]
        apply()
        found, _ = simulated(kernel, spec.experts, 0, limit=1)
        assert found, (target, where)
        deletions += 1
    assert deletions == 7


@pytest.mark.slow
@pytest.mark.parametrize("slots_per_thread", SLOTS_PER_THREAD)
@pytest.mark.parametrize("count", [1, 30, 128, 256, MAX_EXPERTS])
def test_no_spills(count: int, slots_per_thread: int) -> None:
    for index_bytes in (4, 8):
        kernel = sort_kernel(SortSpec(count, index_bytes, slots_per_thread))
        r = compile_source(kernel.source, kernel.name).resources
        assert (r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes, r.advisories) == (0, 0, 0, ())
