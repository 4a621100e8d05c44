"""The second step of reductions, alone: partial results of every kind, number and shape, several at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.mutants.mutate import mutants_of

from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.core.arguments import Pointer
from gemmsmith.core.chip import HOPPER
from gemmsmith.core.dtypes import BF16, FP16, FP32, DType
from gemmsmith.epilogue.partials import PartialsShape
from gemmsmith.graph.reductions import REDUCTIONS
from gemmsmith.kernels.reduce import (
    LOADS_IN_FLIGHT,
    MAX_SLICES,
    ROUNDS_PER_SLICE,
    THREADS,
    BoundReduction,
    ReduceSpec,
    reduce_kernel,
)
from gemmsmith.lang.kernel import Kernel

SIMPLE: dict[str, Callable[..., Any]] = {"sum": np.sum, "mean": np.sum, "max": np.max, "min": np.min}
LINES = 8 * LOADS_IN_FLIGHT * ROUNDS_PER_SLICE
"""Partials of a slice of a line."""
CONTIGUOUS = THREADS * LOADS_IN_FLIGHT
"""Partials of a slice of a full reduction."""


class Given(NamedTuple):
    """Components of states (batch, parts, elements), and what is made of them."""

    kind: str
    states: list[np.ndarray]
    is_full: bool = False
    dtype: DType = FP32
    scale: float = 1
    offset: float = 0

    def bind(self, i: int) -> BoundReduction:
        batch, parts, elements = self.states[0].shape
        tiles = parts // 4 if self.is_full else 0
        partials = PartialsShape(self.kind, batch, parts, elements, tiles, tiles)
        spec = ReduceSpec.from_partials(REDUCTIONS[self.kind], self.dtype, partials)
        return BoundReduction(spec, partials, Pointer(f"partials_{i}"), Pointer(f"out_{i}"), self.scale, self.offset)


def execute(given: list[Given], kernel: Kernel | None = None, seed: int = 0) -> tuple[list[np.ndarray], set[str]]:
    """The (batch, elements) results, and the kinds of hazards; nothing is written behind them."""
    bound = tuple(x.bind(i) for i, x in enumerate(given))
    kernel = kernel or reduce_kernel(tuple(r.spec for r in bound))
    memory, places, outs = GlobalMemory(), {}, []
    for i, (x, r) in enumerate(zip(given, bound, strict=True)):
        total = r.partials.total_outputs
        out = np.full(total + 5, 99, x.dtype.numpy)
        out[:total] = np.nan
        outs.append(out)
        places[f"partials_{i}"] = memory.add_buffer(np.stack(x.states).astype(np.float32), "partials", writable=False)
        places[f"out_{i}"] = memory.add_buffer(out, "out")
    space = np.full(max(kernel.scratch_bytes(bound), 4), 255, np.uint8)
    flags = np.zeros(max(kernel.scratch_bytes(bound, zero_initialized=True), 4), np.uint8)
    places["workspace"] = memory.add_buffer(space, "workspace", uninitialized=True)
    places["flags"] = memory.add_buffer(flags, "flags")
    arguments = kernel.arguments(bound, Pointer("workspace"), Pointer("flags"))
    arguments = {n: places[a.name] + a.offset if isinstance(a, Pointer) else a for n, a in arguments.items()}
    with np.errstate(all="ignore"):
        done = simulate(kernel, kernel.work_clusters(bound), arguments, memory, seed=seed, is_dependent_launch=True)
    hazards = {x.kind for x in done.hazards} | ({"flags not reset"} if flags.any() else set())
    results = []
    for out, r in zip(outs, bound, strict=True):
        total = r.partials.total_outputs
        assert (out[total:].astype(np.float32) == 99).all()
        results.append(out[:total].astype(np.float64).reshape(r.partials.batch, r.partials.num_outputs))
    return results, hazards


def reduced(kind: str, states: list[np.ndarray], seed: int = 0, **given: Any) -> np.ndarray:
    (result,), hazards = execute([Given(kind, states, **given)], seed=seed)
    assert not hazards
    return result


SHAPES = [
    (1, 1, 40), (2, 9, 33), (3, 70, 11), (1, 300, 7), (1, 37, 1), (2, LINES, 40), (2, LINES + 1, 40), (1, 1000, 70),
]  # fmt: skip


@pytest.mark.parametrize("kind", SIMPLE)
@pytest.mark.parametrize(("batch", "parts", "elements"), SHAPES)
def test_partials_are_combined(kind: str, batch: int, parts: int, elements: int, rng: np.random.Generator) -> None:
    """Integers, whose sums are exact in any order."""
    x = rng.integers(-50, 50, (batch, parts, elements))
    np.testing.assert_array_equal(reduced(kind, [x]), SIMPLE[kind](x, axis=1))


@pytest.mark.parametrize("kind", SIMPLE)
@pytest.mark.parametrize(("batch", "parts"), [(1, 4), (3, 44), (2, CONTIGUOUS), (2, CONTIGUOUS + 4), (1, 43_776)])
def test_full_reductions(kind: str, batch: int, parts: int, rng: np.random.Generator) -> None:
    x = rng.integers(-50, 50, (batch, parts, 1))
    np.testing.assert_array_equal(reduced(kind, [x], is_full=True), SIMPLE[kind](x, axis=1))


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "elements", "is_full"), [
    (200_000, 1, True), (MAX_SLICES * CONTIGUOUS + 4, 1, True), (MAX_SLICES * LINES + 1, 3, False), (1, 100_000, False),
])  # fmt: skip
def test_many(parts: int, elements: int, is_full: bool, rng: np.random.Generator) -> None:
    x = rng.integers(-50, 50, (1, parts, elements))
    np.testing.assert_array_equal(reduced("sum", [x], is_full=is_full), x.sum(1))


@pytest.mark.parametrize(("shape", "is_full"), [((1, 40_000, 1), True), ((2, 1000, 40), False), ((1, 200, 40), False)])
def test_error_of_sums(shape: tuple[int, ...], is_full: bool, rng: np.random.Generator) -> None:
    """A sum is a tree: no addend is rounded more often than its levels, slices included."""
    x = rng.standard_normal(shape).astype(np.float32)
    levels = 4 + ROUNDS_PER_SLICE + 5 + 3 + 2 + 1 + 5 + 3
    bound = levels * 2.0**-24 * np.abs(x).sum(1, dtype=np.float64)
    assert (np.abs(reduced("sum", [x], is_full=is_full) - x.sum(1, dtype=np.float64)) <= bound).all()


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("parts", [20, LINES + 20])
def test_results_are_scaled_and_rounded_once(dtype: DType, parts: int, rng: np.random.Generator) -> None:
    x = rng.integers(-50, 50, (1, parts, 40))
    want = (x.sum(1).astype(np.float32) * np.float32(0.25) + np.float32(1.5)).astype(dtype.numpy)
    np.testing.assert_array_equal(reduced("sum", [x], dtype=dtype, scale=0.25, offset=1.5), want.astype(np.float64))


@pytest.mark.parametrize(("shape", "is_full"), [
    ((2, 20, 9), False), ((2, LINES + 44, 9), False), ((2, 44, 1), True), ((2, CONTIGUOUS + 44, 1), True),
])  # fmt: skip
def test_logsumexp_has_a_maximum_and_a_sum(shape: tuple[int, ...], is_full: bool, rng: np.random.Generator) -> None:
    """An element with nothing in it is minus infinity."""
    largest, total = rng.uniform(-200, 200, shape), rng.uniform(1, 30, shape)
    largest[0, :, -1], total[0, :, -1] = -3.4e38, 0
    found = reduced("logsumexp", [largest, total], is_full=is_full)
    assert found[0, -1] == -np.inf
    found[0, -1] = total[0, :, -1] = 1
    top = largest.max(1)
    want = top + np.log((total * np.exp(largest - top[:, None])).sum(1))
    want[0, -1] = 1
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("parts", [12, LINES + 12])
def test_nan_is_not_lost(parts: int) -> None:
    x = np.zeros((1, parts, 5))
    x[0, parts - 5, 2] = np.nan
    for kind in SIMPLE:
        np.testing.assert_array_equal(np.isnan(reduced(kind, [x])[0]), np.arange(5) == 2)


@pytest.mark.parametrize("kind", ["sum", "logsumexp"])
@pytest.mark.parametrize("parts", [5, 40, 200, LINES + 9])
def test_an_output_has_the_same_bits_among_any_others(kind: str, parts: int, rng: np.random.Generator) -> None:
    """Batch invariance of rows: the order of additions depends on the number of partials only."""
    states = list(rng.uniform(0.5, 2, (1 if kind == "sum" else 2, 1, parts, 300)))
    every = reduced(kind, states)
    for first, stop in ((0, 1), (37, 38), (100, 300)):
        np.testing.assert_array_equal(reduced(kind, [x[:, :, first:stop] for x in states]), every[:, first:stop])


def several(rng: np.random.Generator) -> list[Given]:
    """Results of different kinds, dtypes, numbers of CTAs, and slices."""
    return [
        Given("sum", [rng.integers(-50, 50, (2, LINES + 20, 40))], dtype=BF16),
        Given("mean", [rng.integers(-50, 50, (1, 2 * CONTIGUOUS + 8, 1))], True, scale=0.5),
        Given("max", [rng.integers(-50, 50, (1, 20, 300))], dtype=FP16),
        Given("logsumexp", [rng.uniform(-20, 20, (1, LINES + 1, 9)), rng.uniform(1, 30, (1, LINES + 1, 9))]),
        Given("min", [rng.integers(-50, 50, (1, 2 * LINES + 1, 33))]),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_several_results_in_one_launch(seed: int, rng: np.random.Generator) -> None:
    """Each is as it is alone, bit by bit, whichever CTA comes last."""
    given = several(rng)
    found, hazards = execute(given, seed=seed)
    assert not hazards
    for x, result in zip(given, found, strict=True):
        np.testing.assert_array_equal(result, reduced(*x[:2], **dict(zip(Given._fields[2:], x[2:], strict=True))))
        if x.kind in SIMPLE:
            want = SIMPLE[x.kind](x.states[0], axis=1) * x.scale
            np.testing.assert_array_equal(result, want.astype(x.dtype.numpy).astype(np.float64))


@pytest.mark.slow
def test_kernels_do_not_spill(rng: np.random.Generator) -> None:
    specs = [x.bind(0).spec for x in several(rng)]
    for kernel in [reduce_kernel(tuple(specs)), *(reduce_kernel((spec,)) for spec in specs)]:
        resources = compile_source(kernel.source, kernel.name).resources
        assert resources.spill_store_bytes == 0
        assert resources.registers <= 80


EXPECTED = {
    ("delete", "sync_threads"): {"race", "uninitialized read", "deadlock", "flags not reset"},
    ("move", "sync_threads"): {"race", "uninitialized read", "deadlock", "flags not reset"},
    ("delete", "grid_dependency_wait"): {"race"},
    ("delete", "store_strong"): {"flags not reset"},
    ("relax", "atom_add_u32"): {"race"},
    ("narrow scope of", "atom_add_u32"): {"race"},
    ("by one lane", "sync_threads"): {"divergence"},
    ("late start of", "round"): {"wrong"},
}
EQUIVALENT = {("narrow scope of", "relaxed store_strong"): "whoever makes it zero again has seen all that use it"}


@pytest.mark.slow
@pytest.mark.parametrize("is_full", [False, True])
def test_every_mutant_is_reported(is_full: bool, rng: np.random.Generator) -> None:
    shape = (1, 2 * CONTIGUOUS + 4, 1) if is_full else (1, LINES + 40, 40)
    given = [Given("sum", [rng.integers(-50, 50, shape)], is_full)]
    spec, want = given[0].bind(0).spec, given[0].states[0].sum(axis=1)
    np.testing.assert_array_equal(execute(given)[0][0], want)

    def fresh() -> Kernel:
        reduce_kernel.cache_clear()
        return reduce_kernel((spec,), HOPPER)

    count = unreported = 0
    for mutant in mutants_of(fresh):
        count += 1
        what = "move" if mutant.what.startswith("move") else mutant.what
        kinds: set[str] = set()
        for seed in range(8):
            (result,), hazards = execute(given, mutant.kernel, seed)
            kinds |= hazards | ({"wrong"} if mutant.what.startswith("late start") and (result != want).any() else set())
            if kinds:
                break
        if (what, mutant.target) in EQUIVALENT:
            continue
        if is_full and not kinds and mutant.what.startswith(("delete", "move")) and mutant.target == "sync_threads":
            unreported += 1  # one thread writes the state and counts: it needs no barrier in between
            continue
        assert kinds & EXPECTED.get((what, mutant.target), set()), f"{mutant}: reported as {kinds}"
    assert count >= 14
    assert unreported <= 3
    reduce_kernel.cache_clear()


@pytest.mark.parametrize(
    ("parts", "columns", "lanes", "is_split", "slices"),
    [
        (0, 256, 1, False, 1),
        (LOADS_IN_FLIGHT, 256, 1, False, 1),
        (LOADS_IN_FLIGHT + 1, 128, 2, False, 1),
        (4 * LOADS_IN_FLIGHT + 1, 32, 8, False, 1),
        (LINES, 32, 8, False, 1),
        (LINES + 1, 32, 8, True, 2),
        (MAX_SLICES * LINES, 32, 8, True, MAX_SLICES),
        (MAX_SLICES * LINES + 1, 32, 8, True, MAX_SLICES // 2 + 1),
    ],
)
def test_threads_and_ctas_of_an_output(parts: int, columns: int, lanes: int, is_split: bool, slices: int) -> None:
    """As many threads as have something to load, then as many CTAs."""
    partials = PartialsShape("sum", 1, parts, 9)
    spec = ReduceSpec.from_partials(REDUCTIONS["sum"], FP32, partials)
    assert (spec.columns, spec.lanes, spec.is_split) == (columns, lanes, is_split)
    assert BoundReduction(spec, partials, 0, Pointer("out")).slices == slices
    full = ReduceSpec.from_partials(REDUCTIONS["sum"], FP32, PartialsShape("sum", 1, parts, 1, parts + 1, 1))
    assert (full.columns, full.is_split) == (1, parts > CONTIGUOUS)
