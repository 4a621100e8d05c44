"""The choice of a config: as many as asked for, and fields that were not given follow those that were."""

from __future__ import annotations

from typing import Any

import pytest

from gemmsmith import Config, Spec
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.epilogue.epilogue_plan import plan_epilogue
from gemmsmith.tuning.candidates import spec_for
from gemmsmith.tuning.choose import DEFAULT_MAX_STAGES, choose, complete_config, rank_configs


@pytest.mark.parametrize("most", [1, 3, 20])
def test_as_many_as_asked_for_and_the_best_first(most: int) -> None:
    p = bind(Request(Spec((1024, 4096), "bf16"), Spec((4096, 4096), "bf16", (1, 4096)))).problem
    found = rank_configs(p, limit=most)
    assert len(found) == most
    assert found == rank_configs(p, limit=20)[:most]
    assert choose(p) == found[0]


@pytest.mark.parametrize(("shape", "pay"), [
    ((256, 5120, 14336), True), ((129, 4096, 32768), True), ((128, 5120, 14336), False), ((257, 5120, 14336), False),
    ((200, 2047, 14336), False), ((200, 5120, 14335), False), ((200, 5120, 32769), False), ((32, 64, 16384), False),
])  # fmt: skip
def test_splits_are_considered_where_they_pay(shape: tuple[int, int, int], pay: bool) -> None:
    m, n, k = shape
    p = bind(Request(Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, k)))).problem
    assert any(c.splits != 1 for c in rank_configs(p)) == pay
    assert any(c.splits != 1 for c in rank_configs(p, any_splits=True))
    assert any(c.cluster_splits > 1 for c in rank_configs(p))


@pytest.mark.parametrize(("precision", "shape", "pay"), [
    ("tf32", (768, 1024, 11008), True), ("tf32", (767, 1024, 11008), False), ("3xtf32", (512, 1024, 16384), True),
    ("3xtf32", (1024, 1024, 16384), False),
])  # fmt: skip
def test_splits_of_fp32_operands(precision: str, shape: tuple[int, int, int], pay: bool) -> None:
    """As benchmarks/results/splits-tf32-h100.json.xz has them, with 3/4 and 1 times 2^20 results as borders."""
    m, n, k = shape
    p = bind(Request(Spec((m, k), "fp32"), Spec((k, n), "fp32", (1, k)), precision=precision)).problem
    assert any(c.splits != 1 for c in rank_configs(p)) == pay
    assert any(c.splits != 1 for c in rank_configs(p, any_splits=True))


@pytest.mark.parametrize("shape", [(2048, 128256), (4096, 4096), (100, 72), (1, 8)])
def test_without_k_the_epilogue_has_the_shared_memory(shape: tuple[int, int]) -> None:
    m, n = shape
    operands = {"c": Spec(shape, "fp16")}
    binding = bind(Request(Spec((m, 0), "bf16"), Spec((0, n), "bf16"), None, operands, lambda acc, c: c.exp()))
    config = choose(binding.problem, binding.spec)
    assert (config.stages, config.cluster) == (2, (1, 1))
    plan = plan_epilogue(spec_for(config, binding.problem, binding.spec))
    assert plan.load_stages >= min(plan.subtiles, 4)
    with_k = bind(Request(Spec((m, 512), "bf16"), Spec((512, n), "bf16"), None, operands, lambda acc, c: acc + c))
    assert choose(with_k.problem, with_k.spec).stages > 2


def test_where_nothing_can_be_built_the_default_is_refused_later() -> None:
    batch = 1 << 24
    tall = bind(Request(Spec((batch, 1 << 18, 8), "bf16", (0, 8, 1)), Spec((batch, 8, 8), "bf16", (64, 8, 1)))).problem
    assert rank_configs(tall) == []
    assert choose(tall) == Config()


@pytest.mark.parametrize(("tile", "consumers"), [
    ((256, 128, 64), 2), ((192, 64, 64), 3), ((64, 64, 64), 1), ((128, 64, 64), 2), ((256, 256, 64), 2),
])  # fmt: skip
def test_consumers_follow_the_tile(tile: tuple[int, int, int], consumers: int) -> None:
    found = complete_config(Config(tile=tile, cluster=(2, 1)), {"tile"})
    assert (found.consumers, found.cluster, found.stages) == (consumers, (1, 1), DEFAULT_MAX_STAGES)


@pytest.mark.parametrize("given", [{"consumers": 1}, {"cluster": (2, 1)}, {"stages": 3}])
def test_what_is_given_stays(given: dict[str, Any]) -> None:
    config = Config(tile=(128, 64, 64)).replace(**given)
    found = complete_config(config, {"tile", *given})
    assert {name: getattr(found, name) for name in given} == given


def test_clusters_meet_only_where_they_can() -> None:
    config = Config(sync_clusters=True)
    assert complete_config(config, set()).sync_clusters
    assert not complete_config(config.replace(splits=2, sync_clusters=False), {"splits"}).sync_clusters


@pytest.mark.parametrize(("n", "swapped"), [(8192, True), (8196, False)])
def test_columns_that_threads_store_are_dear(n: int, swapped: bool) -> None:
    """TMA stores D^T of few rows if D's rows are multiples of 16 bytes."""
    p = bind(Request(Spec((64, 4096), "bf16"), Spec((4096, n), "bf16", (1, 4096)))).problem
    assert choose(p).swap_ab == swapped
