"""The choice of a config without wgmma, where there is no Hopper, and for fp32: among a few tiles of mma_multistage, by
waves and by traffic, or of sgemm, by instructions (issue.py). On other chips than an H200 nothing was measured."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from gemmsmith.core.chip import Chip
from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.mma import WARPGROUP
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import EpilogueSpec, KernelSpec
from gemmsmith.epilogue.device.held import sources
from gemmsmith.tuning.fitting import fitting, spec_for
from gemmsmith.tuning.issue import cycles
from gemmsmith.tuning.table import kept

TILES = [(256, 128, 2), (128, 256, 2), (128, 128, 2), (128, 64, 2), (64, 128, 2), (64, 64, 2), (64, 32, 1)]
TILES += [(64, 128, 1), (64, 256, 1)]
"""(M, N, math warpgroups); the last ones for functions of whole rows, which one warpgroup has."""
ROWS = [(128, 3), (64, 4)]
"""Bytes of a k-tile's rows, and its most stages: whole lines are 3 to 5 % faster on an H200 (tries-ladder-h200.json)
where shared memory holds three stages of them."""
SGEMM = [(256, 128, 2), (256, 64, 1), (128, 128, 2), (128, 64, 1), (128, 64, 2), (256, 32, 1), (128, 32, 1)]
SGEMM += [(256, 16, 1), (64, 128, 1), (64, 64, 1), (64, 32, 1)]
WHOLE_ROWS = (64, 256, 1)
"""Tiles of sgemm; the last one only for functions of rows that need it, for its threads load no columns ahead
(collective/cuda_cores.py)."""
SHALLOW, DEEP, MOST_SPLITS = (8, 4), (16, 3), 64
"""Depths of a k-tile, each with its most stages; and the most clusters that share a tile's K."""
DEEPER = {(128, 128, 2), (128, 64, 2)}
"""Tiles that are tried deep too. 256x128 is slower so, by 2 to 11 % of 23 products; and 256x64 takes 1.9 of its time,
for deep stages leave room for one CTA of an SM, which needs eight warps (tries-fp32-h100.json)."""
INVARIANT_ROWS = 1024
ROOM, OF_PIECE, FEW_REDUCTIONS = 116, 32, 3
"""Registers for sums and what an epilogue holds beside them, and for the elements of a piece, 64x64, of a matrix: what
takes more spilled on one chip or another. So did more reductions."""
OVERHEAD, SHARES = 96, 64
"""Rows and columns, of tiles that wide and high, that take as long to copy as they take to multiply; and as how many
such copies of one k bringing a tile's shares together counts."""


def choose_multistage(problem: Problem, epilogue: EpilogueSpec, chip: Chip, *, invariant: bool = False) -> Config:
    """The first of `ranked_multistage`."""
    return ranked_multistage(problem, epilogue, chip, invariant=invariant)[0]


def ranked_multistage(problem: Problem, epilogue: EpilogueSpec, chip: Chip, *, invariant: bool = False) -> list[Config]:
    """Configs with the least estimated time first, but those that spill last; the last one's ConfigError where none
    works. `invariant`: one for every M, which sums each tile in one CTA."""
    refused, rows = ConfigError("no tile"), INVARIANT_ROWS if invariant else problem.m
    every = _of_sgemm(problem, epilogue, rows, chip) if problem.a.dtype == FP32 else _configs(problem, chip)
    possible = [c for c in every if not invariant or (c.splits == 1 and not c.swap_ab)]
    found: list[tuple[bool, float, Config]] = []
    for config in possible:
        try:
            settled = _settled(config, problem, epilogue)
            if settled.stages > 2:
                spec = spec_for(settled, problem, epilogue)
                time = cycles(problem, rows, spec, chip) if spec.mma.by == "fma" else _time(problem, rows, config, chip)
                found.append((_spills(spec), time, settled))
        except ConfigError as error:
            refused = error
    if not found:
        raise refused
    return [config for *_, config in sorted(found, key=lambda x: x[:2])]


def tuned_multistage(problem: Problem, epilogue: EpilogueSpec, chip: Chip) -> Config | None:
    """The config that the user has tuned for the bare product on such a chip, where it works and does not spill."""
    found = kept().get(problem, chip)
    try:
        settled = _settled(found, problem, epilogue) if found else None
        return settled if settled and not _spills(spec_for(settled, problem, epilogue)) else None
    except ConfigError:
        return None


def _settled(config: Config, problem: Problem, epilogue: EpilogueSpec) -> Config:
    """The config with as many of its stages as there is room for."""
    return fitting(config, spec_for(config, problem, epilogue))


def _spills(spec: KernelSpec) -> bool:
    """Whether an epilogue holds more elements of matrices that it reads without TMA, or of whole rows, or sums of its
    own, than there are registers for beside the product's; sgemm, where tiles of a column-major D are shared."""
    graph, of_product = spec.epilogue.graph, spec.warpgroup_rows * spec.warpgroup_columns / WARPGROUP
    held = sum(o.extent.is_matrix and o.name not in spec.tma for o in graph.operands) + graph.takes_whole_rows
    held += sum(node.op == "reduce" for node in graph.nodes) > FEW_REDUCTIONS
    turned = bool(spec.epilogue.column_major) != spec.config.swap_ab  # the epilogue's, as it is without the config
    held += spec.mma.by == "fma" and spec.config.splits != 1 and turned
    return held > 0 and of_product + OF_PIECE * held > ROOM


def _configs(problem: Problem, chip: Chip) -> Iterator[Config]:
    dtype = problem.a.dtype
    for m, n, consumers in TILES:
        for splits in (1, 0):
            for nbytes, stages in ROWS:
                tile = m, n, nbytes // dtype.bytes
                yield Config("mma_multistage", tile, (1, 1), stages, consumers, splits=splits, chip=chip.name)


def _of_sgemm(problem: Problem, epilogue: EpilogueSpec, rows: int, chip: Chip) -> Iterator[Config]:
    """Those of sgemm. A tile's K is shared by stream-K, or so that there are as many CTAs as SMs, or twice as many; but
    not with functions of whole rows, which would spill."""
    graph = epilogue.graph
    swaps = (False, True) if graph.transposable else (False,)
    for (m, n, consumers), swap in product(SGEMM + [WHOLE_ROWS] * bool(sources(graph)), swaps):
        height, width = (problem.n, rows) if swap else (rows, problem.n)
        tiles = max(-(-height // m) * -(-width // n) * problem.batch, 1)
        each = {ctas * chip.multiprocessors // tiles for ctas in (1, 2)}
        shared = () if graph.takes_whole_rows else (0, *sorted(s for s in each if 1 < s <= MOST_SPLITS))
        depths = (SHALLOW, DEEP) if (m, n, consumers) in DEEPER else (SHALLOW,)
        for (depth, stages), splits in product(depths, (1, *shared)):
            tile = m, n, depth
            yield Config("sgemm", tile, (1, 1), stages, consumers, splits=splits, swap_ab=swap, chip=chip.name)


def _time(problem: Problem, rows: int, config: Config, chip: Chip) -> float:
    """In products of one SM: waves of whole tiles, or equal shares and what it costs to bring these together."""
    m, n, _ = config.tile
    tiles = -(-rows // m) * -(-problem.n // n) * problem.batch
    of_tile = (m * n + OVERHEAD * (m + n)) * max(problem.k, 1)
    if config.splits == 1:
        return -(-tiles // chip.multiprocessors) * of_tile
    return tiles * of_tile / chip.multiprocessors + 4 * m * n * SHARES * OVERHEAD
