"""Cluster synchronization: no cluster runs ahead of another by more than one synchronization interval."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmsmith
from gemmsmith import Config, Spec, hw
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.make_spec import make_spec
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import I32, U32, U64
from gemmsmith.lang.values import Constant
from gemmsmith.tile_scheduler import sync_clusters
from gemmsmith.tile_scheduler.sync_clusters import SYNC_INTERVAL_K_TILES
from gemmsmith.tile_scheduler.tiles import TileScheduler

TILE = Config(tile=(64, 8, 16), cluster=(1, 1), consumers=1, sync_clusters=True)


def walked(m: int, n: int, k: int, ctas: int, seed: int) -> list[int]:
    """The CTA of each k-tile of a product of m x n x k tiles, in the order in which they were begun."""
    problem = bind(Request(Spec((64 * m, 16 * k), "bf16"), Spec((16 * k, 8 * n), "bf16", (1, 16 * k)))).problem
    spec = make_spec(problem, TILE)
    with Builder("walk", threads=32) as b:
        scheduler = TileScheduler(spec)
        out, count = b.pointer("out"), b.pointer("count")
        with b.when(b.thread == 0):
            sync = scheduler.cluster_sync
            assert sync
            sync.start_producer()
            with scheduler.tile_loop() as tile, b.range(tile.k_tiles, name="k_tile") as k_tile:
                assert tile.is_full_wave is not None
                sync.sync(k_tile, tile.is_full_wave)
                one = b.registers(U32, 1, "one")
                one[0] = hw.block_index().to(U32)
                turn = hw.atom_add_u32(count, Constant(U32, 1)).to(I32)
                hw.store_global(one, out + (turn * 4).to(U64), True)
            sync.finish()
        kernel = b.finish()
    order, turns, counters = (np.zeros(size, np.uint32) for size in (m * n * k, 1, 2))
    memory = GlobalMemory()
    arguments = {
        **kernel.arguments(problem),
        "out": memory.add_buffer(order, "out"),
        "count": memory.add_buffer(turns, "count"),
        "sync_counter": memory.add_buffer(counters, "sync_counter"),
    }
    assert simulate(kernel, ctas, arguments, memory, seed=seed).hazards == []
    assert turns.tolist() == [m * n * k]
    assert counters.tolist() == [0, 0]
    return [int(x) for x in order]


@pytest.mark.parametrize(
    ("m", "n", "k", "ctas"), [(3, 4, 10, 3), (2, 3, 7, 6), (4, 2, 9, 4), (5, 1, SYNC_INTERVAL_K_TILES, 2)]
)
@pytest.mark.parametrize("seed", range(3))
def test_nobody_runs_ahead(m: int, n: int, k: int, ctas: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_clusters, "MAX_POLLS_PER_SYNC", 1 << 31)  # nobody gives up
    steps = [0] * ctas
    waves = m * n // ctas
    for cta in walked(m, n, k, ctas, seed):
        steps[cta] += 1
        assert min(steps[cta], waves * k) - min(steps) <= SYNC_INTERVAL_K_TILES
    assert sum(steps) == m * n * k


@pytest.mark.slow
def test_who_gives_up_runs_ahead() -> None:
    """Under some seeds: the others may be held up for any time."""
    ahead = []
    for seed in range(8):
        steps, most = [0] * 3, 0
        for cta in walked(3, 4, 40, 3, seed):
            steps[cta] += 1
            most = max(most, steps[cta] - min(steps))
        ahead.append(most > SYNC_INTERVAL_K_TILES)
    assert any(ahead)
    assert not ahead[0]  # the cost model's schedule


def test_a_wave_that_is_not_whole_waits_for_nobody() -> None:
    assert sorted(walked(5, 1, 9, 3, 0)) == [0] * 18 + [1] * 18 + [2] * 9


@pytest.mark.slow
@pytest.mark.parametrize(("m", "n", "k", "batch", "changes"), [
    (700, 72, 600, 1, {"stages": 6}),
    (300, 80, 200, 3, {"serpentine": True}),
    (400, 40, 330, 1, {"alias_epilogue": True}),
    (33, 600, 500, 1, {"swap_ab": True}),
    (500, 60, 400, 1, {"cluster": (2, 1), "evict": ("first", "normal")}),
    (300, 40, 0, 1, {}),
    (60, 8, 700, 1, {}),
])  # fmt: skip
def test_products(m: int, n: int, k: int, batch: int, changes: dict[str, Any]) -> None:
    """In the simulator, which also finds words that are left raised."""
    rng = np.random.default_rng()
    lead = (batch,) if batch > 1 else ()
    a = rng.integers(-4, 5, (*lead, m, k)).astype(np.float16)
    b = rng.integers(-4, 5, (*lead, k, n)).astype(np.float16)
    out = np.full((*lead, m, n), np.nan, np.float16)
    config = Config(tile=(64, 16, 64), cluster=(1, 1), consumers=1, sync_clusters=True).replace(**changes)
    plan = gemmsmith.plan(a, b, out=out, config=config, backend="sim")
    assert plan._planned.spec.config.sync_clusters
    plan.run(a, b, out)
    assert np.array_equal(out, (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float16))
