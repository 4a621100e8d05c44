"""The walk over tiles is the kernel's; the model's traffic has the right bounds and known values."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from matplotlib.figure import Figure

from benchmarks.rows import load
from gemmsmith import Config, Spec, hw
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.config import Eviction
from gemmsmith.core.make_spec import make_spec
from gemmsmith.core.problem import Problem
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32, U64
from gemmsmith.tile_scheduler.tiles import TileScheduler
from gemmsmith.tuning.gpus import H200
from gemmsmith.tuning.l2 import plot_waves, simulate_traffic, tile_order, wave_bytes, waves


def problem(m: int, n: int, k: int) -> Problem:
    return bind(Request(Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, k)))).problem


@given(m=some.integers(1, 20), n=some.integers(1, 20), raster=some.sampled_from("mn"), raster_group=some.integers(1, 9))
def test_the_walk_is_the_kernels(m: int, n: int, raster: str, raster_group: int) -> None:
    config = Config(tile=(64, 8, 64), cluster=(1, 1), consumers=1, raster=raster, raster_group=raster_group)  # type: ignore
    p = problem(64 * m, 8 * n, 8)
    spec = make_spec(p, config)
    with Builder("walk", threads=32) as k:
        scheduler, out = TileScheduler(spec), k.pointer("out")
        index = k.var(U32, 0, "index")
        with scheduler.tile_loop() as tile:
            for value, place in ((tile.m // 64, 0), (tile.n // 8, 4)):
                one = k.registers(U32, 1, "one")
                one[0] = value.to(U32)
                hw.store_global(one, out + (index.get() * 8 + place).to(U64), k.thread == 0)
            index.set(index.get() + 1)
        kernel = k.finish()
    found = np.zeros((m * n, 2), np.uint32)
    memory = GlobalMemory()
    arguments = {**kernel.arguments(p), "out": memory.add_buffer(found, "out")}
    assert simulate(kernel, 1, arguments, memory, seed=0).hazards == []
    assert list(map(tuple, found.tolist())) == list(tile_order(m, n, raster, raster_group))


EVICTIONS = some.sampled_from(get_args(Eviction))


@given(
    m=some.integers(1, 6000), n=some.integers(1, 6000), k=some.integers(1, 6000), width=some.integers(1, 16),
    evict=some.tuples(EVICTIONS, EVICTIONS), serpentine=some.booleans(),
)  # fmt: skip
def test_bounds(m: int, n: int, k: int, width: int, evict: tuple[Eviction, Eviction], serpentine: bool) -> None:
    p, config = problem(m, n, k), Config(raster_group=width, evict=evict, serpentine=serpentine)
    tiles = [tile for wave in waves(p, config) for tile in wave]
    assert len(set(tiles)) == len(tiles) == -(-m // 256) * -(-n // 256)
    rows, columns = -(-m // 256) * 256, -(-n // 256) * 256
    found = simulate_traffic(p, config)
    assert 2 * k * (rows + columns) <= found.dram_bytes <= found.l2_bytes
    assert simulate_traffic(p, config, capacity=10**12).dram_bytes == 2 * k * (rows + columns)


def test_traffic_where_neighbors_share_what_is_multicast() -> None:
    """The H200's counters, where the chip merges no reads: 145 MB from DRAM, 33.7 M sectors from the L2."""
    found = simulate_traffic(problem(4096, 4096, 4096), Config(raster="n"))
    assert found.dram_bytes == pytest.approx(145e6, rel=0.05)
    assert found.l2_bytes / 32 == pytest.approx(33.7e6, rel=0.05)


@pytest.mark.parametrize("row", load("counters-h200")["rows"], ids=str)
def test_against_hardware_counters(row) -> None:
    """What an H200 counted (counters-h200); with hints, as the table's configs, a little less well, and
    more than that where clusters drift apart."""
    config = Config.parse(row["config"])
    found = simulate_traffic(problem(row["m"], row["n"], row["k"]), config)
    if config.sync_clusters or "first" not in config.evict:
        assert found.dram_bytes == pytest.approx(row["dram_bytes"], rel=0.07 if config.sync_clusters else 0.05)
    else:
        assert found.dram_bytes < row["dram_bytes"] < 2 * found.dram_bytes
    assert 0.85 * found.l2_bytes < row["l2_bytes"] < 1.1 * found.l2_bytes


@pytest.mark.parametrize(("shape", "share"), [((8192, 8192, 8192), 0.95), ((4096, 4096, 4096), 0.82)])
def test_to_and_fro_reads_less_where_a_wave_fills_the_l2(shape: tuple[int, int, int], share: float) -> None:
    p, config = problem(*shape), Config()
    assert wave_bytes(p, config) > H200.l2_bytes
    assert (
        simulate_traffic(p, config.replace(serpentine=True)).dram_bytes < share * simulate_traffic(p, config).dram_bytes
    )


def test_to_and_fro_reads_more_where_a_wave_just_fits() -> None:
    p, config = problem(4855, 5411, 2300), Config(raster_group=3)
    assert H200.l2_bytes / 2 < wave_bytes(p, config) < H200.l2_bytes
    assert (
        simulate_traffic(p, config.replace(serpentine=True)).dram_bytes > 1.5 * simulate_traffic(p, config).dram_bytes
    )


def test_a_hint_keeps_what_the_next_wave_reads_again() -> None:
    """As counted where clusters keep step (benchmarks/results/lockstep-h200.json.xz)."""
    p, config = problem(8192, 8192, 8192), Config(tile=(256, 192, 64), cluster=(1, 2), raster="n", serpentine=True)
    plain, hinted, wrong = (
        simulate_traffic(p, config.replace(evict=evict)).dram_bytes
        for evict in (("normal", "normal"), ("normal", "first"), ("first", "normal"))
    )
    assert hinted == pytest.approx(905e6, rel=0.05)
    assert plain == pytest.approx(967e6, rel=0.05)
    assert hinted < 0.95 * min(plain, wrong)


def test_progress_is_told_to_the_end() -> None:
    told: list[float] = []
    assert simulate_traffic(problem(4096, 3000, 512), Config(), on_progress=told.append).dram_bytes
    assert told == sorted(told)
    assert len(told) > 1
    assert 0 < told[0] < told[-1] == 1


@pytest.mark.parametrize(("m", "n", "swap_ab", "waves_text"), [
    (300, 900, False, "1 wave of 66"), (300, 900, True, "1 wave of 66"), (1024, 64, True, "1 wave of 66"),
    (4096, 20000, False, "20 waves of 66"), (20000, 4096, True, "20 waves of 66"),
])  # fmt: skip
def test_the_picture(monkeypatch: pytest.MonkeyPatch, m: int, n: int, swap_ab: bool, waves_text: str) -> None:
    """Its axes are those of D, whichever operand is swapped; its title and labels are within it."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    config = Config(swap_ab=swap_ab)  # tiles of a cluster: 256 x 256
    plot_waves(problem(*((n, m) if swap_ab else (m, n)), 64), config, "raster.png")
    (figure,) = drawn
    axes, bar = figure.axes
    assert axes.images[0].get_array().shape == (-(-m // 256), -(-n // 256))
    assert axes.get_ylabel().startswith("rows of D")
    assert axes.get_xlabel().startswith("columns of D")
    title = figure._suptitle
    assert f"{m} x {n} x 64" in title.get_text()
    assert waves_text in title.get_text()
    figure.draw_without_rendering()
    boxes = [x.get_window_extent() for x in (title, axes.xaxis.label, axes.yaxis.label, bar.yaxis.label)]
    assert all(figure.bbox.x0 <= x.x0 and x.x1 <= figure.bbox.x1 for x in boxes)
    assert all(figure.bbox.y0 <= x.y0 and x.y1 <= figure.bbox.y1 for x in boxes)


def test_each_wave_of_a_picture_has_a_color(monkeypatch: pytest.MonkeyPatch) -> None:
    """As each wave has the color that the bar shows for it, waves can be told apart by their order."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    for n in (256 * 66, 256 * 66 * 8, 256 * 66 * 40):
        plot_waves(problem(256, n, 64), Config(), "raster.png")
    for figure, waves_drawn in zip(drawn, (1, 8, 40), strict=True):
        image = figure.axes[0].images[0]
        assert len({tuple(image.to_rgba(i)) for i in range(waves_drawn)}) == waves_drawn
