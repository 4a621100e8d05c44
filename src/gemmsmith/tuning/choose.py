"""The analytic choice of a config: waves of tiles, each as long as its slower half, copies or math."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from gemmsmith.core.config import Config
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import BARRIER_BYTES, SHARED_LIMIT, WGMMA_M, EpilogueSpec
from gemmsmith.epilogue.layout import least_bytes, suits

SMS = 132
"""H100 SXM and H200."""
FLOPS_PER_CYCLE = 4096
"""Dense 16-bit FLOPs of one SM's tensor cores a cycle: m64n256k16 takes 128."""
L2_BYTES_PER_CYCLE, SM_BYTES_PER_CYCLE = 40 * SMS, 64
"""What the L2 gives all SMs together, about 9 TB/s, and at most one."""
DRAM_BYTES_PER_CYCLE = 2400
"""4.2 TB/s at 1.75 GHz."""
MANY_WAVES = 4
"""Beyond, SMs that are idle in the last wave save power that the others use: half a wave is half lost."""
COPY_ENERGY = 0.15
"""Under its power limit the chip runs slower the more bytes it moves, hidden or not: cycles a cycle of copying."""
FILL_CYCLES, STORE_BYTES_PER_CYCLE = 1500, 40
"""Filling the pipeline, and storing a tile where nothing hides it."""

_TILES = [
    ((128, 256), 2), ((256, 128), 2), ((128, 224), 2), ((128, 192), 2), ((128, 160), 2), ((128, 128), 2),
    ((128, 112), 2), ((128, 96), 2), ((128, 64), 2), ((64, 256), 1), ((64, 224), 1), ((64, 192), 1), ((64, 128), 1),
    ((64, 112), 1), ((64, 96), 1), ((64, 64), 1), ((64, 48), 1), ((64, 32), 1), ((64, 16), 1),
]  # fmt: skip
_CLUSTERS = [(1, 2), (2, 1), (1, 1)]


def stages_that_fit(tile: tuple[int, int, int], epilogue: EpilogueSpec, consumers: int, most: int = 8) -> int:
    """As many stages of 16-bit operands as shared memory holds beside what the epilogue needs, at most `most`."""
    left = SHARED_LIMIT - least_bytes(epilogue.graph, epilogue.tma, tile[1], consumers)
    return max(2, min(most, left // ((tile[0] + tile[1]) * tile[2] * 2 + BARRIER_BYTES)))


@lru_cache(maxsize=64)
def candidates(epilogue: EpilogueSpec) -> tuple[Config, ...]:
    """The configs that are considered, warp-specialised all.

    Consecutive clusters share what their cluster does not: such reads of neighbouring SMs are merged.
    """
    found = []
    for (m, n), consumers in _TILES:
        for cluster in _CLUSTERS:
            if suits(epilogue.graph, n) and n % (8 * cluster[0]) == 0:
                stages = stages_that_fit((m, n, 64), epilogue, consumers)
                raster = "n" if cluster == (1, 2) else "m"
                found.append(Config("warp_specialized", (m, n, 64), cluster, stages, consumers, raster))  # type: ignore[arg-type]
    return tuple(found)


def fitted(config: Config, epilogue: EpilogueSpec, given: Iterable[str], *, fp16: bool = False) -> Config:
    """A config with the choices that were not `given` adapted to those that were: consumers, stages, cluster."""
    changes: dict[str, object] = {}
    if config.design == "pingpong":
        changes["consumers"] = 2
        if "tile" not in given:
            changes["tile"] = (64, 256, 64)
    elif "consumers" not in given and "tile" in given:
        m, n, _ = config.tile
        possible = [c for c in (2, 3, 1) if m % (WGMMA_M * c) == 0]
        registers = [m // c * n // (256 if fp16 else 128) for c in possible]
        fitting = [c for c, r in zip(possible, registers, strict=True) if r <= (128 if c == 3 else 200)]
        changes["consumers"] = (fitting or possible or [1])[0]
    if "cluster" not in given and "tile" in given:
        changes["cluster"] = (1, 1)
    config = config.replace(**changes)
    if "stages" not in given:
        config = config.replace(stages=stages_that_fit(config.tile, epilogue, config.consumers))
    return config


def cycles(problem: Problem, config: Config) -> float:
    """The model's estimate for a problem, in SM cycles: waves of tiles, or the bytes that must move at all."""
    (m, n, k), (rows, columns) = config.tile, config.cluster
    size = rows * columns
    ctas = -(-problem.m // (m * rows)) * -(-problem.n // (n * columns)) * problem.batch * size
    resident = SMS // size * size
    waves: float = -(-ctas // resident)
    if waves > MANY_WAVES:
        waves = (waves + ctas / resident) / 2
    math = 2 * m * n * k / FLOPS_PER_CYCLE
    bandwidth = min(SM_BYTES_PER_CYCLE, L2_BYTES_PER_CYCLE / min(max(ctas, 1), resident))
    copies = 2 * k * (m / columns + n / rows) / bandwidth
    store = m * n * problem.d.dtype.bytes / STORE_BYTES_PER_CYCLE
    elements = problem.m * problem.k + problem.k * problem.n + problem.m * problem.n
    memory = 2 * problem.batch * elements / DRAM_BYTES_PER_CYCLE
    return max(waves * (-(-problem.k // k) * (max(math, copies) + COPY_ENERGY * copies) + store), memory) + FILL_CYCLES


@lru_cache(maxsize=4096)
def choose(problem: Problem, epilogue: EpilogueSpec | None = None) -> Config:
    """The config with the least estimated time."""
    epilogue = epilogue or EpilogueSpec.bare(problem.d)
    configs = candidates(epilogue)
    if epilogue.graph.takes_whole_rows:  # where no tile is wide enough the widest is refused later
        widest = max(c.tile[1] for c in configs)
        configs = tuple(c for c in configs if c.tile[1] >= min(problem.n, widest))
    return min(configs, key=lambda config: cycles(problem, config))
