"""Which tiles a CTA has, and which k-tiles of each it sums, in what order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemmsmith import Config, Spec, hw
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.make_spec import make_spec
from gemmsmith.hw.cluster import MAX_CLUSTERS
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import I32, U32, U64
from gemmsmith.tile_scheduler import make_tile_scheduler

TILE = Config(tile=(64, 8, 16), cluster=(1, 1), consumers=1)


def k_tiles(config: Config, m: int, n: int, k: int, ctas: int) -> list[list[list[int]]]:
    """For each CTA, for each of its tiles, the k-tiles in order, where a product has m x n x k tiles."""
    problem = bind(Request(Spec((64 * m, 16 * k), "bf16"), Spec((16 * k, 8 * n), "bf16", (1, 16 * k)))).problem
    spec = make_spec(problem, config)
    room = m * n * k * 2
    with Builder("walk", threads=32, cluster=(config.cluster_splits, 1, 1)) as b:
        scheduler, out, count = make_tile_scheduler(spec), b.pointer("out"), b.var(I32, 0, "count")

        def note(value) -> None:
            one = b.registers(U32, 1, "one")
            one[0] = value.to(U32)
            hw.store_global(one, out + ((hw.block_index() * room + count.get()) * 4).to(U64), b.thread == 0)
            count.set(count.get() + 1)

        with scheduler.tile_loop() as tile:
            note(tile.m * 0 + 1000)
            with b.range(tile.k_tiles, name="k_tile") as k_tile:
                note(tile.k_tile_index(k_tile))
        kernel = b.finish()
    found = np.full((ctas, room), 2000, np.uint32)
    memory = GlobalMemory()
    arguments = {
        **kernel.arguments(problem),
        "out": memory.add_buffer(found, "out"),
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


def visited(config: Config, m: int, n: int, batch: int, ctas: int) -> list[list[tuple[int, int, int]]]:
    """For each CTA, the (m, n, batch) of its tiles, where each of `batch` products has m x n of them."""
    a, b = Spec((batch, 64 * m, 16), "bf16"), Spec((batch, 16, 8 * n), "bf16", (128 * n, 1, 16))
    problem = bind(Request(a, b)).problem
    spec = make_spec(problem, config)
    room = 2 * m * n * batch
    with Builder("walk", threads=32, cluster=(spec.cluster_size, 1, 1)) as k:
        scheduler, out, count = make_tile_scheduler(spec), k.pointer("out"), k.var(I32, 0, "count")
        with scheduler.tile_loop() as tile:
            found = k.registers(U32, 4, "found")
            for i, value in enumerate((tile.m // 64, tile.n // 8, tile.batch, tile.k_tiles)):
                found[i] = value.to(U32)
            place = (hw.block_index() * room + count.get()) * 16
            hw.store_global(found, out + place.to(U64), k.thread == 0)
            count.set(count.get() + 1)
        kernel = k.finish()
    found, memory = np.full((ctas, room, 4), 2000, np.uint32), GlobalMemory()
    arguments = {**kernel.arguments(problem), "out": memory.add_buffer(found, "out")}
    assert simulate(kernel, ctas, arguments, memory, seed=0).hazards == []
    return [[tuple(x[:3]) for x in row.tolist() if x[0] != 2000] for row in found]


def bands(across: int, along: int, width: int) -> list[tuple[int, int]]:
    """(across, along), band after band of so many."""
    found = []
    for first in range(0, across, width):
        found += [(i, j) for j in range(along) for i in range(first, min(first + width, across))]
    return found


@pytest.mark.parametrize("raster", ["m", "n"])
@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize(("m", "n", "batch", "ctas"), [(3, 4, 1, 1), (5, 2, 1, 3), (4, 7, 1, 2), (2, 3, 3, 4)])
def test_tiles_are_walked_in_bands(raster: str, group: int, m: int, n: int, batch: int, ctas: int) -> None:
    """CTA i has the tiles number i, i + the number of CTAs, and so on."""
    every = [(j, i) for i, j in bands(n, m, group)] if raster == "m" else bands(m, n, group)
    order = [(i, j, b) for b in range(batch) for i, j in every]
    found = visited(TILE.replace(raster=raster, raster_group=group), m, n, batch, ctas)
    assert found == [order[cta::ctas] for cta in range(ctas)]


@pytest.mark.parametrize("cluster", [(2, 1), (1, 2), (2, 2)])
def test_ctas_of_a_cluster_have_neighboring_tiles(cluster: tuple[int, int]) -> None:
    """Ranks run along M first; those of a ragged cluster lie outside."""
    (rows, columns), (m, n) = cluster, (3, 4)
    config = TILE.replace(cluster=cluster, raster_group=1, tile=(64, 16, 16))
    found = visited(config, m, n, 1, rows * columns)
    corners = [(i, 2 * j) for i, j in bands(-(-m // rows), n // 2 // columns, 1)]
    if config.raster == "m":
        corners = [(i, 2 * j) for j, i in bands(n // 2 // columns, -(-m // rows), 1)]
    for rank, tiles in enumerate(found):
        assert tiles == [(i * rows + rank % rows, j * columns + 2 * (rank // rows), 0) for i, j in corners]


@pytest.mark.parametrize(
    ("batch", "m", "counted"), [(1 << 12, (1 << 19) - 1, True), (167 * 757, 16987, False), (1 << 15, 1 << 16, False)]
)
@pytest.mark.parametrize("splits", [1, 2, 0])
def test_tiles_that_int32_cannot_count_are_refused(splits: int, batch: int, m: int, counted: bool) -> None:
    """2^31 - 4096 can be counted, one more cannot."""
    p = bind(Request(Spec((batch, 64 * m, 16), "bf16", (0, 16, 1)), Spec((batch, 16, 8), "bf16", (0, 1, 16)))).problem
    with Builder("walk", threads=32):
        scheduler = make_tile_scheduler(make_spec(p, TILE.replace(splits=splits)))
    if counted:
        assert scheduler.tiles_of(p) == batch * m == 2**31 - 4096
    else:
        with pytest.raises(ArgumentError, match=f"{batch * m} tiles are more than an int32 can count; use a larger"):
            scheduler.clusters_of(p)


@pytest.mark.parametrize("splits", [2, 0])
def test_sums_that_int32_cannot_count_are_refused(splits: int) -> None:
    p = bind(Request(Spec((64 * 64, 1 << 30), "bf16"), Spec((1 << 30, 8), "bf16", (1, 1 << 30)))).problem
    with Builder("walk", threads=32):
        scheduler = make_tile_scheduler(make_spec(p, TILE.replace(splits=splits)))
    with pytest.raises(ArgumentError, match=f"K is too large for {splits or 'stream-K'} splits; use splits=1"):
        scheduler.clusters_of(p)


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


@pytest.mark.parametrize("ctas", [1, 2, 3])
def test_tiles_of_no_k_are_visited_once(ctas: int) -> None:
    """By stream-K too, which has nothing to cut: D is zero."""
    p = bind(Request(Spec((192, 0), "bf16"), Spec((0, 8), "bf16"))).problem
    spec = make_spec(p, TILE.replace(splits=0))
    with Builder("walk", threads=32) as k:
        scheduler, out = make_tile_scheduler(spec), k.pointer("out")
        with scheduler.tile_loop() as tile:
            one = k.registers(U32, 1, "one")
            one[0] = (tile.k_tiles + 1).to(U32)
            hw.store_global(one, out + (tile.m // 64 * 4).to(U64), k.thread == 0)
        kernel = k.finish()
    found, memory = np.zeros(3, np.uint32), GlobalMemory()
    arguments = {**kernel.arguments(p), "out": memory.add_buffer(found, "out")}
    assert simulate(kernel, ctas, arguments, memory, seed=0).hazards == []
    assert found.tolist() == [1, 1, 1]


@pytest.mark.parametrize("changes", [{"cluster_splits": 2}, {"cluster": (2, 1)}, {"cluster": (2, 1), "splits": 2}])
def test_clusters_begin_with_the_tiles_of_a_permutation(changes: dict[str, Any], rng: np.random.Generator) -> None:
    """But for those that may wait for others, which keep the grid's order."""
    clusters, tiles, config = 5, 13, TILE.replace(tile=(64, 16, 16), **changes)
    problem = bind(Request(Spec((64 * 13 * config.cluster[0], 128), "bf16"), Spec((128, 16), "bf16", (1, 128)))).problem
    with Builder("walk", threads=32, cluster=(2, 1, 1)) as b:
        scheduler, out = make_tile_scheduler(make_spec(problem, config)), b.pointer("out")
        with scheduler.tile_loop() as tile:
            m = b.registers(U32, 1, "m")
            m[0] = (tile.m // (64 * config.cluster[0])).to(U32)
            hw.store_global(m, out + ((hw.block_index() * tiles + m[0].to(I32)) * 4).to(U64), b.thread == 0)
        kernel = b.finish()
    found, memory = np.full((2 * clusters, tiles), 99, np.uint32), GlobalMemory()
    order = (*rng.permutation(clusters).tolist(), *range(clusters, MAX_CLUSTERS))
    arguments = {**kernel.arguments(problem), "out": memory.add_buffer(found, "out")}
    if "splits" in changes:
        assert "cluster_permutation" not in arguments
        return
    assert simulate(kernel, 2 * clusters, arguments | {"cluster_permutation": order}, memory, seed=0).hazards == []
    for cta, row in enumerate(found):
        assert row[row != 99].tolist() == list(range(order[cta // 2], tiles, clusters))
