"""The selection of experts from a router's logits in the simulator, against float64; its kernels do not spill."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tests.moe.test_expert_sort import expected
from tests.mutants.mutate import _changes

from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.sim import GlobalMemory, Hazard, simulate
from gemmsmith.core.dtypes import BF16, FP16, FP32, DType
from gemmsmith.core.errors import ArgumentError
from gemmsmith.lang.kernel import Kernel
from gemmsmith.moe.launch import MAX_ROUTED_TOKENS, route
from gemmsmith.moe.route import MAX_GROUPS, MAX_TOP_K, BoundRoute, RouteSpec, check_counts
from gemmsmith.moe.route import route as route_kernel
from gemmsmith.moe.sort_by_expert import MAX_EXPERTS, MAX_ROUTED_EXPERTS, MAX_SLOTS, BoundSort, SortSpec
from gemmsmith.moe.sort_by_expert import sort_by_expert as sort_kernel


def choices(logits: np.ndarray, bias: np.ndarray | None, spec: RouteSpec) -> tuple[Any, Any, Any]:
    """Return the scores, what experts are selected by, and in which rows rounding cannot select another group."""
    x = logits.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        exp = np.exp(x - x.max(1, keepdims=True))
        scores = exp / exp.sum(1, keepdims=True) if spec.scores == "softmax" else 1 / (1 + np.exp(-x))
    choice = scores if bias is None else scores + bias
    if spec.groups == spec.top_k_groups:
        return scores, choice, np.full(len(x), True)
    of_group = np.sort(choice.reshape(len(x), spec.groups, -1), 2)[:, :, -2:].sum(2)
    order = np.argsort(-of_group, 1, "stable")
    is_best = np.zeros_like(of_group, bool)
    np.put_along_axis(is_best, order[:, : spec.top_k_groups], True, 1)
    last, next_ = (np.take_along_axis(of_group, order[:, [spec.top_k_groups - i]], 1)[:, 0] for i in (1, 0))
    choice = np.where(np.repeat(is_best, spec.experts // spec.groups, 1), choice, -np.inf)
    return scores, choice, (last == next_) | (last - next_ > 1e-5 * abs(last))


def verify(
    logits: np.ndarray, bias: np.ndarray | None, spec: RouteSpec, scale: float, got: dict[str, np.ndarray]
) -> None:
    """Of equal scores the first is selected. Those that are not equal may be so after they are rounded."""
    scores, choice, is_clear = choices(logits, bias, spec)
    experts, best = got["experts"], np.argsort(-choice, 1, "stable")[:, : spec.top_k]
    assert ((experts >= 0) & (experts < spec.experts)).all()
    assert (np.diff(np.sort(experts, 1), axis=1) > 0).all()
    if spec.scores == "softmax" and spec.dtype != FP32 and spec.groups == 1:
        np.testing.assert_array_equal(experts, best)
    found, want = (np.take_along_axis(choice, x, 1)[is_clear] for x in (experts, best))
    np.testing.assert_allclose(found, want, rtol=2e-6, atol=5e-7)
    weights = np.take_along_axis(scores, experts, 1)
    if spec.normalize:
        weights = weights / (weights.sum(1, keepdims=True) + 1e-20 * (bias is not None))
    np.testing.assert_allclose(got["weights"], weights * scale, rtol=1e-6, atol=0)
    if "offsets" in got:
        for name, x in expected(experts, got["weights"], spec.experts).items():
            np.testing.assert_array_equal(got[name], x.astype(got[name].dtype), name)


def inputs(rng: np.random.Generator, tokens: int, spec: RouteSpec) -> tuple[np.ndarray, np.ndarray | None]:
    logits = (rng.standard_normal((tokens, spec.experts)) * 2).astype(spec.dtype.numpy)
    return logits, rng.standard_normal(spec.experts).astype(np.float32) if spec.scores == "sigmoid" else None


def check(logits: np.ndarray, bias: np.ndarray | None, spec: RouteSpec, scale: float = 1.0) -> None:
    """The simulator reports no hazard; it would raise."""
    got = route(logits, bias, spec, scale, "sim")
    assert ("offsets" in got) == (got["experts"].size <= MAX_SLOTS)
    verify(logits, bias, spec, scale, got)


SHAPES = [(1, 1, 1), (1, 3, 3), (7, 8, 2), (33, 60, 4), (1, 128, 8), (65, 128, 8), (MAX_ROUTED_TOKENS, 256, 16),
          (MAX_ROUTED_TOKENS + 1, 256, 8), (300, 33, 6), (5, MAX_EXPERTS, MAX_TOP_K)]  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(("tokens", "count", "top_k"), SHAPES)
def test_against_numpy(rng: np.random.Generator, tokens: int, count: int, top_k: int, dtype: DType) -> None:
    for scores, normalize in itertools.product(("softmax", "sigmoid"), (False, True)):
        spec = RouteSpec(count, top_k, scores, normalize, 1, 1, dtype)  # type: ignore[arg-type]
        check(*inputs(rng, tokens, spec), spec, 2.5)


@pytest.mark.parametrize(
    ("count", "groups", "top_k_groups", "top_k"),
    [(8, 4, 2, 3), (256, 8, 4, 8), (60, 6, 1, 10), (64, MAX_GROUPS, 3, 6), (MAX_EXPERTS, 16, 16, 8), (99, 3, 2, 5)],
)  # fmt: skip
def test_groups(rng: np.random.Generator, count: int, groups: int, top_k_groups: int, top_k: int) -> None:
    for scores, tokens in itertools.product(("softmax", "sigmoid"), (1, 40)):
        spec = RouteSpec(count, top_k, scores, True, groups, top_k_groups, FP32)  # type: ignore[arg-type]
        check(*inputs(rng, tokens, spec), spec)


def test_many_slots_are_not_sorted(rng: np.random.Generator) -> None:
    spec = RouteSpec(40, 16, "softmax", True, 1, 1, BF16)
    check(*inputs(rng, MAX_SLOTS // 16 + 1, spec), spec)


@pytest.mark.parametrize("groups", [1, 5])
def test_equal_scores(groups: int) -> None:
    """The first experts, and the first groups."""
    logits = np.zeros((3, 40), np.float32)
    for scores, bias in (("softmax", None), ("sigmoid", np.full(40, -1.0, np.float32))):
        check(logits, bias, RouteSpec(40, 6, scores, True, groups, min(groups, 2), FP32))  # type: ignore[arg-type]


def test_infinities(rng: np.random.Generator) -> None:
    """Also fewer finite logits than experts of a token."""
    spec = RouteSpec(50, 8, "softmax", True, 1, 1, BF16)
    logits, _ = inputs(rng, 20, spec)
    logits[np.arange(50) % 5 > np.arange(20)[:, None] % 5] = -np.inf
    logits[3, 5:] = -np.inf
    check(logits, None, spec)
    logits[4, 7] = np.inf
    spec = RouteSpec(50, 8, "sigmoid", True, 1, 1, BF16)
    check(logits, np.zeros(50, np.float32), spec)


@pytest.mark.parametrize("groups", [1, 5])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_nan(rng: np.random.Generator, scores: Any, groups: int) -> None:
    """Experts are different ones; all weights of a softmax with NaN, or of a NaN that is selected, are NaN."""
    spec = RouteSpec(40, 7, scores, True, groups, 1, FP32)
    logits, bias = inputs(rng, 30, spec)
    logits[10:13, 3], logits[13:16], logits[16:18], logits[18] = np.nan, np.nan, -np.nan, np.inf
    logits[19], logits[20, 1:5] = -np.inf, np.inf
    got = route(logits, bias, spec, 1.0, "sim")
    experts = np.sort(got["experts"], 1)
    assert (experts >= 0).all()
    assert (experts < 40).all()
    assert (experts[:, 1:] != experts[:, :-1]).all()
    assert np.isnan(got["weights"][10:18]).all()
    assert np.isfinite(got["weights"][:10]).all()
    assert scores == "sigmoid" or np.isnan(got["weights"][18:21]).all()


@pytest.mark.parametrize(
    ("top_k", "groups", "top_k_groups", "message"),
    [
        (4, 4, 1, "top_k: got 4, and 1 of 4 groups have 2 experts; use at most 2, or more top_k_groups"),
        (9, 1, 1, "top_k: got 9 of 8 experts; use 1 to 8"),
        (2, 8, 4, "groups: got 8 for 8 experts; use 1, or equal groups of two experts or more"),
        (2, 3, 1, "groups: got 3 for 8 experts"),
        (2, 4, 5, "top_k_groups: got 5 of 4 groups; use 1 to 4"),
    ],
)
def test_what_cannot_be_selected_is_refused(top_k: int, groups: int, top_k_groups: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check_counts(8, top_k, groups, top_k_groups)


SPEC = RouteSpec(24, 3, "sigmoid", True, 4, 2, BF16)
KERNELS = {
    True: (lambda: sort_kernel.__wrapped__(SortSpec(24, 4, 2, SPEC)), BoundSort(210, 3)),
    False: (lambda: route_kernel.__wrapped__(SPEC), BoundRoute(70, 1.0)),
}
"""How a kernel is made, and its arguments, by whether it sorts slots, too."""


def simulated(kernel: Kernel, bound: Any, seed: int, limit: int = 20) -> tuple[list[Hazard], Any]:
    """The hazards of a kernel; its inputs and results."""
    rng, memory = np.random.default_rng(seed), GlobalMemory()
    logits, bias = inputs(rng, 70, SPEC)
    lengths: dict[str, Any] = {"experts": (70, 3), "weights": (70, 3)}
    if isinstance(bound, BoundSort):
        lengths |= dict.fromkeys(("slot_of_row", "token_of_row", "row_of_slot", "row_weights"), 210)
        lengths["offsets"] = 24
    got = {name: np.full(x, -7, np.float32 if "weights" in name else np.int32) for name, x in lengths.items()}
    places = {name: memory.add_buffer(x, name) for name, x in got.items()}
    places |= {name: memory.add_buffer(x, name, writable=False) for name, x in (("logits", logits), ("bias", bias))}
    done = simulate(
        kernel, kernel.work_clusters(bound), kernel.arguments(bound) | places, memory, seed=seed,
        is_dependent_launch=True, max_hazards=limit,
    )  # fmt: skip
    return done.hazards, (logits, bias, SPEC, 1.0, got)


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_every_schedule_is_right(seed: int, is_sorted: bool) -> None:
    make, bound = KERNELS[is_sorted]
    found, results = simulated(make(), bound, seed)
    assert found == []
    verify(*results)


@pytest.mark.parametrize(("is_sorted", "count"), [(True, 7), (False, 1)])
def test_every_barrier_is_needed(is_sorted: bool, count: int) -> None:
    """Without one of them, or without the wait for the grid before, the simulator reports it."""
    (make, bound), deletions = KERNELS[is_sorted], 0
    while True:
        kernel = make()
        changes = [x for x in _changes(kernel) if x[0] == "delete"]
        if deletions == len(changes):
            break
        _, target, where, apply = changes[deletions]
        apply()
        assert simulated(kernel, bound, 0, limit=1)[0], (target, where)
        deletions += 1
    assert deletions == count


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("count", [1, 30, 128, 255, MAX_ROUTED_EXPERTS, 1000, MAX_EXPERTS])
def test_no_spills(count: int, dtype: DType) -> None:
    for scores, groups in itertools.product(("softmax", "sigmoid"), (1, 5, 32)):
        if count % groups or count // groups < 2 <= groups:
            continue
        spec = RouteSpec(count, min(count, 8), scores, True, groups, min(groups, 4), dtype)  # type: ignore[arg-type]
        kernels = [route_kernel(spec)]
        if count <= MAX_ROUTED_EXPERTS:
            kernels += [sort_kernel(SortSpec(count, 4, slots, spec)) for slots in (1, 2)]
        for kernel in kernels:
            r = compile_source(kernel.source, kernel.name).resources
            assert (r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes, r.advisories) == (0, 0, 0, ())
