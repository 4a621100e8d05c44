"""The configs that may be the fastest for a problem, and a model of how fast each is, for all of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

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

Column = np.ndarray[Any, Any]

COOPERATIVE = [(256, 128, 2), (256, 96, 2), (256, 64, 2), (192, 160, 3), (192, 128, 3)]
COOPERATIVE += [(128, n, 2) for n in (256, 224, 208, 192, 176, 160, 144, 128, 112, 96, 80, 64, 48, 32, 16, 8)]
COOPERATIVE += [(64, n, 1) for n in (256, 224, 192, 160, 128, 112, 96, 80, 64, 56, 48, 40, 32, 24, 16, 8)]
PINGPONG = [(64, n) for n in (256, 224, 192, 160, 128, 96)] + [(128, n) for n in (160, 128, 112, 96, 64)]
CLUSTERS = [(1, 1), (2, 1), (1, 2)]
SPLITS, CLUSTER_SPLITS = (0, 2, 3, 4, 5, 6, 8, 12, 16), (2, 4)
MOST_STAGES = 16
RESIDENT = {1: 132, 2: 66, 4: 30, 8: 14}
"""Clusters that an H200 holds at once, by their CTAs: its GPCs have 16 or 18 SMs."""
MOST_ROWS_SWAPPED = 256
DEEP = 512
"""K from which tiles of 128 are tried."""
SHARE_CYCLES, CLUSTER_SHARE_CYCLES, BYTES_OF_SHARE_PER_CYCLE = 2500, 1000, 24
"""Of bringing a tile's partial sums together: flags or barriers, and reading them."""
LATENCY_CYCLES, SHARPNESS = 1200, 6
"""A copy's from DRAM; and how sharply the longer of work and memory decides."""
SMALLEST_SHARE = 4
"""K-tiles."""


def resident_clusters(size: int) -> int:
    """Clusters of that many CTAs that run at once."""
    return RESIDENT.get(size, SMS // size)


@dataclass(frozen=True, eq=False)
class Space:
    """Configs, and a column of numbers for each of their choices."""

    configs: list[Config]
    m: Column
    n: Column
    k: Column
    rows: Column
    columns: Column
    stages: Column
    splits: Column
    cluster_splits: Column
    cluster_size: Column
    resident: Column
    pingpong: Column
    swap: Column

    @staticmethod
    def of(configs: list[Config]) -> Space:
        numbers = np.array(
            [
                (*c.tile, *c.cluster, c.stages, c.splits, c.cluster_splits, c.design == "pingpong", c.swap)
                for c in configs
            ],
            np.int64,
        ).reshape(-1, 10)
        m, n, k, rows, columns, stages, splits, cluster_splits, pingpong, swap = numbers.T
        size = rows * columns * cluster_splits
        resident = np.array([resident_clusters(int(x)) for x in size])
        yes = pingpong.astype(bool), swap.astype(bool)
        return Space(configs, m, n, k, rows, columns, stages, splits, cluster_splits, size, resident, *yes)

    def sizes(self, problem: Problem) -> tuple[Column, Column]:
        """M and N of what each config computes: the problem, or its transpose."""
        return np.where(self.swap, problem.n, problem.m), np.where(self.swap, problem.m, problem.n)

    def tiles(self, problem: Problem) -> Column:
        """How many clusters have a tile."""
        m, n = self.sizes(problem)
        return np.asarray(problem.batch * -(-m // (self.m * self.rows)) * -(-n // (self.n * self.columns)))

    def sensible(self, problem: Problem) -> Column:
        """Those whose tiles are not mostly outside of the problem, and whose shares of K are worth it."""
        m, n = self.sizes(problem)
        k_tiles, tiles, resident = -(-problem.k // self.k), self.tiles(problem), self.resident
        good = (self.m * self.rows < 2 * np.maximum(m, 64)) & (self.n * self.columns < 2 * np.maximum(n, 8))
        good &= ~self.swap | (problem.m <= MOST_ROWS_SWAPPED)
        good &= (self.k == 64) | (problem.k >= DEEP)
        split = self.splits > 1
        good &= ~split | ((tiles * self.splits <= resident) & (k_tiles >= SMALLEST_SHARE * self.splits))
        stream = self.splits == 0
        ragged = (tiles % resident > 0) & (tiles < 8 * resident) & (tiles * k_tiles >= SMALLEST_SHARE * resident)
        good &= ~stream | ragged
        shared = self.cluster_splits > 1
        good &= ~shared | ((tiles <= resident) & (k_tiles >= SMALLEST_SHARE * self.cluster_splits))
        return np.asarray(good)


class Estimate(NamedTuple):
    """What the model says, in SM cycles: of a k-tile's math and copies, how long a k-tile takes, how many a CTA works
    on one after the other, what stores and bringing shares together add, and the time that the bytes take at all."""

    math: Column
    copies: Column
    step: Column
    k_steps: Column
    stores: Column
    share: Column
    memory: float

    @property
    def work(self) -> Column:
        return np.asarray(self.k_steps * self.step + self.stores)

    @property
    def cycles(self) -> Column:
        both = (self.work**SHARPNESS + self.memory**SHARPNESS) ** (1 / SHARPNESS)
        return np.asarray(both + self.share + FILL_CYCLES)


def estimate(problem: Problem, s: Space) -> Estimate:
    """Waves of tiles, each as long as its slower half, copies or math; or the bytes that must move at all."""
    tiles, resident = s.tiles(problem), s.resident
    k_tiles = np.maximum(1, -(-problem.k // s.k))
    # wgmma reads A and B from shared memory, 128 bytes a cycle
    wgmma = np.maximum(s.n / 2, 16 + s.n / 4) * (s.m / 64) * (s.k / 16)
    math = np.maximum(2 * s.m * s.n * s.k / FLOPS_PER_CYCLE, wgmma)
    stream = s.splits == 0
    clusters = np.maximum(1, np.minimum(resident, tiles * np.where(stream, k_tiles, s.splits)))
    bandwidth = np.minimum(SM_BYTES_PER_CYCLE, L2_BYTES_PER_CYCLE / (clusters * s.cluster_size))
    copies = 2 * s.k * (s.m / s.columns + s.n / s.rows) / bandwidth
    step = np.maximum(np.maximum(math, copies), LATENCY_CYCLES / s.stages) + COPY_ENERGY * copies
    store = s.m * s.n * problem.d.dtype.bytes / STORE_BYTES_PER_CYCLE
    full = -(-tiles // resident)
    waves = np.where((full > MANY_WAVES) & (s.cluster_splits == 1), (full + tiles / resident) / 2, full)
    hidden = np.where(s.pingpong, k_tiles * step, 0.0)
    k_steps = waves * -(-k_tiles // s.cluster_splits)
    stores = store + (waves - 1) * np.maximum(0.0, store - hidden)
    shared = s.splits != 1
    k_steps = np.where(shared, -(-tiles * k_tiles // clusters), k_steps)
    stores = np.where(shared, np.maximum(1, tiles // clusters) * store, stores)
    partial = 4 * s.m * s.n / BYTES_OF_SHARE_PER_CYCLE
    others = np.where(stream, 1, -(-clusters // np.maximum(tiles, 1)) - 1)
    share = np.where(shared, SHARE_CYCLES + others * partial, 0.0)
    share = np.where(s.cluster_splits > 1, CLUSTER_SHARE_CYCLES + (s.cluster_splits - 1) * partial, share)
    elements = problem.m * problem.k + problem.k * problem.n + problem.m * problem.n
    memory = 2 * problem.batch * elements / DRAM_BYTES_PER_CYCLE
    return Estimate(math, copies, step, k_steps, stores, share, memory)


def ranked(problem: Problem, epilogue: EpilogueSpec | None = None, most: int = 64) -> list[Config]:
    """The `most` promising configs, best first; every one can be built."""
    epilogue = epilogue or EpilogueSpec.bare(problem.d)
    found: list[Config] = []
    every = space(epilogue)
    times = np.where(every.sensible(problem), estimate(problem, every).cycles, np.inf)
    for i in np.argsort(times, kind="stable"):
        config = every.configs[i]
        if len(found) == most or times[i] == np.inf:
            break
        try:
            KernelSpec.of(problem.T if config.swap else problem, config, None if config.swap else epilogue)
        except ConfigError:
            continue
        found.append(config)
    return found


@lru_cache(maxsize=64)
def space(epilogue: EpilogueSpec) -> Space:
    """Every config worth a thought for an epilogue, of whatever problem."""
    return Space.of(list(_configs(epilogue)))


def _configs(epilogue: EpilogueSpec) -> Iterator[Config]:
    tiles = [("warp_specialized", *t) for t in COOPERATIVE] + [("pingpong", *t, 2) for t in PINGPONG]
    for design, m, n, consumers in tiles:
        if not suits(epilogue.graph, n):
            continue
        for k in (64, 128) if m + n <= 256 else (64,):
            stages = stages_that_fit((m, n, k), epilogue, consumers, most=MOST_STAGES)
            for cluster in CLUSTERS:
                if stages < 3 or n % (8 * cluster[0]):
                    continue
                raster = "n" if cluster == (1, 2) else "m"
                base = Config(design, (m, n, k), cluster, stages, consumers, raster)  # type: ignore[arg-type]
                for swap in (False, True) if epilogue.graph.turns else (False,):
                    yield from _shares(base.replace(swap=swap))


def _shares(base: Config) -> Iterator[Config]:
    yield base
    if base.design == "pingpong":
        return
    for splits in SPLITS:
        yield base.replace(splits=splits)
    m, n, k = base.tile
    for splits in CLUSTER_SPLITS:
        slots = (splits - 1) * m * n * 4
        stages = base.stages - -(-slots // ((m + n) * k * 2))
        if base.cluster[0] * base.cluster[1] * splits in RESIDENT and stages >= 3:
            yield base.replace(cluster_splits=splits, stages=stages)
