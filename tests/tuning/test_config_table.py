"""The tuner's space: configs that can be built, of every kind, ranked; and measuring that keeps the better ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

import gemmsmith
from gemmsmith import ArgumentError, Config, Spec
from gemmsmith.binding.bind import bind
from gemmsmith.binding.binding import Binding
from gemmsmith.binding.request import Request
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.problem import MAX_EXTENT, Problem
from gemmsmith.host.launch_sequence import build_launches
from gemmsmith.tuning.candidates import spec_for
from gemmsmith.tuning.choose import rank_configs
from gemmsmith.tuning.config_table import MIN_MN_FOR_L2_REUSE, ConfigTable, configs_for, configs_for_epilogue
from gemmsmith.tuning.gpus import H200
from gemmsmith.tuning.l2 import wave_bytes
from gemmsmith.tuning.model import estimate


def product(m: int, n: int, k: int) -> Binding:
    return bind(Request(Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, k))))


def problem(m: int, n: int, k: int) -> Problem:
    return product(m, n, k).problem


def read_for(p: Binding, config: Config) -> Binding:
    """The product as it is or, where the config swaps operands, transposed: the very same matrices."""
    d = p.problem.T.d
    swapped = replace(p, problem=p.problem.T, swapped=True, spec=EpilogueSpec.identity(d), arrays={"out": d})
    return swapped if config.swap_ab else p


def clusters(p: Binding, config: Config) -> int:
    """How many have work."""
    p = read_for(p, config)
    return build_launches(p, p.kernel_spec(config)).all[-1].work_clusters


@given(
    m=some.integers(1, 9000), n=some.integers(1, 9000), k=some.integers(1, 9000), of_a=some.sampled_from("rcs"),
    of_b=some.sampled_from("rcs"),
)  # fmt: skip
def test_ranked_configs_can_be_built(m: int, n: int, k: int, of_a: str, of_b: str) -> None:
    """Of operands that are row-major, column-major, or strided both ways, so that they are packed first."""
    a, b = {"r": (k, 1), "c": (1, m), "s": (2 * k, 2)}, {"r": (n, 1), "c": (1, k), "s": (2 * n, 2)}
    bound = bind(Request(Spec((m, k), "bf16", a[of_a]), Spec((k, n), "bf16", b[of_b])))
    p = bound.problem
    found = rank_configs(p, limit=12)
    assert found
    assert len(set(found)) == len(found)
    for config in found:
        assert clusters(bound, config) >= 1
    assert (estimate(p, ConfigTable.from_configs(found)).cycles > 0).all()
    # Tiles that are padded have room for fewer stages than they were ranked with.
    whole = [c for c in found if spec_for(c, p).stage_bytes == 2 * (c.tile[0] + c.tile[1]) * c.tile[2]]
    space = ConfigTable.from_configs(whole)
    assert (np.diff(estimate(p, space).cycles) >= 0).all()


@given(m=some.integers(1, 300), n=some.integers(1, 300), log=some.integers(20, 30), few=some.integers(0, 1 << 16))
def test_no_choice_is_too_deep(m: int, n: int, log: int, few: int) -> None:
    k = (1 << log) + 8 * few
    plan = gemmsmith.plan(Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, k)))
    assert plan._planned.launches.all[-1].work_clusters >= 1


@pytest.mark.parametrize(("log", "countable"), [(23, True), (24, False), (25, False), (26, False)])
def test_no_choice_has_more_tiles_than_an_int32_counts(log: int, countable: bool) -> None:
    """2^14 rows of 2^24 matrices are 2^31 tiles of 128 x 8; with half as many matrices they can be counted. Of 2^25
    only wide tiles of D^T in clusters can be, of 2^26 none."""
    batch = 1 << log
    tall = bind(Request(Spec((batch, 1 << 14, 8), "bf16", (0, 8, 1)), Spec((batch, 8, 8), "bf16", (64, 8, 1))))
    every = configs_for_epilogue(EpilogueSpec.identity(tall.problem.d))
    narrow = Config(tile=(128, 8, 64), cluster=(1, 1), consumers=1)
    assert (narrow.tile in [c.tile for c in rank_configs(tall.problem, limit=200) if not c.swap_ab]) == countable
    if countable:
        assert clusters(tall, narrow) == 1 << 30
    else:
        with pytest.raises(ArgumentError, match="more than an int32 can count"):
            clusters(tall, narrow)

    def has_few_tiles(c: Config) -> bool:
        rows, columns = (t * along for t, along in zip(c.tile, c.cluster, strict=False))
        m, n = (8, 1 << 14) if c.swap_ab else (1 << 14, 8)
        return batch * -(-m // rows) * -(-n // columns) <= MAX_EXTENT

    kept = every.plausible(1 << 14, 1 << 14, 8, 8, batch)
    want = [c for c in every.configs[kept] if c.splits == 1 and has_few_tiles(c)]
    assert len(rank_configs(tall.problem, limit=len(every.configs))) == len(want)
    assert bool(want) == (log < 26)
    for config in rank_configs(tall.problem, limit=12):
        assert clusters(tall, config) >= 1


@pytest.mark.parametrize(("shape", "kinds"), [
    ((16, 4096, 4096), {"swap_ab", "splits", "cluster_splits", "stream"}),
    ((512, 4096, 4096), {"pingpong", "stream"}),
    ((1024, 4096, 8192), {"pingpong", "stream"}),
])  # fmt: skip
def test_every_kind_is_there(shape: tuple[int, int, int], kinds: set[str]) -> None:
    p = problem(*shape)
    found = set()
    every = configs_for_epilogue(EpilogueSpec.identity(p.d))
    for c, sensible in zip(every.configs, every.valid_for(p), strict=True):
        if not sensible:
            continue
        found |= {name for name, there in (("pingpong", c.design == "pingpong"), ("swap_ab", c.swap_ab),
                  ("splits", c.splits > 1), ("stream", c.splits == 0), ("cluster_splits", c.cluster_splits > 1))
                  if there}  # fmt: skip
    assert kinds <= found


@given(*[some.sampled_from([*range(1, 130), 512, 513, 3001, 4096, 8192, 20000])] * 3, some.sampled_from([1, 3]))
def test_what_is_kept_for_many_problems_has_all_that_is_sensible(m: int, n: int, k: int, batch: int) -> None:
    p = bind(Request(Spec((batch, m, k), "bf16"), Spec((batch, k, n), "bf16"))).problem
    epilogue = EpilogueSpec.identity(p.d)
    every, some_of_them = configs_for_epilogue(epilogue), configs_for(epilogue, p)
    want, got = every.valid_for(p), some_of_them.valid_for(p)
    assert list(some_of_them.configs[got]) == list(every.configs[want])


@pytest.mark.parametrize(
    "shape", [(128, 6144, 4096), (16, 28672, 4096), (512, 8192, 8192), (4096, 4096, 4096), (8192, 8192, 8192)]
)
def test_one_tile_a_cta_or_several(shape: tuple[int, int, int]) -> None:
    p = problem(*shape)
    found = rank_configs(p, limit=64)
    once = ConfigTable.from_configs(found).tiles(p) <= ConfigTable.from_configs(found).max_active_clusters
    for config, alone in zip(found, once, strict=True):
        lone = config.design == "cooperative" and config.consumers == config.splits == 1 and not config.swap_ab
        assert config.alias_epilogue == (alone and lone)
        overflows = wave_bytes(p.T if config.swap_ab else p, config) > H200.l2_bytes
        assert config.serpentine == (shape[0] > MIN_MN_FOR_L2_REUSE and not alone and overflows)
        assert config.sync_clusters == (config.serpentine and config.can_sync_clusters)
    assert gemmsmith.plan(Spec(shape[::2], "bf16"), Spec((shape[2], shape[1]), "bf16", (1, shape[2]))).source


@given(m=some.integers(1, MAX_EXTENT), n=some.integers(1, MAX_EXTENT))
def test_counts_of_tiles_are_those_of_integers(m: int, n: int) -> None:
    every = configs_for_epilogue(EpilogueSpec.identity(problem(8, 8, 8).d))
    for extent, columns, found in zip(
        (m, n), (every.cluster_tile_m, every.cluster_tile_n), every.grid(m, n), strict=True
    ):
        assert found.tolist() == [-(-extent // int(x)) for x in columns]
    rows = [c.tile[1] * c.cluster[1] if c.swap_ab else c.tile[0] * c.cluster[0] for c in every.configs]
    assert every.cluster_tile_m.tolist() == rows


@pytest.mark.parametrize(("of", "least"), [("splits", 2), ("cluster_splits", 2)])
def test_shares_of_k_have_four_k_tiles(of: str, least: int) -> None:
    """As many as that are tried, and not one less."""
    config = Config(tile=(64, 64, 64), cluster=(1, 1), consumers=1).replace(**{of: least})
    shares = ConfigTable.from_configs([config])
    assert shares.valid_for(problem(64, 64, 64 * 4 * least)).tolist() == [True]
    assert shares.valid_for(problem(64, 64, 64 * (4 * least - 1))).tolist() == [False]


def test_deep_swapped_tiles_read_b_once() -> None:
    """All rows of A are columns of one tile."""
    for depth, several in ((64, True), (256, False)):
        swapped = ConfigTable.from_configs([Config(tile=(64, 16, depth), cluster=(1, 1), consumers=1, swap_ab=True)])
        assert [swapped.valid_for(problem(m, 4096, 1024))[0] for m in (9, 16, 17)] == [True, True, several]


def test_swapped_tiles_are_tried_for_any_number_of_rows() -> None:
    """If a tile's columns are not mostly outside of those rows."""
    narrow = Config(tile=(64, 8, 64), cluster=(1, 1), consumers=1, swap_ab=True)
    both = ConfigTable.from_configs([narrow, narrow.replace(tile=(128, 128, 64), consumers=2)])
    found = [both.valid_for(problem(m, 4096, 1024)).tolist() for m in (1, 64, 65, 1025, 1 << 20)]
    assert found == [[True, False], [True, False], [True, True], [True, True], [True, True]]
