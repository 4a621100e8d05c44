"""A model of DRAM traffic: the order in which tiles run, and what of their operands the L2 still holds.

Clusters of a wave walk along K together, so a wave reads each of its row and column panels from DRAM at most once;
from wave to wave the L2 keeps what was used last, less of what it is told to evict first. An H200's counters
(benchmarks/counters.py) are within 5 % of it for DRAM. With such hints they are within 7 % with
`sync_clusters`; else the counters are up to twice the model, since data are evicted before all clusters have read them.
The chip merges a part of what the SMs of a GPC read from the L2 at one time, unless it is multicast; that is within
15 %.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, get_args

from gemmsmith.core.config import Config, Eviction
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import EpilogueSpec
from gemmsmith.tuning.gpus import H200, Gpu
from gemmsmith.tuning.space import GPC_SMS, resident_clusters

FLOPS_A_BYTE = 280
"""That an H100 computes, of 16 bits, while it stores a byte: 700 TFLOP/s and 2.5 TB/s."""
PASSING = 7_000_000
"""Bytes of the L2 that data with the policy evict_first occupy nevertheless."""
CHUNK = 512
"""Elements of K that are read at once."""
MERGED = {False: 0.4, True: 0.65}
"""The part of the reads that a GPC's clusters could share which the chip merges, by whether `sync_clusters` is on."""


class Traffic(NamedTuple):
    """Bytes read from DRAM, and by SMs from the L2."""

    dram: int
    l2: int

    @property
    def hit_rate(self) -> float:
        """The fraction of reads from the L2 that do not go to DRAM."""
        return 1 - self.dram / max(self.l2, 1)


def walk(tiles_m: int, tiles_n: int, raster: str, raster_group: int) -> Iterator[tuple[int, int]]:
    """Tiles (m, n), in units of clusters, in the order in which TileScheduler hands them out."""
    across, along = (tiles_n, tiles_m) if raster == "m" else (tiles_m, tiles_n)
    for index in range(across * along):
        band, position = divmod(index, along * raster_group)
        width = min(across - band * raster_group, raster_group)
        a, b = band * raster_group + position % width, position // width
        yield (b, a) if raster == "m" else (a, b)


def of_cluster(config: Config) -> tuple[int, int]:
    """Rows and columns of D that a cluster computes at once."""
    (m, n, _), (rows, columns) = config.tile, config.cluster
    return m * rows, n * columns


def waves(problem: Problem, config: Config) -> Iterator[list[tuple[int, int]]]:
    """The tiles that run at once."""
    tile_m, tile_n = of_cluster(config)
    resident = resident_clusters(config.cluster[0] * config.cluster[1])
    order = walk(-(-problem.m // tile_m), -(-problem.n // tile_n), config.raster, config.raster_group)
    while wave := list(islice(order, resident)):
        yield wave


def wave_bytes(problem: Problem, config: Config) -> int:
    """Of A, B and D, what the first wave reads and writes; `problem` is in the kernel's orientation."""
    tile_m, tile_n = of_cluster(config)
    wave = next(waves(problem, config))
    rows, columns = (len(set(indices)) for indices in zip(*wave, strict=True))
    read = (rows * tile_m + columns * tile_n) * problem.k * problem.a.dtype.bytes
    return read + len(wave) * tile_m * tile_n * problem.d.dtype.bytes


def streaming_stores(problem: Problem, epilogue: EpilogueSpec, gpu: Gpu) -> bool:
    """Whether TMA stores more than the L2 holds, and memory takes longer for it than the tensor cores: what is evicted
    first is written in about the order in which it is computed. 2 to 13 % of such products (tries-stores-h100.json),
    while others are 0.5 % slower so (sweep-layouts-h100.json)."""
    stored = sum(r.dtype.bytes for r in epilogue.graph.results if r.dtype and r.name in epilogue.graph.stored)
    larger = problem.batch * problem.m * problem.n * stored > gpu.l2_bytes
    return larger and 2 * problem.k < FLOPS_A_BYTE * stored


def traffic(
    problem: Problem, config: Config, capacity: int = H200.l2_bytes, progress: Callable[[float], None] | None = None
) -> Traffic:
    """What a product of whole tiles reads; `problem` is in the kernel's orientation. `progress` is told the fraction of
    the tiles that is done, after each wave."""
    tile_m, tile_n = of_cluster(config)
    tiles, walked = -(-problem.m // tile_m) * -(-problem.n // tile_n), 0
    size, batch = problem.a.dtype.bytes, problem.batch
    held: dict[str, OrderedDict[tuple[str, int, int], int]] = {name: OrderedDict() for name in get_args(Eviction)}
    policies = dict(zip("ABD", (*config.evict, "first" if config.streaming_stores else "normal"), strict=True))
    used = dict.fromkeys(held, 0)
    dram = l2 = 0

    def touch(key: tuple[str, int, int], nbytes: int, read: bool) -> None:
        nonlocal dram
        policy = policies[key[0]]
        if key in held[policy]:
            held[policy].move_to_end(key)
            return
        dram += nbytes * read
        held[policy][key] = nbytes
        used[policy] += nbytes
        while sum(used.values()) > capacity:
            order = ("normal", "last", "first") if used["first"] <= PASSING else ("first", "normal", "last")
            victim = next(name for name in order if held[name])
            used[victim] -= held[victim].popitem(last=False)[1]

    for wave_index, wave in enumerate(waves(problem, config)):
        rows, columns = sorted({m for m, _ in wave}), sorted({n for _, n in wave})
        for k in range(0, problem.k, CHUNK)[:: -1 if config.serpentine and wave_index % 2 else 1]:
            depth = min(CHUNK, problem.k - k)
            for m in rows:
                touch(("A", m, k), tile_m * depth * size, True)
            for n in columns:
                touch(("B", n, k), tile_n * depth * size, True)
        for m, n in wave:
            touch(("D", m, n), tile_m * tile_n * problem.d.dtype.bytes, False)
        l2 += read_by_sms(wave, config, (tile_m, tile_n)) * problem.k * size
        walked += len(wave)
        if progress:
            progress(walked / tiles)
    return Traffic(dram * batch, l2 * batch)


def read_by_sms(wave: list[tuple[int, int]], config: Config, tile: tuple[int, int]) -> int:
    """Rows of A and of B that are read from the L2 for a wave; `tile` is a cluster's."""
    rows, (down, across) = 0.0, config.cluster
    neighbors = max(1, GPC_SMS // (down * across))  # clusters of a GPC are neighbors in the walk
    for i in range(0, len(wave), neighbors):
        ms, ns = zip(*wave[i : i + neighbors], strict=True)
        for panels, extent, multicast in ((ms, tile[0], across > 1), (ns, tile[1], down > 1)):
            same = len(panels) - len(set(panels))
            rows += extent * (len(panels) - same * MERGED[config.sync_clusters] * (not multicast))
    return round(rows)


def picture(problem: Problem, config: Config, path: str | Path) -> None:
    """Draws the tiles of D, colored by the wave in which they run, numbered where there are few."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    tile_m, tile_n = of_cluster(config)
    tiles_m, tiles_n = -(-problem.m // tile_m), -(-problem.n // tile_n)
    number = np.zeros((tiles_m, tiles_n), np.int32)
    wave_of = np.zeros((tiles_m, tiles_n), np.int32)
    count = last = 0
    for last, wave in enumerate(waves(problem, config)):
        for m, n in wave:
            wave_of[m, n], number[m, n] = last, count
            count += 1
    figure, axes = plt.subplots(figsize=(min(12, 3 + tiles_n / 2.5), min(12, 2 + tiles_m / 3.5)))
    axes.imshow(wave_of, cmap="tab20", aspect="auto", interpolation="nearest")
    if count <= 1024:
        for m in range(tiles_m):
            for n in range(tiles_n):
                axes.text(n, m, str(number[m, n]), ha="center", va="center", fontsize=7)
    found = traffic(problem, config)
    axes.set_xlabel("tiles along N")
    axes.set_ylabel("tiles along M")
    axes.set_title(
        f"raster {config.raster}, bands of {config.raster_group}: {last + 1} waves, "
        f"{found.dram / 1e6:.0f} MB from DRAM, L2 hit rate {found.hit_rate:.1%}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
