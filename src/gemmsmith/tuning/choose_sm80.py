"""Choice of a config of the sm_80 designs, which run without wgmma: on GPUs before Hopper, and for fp32.

Tiles of mma_multistage are ranked by waves and traffic, tiles of sgemm by instructions (sgemm_model.py). Nothing was
measured on other chips than H100 and H200.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from gemmsmith.core.chip import Chip
from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.integers import ceil_div
from gemmsmith.core.mma import THREADS_PER_WARPGROUP
from gemmsmith.core.problem import Problem
from gemmsmith.core.register_budgets import MAX_REDUCTIONS, REGISTERS_PER_SUBTILE_MATRIX, SM80_REGISTER_BUDGET
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.register_usage import row_function_inputs
from gemmsmith.tuning.sgemm_model import sgemm_cycles
from gemmsmith.tuning.stage_count import fit_stages, spec_for
from gemmsmith.tuning.tuned_table import user_table

MMA_TILES = [(256, 128, 2), (128, 256, 2), (128, 128, 2), (128, 64, 2), (64, 128, 2), (64, 64, 2), (64, 32, 1)]
MMA_TILES += [(64, 128, 1), (64, 256, 1)]
"""Tiles of mma_multistage (M, N, consumers); the last ones for row functions, since one warpgroup has full rows."""
ROW_BYTES_AND_STAGES = [(128, 3), (64, 4)]
"""Bytes of a k-tile's rows, and their maximum stages. Full lines of 128 bytes are 3 to 5 % faster on an H200
(tries-ladder-h200) if shared memory holds three stages of them."""
SGEMM_TILES = [(256, 128, 2), (256, 64, 1), (128, 128, 2), (128, 64, 1), (128, 64, 2), (256, 32, 1), (128, 32, 1)]
SGEMM_TILES += [(256, 16, 1), (64, 128, 1), (64, 64, 1), (64, 32, 1)]
"""Tiles of sgemm (M, N, consumers)."""
FULL_ROW_TILE = (64, 256, 1)
"""Tile of sgemm for row functions that need its width only: threads do not prefetch columns (collective/simt.py)."""
SGEMM_TILE_K_AND_STAGES = (8, 4)
"""Tile K of sgemm and its maximum stages."""
SGEMM_LARGE_TILE_K_AND_STAGES = (16, 3)
"""The same for `LARGE_TILE_K_TILES`."""
MAX_SPLITS = 64
"""Maximum splits of a tile's K; chosen, not measured."""
LARGE_TILE_K_TILES = {(128, 128, 2), (128, 64, 2)}
"""Tiles that are also tried with the larger tile K. 256x128 is 2 to 11 % slower with it, of 23 GEMMs; 256x64 takes 1.9
times as long, since its stages leave one CTA per SM, which needs eight warps (tries-fp32-h100)."""
BATCH_INVARIANT_M = 1024
"""M for which batch-invariant configs are ranked; chosen, not measured."""
COPY_COST_PER_ROW = 96
"""Cost of copying one row or column of a k-slice, in multiply-adds; chosen, not measured."""
SPLIT_REDUCTION_COST = 64
"""Factor of the cost of a tile's split-K reduction, 4 * m * n * this * COPY_COST_PER_ROW; chosen, not measured."""


def choose_sm80(problem: Problem, epilogue: EpilogueSpec, chip: Chip, *, invariant: bool = False) -> Config:
    """Return the first config of `rank_sm80`."""
    return rank_sm80(problem, epilogue, chip, invariant=invariant)[0]


def rank_sm80(problem: Problem, epilogue: EpilogueSpec, chip: Chip, *, invariant: bool = False) -> list[Config]:
    """Return the configs by estimated time, fastest first, with those that spill last.

    `invariant`: the config must not depend on M, and accumulates each tile in one CTA.

    Raises:
        ConfigError: No config works; the last one's error.
    """
    rejection, rows = ConfigError("no tile"), BATCH_INVARIANT_M if invariant else problem.m
    configs = _sgemm_configs(problem, epilogue, rows, chip) if problem.a.dtype == FP32 else _mma_configs(problem, chip)
    ranking: list[tuple[bool, float, Config]] = []
    for config in configs:
        if invariant and (config.splits != 1 or config.swap_ab):
            continue
        try:
            fitted = _with_fitted_stages(config, problem, epilogue)
            if fitted.stages > 2:
                spec = spec_for(fitted, problem, epilogue)
                if not spec.design.mma_op.uses_tensor_cores:
                    time = sgemm_cycles(problem, rows, spec, chip)
                else:
                    time = _estimated_time(problem, rows, config, chip)
                ranking.append((_spills(spec), time, fitted))
        except ConfigError as error:
            rejection = error
    if not ranking:
        raise rejection
    return [config for *_, config in sorted(ranking, key=lambda x: x[:2])]


def lookup_sm80(problem: Problem, epilogue: EpilogueSpec, chip: Chip) -> Config | None:
    """Return the config that the user has tuned for the plain GEMM on a chip, if it works and does not spill."""
    config = user_table().get(problem, chip)
    try:
        fitted = _with_fitted_stages(config, problem, epilogue) if config else None
        return fitted if fitted and not _spills(spec_for(fitted, problem, epilogue)) else None
    except ConfigError:
        return None


def _with_fitted_stages(config: Config, problem: Problem, epilogue: EpilogueSpec) -> Config:
    """Return the config with as many of its stages as fit into shared memory."""
    return fit_stages(spec_for(config, problem, epilogue))


def _spills(spec: KernelSpec) -> bool:
    """Return whether the accumulator and the epilogue's matrices exceed the register budget.

    Matrices that are loaded without TMA, full rows, more than MAX_REDUCTIONS reductions, and for sgemm split tiles of
    a transposed D count as one matrix each.
    """
    graph = spec.epilogue.graph
    accumulator = spec.warpgroup_rows * spec.warpgroup_columns / THREADS_PER_WARPGROUP
    matrices = sum(o.broadcast_dims.is_matrix and o.name not in spec.tma_names for o in graph.operands)
    matrices += graph.requires_full_rows
    matrices += sum(node.op == "reduce" for node in graph.nodes) > MAX_REDUCTIONS
    is_transposed = bool(spec.epilogue.column_major) != spec.config.swap_ab  # column_major is before swap_ab
    matrices += not spec.design.mma_op.uses_tensor_cores and spec.config.splits != 1 and is_transposed
    return matrices > 0 and accumulator + REGISTERS_PER_SUBTILE_MATRIX * matrices > SM80_REGISTER_BUDGET


def _mma_configs(problem: Problem, chip: Chip) -> Iterator[Config]:
    dtype = problem.a.dtype
    for m, n, consumers in MMA_TILES:
        for splits in (1, 0):
            for row_bytes, stages in ROW_BYTES_AND_STAGES:
                tile = m, n, row_bytes // dtype.bytes
                yield Config("mma_multistage", tile, (1, 1), stages, consumers, splits=splits, chip=chip.name)


def _sgemm_configs(problem: Problem, epilogue: EpilogueSpec, rows: int, chip: Chip) -> Iterator[Config]:
    """Yield the configs of sgemm.

    K is split by stream-K, or so that there are as many CTAs as SMs, or twice as many; but not with functions of full
    rows, which would spill.
    """
    graph = epilogue.graph
    swaps = (False, True) if graph.is_transposable else (False,)
    for (m, n, consumers), swap in product(SGEMM_TILES + [FULL_ROW_TILE] * bool(row_function_inputs(graph)), swaps):
        problem_m, problem_n = (problem.n, rows) if swap else (rows, problem.n)
        tiles = max(ceil_div(problem_m, m) * ceil_div(problem_n, n) * problem.batch, 1)
        splits_per_tile = {ctas_per_sm * chip.sm_count // tiles for ctas_per_sm in (1, 2)}
        splits_of_k = (1, 0, *sorted(s for s in splits_per_tile if 1 < s <= MAX_SPLITS))
        if graph.requires_full_rows:
            splits_of_k = (1,)
        tile_ks = [SGEMM_TILE_K_AND_STAGES]
        if (m, n, consumers) in LARGE_TILE_K_TILES:
            tile_ks.append(SGEMM_LARGE_TILE_K_AND_STAGES)
        for (k, stages), splits in product(tile_ks, splits_of_k):
            tile = m, n, k
            yield Config("sgemm", tile, (1, 1), stages, consumers, splits=splits, swap_ab=swap, chip=chip.name)


def _estimated_time(problem: Problem, rows: int, config: Config, chip: Chip) -> float:
    """Return the time in multiply-adds of one SM: waves of tiles, or equal splits and their reduction."""
    m, n, _ = config.tile
    tiles = ceil_div(rows, m) * ceil_div(problem.n, n) * problem.batch
    tile_time = (m * n + COPY_COST_PER_ROW * (m + n)) * max(problem.k, 1)
    if config.splits == 1:
        return ceil_div(tiles, chip.sm_count) * tile_time
    return tiles * tile_time / chip.sm_count + 4 * m * n * SPLIT_REDUCTION_COST * COPY_COST_PER_ROW
