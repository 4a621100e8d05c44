"""Cost model of sgemm by issued instructions: an FFMA takes an issue slot as any other instruction does.

Instructions are counted in SASS; the other constants were fitted to tries-fp32-h100. Of the configs with tile K 8
the choice is at most 3.5 % slower than the fastest of a shape, in the mean 0.5 %.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gemmsmith.collective.simt import MAX_COPY_LANES_ALONG_K, VECTOR_ELEMENTS, WARP_THREADS, WORD_BYTES
from gemmsmith.core.chip import Chip
from gemmsmith.core.mma import N8_COLUMNS, WGMMA_M
from gemmsmith.core.occupancy import occupancy
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.hw.cluster import MAX_CLUSTERS
from gemmsmith.tile_scheduler.stream_k import INVERSE_MAX_IDLE_FRACTION, MAX_SPLITS_PER_TILE
from gemmsmith.tuning.gpus import H100

SCHEDULERS_PER_SM = 4
"""Instructions that an SM issues per cycle."""
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


class _KernelCost(NamedTuple):
    """Costs of a kernel.

    `issue_cycles`: cycles in which an SM issues the instructions of one CTA's k-tile; `copy_cycles`: additional cycles
    of its copies; `min_k_tile_cycles`: minimum cycles of a k-tile; `warps`: warps per CTA; `accumulator_bytes`: bytes
    of a tile's accumulators.
    """

    issue_cycles: float
    copy_cycles: float
    min_k_tile_cycles: float
    ctas_per_sm: int
    warps: int
    accumulator_bytes: int

    def k_tile_cycles(self, ctas: int) -> float:
        """Return the cycles in which `ctas` CTAs of an SM compute one k-tile each."""
        busy = 1 - SINGLE_WARP_IDLE_FRACTION / max(ctas * self.warps / SCHEDULERS_PER_SM, 1) ** 2
        return max(ctas * (self.issue_cycles + self.copy_cycles) / busy, self.min_k_tile_cycles)


@lru_cache(maxsize=4096)
def _kernel_cost(spec: KernelSpec, chip: Chip) -> _KernelCost:
    (m, n, tile_k), threads, warps = spec.config.tile, spec.threads, spec.threads // WARP_THREADS
    rows, columns = 2 * spec.warpgroup_rows // WGMMA_M, 2 * spec.warpgroup_columns // N8_COLUMNS
    loads = ceil(rows / VECTOR_ELEMENTS) + ceil(columns / VECTOR_ELEMENTS)
    copies = sum(INSTRUCTIONS_PER_COPIED_WORD[tile.major] * tile.mn / threads for tile in spec.tiles)
    instructions = tile_k * (rows * columns + loads + copies) + INSTRUCTIONS_PER_K_TILE
    lines = 0.0
    for tile in spec.tiles:
        lines += tile.mn * tile_k / (min(tile_k, MAX_COPY_LANES_ALONG_K) if tile.major == "K" else WARP_THREADS)
    other_registers = OTHER_REGISTERS + SPLIT_REGISTERS * (spec.config.splits != 1)
    registers = min(rows * columns + 2 * (rows + columns) + other_registers, MAX_REGISTERS)
    shared = min(spec.config.stages * spec.stage_bytes + m * n * WORD_BYTES, chip.max_shared_bytes_per_cta)
    max_ctas = max(MAX_CLUSTERS // chip.sm_count, 1)
    ctas_per_sm = max(min(occupancy(chip, threads, registers, shared).ctas_per_sm, max_ctas), 1)
    min_k_tile_cycles = COPY_LATENCY_CYCLES / (spec.config.stages - 1)
    issue_cycles = warps * instructions / SCHEDULERS_PER_SM
    return _KernelCost(issue_cycles, CYCLES_PER_LINE * lines, min_k_tile_cycles, ctas_per_sm, warps, m * n * WORD_BYTES)


def sgemm_cycles(problem: Problem, rows: int, spec: KernelSpec, chip: Chip) -> float:
    """Return the estimated cycles of a GEMM with `rows` rows of A.

    They are the maximum of the mainloop's cycles on the SM with most work (its full waves of tiles and its share of the
    remaining ones) and of the cycles of the DRAM traffic, plus the cycles of the epilogues.
    """
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
    return max(mainloop_cycles, nbytes / H100.dram_bytes_per_cycle) + waves * cycles_per_epilogue + epilogue_cycles


def _stream_k_units(last_tiles: int, ctas: int, waves: int, k_tiles: int) -> tuple[int, int]:
    """Return stream-K's work units and tiles if `last_tiles` tiles follow full waves, as StreamKTileScheduler does."""
    splits = min(ctas // last_tiles, k_tiles, MAX_SPLITS_PER_TILE)
    if waves and splits > 1 and (ctas - last_tiles * splits) * INVERSE_MAX_IDLE_FRACTION <= ctas * splits * waves:
        return last_tiles * splits, last_tiles
    return ctas, last_tiles + ctas * (waves > 0)
