"""Cycles that a product by sgemm takes, by the instructions that SMs issue: FFMA is one like any other, so each beside
it takes its time. Counts are those of SASS; what takes cycles otherwise was fitted to tries-fp32-h100.json: what is
chosen of those 8 deep is at most 3.5 % slower than the best of a shape, in the mean 0.5 %."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gemmsmith.collective.cuda_cores import ALONG, VECTOR, WARP, WORD
from gemmsmith.core.chip import Chip
from gemmsmith.core.mma import CHUNK, WGMMA_M
from gemmsmith.core.occupancy import occupancy
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.types import ORDER_LENGTH
from gemmsmith.schedule.stream import LEAST_IDLE, MOST_PARTS
from gemmsmith.tuning.gpus import H100

SCHEDULERS = 4
"""Of an SM, an instruction a cycle each."""
OF_COPY, OF_K_TILE = {"K": 3.0, "MN": 1.5}, 30
"""Instructions of a word's copy, its address with it, by the operand's layout; and of a k-tile, for the barrier and the
stages (SASS by NVRTC 13 for sm_90a; ten tiles in four layouts are off by 3.4 % at most)."""
BESIDE, SHARING, MOST_REGISTERS = 62, 24, 255
"""Registers of a thread beside its sums and, twice, its rows and columns; and where K is shared (of kernels
8 deep, off by 14 at most)."""
IDLE = 0.14
"""Of the cycles where a scheduler has one warp it issues nothing in so many; with more, over the square of how many."""
LINE_CYCLES = 0.6
"""Cycles of an SM for each line of memory that a warp's copy touches."""
LATENCY, OF_TILE, STORED, ADDED = 900, 5000, 40, 45
"""Cycles until a copy has landed; cycles of a tile in which nothing is multiplied; and bytes a cycle by which an SM
stores D, and by which it stores, or loads, the sums of a share."""


class _Cost(NamedTuple):
    """Of a kernel: cycles an SM issues for a k-tile of one CTA, those its copies take besides, cycles that it takes at
    least, CTAs an SM, warps of each, and the bytes of a tile's sums."""

    issue: float
    copies: float
    least: float
    resident: int
    warps: int
    sums: int

    def k_tile(self, resident: int) -> float:
        """Cycles of a k-tile of each of so many CTAs of an SM, together."""
        busy = 1 - IDLE / max(resident * self.warps / SCHEDULERS, 1) ** 2
        return max(resident * (self.issue + self.copies) / busy, self.least)


@lru_cache(maxsize=4096)
def _cost(spec: KernelSpec, chip: Chip) -> _Cost:
    (m, n, depth), threads, warps = spec.config.tile, spec.threads, spec.threads // WARP
    rows, columns = 2 * spec.warpgroup_rows // WGMMA_M, 2 * spec.warpgroup_columns // CHUNK
    loads = ceil(rows / VECTOR) + ceil(columns / VECTOR)
    copies = sum(OF_COPY[tile.major] * tile.mn / threads for tile in spec.tiles)
    slots = depth * (rows * columns + loads + copies) + OF_K_TILE
    lines = sum(tile.mn * depth / (min(depth, ALONG) if tile.major == "K" else WARP) for tile in spec.tiles)
    beside = BESIDE + SHARING * (spec.config.splits != 1)
    registers = min(rows * columns + 2 * (rows + columns) + beside, MOST_REGISTERS)
    shared = min(spec.config.stages * spec.stage_bytes + m * n * WORD, chip.shared_bytes)
    resident = min(occupancy(chip, threads, registers, shared).ctas, max(ORDER_LENGTH // chip.multiprocessors, 1))
    least = LATENCY / (spec.config.stages - 1)
    return _Cost(warps * slots / SCHEDULERS, LINE_CYCLES * lines, least, max(resident, 1), warps, m * n * WORD)


def cycles(problem: Problem, rows: int, spec: KernelSpec, chip: Chip) -> float:
    """Of a product of so many rows: what the SM with most to do issues, in waves of tiles and equal shares of those
    that are left, or what the bytes of memory take; and the tiles' ends."""
    cost, config = _cost(spec, chip), spec.config
    m, n, depth = config.tile
    height, width = (problem.n, rows) if config.swap_ab else (rows, problem.n)
    tiles, k_tiles = ceil(height / m) * ceil(width / n) * problem.batch, max(ceil(problem.k / depth), 1)
    sms, slots = chip.multiprocessors, chip.multiprocessors * cost.resident
    end = OF_TILE + cost.resident * cost.sums / STORED
    if config.splits != 1:
        slots = min(slots, tiles * (config.splits or k_tiles))
    (waves, left), loops, ends = divmod(tiles, slots), 0.0, 0.0
    if left and config.splits == 1:
        loops, ends = k_tiles * cost.k_tile(ceil(left / sms)), end
    elif left:
        units, left = _stream_k_units(left, slots, waves, k_tiles)
        waves, beside = (tiles - left) // slots, ceil(units / sms)
        adds = ceil(units / left) - (units % left == 0)  # of a tile's shares, to that of who reduces it
        loops = ceil(left * k_tiles / units) * cost.k_tile(beside)
        ends = ceil(left / units) * end + (adds > 0) * (1 + adds) * beside * cost.sums / ADDED
    loops += waves * k_tiles * cost.k_tile(min(ceil(slots / sms), cost.resident))
    nbytes = problem.batch * WORD * (height * width + problem.k * (height + width))
    return max(loops, nbytes / H100.dram_bytes_per_cycle) + waves * end + ends


def _stream_k_units(left: int, slots: int, waves: int, k_tiles: int) -> tuple[int, int]:
    """Stream-K's work units, and how many tiles' k-tiles they share, where `left` tiles follow whole waves (as
    StreamScheduler chooses them)."""
    parts = min(slots // left, k_tiles, MOST_PARTS)
    if waves and parts > 1 and (slots - left * parts) * LEAST_IDLE <= slots * parts * waves:
        return left * parts, left
    return slots, left + slots * (waves > 0)
