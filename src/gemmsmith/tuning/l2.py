"""Model of DRAM and L2 traffic: the order of the tiles, and which of their operands the L2 still holds.

The clusters of a wave advance along K together, so a wave reads each of its row and column panels from DRAM at most
once. From wave to wave the L2 keeps the most recently used data, and less of the data with the policy evict_first. For
DRAM an H200's counters (counters-h200) are within 5 % of the model. With eviction hints they are within
7 % with `sync_clusters`; without it up to twice the model, since data are evicted before all clusters have read them.
The chip merges a fraction of what a GPC's SMs read from the L2 at one time, unless it is multicast; within 15 %.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, get_args

from gemmsmith.core import pictures
from gemmsmith.core.config import Config, Eviction
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.problem import Problem
from gemmsmith.core.scalars import ceil_div
from gemmsmith.tuning.config_table import SMS_PER_GPC, get_max_active_clusters
from gemmsmith.tuning.gpus import H200, NUM_SMS, Gpu

FLOPS_PER_STORED_BYTE = 280
"""16-bit FLOPs that an H100 computes in the time of storing a byte: 700 TFLOP/s and 2.5 TB/s."""
EVICT_FIRST_RESIDENT_BYTES = 7_000_000
"""Bytes of the L2 that data with the policy evict_first occupy all the same; by the counters in lockstep-h200."""
L2_MODEL_K_STEP = 512
"""Elements of K that a wave reads at about the same time; chosen, not measured."""
GPC_MERGED_READ_FRACTIONS = {False: 0.4, True: 0.65}
"""Fraction of the repeated reads of a panel by the clusters of a GPC that the chip merges, without and with
`sync_clusters`; by the counters in counters-h200 and lockstep-h200."""

MAX_LABELED_ROWS, MAX_LABELED_COLUMNS = 64, 24
"""Tiles of a picture are labeled if they are not more."""


class L2Traffic(NamedTuple):
    """Bytes that are read from DRAM, and from the L2 by SMs."""

    dram_bytes: int
    l2_bytes: int

    @property
    def hit_rate(self) -> float:
        """Fraction of the reads from the L2 that do not go to DRAM."""
        return 1 - self.dram_bytes / max(self.l2_bytes, 1)


def tile_order(tiles_m: int, tiles_n: int, raster: str, raster_group: int) -> Iterator[tuple[int, int]]:
    """Yield the tiles (m, n), in units of clusters, in the order of TileScheduler.

    The order runs along dimension `raster`, "m" or "n", in groups of `raster_group` tiles of the other dimension.
    """
    tiles_across, tiles_along = (tiles_n, tiles_m) if raster == "m" else (tiles_m, tiles_n)
    for index in range(tiles_across * tiles_along):
        group, offset_in_group = divmod(index, tiles_along * raster_group)
        width = min(tiles_across - group * raster_group, raster_group)
        a, b = group * raster_group + offset_in_group % width, offset_in_group // width
        yield (b, a) if raster == "m" else (a, b)


def cluster_tile(config: Config) -> tuple[int, int]:
    """Return the rows and columns of D that a cluster computes at once."""
    (m, n, _), (rows, columns) = config.tile, config.cluster
    return m * rows, n * columns


def waves(problem: Problem, config: Config, sms: int = NUM_SMS) -> Iterator[list[tuple[int, int]]]:
    """Yield the waves: lists of the clusters' tiles (m, n) that are computed at once, in units of clusters."""
    tile_m, tile_n = cluster_tile(config)
    max_active_clusters = get_max_active_clusters(config.cluster[0] * config.cluster[1], sms)
    order = tile_order(ceil_div(problem.m, tile_m), ceil_div(problem.n, tile_n), config.raster, config.raster_group)
    while wave := list(islice(order, max_active_clusters)):
        yield wave


def wave_bytes(problem: Problem, config: Config, sms: int = NUM_SMS) -> int:
    """Return the bytes of A, B and D of the first wave of a problem in the kernel's orientation."""
    tile_m, tile_n = cluster_tile(config)
    wave = next(waves(problem, config, sms))
    rows, columns = (len(set(indices)) for indices in zip(*wave, strict=True))
    read = (rows * tile_m + columns * tile_n) * problem.k * problem.a.dtype.bytes
    return read + len(wave) * tile_m * tile_n * problem.d.dtype.bytes


def prefers_streaming_stores(problem: Problem, epilogue: EpilogueSpec, gpu: Gpu) -> bool:
    """Return whether results should be stored with the policy evict_first.

    They should if they exceed the L2 and storing them takes longer than the tensor cores: with evict_first they are
    written to DRAM in about the order in which they are computed. Such GEMMs are 2 to 13 % faster
    (tries-stores-h100), while others are 0.5 % slower (sweep-layouts-h100).
    """
    matrices = epilogue.graph.matrix_result_names
    stored = sum(r.dtype.bytes for r in epilogue.graph.results if r.dtype and r.name in matrices)
    larger = problem.batch * problem.m * problem.n * stored > gpu.l2_bytes
    return larger and 2 * problem.k < FLOPS_PER_STORED_BYTE * stored


def simulate_traffic(
    problem: Problem, config: Config, capacity: int = H200.l2_bytes, on_progress: Callable[[float], None] | None = None
) -> L2Traffic:
    """Simulate the L2 over all waves and return what a GEMM of full tiles reads.

    The problem is in the kernel's orientation; `capacity` in bytes. `on_progress` is called after each wave with the
    fraction of the tiles that is done.
    """
    tile_m, tile_n = cluster_tile(config)
    tiles, done_tiles = ceil_div(problem.m, tile_m) * ceil_div(problem.n, tile_n), 0
    size, batch = problem.a.dtype.bytes, problem.batch
    cached: dict[str, OrderedDict[tuple[str, int, int], int]] = {name: OrderedDict() for name in get_args(Eviction)}
    policies = dict(zip("ABD", (*config.evict, "first" if config.streaming_stores else "normal"), strict=True))
    used = dict.fromkeys(cached, 0)
    dram = l2 = 0

    def access(key: tuple[str, int, int], nbytes: int, read: bool) -> None:
        """Access a panel: count the bytes that DRAM reads, and evict the least recently used panels.

        `key`: (matrix, index of the panel's row or column of tiles, first element of K). `read`: DRAM must be read if
        the panel is not in the L2; a store only occupies it. Data with evict_first are evicted before others as long as
        they occupy more than EVICT_FIRST_RESIDENT_BYTES.
        """
        nonlocal dram
        policy = policies[key[0]]
        if key in cached[policy]:
            cached[policy].move_to_end(key)
            return
        dram += nbytes * read
        cached[policy][key] = nbytes
        used[policy] += nbytes
        while sum(used.values()) > capacity:
            keeps_first = used["first"] <= EVICT_FIRST_RESIDENT_BYTES
            order = ("normal", "last", "first") if keeps_first else ("first", "normal", "last")
            victim = next(name for name in order if cached[name])
            used[victim] -= cached[victim].popitem(last=False)[1]

    for wave_index, wave in enumerate(waves(problem, config)):
        rows, columns = sorted({m for m, _ in wave}), sorted({n for _, n in wave})
        for k in range(0, problem.k, L2_MODEL_K_STEP)[:: -1 if config.serpentine and wave_index % 2 else 1]:
            depth = min(L2_MODEL_K_STEP, problem.k - k)
            for m in rows:
                access(("A", m, k), tile_m * depth * size, True)
            for n in columns:
                access(("B", n, k), tile_n * depth * size, True)
        for m, n in wave:
            access(("D", m, n), tile_m * tile_n * problem.d.dtype.bytes, False)
        l2 += l2_rows_read(wave, config, (tile_m, tile_n)) * problem.k * size
        done_tiles += len(wave)
        if on_progress:
            on_progress(done_tiles / tiles)
    return L2Traffic(dram * batch, l2 * batch)


def l2_rows_read(wave: list[tuple[int, int]], config: Config, tile: tuple[int, int]) -> int:
    """Return how many rows of A and columns of B, in total, a wave reads from the L2.

    Clusters of a GPC that read the same rows count less, by the fraction that the chip merges. `wave`: tiles (m, n) in
    units of clusters. `tile`: rows and columns of a cluster's tile.
    """
    rows, (cluster_m, cluster_n) = 0.0, config.cluster
    clusters_per_gpc = max(1, SMS_PER_GPC // (cluster_m * cluster_n))  # they have consecutive tiles
    for i in range(0, len(wave), clusters_per_gpc):
        ms, ns = zip(*wave[i : i + clusters_per_gpc], strict=True)
        for panels, extent, multicast in ((ms, tile[0], cluster_n > 1), (ns, tile[1], cluster_m > 1)):
            merged = 0.0 if multicast else GPC_MERGED_READ_FRACTIONS[config.sync_clusters]
            rows += extent * (len(panels) - (len(panels) - len(set(panels))) * merged)
    return round(rows)


def plot_waves(problem: Problem, config: Config, path: str | Path) -> None:
    """Plot the clusters' tiles of D to a file, colored by wave, and numbered if the numbers have room.

    `problem`: in the kernel's orientation; with `swap_ab` its rows are the columns of the D that is drawn.
    """
    import numpy as np

    tile = cluster_tile(config)
    tiles = [(wave_index, *coord) for wave_index, wave in enumerate(waves(problem, config)) for coord in wave]
    wave_of = np.zeros((ceil_div(problem.m, tile[0]), ceil_div(problem.n, tile[1])), np.int32)
    for wave_index, m, n in tiles:
        wave_of[m, n] = wave_index
    sizes, drawn = (problem.m, problem.n), -1 if config.swap_ab else 1
    (rows, columns), (m_size, n_size) = wave_of.shape[::drawn], sizes[::drawn]
    traffic, count = simulate_traffic(problem, config), tiles[-1][0] + 1
    title = (
        f"{m_size} x {n_size} x {problem.k}: {config}\n{count} wave{'s' * (count > 1)} of "
        f"{get_max_active_clusters(config.cluster[0] * config.cluster[1])} clusters, "
        f"{traffic.dram_bytes / 1e6:.0f} MB from DRAM, L2 hit rate {traffic.hit_rate:.1%}"
    )
    width, height = (min(9, max(least, 2 + count / 3)) for least, count in ((7, columns * 1.25), (4, rows)))
    with pictures.drawing(path, width, height, title) as figure:
        from matplotlib.colors import ListedColormap
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        few = ListedColormap(pictures.colors(count)) if count <= len(pictures.PALETTE) else pictures.gradient()
        image = axes.imshow(
            wave_of.T if config.swap_ab else wave_of, few, aspect="auto", interpolation="nearest",
            vmin=-0.5, vmax=count - 0.5,
        )  # fmt: skip
        if rows <= MAX_LABELED_ROWS and columns <= MAX_LABELED_COLUMNS:
            for number, (_, *coord) in enumerate(tiles):
                row, column = coord[::drawn]
                axes.text(column, row, str(number), ha="center", va="center", fontsize=7, color="black")
        units = [f"in tiles of {extent}, those of a cluster" for extent in tile[::drawn]]
        axes.set_ylabel(f"rows of D, {units[0]}")
        axes.set_xlabel(f"columns of D, {units[1]}")
        bar = figure.colorbar(image, ax=axes, label="wave")
        for axis in (axes.xaxis, axes.yaxis, bar.ax.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
