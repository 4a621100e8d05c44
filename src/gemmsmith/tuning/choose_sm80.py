"""Choice of a config of the sm_80 designs, which run without wgmma: on GPUs before Hopper, and for fp32.

Tiles of mma_multistage are ranked by waves and traffic, tiles of sgemm by issued instructions: an FFMA takes an issue
slot as any other instruction does. Instructions are counted in SASS; the other constants were fitted to
tries-fp32-h100. Of the configs with tile K 8 the choice is at most 3.5 % slower than the fastest of a shape, in the
mean 0.5 %. Nothing was measured on other chips than H100 and H200.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import ceil
from typing import NamedTuple

from gemmsmith.collective.simt import MAX_COPY_LANES_ALONG_K, VECTOR_ELEMENTS, WORD_BYTES
from gemmsmith.core.chip import Chip, occupancy
from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.mma import N8_COLUMNS, THREADS_PER_WARPGROUP, WARP_THREADS, WGMMA_M
from gemmsmith.core.problem import Problem
from gemmsmith.core.register_budgets import MAX_REDUCTIONS, REGISTERS_PER_SUBTILE_MATRIX, SM80_REGISTER_BUDGET
from gemmsmith.core.scalars import ceil_div
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.evaluate import row_function_inputs
from gemmsmith.hw.cluster import MAX_CLUSTERS
from gemmsmith.tile_scheduler.stream_k import INVERSE_MAX_IDLE_FRACTION, MAX_SPLITS_PER_TILE
from gemmsmith.tuning import measured_configs
from gemmsmith.tuning.candidates import fit_stages, spec_for
from gemmsmith.tuning.gpus import H100, SCHEDULERS_PER_SM

INSTRUCTIONS_PER_COPIED_WORD = {"K": 3.0, "MN": 1.5}
"""Instructions to copy a word, with its address, by the operand's major dimension. This and the next from SASS by NVRTC
13 for sm_90a; ten tiles in four layouts deviate by at most 3.4 %."""
INSTRUCTIONS_PER_K_TILE = 30
"""Further instructions per k-tile, for the barrier and the stages."""
OTHER_REGISTERS = 62
"""Registers per thread besides the accumulator and two sets of fragments. For kernels with tile K 8, within 14
registers."""
SPLIT_REGISTERS = 24
"""Additional registers per thread if K is split."""
MAX_REGISTERS = 255
"""Registers that a thread can have (CUDA)."""
SINGLE_WARP_IDLE_FRACTION = 0.14
"""Fraction of cycles in which a scheduler with one warp issues nothing; with n warps it is divided by n^2. This and the
rest fitted to tries-fp32-h100."""
CYCLES_PER_LINE = 0.6
"""Cycles of an SM per line of memory that a warp's copy touches."""
COPY_LATENCY_CYCLES = 900
"""Cycles until a copy is complete."""
TILE_OVERHEAD_CYCLES = 5000
"""Cycles per tile in which nothing is multiplied."""
STORE_BYTES_PER_CYCLE = 40
"""Bytes of D per cycle that an SM stores."""
PARTIALS_BYTES_PER_CYCLE = 45
"""Bytes of partial sums per cycle that an SM stores or loads."""


class KernelCost(NamedTuple):
    """Costs of an sgemm kernel.

    Attributes:
        issue_cycles: Cycles in which an SM issues the instructions of one CTA's k-tile.
        copy_cycles: Additional cycles of the k-tile's copies, for the lines that they touch.
        min_k_tile_cycles: Minimum cycles of a k-tile, by the latency of copies.
    """

    issue_cycles: float
    copy_cycles: float
    min_k_tile_cycles: float
    ctas_per_sm: int
    warps: int
    accumulator_bytes: int

    def k_tile_cycles(self, ctas: int) -> float:
        """Return the cycles in which `ctas` CTAs of an SM compute one k-tile each.

        A scheduler idles more the fewer warps it has to choose from (SINGLE_WARP_IDLE_FRACTION).
        """
        busy = 1 - SINGLE_WARP_IDLE_FRACTION / max(ctas * self.warps / SCHEDULERS_PER_SM, 1) ** 2
        return max(ctas * (self.issue_cycles + self.copy_cycles) / busy, self.min_k_tile_cycles)


@lru_cache(maxsize=4096)
def _kernel_cost(spec: KernelSpec, chip: Chip) -> KernelCost:
    (m, n, tile_k), threads, warps = spec.config.tile, spec.threads, spec.threads // WARP_THREADS
    rows, columns = 2 * spec.warpgroup_rows // WGMMA_M, 2 * spec.warpgroup_columns // N8_COLUMNS
    loads = ceil(rows / VECTOR_ELEMENTS) + ceil(columns / VECTOR_ELEMENTS)
    copies = sum(INSTRUCTIONS_PER_COPIED_WORD[tile.major] * tile.mn / threads for tile in spec.tiles)
    instructions = tile_k * (rows * columns + loads + copies) + INSTRUCTIONS_PER_K_TILE
    lanes_per_line = {"K": min(tile_k, MAX_COPY_LANES_ALONG_K), "MN": WARP_THREADS}
    lines = sum(tile.mn * tile_k / lanes_per_line[tile.major] for tile in spec.tiles)
    other_registers = OTHER_REGISTERS + SPLIT_REGISTERS * (spec.config.splits != 1)
    registers = min(rows * columns + 2 * (rows + columns) + other_registers, MAX_REGISTERS)
    shared = min(spec.config.stages * spec.stage_bytes + m * n * WORD_BYTES, chip.max_shared_bytes_per_cta)
    max_ctas = max(MAX_CLUSTERS // chip.sm_count, 1)
    ctas_per_sm = max(min(occupancy(chip, threads, registers, shared).ctas_per_sm, max_ctas), 1)
    min_k_tile_cycles = COPY_LATENCY_CYCLES / (spec.config.stages - 1)
    issue_cycles = warps * instructions / SCHEDULERS_PER_SM
    return KernelCost(issue_cycles, CYCLES_PER_LINE * lines, min_k_tile_cycles, ctas_per_sm, warps, m * n * WORD_BYTES)


class SgemmEstimate(NamedTuple):
    """What is estimated of an sgemm GEMM, in SM cycles.

    Attributes:
        mainloop_cycles: Of the SM with most work: its full waves of tiles, and its share of the remaining tiles.
        memory_cycles: Of the DRAM traffic, of `dram_bytes` bytes.
        epilogue_cycles: Of the epilogues, and of partial sums.
        dram_bytes: Bytes of operands and results.
    """

    mainloop_cycles: float
    memory_cycles: float
    epilogue_cycles: float
    dram_bytes: int
    cost: KernelCost

    @property
    def cycles(self) -> float:
        """Cycles of the kernel."""
        return max(self.mainloop_cycles, self.memory_cycles) + self.epilogue_cycles


def sgemm_estimate(problem: Problem, rows: int, spec: KernelSpec, chip: Chip) -> SgemmEstimate:
    """Return the estimate of an sgemm GEMM with `rows` rows of A, which replace the problem's M."""
    cost, config = _kernel_cost(spec, chip), spec.config
    tile_m, tile_n, tile_k = config.tile
    m, n = (problem.n, rows) if config.swap_ab else (rows, problem.n)
    tiles, k_tiles = ceil(m / tile_m) * ceil(n / tile_n) * problem.batch, max(ceil(problem.k / tile_k), 1)
    sms, ctas = chip.sm_count, chip.sm_count * cost.ctas_per_sm
    cycles_per_epilogue = TILE_OVERHEAD_CYCLES + cost.ctas_per_sm * cost.accumulator_bytes / STORE_BYTES_PER_CYCLE
    if config.splits != 1:
        ctas = min(ctas, tiles * (config.splits or k_tiles))
    (waves, last_tiles), mainloop_cycles, epilogue_cycles = divmod(tiles, ctas), 0.0, 0.0
    if last_tiles and config.splits == 1:
        mainloop_cycles, epilogue_cycles = k_tiles * cost.k_tile_cycles(ceil(last_tiles / sms)), cycles_per_epilogue
    elif last_tiles:
        sk_units, sk_tiles = _stream_k_units(last_tiles, ctas, waves, k_tiles)
        waves, units_per_sm = (tiles - sk_tiles) // ctas, ceil(sk_units / sms)
        peers = ceil(sk_units / sk_tiles) - (sk_units % sk_tiles == 0)  # whose partial sums the final split adds
        mainloop_cycles = ceil(sk_tiles * k_tiles / sk_units) * cost.k_tile_cycles(units_per_sm)
        fixup_bytes = (peers > 0) * (1 + peers) * units_per_sm * cost.accumulator_bytes
        epilogue_cycles = ceil(sk_tiles / sk_units) * cycles_per_epilogue + fixup_bytes / PARTIALS_BYTES_PER_CYCLE
    mainloop_cycles += waves * k_tiles * cost.k_tile_cycles(min(ceil(ctas / sms), cost.ctas_per_sm))
    nbytes = problem.batch * WORD_BYTES * (m * n + problem.k * (m + n))
    epilogue_cycles += waves * cycles_per_epilogue
    return SgemmEstimate(mainloop_cycles, nbytes / H100.dram_bytes_per_cycle, epilogue_cycles, nbytes, cost)


def _stream_k_units(last_tiles: int, ctas: int, waves: int, k_tiles: int) -> tuple[int, int]:
    """Return (work units, stream-K tiles) if `last_tiles` tiles are left after `waves` full waves of `ctas` tiles.

    The rules are those of StreamKTileScheduler: a work unit is a CTA's share of the k-tiles of the stream-K tiles.
    """
    splits = min(ctas // last_tiles, k_tiles, MAX_SPLITS_PER_TILE)
    if waves and splits > 1 and (ctas - last_tiles * splits) * INVERSE_MAX_IDLE_FRACTION <= ctas * splits * waves:
        return last_tiles * splits, last_tiles
    return ctas, last_tiles + ctas * (waves > 0)


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


def rank_sm80(problem: Problem, epilogue: EpilogueSpec, chip: Chip, *, invariant: bool = False) -> list[Config]:
    """Return the configs of sgemm (for fp32) or mma_multistage, by estimated time; those that spill come last.

    `invariant`: for a batch-invariant plan configs are ranked for BATCH_INVARIANT_M rows, and only those that
    accumulate each tile in one CTA. Raises the last config's ConfigError if none works.
    """
    rejection, rows = ConfigError("no tile"), BATCH_INVARIANT_M if invariant else problem.m
    is_sgemm, ranking = problem.a.dtype == FP32, list[tuple[bool, float, Config]]()
    for config in _sgemm_configs(problem, epilogue, rows, chip) if is_sgemm else _mma_configs(problem, chip):
        if invariant and (config.splits != 1 or config.swap_ab):
            continue
        try:
            fitted = _with_fitted_stages(config, problem, epilogue)
            if fitted.stages > 2:
                spec = spec_for(fitted, problem, epilogue)
                if is_sgemm:
                    time = sgemm_estimate(problem, rows, spec, chip).cycles
                else:
                    time = _mma_time(problem, rows, spec, chip)
                ranking.append((_spills(spec), time, fitted))
        except ConfigError as error:
            rejection = error
    if not ranking:
        raise rejection
    return [config for *_, config in sorted(ranking, key=lambda x: x[:2])]


def lookup_sm80(problem: Problem, epilogue: EpilogueSpec, chip: Chip, device: int = 0) -> Config | None:
    """Return the config that was measured for the GEMM, or the plain one, on a chip, if it works and does not spill."""
    key = measured_configs.key_of(problem, epilogue, chip)
    entry = measured_configs.find(key, device) or measured_configs.find(key.plain, device)
    config = entry and entry.config
    try:
        fitted = _with_fitted_stages(config, problem, epilogue) if config else None
        return fitted if fitted and not _spills(spec_for(fitted, problem, epilogue)) else None
    except ConfigError:
        return None


def _with_fitted_stages(config: Config, problem: Problem, epilogue: EpilogueSpec) -> Config:
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
    """Yield the configs of mma_multistage, without and with stream-K (splits=0)."""
    for (m, n, consumers), splits, (row_bytes, stages) in product(MMA_TILES, (1, 0), ROW_BYTES_AND_STAGES):
        tile = m, n, row_bytes // problem.a.dtype.bytes
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
        splits_of_k = [1]
        if not graph.requires_full_rows:
            splits_of_k += [0, *sorted(s for s in splits_per_tile if 1 < s <= MAX_SPLITS)]
        tile_ks = [SGEMM_TILE_K_AND_STAGES]
        tile_ks += [SGEMM_LARGE_TILE_K_AND_STAGES] * ((m, n, consumers) in LARGE_TILE_K_TILES)
        for (k, stages), splits in product(tile_ks, splits_of_k):
            tile = m, n, k
            yield Config("sgemm", tile, (1, 1), stages, consumers, splits=splits, swap_ab=swap, chip=chip.name)


def _mma_time(problem: Problem, rows: int, spec: KernelSpec, chip: Chip) -> float:
    """Return the estimated time of a GEMM with `rows` rows of A by mma_multistage, in multiply-adds of one SM.

    Without splits, waves of tiles follow one another, and each takes as long as a tile. With stream-K all SMs have
    equal work, and the reduction of a tile's partial sums is added.
    """
    m, n, _ = spec.config.tile
    tiles = ceil_div(rows, m) * ceil_div(problem.n, n) * problem.batch
    tile_time = (m * n + COPY_COST_PER_ROW * (m + n)) * max(problem.k, 1)
    if spec.config.splits == 1:
        return ceil_div(tiles, chip.sm_count) * tile_time
    return tiles * tile_time / chip.sm_count + 4 * m * n * SPLIT_REDUCTION_COST * COPY_COST_PER_ROW
