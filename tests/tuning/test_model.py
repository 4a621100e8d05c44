"""The model of a kernel's time: each term by hand, for one config at a time."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from gemmsmith import Config, Spec
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.dtypes import BF16, FP32
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.graph import identity_graph
from gemmsmith.core.problem import Problem
from gemmsmith.tuning import model
from gemmsmith.tuning.config_table import ConfigTable
from gemmsmith.tuning.costs import SM_CLOCK_MHZ, EpilogueCost
from gemmsmith.tuning.gpus import H200
from gemmsmith.tuning.model import Estimate, estimate

TILE = Config(tile=(128, 256, 64), cluster=(1, 1), stages=4)


def problem(m: int, n: int, k: int) -> Problem:
    return bind(Request(Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, k)))).problem


def of_epilogue(config: Config, p: Problem, epilogue: EpilogueSpec | None) -> Estimate:
    found = estimate(p, ConfigTable.from_configs([config]), epilogue)
    return Estimate(*(float(np.broadcast_to(x, (1,))[0]) for x in found))


def of(config: Config, m: int, n: int, k: int) -> Estimate:
    return of_epilogue(config, problem(m, n, k), None)


def test_math_of_a_k_tile_is_the_tensor_cores_rate() -> None:
    assert of(TILE, 4096, 4096, 4096).math_cycles == 2 * 128 * 256 * 64 / model.FLOPS_PER_CYCLE
    assert 0.97 * 4096 < model.FLOPS_PER_CYCLE < 4096
    # Narrow tiles are bound by what wgmma reads of A: 16 chunks of 128 bytes for 64 rows, and a quarter of n of B.
    assert of(TILE.replace(tile=(64, 8, 64), consumers=1), 64, 8, 64).math_cycles == (16 + 8 / 4) * 4


@pytest.mark.parametrize(("cluster", "read"), [((1, 1), (128, 256)), ((2, 1), (128, 128)), ((1, 2), (64, 256))])
def test_ctas_of_a_cluster_read_less(cluster: tuple[int, int], read: tuple[int, int]) -> None:
    """Of the operand that they share; into shared memory goes as much as ever. What is not multicast the CTAs of a GPC
    read at once: a tile of A the 8 of a group, one of B one of them."""
    fraction = model.CONSECUTIVE_MERGED_READ_FRACTION if cluster == (1, 1) else model.GPC_MERGED_READ_FRACTION
    asked = read[0] * (1 if cluster[1] > 1 else 1 - fraction * 7 / 8) + read[1]
    copies = of(TILE.replace(cluster=cluster), 4096, 4096, 4096).copy_cycles
    assert copies == pytest.approx(
        max(2 * 64 * asked / model.L2_TO_SM_BYTES_PER_CYCLE, 2 * 64 * (128 + 256) / model.SMEM_FILL_BYTES_PER_CYCLE)
    )


@pytest.mark.parametrize(("k", "more"), [
    (4096, 1), (4096 + 32, 1 + model.UNALIGNED_OVERHEAD), (4096 + 1, 1),
    (4096 + 8, 1 + model.UNALIGNED_OVERHEAD + model.UNALIGNED_SECTOR_OVERHEAD),
])  # fmt: skip
@pytest.mark.parametrize("tiles", [32, 128, 256])
def test_rows_that_begin_within_a_line_take_longer_to_copy(
    k: int, more: float, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines have 128 bytes, sectors 32. What is packed first counts as aligned. Few SMs do not wait for the L2. Reads
    are merged as much in either case here."""
    monkeypatch.setattr(model, "CONSECUTIVE_MERGED_READ_FRACTION", model.GPC_MERGED_READ_FRACTION)
    more = max(more * min(tiles / 132, 1), 1)
    assert of(TILE, 128, 256 * tiles, k).copy_cycles == pytest.approx(
        more * of(TILE, 128, 256 * tiles, 4096).copy_cycles
    )


@pytest.mark.parametrize("tiles", [1, 66, 132, 133, 4 * 132, 4 * 132 + 66])
def test_waves_of_tiles(tiles: int) -> None:
    """Whole ones together, and a last one: each is the norm of its work, with its stores, and its part of the rest."""
    e = of(TILE, 128, 256 * tiles, 640)
    whole, rest = divmod(tiles, 132)
    assert e.k_tiles_per_cta == 10 * (whole + (rest > 0))

    def norm(work: float, part: float) -> float:
        bounds = work, e.memory_cycles * part, e.power_limited_cycles * part
        return float(sum(x**model.BOUND_NORM_EXPONENT for x in bounds) ** (1 / model.BOUND_NORM_EXPONENT))

    store = e.exposed_stores / (whole + (rest > 0))
    expected = norm(whole * (10 * e.k_tile_cycles + store), (tiles - rest) / tiles)
    expected += norm(10 * e.k_tile_cycles + store, rest / tiles) if rest else 0
    assert e.wave_cycles == pytest.approx(expected)
    assert e.cycles == e.wave_cycles + e.launch_and_fill


@pytest.mark.parametrize(("splits", "k_steps"), [(2, 5), (4, 3)])
def test_ctas_that_share_a_tile_have_fewer_k_tiles(splits: int, k_steps: int) -> None:
    config = TILE.replace(tile=(64, 64, 64), consumers=1, cluster_splits=splits)
    one, found = of(config.replace(cluster_splits=1), 64, 64, 640), of(config, 64, 64, 640)
    assert (one.k_tiles_per_cta, one.split_reduction) == (10, 0)
    assert found.k_tiles_per_cta == k_steps
    assert found.split_reduction > model.CLUSTER_SPLIT_CYCLES


@pytest.mark.parametrize("splits", [2, 5])
def test_splits_share_through_memory(splits: int) -> None:
    config = TILE.replace(tile=(64, 64, 64), consumers=1, splits=splits)
    found = of(config, 64, 64, 640)
    assert found.k_tiles_per_cta == 10 / splits
    partial = 4 * 64 * 64 / model.SPLIT_REDUCTION_BYTES_PER_CYCLE
    assert found.split_reduction == pytest.approx(model.SPLIT_REDUCTION_CYCLES + (splits - 1) * partial)


@pytest.mark.parametrize(("m", "k_tile", "slower"), [
    (64, 64, model.SHORT_ROW_OVERHEAD), (64, 128, model.SHORT_ROW_OVERHEAD / 4), (65, 64, 0), (65, 128, 0),
])  # fmt: skip
def test_memory_reads_again_and_short_rows(m: int, k_tile: int, slower: float) -> None:
    """A by three more clusters, B where A has a second row of tiles; k-tiles that are not deep slow few rows down."""
    config = TILE.replace(tile=(64, 64, k_tile), consumers=1)
    nbytes = 2 * (m * 4096 + 4096 * 4096 + -(-m // 64) * 64 * 4096)  # of D whole tiles
    again = 2 * 4096 * (3 * m + 4096 * (m > 64))
    expected = (nbytes + model.REREAD_FRACTION * again) / H200.dram_bytes_per_cycle * (1 + slower)
    assert of(config, m, 4096, 4096).memory_cycles == pytest.approx(expected)


def test_the_longest_counts_and_no_other_is_free() -> None:
    e = of(TILE, 2048, 4096, 4096)
    longest = max(e.work_cycles, e.memory_cycles, e.power_limited_cycles)
    assert longest < e.cycles - e.split_reduction - e.launch_and_fill < 3 ** (1 / 4) * longest
    assert e.work_cycles == e.k_tiles_per_cta * e.k_tile_cycles + e.exposed_stores


@pytest.mark.parametrize("m", [8192, 40000])
def test_power_limits_the_clock_of_large_products(m: int) -> None:
    """Their time is the geometric mean of the work's and the energy's: fewer copies for as much work are faster."""
    wide, narrow = of(TILE, m, 8192, 8192), of(TILE.replace(tile=(128, 128, 64)), m, 8192, 8192)
    for e in (wide, narrow):
        expected = (e.work_cycles * e.power_limited_cycles) ** 0.5
        assert e.wave_cycles == pytest.approx(expected, rel=0.01)
    assert narrow.wave_cycles / wide.wave_cycles > narrow.work_cycles / wide.work_cycles


def test_the_clock_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "FLOPS_PER_CYCLE_AT_700W", 1e9)
    e = of(TILE.replace(cluster=(2, 2)), 8192, 8192, 8192)
    assert e.wave_cycles == pytest.approx(e.work_cycles * 1600 / 1980, rel=0.01)


def test_a_kernels_start_grows_with_stages_and_peers_in_a_cluster() -> None:
    for stages in (4, 6):
        alone = TILE.replace(stages=stages)
        fill = model.LAUNCH_AND_FILL_CYCLES + stages * model.FILL_CYCLES_PER_STAGE
        assert of(alone, 64, 64, 64).launch_and_fill == fill
        assert of(alone.replace(cluster=(2, 2)), 64, 64, 64).launch_and_fill == fill + 3 * model.CLUSTER_SYNC_CYCLES


def test_few_stages_wait_for_memory() -> None:
    """All k-tiles but the one that is multiplied are on their way at once."""
    small = TILE.replace(tile=(64, 8, 64), consumers=1)
    two, three, nine = (of(small.replace(stages=n), 4096, 4096, 4096).k_tile_cycles for n in (2, 3, 9))
    assert two == pytest.approx(2 * three)
    assert nine > two / 8  # a barrier and a wgmma take longer
    deep = of(small.replace(stages=2, tile=(64, 8, 128)), 4096, 4096, 4096).k_tile_cycles
    assert deep == pytest.approx(two * model.TILE_K_128_SLOWDOWN)


def test_nothing_takes_no_waves() -> None:
    """And gives no warning, such as numpy's of a division by zero."""
    e = of(TILE, 0, 4096, 4096)
    assert (e.k_tiles_per_cta, e.exposed_stores) == (0, 0)
    assert np.isfinite(e.cycles)


def test_an_epilogue_costs_its_bytes() -> None:
    assert EpilogueCost.from_epilogue(EpilogueSpec(identity_graph(BF16), frozenset({"out"}))) == (2, 0, 0, 1)
    assert EpilogueCost.from_epilogue(EpilogueSpec(identity_graph(FP32), frozenset({"out"}))) == (4, 0, 0, 1)


def cost_of(epilogue: Callable[[Any], Any]) -> EpilogueCost:
    square = Spec((64, 64), "bf16")
    return EpilogueCost.from_epilogue(bind(Request(square, square, epilogue=epilogue)).spec)


def test_an_epilogue_costs_its_instructions_and_special_functions() -> None:
    """Sigmoid: 4 instructions, two of which are special functions of 8 cycles at least."""
    assert cost_of(lambda acc: acc * 2).cycles < cost_of(lambda acc: acc.sigmoid()).cycles
    assert 16 + 4 <= cost_of(lambda acc: acc.sigmoid()).cycles < 24


def test_reductions_along_a_tiles_rows_are_expensive() -> None:
    rows, columns = cost_of(lambda acc: (acc, acc.sum(-1))), cost_of(lambda acc: (acc, acc.sum(-2)))
    assert rows.cycles == columns.cycles_if_swapped < columns.cycles == rows.cycles_if_swapped
    assert rows.cycles < cost_of(lambda acc: (acc, acc.logsumexp(-1))).cycles


def test_what_pingpong_hides() -> None:
    """Epilogues up to a mainloop's length with two warpgroups, up to twice that with three."""
    configs = [Config("pingpong", (64, 128, 64), consumers=c) for c in (2, 3)]
    p, spec = problem(8192, 8192, 512), EpilogueSpec(identity_graph(BF16), frozenset({"out"}))
    waves = 8192 * 8192 / (64 * 128) / 132

    def exposed(cycles: float) -> list[float]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EpilogueCost, "from_epilogue", staticmethod(lambda _: EpilogueCost(0, cycles, cycles, 1)))
            patch.setattr(model, "OVERLAP_SLOWDOWN", 0)
            return [float(of_epilogue(c, p, spec).exposed_stores) / waves for c in configs]

    mainloop = float(of_epilogue(configs[0], p, spec).k_tile_cycles) * 8
    per_element = mainloop / 64  # of a thread's elements
    assert max(exposed(0.5 * per_element)) < 0.1 * mainloop
    two, three = exposed(2.5 * per_element)
    assert two == pytest.approx(0.75 * mainloop, rel=0.1)
    assert three == pytest.approx(0.17 * mainloop, abs=0.1 * mainloop)


@given(m=some.integers(1, 5000), n=some.integers(1, 5000), k=some.integers(1, 5000))
def test_many_at_once_are_as_one_by_one(m: int, n: int, k: int) -> None:
    configs = [TILE, TILE.replace(tile=(64, 64, 128), consumers=1, splits=3), Config("pingpong", (64, 128, 64)),
               TILE.replace(splits=0), TILE.replace(tile=(64, 8, 64), consumers=1, swap_ab=True)]  # fmt: skip
    together = estimate(problem(m, n, k), ConfigTable.from_configs(configs)).cycles
    assert (together > 0).all()
    np.testing.assert_allclose(together, [of(c, m, n, k).cycles for c in configs])


def test_more_work_takes_longer() -> None:
    for config in (TILE, TILE.replace(cluster=(2, 1))):
        times = [
            float(of(config, m, 4096, k).cycles) for m, k in ((1024, 1024), (1024, 4096), (4096, 4096), (8192, 8192))
        ]
        assert times == sorted(times)
        assert len(set(times)) == len(times)


def test_the_page_on_timing_has_the_rates() -> None:
    """Rounded, in TFLOP/s and TB/s."""
    page = Path(__file__).parents[2] / "docs/notebook/timing.md"
    found = [float(x) for x in re.findall(r"^\| [\w ]+ \| ([\d.]+) T(?:FLOP|B)/s \|$", page.read_text(), re.MULTILINE)]
    names = ("FLOPS", "WGMMA_READ_BYTES", "L2_BYTES", "SMEM_FILL_BYTES", "DRAM_BYTES")
    rates = [getattr(model, f"{name}_PER_CYCLE_AT_700W") * SM_CLOCK_MHZ / 1e6 for name in names]
    assert found == [pytest.approx(x, abs=0.5, rel=0.003) for x in rates]
