"""Which k-tiles a CTA sums, and in what order, of each of its tiles."""

from __future__ import annotations

import numpy as np
import pytest

from gemmsmith import Config, Spec, hw
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.binding import bind
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import I32, U32, U64
from gemmsmith.schedule.stream import tile_scheduler

TILE = Config(tile=(64, 8, 16), cluster=(1, 1), consumers=1)


def k_tiles(config: Config, m: int, n: int, k: int, ctas: int) -> list[list[list[int]]]:
    """For each CTA, for each of its tiles, the k-tiles in order, where a product has m x n x k tiles."""
    problem = bind(Spec((64 * m, 16 * k), "bf16"), Spec((16 * k, 8 * n), "bf16", (1, 16 * k))).problem
    spec = KernelSpec.of(problem, config)
    room = m * n * k * 2
    with Builder("walk", threads=32, cluster=(config.cluster_splits, 1, 1)) as b:
        scheduler, out, count = tile_scheduler(spec), b.pointer("out"), b.var(I32, 0, "count")

        def note(value) -> None:
            one = b.registers(U32, 1, "one")
            one[0] = value.to(U32)
            hw.store_global(one, out + ((hw.block_index() * room + count.get()) * 4).to(U64), b.thread == 0)
            count.set(count.get() + 1)

        with scheduler.each(scheduler.position()) as tile:
            note(tile.m * 0 + 1000)
            with b.range(tile.k_tiles, name="k_tile") as k_tile:
                note(tile.k(k_tile, 1))
        kernel = b.finish()
    found = np.full((ctas, room), 2000, np.uint32)
    memory = GlobalMemory()
    arguments = {
        **kernel.arguments(problem),
        "out": memory.place(found, "out", granule=4),
    }
    assert simulate(kernel, ctas, arguments, memory, seed=0).hazards == []
    tiles = []
    for row in found.tolist():
        tiles.append([])
        for value in row[: row.index(2000)]:
            if value == 1000:
                tiles[-1].append([])
            else:
                tiles[-1][-1].append(value)
    return tiles


def test_to_and_fro() -> None:
    there, back = [0, 1, 2, 3, 4], [4, 3, 2, 1, 0]
    assert k_tiles(TILE, 3, 2, 5, 2) == [[there] * 3] * 2
    assert k_tiles(TILE.replace(serpentine=True), 3, 2, 5, 2) == [[there, back, there]] * 2


def test_shares_of_a_cluster_to_and_fro() -> None:
    config = TILE.replace(cluster_splits=2, serpentine=True)
    assert k_tiles(config, 2, 1, 5, 2) == [[[0, 1], [1, 0]], [[2, 3, 4], [4, 3, 2]]]


@pytest.mark.parametrize("serpentine", [False, True])
def test_a_row_of_tiles_cut_into_equal_parts(serpentine: bool) -> None:
    """Behind whole ones, all CTAs' in one direction."""
    found = k_tiles(TILE.replace(splits=0, serpentine=serpentine), 11, 1, 6, 3)
    back = [5, 4, 3, 2, 1, 0] if serpentine else [0, 1, 2, 3, 4, 5]
    assert [tiles[:2] for tiles in found] == [[[0, 1, 2, 3, 4, 5], back]] * 3
    assert [tiles[2:] for tiles in found] == [
        [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5]],
        [[0, 1], [0, 1, 2, 3, 4, 5], [4, 5]],
        [[0, 1, 2, 3, 4, 5], [2, 3, 4, 5]],
    ]


def test_a_few_last_tiles_cut_alike() -> None:
    """Two for four CTAs: all of a wave still read the same few k-tiles."""
    found = k_tiles(TILE.replace(splits=0), 6, 1, 6, 4)
    assert [tiles[0] for tiles in found] == [[0, 1, 2, 3, 4, 5]] * 4
    assert [tiles[1:] for tiles in found] == [[[0, 1, 2]], [[3, 4, 5]]] * 2


@pytest.mark.parametrize(("waves", "idle"), [(4, False), (5, True)])
def test_or_not_where_a_cta_would_be_idle_for_long(waves: int, idle: bool) -> None:
    """Two for five CTAs: a tenth of a wave."""
    found = k_tiles(TILE.replace(splits=0), 5 * waves + 2, 1, 6, 5)
    assert all(len(tiles) > waves for tiles in found) != idle
