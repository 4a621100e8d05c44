"""The mainloop: what is copied before the roles begin, who of a cluster copies what, and with which L2 policy."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tests.collective.exact_gemm import check

import gemmsmith
from gemmsmith import Config, Spec
from gemmsmith.collective.pipeline import Peers
from gemmsmith.collective.tma_mainloop import TmaStages

TILE = Config(tile=(64, 16, 32), cluster=(1, 1), consumers=1, stages=3)


@pytest.mark.parametrize("stages", [2, 6])
@pytest.mark.parametrize("k_tiles", [0, 1, 2, 5, 7])
def test_tiles_of_any_depth(stages: int, k_tiles: int, rng: np.random.Generator) -> None:
    """Fewer k-tiles than are started early, as many, and more; two tiles."""
    check(TILE.replace(stages=stages), 128, 16, 32 * k_tiles, rng)


@pytest.mark.parametrize("cluster", [(1, 2), (2, 1), (2, 2), (4, 1)])
def test_ctas_of_a_cluster_share_copies(cluster: tuple[int, int], rng: np.random.Generator) -> None:
    check(TILE.replace(tile=(64, 32, 32), cluster=cluster), 64 * cluster[0] + 9, 32 * cluster[1] - 5, 32 * 4, rng)


@pytest.mark.parametrize("cluster", [(1, 1), (2, 1)])
def test_the_epilogue_in_the_stages_leaves_them_before_the_next_tile(
    cluster: tuple[int, int], rng: np.random.Generator
) -> None:
    """With one k-tile, and with more than there are stages."""
    for k_tiles in (1, 2, 5):
        check(TILE.replace(alias_epilogue=True, cluster=cluster), 64 * 3, 16, 32 * k_tiles, rng)


@pytest.mark.parametrize("m", [1, 33, 63, 64])
@pytest.mark.parametrize("cluster", [(1, 1), (1, 2)])
def test_rows_beyond_the_result_have_left_the_stages_too(
    cluster: tuple[int, int], m: int, rng: np.random.Generator
) -> None:
    """Threads write them, but no TMA store reads them: the release itself must order them before the peers' copies of
    the next tile."""
    config = TILE.replace(tile=(64, 8, 16), cluster=cluster, stages=2, alias_epilogue=True)
    for _ in range(4):
        check(config, m, 80, 32, rng)


def source(config: Config) -> str:
    a, b = Spec((4096, 4096), "bf16"), Spec((4096, 4096), "bf16", (1, 4096))
    return gemmsmith.plan(a, b, config=config).source


@pytest.mark.parametrize("evict", [("first", "last"), ("last", "first"), ("first", "normal")])
def test_each_operand_has_its_policy(evict: tuple[str, str]) -> None:
    loads = set(re.findall(r"tma_load\(&\([^?]*\? (a|b) : [^;]*, (EVICT_\w+)\);", source(TILE.replace(evict=evict))))
    assert loads == {("a", f"EVICT_{evict[0].upper()}"), ("b", f"EVICT_{evict[1].upper()}")}


def test_it_waits_for_the_kernel_before() -> None:
    assert "griddepcontrol.wait" in source(TILE)


@pytest.mark.parametrize("swap_ab", [False, True])
def test_the_operand_of_few_rows_is_copied_last(swap_ab: bool) -> None:
    loads = re.findall(r"tma_load\(&\([^?]*\? (a|b) : ", source(TILE.replace(swap_ab=swap_ab)))
    assert loads[:2] == (["a", "b"] if swap_ab else ["b", "a"])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("alias", [False, True])
@pytest.mark.parametrize(("cluster", "splits"), [((2, 2), 1), ((2, 2), 2), ((4, 2), 1), ((2, 4), 1)])
def test_stages_are_released_to_the_ctas_of_a_row_and_a_column(
    cluster: tuple[int, int], splits: int, alias: bool, seed: int, rng: np.random.Generator
) -> None:
    config = Config(
        "cooperative", (64, 64, 32), cluster, stages=2, consumers=1, cluster_splits=splits, alias_epilogue=alias
    )
    rows, columns, k = 64 * cluster[0] + 8, 64 * cluster[1] + 8, 200
    a, b = (rng.standard_normal(shape, np.float32).astype(np.float16) for shape in ((rows, k), (k, columns)))
    done = gemmsmith.simulate(a, b, out_dtype="fp32", config=config, seed=seed)
    assert done.hazards == []
    np.testing.assert_allclose(done.result, a.astype(np.float64) @ b.astype(np.float64), rtol=0, atol=1e-3)


@pytest.mark.parametrize("cluster", [(2, 2), (4, 2)])
def test_an_arrival_on_other_ctas_could_be_counted_a_phase_early(
    cluster: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = cluster[0] * cluster[1]
    monkeypatch.setattr(TmaStages, "peers", property(lambda self: Peers(size, lambda i: i)))
    config = Config("cooperative", (64, 64, 32), cluster, stages=2, consumers=1)
    a, b = (np.ones(shape, np.float16) for shape in ((256, 200), (200, 256)))
    done = gemmsmith.simulate(a, b, config=config)
    assert {h.kind for h in done.hazards} == {"barrier"}
    assert all("is not ordered after phase" in h.message for h in done.hazards)
