"""The tuner's space: configs that can be built, of every kind, ranked; and measuring that keeps the better ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

import gemmsmith
from gemmsmith import ArgumentError, Config, Spec
from gemmsmith.binding import Binding, bind
from gemmsmith.core.problem import MAX_EXTENT, Problem
from gemmsmith.core.spec import EpilogueSpec, KernelSpec
from gemmsmith.launches import kernel_spec, launches
from gemmsmith.tuning.choose import ranked
from gemmsmith.tuning.l2 import CAPACITY, wave_bytes
from gemmsmith.tuning.measure import halving, settled
from gemmsmith.tuning.model import estimate
from gemmsmith.tuning.space import MOST_COPIES, READ_ONCE_ROWS, Space, considered, fitting, space, spec_for


def product(m: int, n: int, k: int) -> Binding:
    return bind(Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, k)))


def problem(m: int, n: int, k: int) -> Problem:
    return product(m, n, k).problem


def read_for(p: Binding, config: Config) -> Binding:
    """The product as it is or, where the config swaps operands, transposed: the very same matrices."""
    d = p.problem.T.d
    swapped = replace(p, problem=p.problem.T, swapped=True, spec=EpilogueSpec.bare(d), arrays={"out": d})
    return swapped if config.swap_ab else p


def clusters(p: Binding, config: Config) -> int:
    """How many have work."""
    p = read_for(p, config)
    return launches(p, kernel_spec(p, config)).all[-1].clusters


@given(
    m=some.integers(1, 9000), n=some.integers(1, 9000), k=some.integers(1, 9000), of_a=some.sampled_from("rcs"),
    of_b=some.sampled_from("rcs"),
)  # fmt: skip
def test_ranked_configs_can_be_built(m: int, n: int, k: int, of_a: str, of_b: str) -> None:
    """Of operands that are row-major, column-major, or strided both ways, so that they are packed first."""
    a, b = {"r": (k, 1), "c": (1, m), "s": (2 * k, 2)}, {"r": (n, 1), "c": (1, k), "s": (2 * n, 2)}
    bound = bind(Spec((m, k), "bf16", a[of_a]), Spec((k, n), "bf16", b[of_b]))
    p = bound.problem
    found = ranked(p, most=12)
    assert found
    assert len(set(found)) == len(found)
    for config in found:
        assert clusters(bound, config) >= 1
    assert (estimate(p, Space.of(found)).cycles > 0).all()
    # Tiles that are padded have room for fewer stages than they were ranked with.
    whole = [c for c in found if spec_for(c, p).stage_bytes == 2 * (c.tile[0] + c.tile[1]) * c.tile[2]]
    assert (np.diff(estimate(p, Space.of(whole)).cycles) >= 0).all()


@given(m=some.integers(1, 300), n=some.integers(1, 300), log=some.integers(20, 30), few=some.integers(0, 1 << 16))
def test_no_choice_is_too_deep(m: int, n: int, log: int, few: int) -> None:
    k = (1 << log) + 8 * few
    plan = gemmsmith.plan(Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, k)))
    assert plan.launches.all[-1].clusters >= 1


@pytest.mark.parametrize(("log", "countable"), [(23, True), (24, False), (25, False), (26, False)])
def test_no_choice_has_more_tiles_than_an_int32_counts(log: int, countable: bool) -> None:
    """2^14 rows of 2^24 matrices are 2^31 tiles of 128 x 8; with half as many matrices they can be counted. Of 2^25
    only wide tiles of D^T in clusters can be, of 2^26 none."""
    batch = 1 << log
    tall = bind(Spec((batch, 1 << 14, 8), "bf16", (0, 8, 1)), Spec((batch, 8, 8), "bf16", (64, 8, 1)))
    every = space(EpilogueSpec.bare(tall.problem.d))
    narrow = Config(tile=(128, 8, 64), cluster=(1, 1), consumers=1)
    assert (narrow.tile in [c.tile for c in ranked(tall.problem, most=200) if not c.swap_ab]) == countable
    if countable:
        assert clusters(tall, narrow) == 1 << 30
    else:
        with pytest.raises(ArgumentError, match="more than an int32 can count"):
            clusters(tall, narrow)

    def has_few_tiles(c: Config) -> bool:
        rows, columns = (t * along for t, along in zip(c.tile, c.cluster, strict=False))
        m, n = (8, 1 << 14) if c.swap_ab else (1 << 14, 8)
        return batch * -(-m // rows) * -(-n // columns) <= MAX_EXTENT

    kept = every.possible(1 << 14, 1 << 14, 8, 8, batch) & every.fed(tall.problem)
    want = [c for c in every.configs[kept] if c.splits == 1 and has_few_tiles(c)]
    assert len(ranked(tall.problem, most=len(every.configs))) == len(want)
    assert bool(want) == (log < 26)
    for config in ranked(tall.problem, most=12):
        assert clusters(tall, config) >= 1


def relu_sums(acc: Any) -> Any:
    y = acc.maximum(0.0)
    return y, y.sum(-1)


@pytest.mark.parametrize("epilogue", [None, relu_sums, lambda acc, c: acc + c])
@pytest.mark.parametrize("strides", ["nn", "nt", "tn", "tt", "spread", "windows"])
@pytest.mark.parametrize(("m", "n", "k"), [(300, 1000, 520), (300, 1104, 520), (300, 40, 520), (392, 630, 1160)])
def test_what_is_chosen_fits_in_every_layout(epilogue: Any, strides: str, m: int, n: int, k: int) -> None:
    """MN-major tiles are padded: 300 x 520 x 1000 by tiles of 64 x 40 had a stage too many."""
    a = Spec((m, k), "fp16", (1, m) if strides[0] == "t" else (k, 1))
    b = {"n": (n, 1), "t": (1, k), "d": (2 * n, 2), "s": (1, 1)}[strides[-1]]
    operands = {"c": Spec((m, n), "fp16")} if epilogue is not None and epilogue is not relu_sums else None
    assert gemmsmith.plan(a, Spec((k, n), "fp16", b), epilogue=epilogue, operands=operands).source


def test_what_is_chosen_fits_a_turned_epilogue() -> None:
    """Transposed, a column-major residual comes by TMA, and takes shared memory."""
    a, b, c = Spec((1, 4096), "bf16"), Spec((4096, 16384), "bf16"), Spec((1, 16384), "fp32", (1, 16))
    assert gemmsmith.plan(a, b, epilogue=lambda acc, c: (acc + c, (acc + c).sum(-1)), operands={"c": c}).source


@pytest.mark.parametrize("m", [16, 32, 48])
def test_what_is_chosen_suits_columns_of_8_bits(m: int) -> None:
    """Which TMA stores where D^T is computed, in rows of 16 elements at least."""
    a, b = Spec((m, 4096), "bf16"), Spec((4096, 4096), "bf16", (1, 4096))
    out = {"out": Spec((m, 4096), "bf16"), "out1": Spec((m, 4096), "fp8_e4m3", (1, m))}

    def twice(acc: Any) -> Any:
        return acc, acc.to("fp8_e4m3")

    p = bind(a, b, out, epilogue=twice)
    found = ranked(p.problem, p.spec, most=20)
    assert {c.swap_ab for c in found} == {True, False}
    for config in found:
        assert gemmsmith.plan(a, b, epilogue=twice, out=out, config=config).source
    assert gemmsmith.plan(a, b, epilogue=twice, out=out).source


@pytest.mark.parametrize("n", [8, 40, 176, 256])
@pytest.mark.parametrize("strides", ["nn", "tn", "tt"])
def test_stages_that_fit_stay(n: int, strides: str) -> None:
    """What is kept is what was measured."""
    a = Spec((304, 520), "fp16", (520, 1) if strides[0] == "n" else (1, 304))
    b = Spec((520, 1000), "fp16", (1000, 1) if strides[1] == "n" else (1, 520))
    p = bind(a, b).problem
    config = Config(tile=(64, n, 64), cluster=(1, 1), consumers=1, stages=16)
    once = fitting(config, KernelSpec.of(p, config))
    assert fitting(once, KernelSpec.of(p, once)) == once
    assert gemmsmith.plan(a, b, config=once).source
    if n == 8:
        assert once.stages == 16


@pytest.mark.parametrize(("shape", "kinds"), [
    ((16, 4096, 4096), {"swap_ab", "splits", "cluster_splits", "stream"}),
    ((512, 4096, 4096), {"pingpong", "stream"}),
    ((1024, 4096, 8192), {"pingpong", "stream"}),
])  # fmt: skip
def test_every_kind_is_there(shape: tuple[int, int, int], kinds: set[str]) -> None:
    p = problem(*shape)
    found = set()
    every = space(EpilogueSpec.bare(p.d))
    for c, sensible in zip(every.configs, every.sensible(p), strict=True):
        if not sensible:
            continue
        found |= {name for name, there in (("pingpong", c.design == "pingpong"), ("swap_ab", c.swap_ab),
                  ("splits", c.splits > 1), ("stream", c.splits == 0), ("cluster_splits", c.cluster_splits > 1))
                  if there}  # fmt: skip
    assert kinds <= found


@given(*[some.sampled_from([*range(1, 130), 512, 513, 3001, 4096, 8192, 20000])] * 3, some.sampled_from([1, 3]))
def test_what_is_kept_for_many_problems_has_all_that_is_sensible(m: int, n: int, k: int, batch: int) -> None:
    p = bind(Spec((batch, m, k), "bf16"), Spec((batch, k, n), "bf16")).problem
    epilogue = EpilogueSpec.bare(p.d)
    every, some_of_them = space(epilogue), considered(epilogue, p)
    want, got = (list(s.configs[np.flatnonzero(s.sensible(p))]) for s in (every, some_of_them))
    assert got == want


@pytest.mark.parametrize(
    "shape", [(128, 6144, 4096), (16, 28672, 4096), (512, 8192, 8192), (4096, 4096, 4096), (8192, 8192, 8192)]
)
def test_one_tile_a_cta_or_several(shape: tuple[int, int, int]) -> None:
    p = problem(*shape)
    found = ranked(p, most=64)
    once = Space.of(found).tiles(p) <= Space.of(found).resident
    for config, alone in zip(found, once, strict=True):
        lone = config.design == "cooperative" and config.consumers == config.splits == 1 and not config.swap_ab
        assert config.alias_epilogue == (alone and lone)
        overflows = wave_bytes(p.T if config.swap_ab else p, config) > CAPACITY
        assert config.serpentine == (shape[0] > READ_ONCE_ROWS and not alone and overflows)
        assert config.sync_clusters == (config.serpentine and config.can_sync_clusters)
    assert gemmsmith.plan(Spec(shape[::2], "bf16"), Spec((shape[2], shape[1]), "bf16", (1, shape[2]))).source


def test_halving_finds_the_fastest(rng: np.random.Generator) -> None:
    configs = [Config(stages=s, raster_group=w) for s in range(2, 10) for w in range(1, 9)]
    truth = dict(zip(configs, rng.uniform(10, 100, len(configs)), strict=True))
    broken = configs[5]
    timed: list[float] = []

    def measure(config: Config, us: float) -> float:
        if config == broken:
            raise RuntimeError("does not run")
        timed.append(us)
        return truth[config] * (1 + rng.normal() / us)

    found = halving(configs, measure)
    assert len(found) == len(configs) - 1
    assert broken not in [x.config for x in found]
    best = min((c for c in configs if c != broken), key=truth.__getitem__)
    assert found[0].config == best
    assert sum(timed) < 5e6


def test_large_products_are_warmed_up() -> None:
    asked: list[int] = []

    def replay(times: int) -> float:
        asked.append(times)
        return 20.0 * times

    assert settled(replay, 1000.0, 1e6) == 20.0
    assert settled(replay, 1000.0, 1e12) == 20.0
    assert asked == [1, 50, 1, 50, 50]


def test_narrow_boxes_are_few_where_the_producers_registers_are() -> None:
    """Of a column-major A and a row-major B, also where packing makes them so, or makes rows of B^T."""
    for a_strides, b_strides in (((1, 1536), (8192, 1)), ((1, 1537), (8193, 1)), ((1, 1537), (16384, 2))):
        p = bind(Spec((1536, 8192), "bf16", a_strides), Spec((8192, 8192), "bf16", b_strides))
        every = considered(EpilogueSpec.bare(p.problem.d), p.problem)
        for fed in (True, False):
            found = every.configs[every.sensible(p.problem) if fed else ~every.fed(p.problem)]
            assert {config.consumers for config in found} >= {2, 3}
            for config in found:
                spec = kernel_spec(read_for(p, config), config)
                assert spec.majors == ("K" if config.swap_ab and b_strides[1] == 2 else "MN", "MN")
                boxes = [tile.boxes for tile in spec.tiles]
                if config.consumers == 3:
                    assert (sum(boxes) <= MOST_COPIES) == fed
                elif config.consumers == 2:
                    assert (max(boxes) <= MOST_COPIES) == fed
                else:
                    assert fed


@pytest.mark.parametrize(("of", "least"), [("splits", 2), ("cluster_splits", 2)])
def test_shares_of_k_have_four_k_tiles(of: str, least: int) -> None:
    """As many as that are tried, and not one less."""
    config = Config(tile=(64, 64, 64), cluster=(1, 1), consumers=1).replace(**{of: least})
    shares = Space.of([config])
    assert shares.sensible(problem(64, 64, 64 * 4 * least)).tolist() == [True]
    assert shares.sensible(problem(64, 64, 64 * (4 * least - 1))).tolist() == [False]


def test_deep_swapped_tiles_read_b_once() -> None:
    """All rows of A are columns of one tile."""
    for depth, several in ((64, True), (256, False)):
        swapped = Space.of([Config(tile=(64, 16, depth), cluster=(1, 1), consumers=1, swap_ab=True)])
        assert [swapped.sensible(problem(m, 4096, 1024))[0] for m in (9, 16, 17)] == [True, True, several]


def test_swapped_tiles_are_tried_for_any_number_of_rows() -> None:
    """If a tile's columns are not mostly outside of those rows."""
    narrow = Config(tile=(64, 8, 64), cluster=(1, 1), consumers=1, swap_ab=True)
    both = Space.of([narrow, narrow.replace(tile=(128, 128, 64), consumers=2)])
    found = [both.sensible(problem(m, 4096, 1024)).tolist() for m in (1, 64, 65, 1025, 1 << 20)]
    assert found == [[True, False], [True, False], [True, True], [True, True], [True, True]]


def test_clusters_along_n_walk_along_n() -> None:
    """The tiles of a cluster share the operand that the next ones use again."""
    configs = space(EpilogueSpec.bare(problem(8, 8, 8).d)).configs
    assert {(c.cluster, c.raster) for c in configs} == {((1, 2), "n"), ((2, 1), "m"), ((1, 1), "m")}
    assert all((c.raster == "n") == (c.cluster[1] > c.cluster[0]) for c in configs)
    assert max(c.stages for c in configs) == 16
    assert min(c.stages for c in configs) >= 3
