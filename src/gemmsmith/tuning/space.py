"""The configs that may be the fastest for a problem, and a model's guess of how fast each is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from gemmsmith.core.config import Config
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import EpilogueSpec, KernelSpec
from gemmsmith.epilogue.layout import suits
from gemmsmith.tuning.choose import (
    COPY_ENERGY,
    DRAM_BYTES_PER_CYCLE,
    FILL_CYCLES,
    FLOPS_PER_CYCLE,
    L2_BYTES_PER_CYCLE,
    MANY_WAVES,
    SM_BYTES_PER_CYCLE,
    SMS,
    STORE_BYTES_PER_CYCLE,
    stages_that_fit,
)

COOPERATIVE = [(256, 128, 2), (256, 96, 2), (256, 64, 2), (192, 160, 3), (192, 128, 3)]
COOPERATIVE += [(128, n, 2) for n in (256, 224, 208, 192, 176, 160, 144, 128, 112, 96, 80, 64, 48, 32, 16, 8)]
COOPERATIVE += [(64, n, 1) for n in (256, 224, 192, 160, 128, 112, 96, 80, 64, 56, 48, 40, 32, 24, 16, 8)]
PINGPONG = [(64, n) for n in (256, 224, 192, 160, 128, 96)] + [(128, n) for n in (160, 128, 112, 96, 64)]
CLUSTERS = [(1, 1), (2, 1), (1, 2)]
SPLITS = (2, 3, 4, 5, 6, 8, 12, 16)
CLUSTER_SPLITS = (2, 4)
RESIDENT = {1: 132, 2: 66, 4: 30, 8: 14}
"""Clusters that an H200 holds at once, by their CTAs: its GPCs have 16 or 18 SMs."""
MOST_ROWS_SWAPPED = 256
SHARE_CYCLES, CLUSTER_SHARE_CYCLES, BYTES_OF_SHARE_PER_CYCLE = 2500, 1000, 24
"""Of bringing a tile's partial sums together: flags or barriers, and reading them."""
LATENCY_CYCLES, SHARPNESS = 1200, 6
"""A copy's from DRAM; and how sharply the longer of work and memory decides."""
SMALLEST_SHARE = 4
"""K-tiles."""


def space(problem: Problem, epilogue: EpilogueSpec) -> Iterator[Config]:
    """Every config worth a thought; those that swap are for the problem's transpose."""
    for swap in (False, True):
        if swap and (problem.m > MOST_ROWS_SWAPPED or not epilogue.graph.turns):
            continue
        m, n = (problem.n, problem.m) if swap else (problem.m, problem.n)
        for config in _schedules(m, n, epilogue):
            for k in (64, 128):
                if k == 128 and (problem.k < 512 or (config.tile[0] + config.tile[1]) > 256):
                    continue
                tile = (*config.tile[:2], k)
                room = replace(config, tile=tile, swap=swap)
                stages = stages_that_fit(tile, epilogue, config.consumers, most=16)
                if stages >= 3:
                    yield from _splits(room.replace(stages=stages), problem, m, n)


def _schedules(m: int, n: int, epilogue: EpilogueSpec) -> Iterator[Config]:
    tiles = [("warp_specialized", *t) for t in COOPERATIVE] + [("pingpong", *t, 2) for t in PINGPONG]
    for design, tile_m, tile_n, consumers in tiles:
        wasted_m, wasted_n = tile_m >= 2 * max(m, 64), tile_n >= 2 * max(n, 8)
        if wasted_m or wasted_n or not suits(epilogue.graph, tile_n):
            continue
        for cluster in CLUSTERS:
            reach = (tile_m * cluster[0] < 2 * max(m, 64)) and (tile_n * cluster[1] < 2 * max(n, 8))
            if reach and tile_n % (8 * cluster[0]) == 0:
                raster = "n" if cluster == (1, 2) else "m"
                yield Config(design, (tile_m, tile_n, 64), cluster, 4, consumers, raster)  # type: ignore[arg-type]


def _splits(config: Config, problem: Problem, m: int, n: int) -> Iterator[Config]:
    yield config
    if config.design == "pingpong":
        return
    size = config.cluster[0] * config.cluster[1]
    tiles, resident = _tiles(config, m, n) * problem.batch, SMS // size
    k_tiles = -(-problem.k // config.tile[2])
    for splits in SPLITS:
        if tiles * splits <= resident and k_tiles >= SMALLEST_SHARE * splits:
            yield config.replace(splits=splits)
    for splits in CLUSTER_SPLITS:
        fits = size * splits in RESIDENT and tiles <= RESIDENT[size * splits]
        shared = (splits - 1) * config.tile[0] * config.tile[1] * 4
        left = config.stages - -(-shared // ((config.tile[0] + config.tile[1]) * config.tile[2] * 2))
        if fits and k_tiles >= SMALLEST_SHARE * splits and left >= 3:
            yield config.replace(cluster_splits=splits, stages=left)
    if tiles % resident and tiles < 8 * resident and tiles * k_tiles >= SMALLEST_SHARE * resident:
        yield config.replace(splits=0)


def _tiles(config: Config, m: int, n: int) -> int:
    return -(-m // (config.tile[0] * config.cluster[0])) * -(-n // (config.tile[1] * config.cluster[1]))


class Estimate(NamedTuple):
    """What the model says of a config, in SM cycles: of a k-tile's math and copies, how many k-tiles a CTA works one
    after the other, what stores and bringing shares together add, and the time that the bytes take at all."""

    math: float
    copies: float
    step: float
    k_steps: float
    stores: float
    share: float
    memory: float

    @property
    def cycles(self) -> float:
        work = self.k_steps * self.step + self.stores
        both = (work**SHARPNESS + self.memory**SHARPNESS) ** (1 / SHARPNESS)
        return float(both + self.share + FILL_CYCLES)


def cycles(problem: Problem, config: Config) -> float:
    """The model's time."""
    return estimate(problem, config).cycles


def estimate(problem: Problem, config: Config) -> Estimate:
    """Waves of tiles, each as long as its slower half, copies or math; or the bytes that must move at all."""
    (m, n, k), (rows, columns) = config.tile, config.cluster
    problem_m, problem_n = (problem.n, problem.m) if config.swap else (problem.m, problem.n)
    size = rows * columns * config.cluster_splits
    tiles = _tiles(config, problem_m, problem_n) * problem.batch
    resident = RESIDENT.get(size, SMS // size)
    k_tiles = max(1, -(-problem.k // k))
    # wgmma reads A and B from shared memory, 128 bytes a cycle
    wgmma = max(n / 2, 16 + n / 4) * (m / 64) * (k / 16)
    math = max(2 * m * n * k / FLOPS_PER_CYCLE, wgmma)
    busy = min(max(tiles * max(config.splits, 1), 1), resident) * size
    bandwidth = min(SM_BYTES_PER_CYCLE, L2_BYTES_PER_CYCLE / busy)
    copies = 2 * k * (m / columns + n / rows) / bandwidth
    step = max(math, copies, LATENCY_CYCLES / config.stages) + COPY_ENERGY * copies
    store = m * n * problem.d.dtype.bytes / STORE_BYTES_PER_CYCLE
    waves: float = -(-tiles // resident)
    share = 0.0
    if config.cluster_splits > 1:
        k_steps = waves * -(-k_tiles // config.cluster_splits)
        stores = waves * store
        share = CLUSTER_SHARE_CYCLES + (config.cluster_splits - 1) * 4 * m * n / BYTES_OF_SHARE_PER_CYCLE
    elif config.splits == 1:
        if waves > MANY_WAVES:
            waves = (waves + tiles / resident) / 2
        k_steps = waves * k_tiles
        hidden = k_tiles * step if config.design == "pingpong" else 0.0
        stores = store + (waves - 1) * max(0.0, store - hidden)
    else:
        clusters = max(1, min(resident, tiles * (config.splits or k_tiles)))
        k_steps = -(-tiles * k_tiles // clusters)
        stores = max(1, tiles // clusters) * store
        others = -(-clusters // max(tiles, 1)) - 1 if config.splits else 1
        share = SHARE_CYCLES + others * 4 * m * n / BYTES_OF_SHARE_PER_CYCLE
    elements = problem.m * problem.k + problem.k * problem.n + problem.m * problem.n
    memory = 2 * problem.batch * elements / DRAM_BYTES_PER_CYCLE
    return Estimate(math, copies, step, k_steps, stores, share, memory)


def ranked(problem: Problem, epilogue: EpilogueSpec | None = None, most: int = 48) -> list[Config]:
    """The `most` promising configs, best first; every one can be built."""
    epilogue = epilogue or EpilogueSpec.bare(problem.d)
    in_order = sorted(space(problem, epilogue), key=lambda config: cycles(problem, config))
    found: list[Config] = []
    for config in in_order:
        if len(found) == most:
            break
        try:
            KernelSpec.of(problem.T if config.swap else problem, config, epilogue if not config.swap else None)
        except ConfigError:
            continue
        found.append(config)
    return found
