"""Choice of a config for a grouped GEMM, as if the sizes of its groups were uniform from 0 to twice their mean.

The table is on the device, so the choice may depend on the number of rows and of groups only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from gemmsmith.binding.binding import Binding
from gemmsmith.core.chip import Chip
from gemmsmith.core.config import Config
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.mma import WGMMA_M
from gemmsmith.core.problem import Problem
from gemmsmith.core.scalars import ceil_div
from gemmsmith.tuning import measured_configs
from gemmsmith.tuning.candidates import fit_stages, promotion_leaves_registers
from gemmsmith.tuning.choose import rank_configs
from gemmsmith.tuning.choose_sm80 import rank_sm80
from gemmsmith.tuning.config_table import Array, ConfigTable, configs_for
from gemmsmith.tuning.dtype_equivalence import as_16bit_problem, config_for_dtype
from gemmsmith.tuning.gpus import Gpu
from gemmsmith.tuning.model import copied_bytes, covers, estimate

MAX_CONFIGS = 256
"""Configs that are ranked, of which the first that can compute groups is taken."""
MIN_STAGES = 3
SIZES = 16
"""Sizes of groups over which estimates are averaged: the middles of so many parts of 0 to twice the mean. Of 19 GEMMs
(tries-grouped-h200, tries-grouped-h100) the choices are 6 % slower than the fastest configs, with 8 sizes 11 %."""
PARTIAL_TILE_GAIN = 0.7
"""How much of the rows that a partial tile does not have its time gets shorter. 500 rows of ten GEMMs on an H200
(tries-grouped-h200), whose estimates then correlate best with their times (0.82; without it 0.64)."""
WIDTHS = 8
"""Widths of a tile whose columns are multiplied alone (Accumulator.widths)."""
L2_BYTES_PER_CYCLE = 6000
"""Bytes that all SMs read from the L2 per cycle, which small tiles without multicast would exceed. This and the next
one: of 5000 to 7000, with exponents of 4 to 16, the nearest to the choices of grouped-unseen-h100."""
L2_NORM_EXPONENT = 8
"""Exponent of the norm that combines this bound with the model's estimate."""
GATHER_COST = 1.2
"""Times that a kernel takes longer if rows are gathered by cp.async. Fitted to times of two GEMMs
(tries-gathered-h100), as the next one."""
GATHER_L2_BYTES_PER_CYCLE = 3190
"""Bytes that all SMs read from the L2 per cycle if cp.async reads most of them: 5.6 TB/s at 1755 MHz."""
UNMULTIPLIED_COLUMN_COST = 0.4
"""Cost of a column that is loaded but not multiplied, relative to one that is. Measured likewise."""


def choose_grouped(binding: Binding, chip: Chip, gpu: Gpu) -> tuple[Config, str]:
    """Return a config for a grouped GEMM, and where it comes from, in words. Raises ConfigError if there is none.

    It is a measured one, or the first one by the estimate for equal or uniformly distributed groups.
    """
    key = measured_configs.key_of(binding.problem, binding.spec, chip)
    entry = measured_configs.find(key, binding.a.device_index)
    if entry and (config := _fitted(binding, entry.config)):
        return config, "tuned"
    ranked, origin = _ranking(binding, chip, gpu)
    for config in ranked:
        if fitted := _fitted(binding, config):
            return fitted, origin
    for config in ranked:
        _fitted(binding, config, must_fit=True)
    raise ConfigError("config: no config can compute this grouped GEMM")


def rank_grouped(binding: Binding, chip: Chip, gpu: Gpu) -> Iterator[Config]:
    """Yield the configs for a grouped GEMM, those with the least estimated time first."""
    ranked, _ = _ranking(binding, chip, gpu)
    return (fitted for config in ranked if (fitted := _fitted(binding, config)))


def _ranking(binding: Binding, chip: Chip, gpu: Gpu) -> tuple[Sequence[Config], str]:
    """Return the configs with the least estimated time, best first, and where they come from, in words."""
    problem, grouping = equal_groups(binding.problem), binding.problem.grouping
    assert grouping
    if not covers(problem.a.dtype, chip):
        return rank_sm80(problem, binding.spec, chip), f"chosen for {chip} and equal groups"
    if grouping.along == "k":
        return rank_configs(problem, binding.spec, MAX_CONFIGS, gpu=gpu), "chosen by the model for equal groups"
    is_swapped = grouping.role == "b"  # a fixed order of rows needs D, not D^T
    swap_ab = is_swapped if binding.spec.reductions_in_order("n" if is_swapped else "m") else None
    ranked = _rank(mean_rows(binding.problem), binding.spec, gpu, grouping.gathers, swap_ab)
    return ranked, "chosen by the model for sizes from 0 to twice the mean"


def _fitted(binding: Binding, config: Config, must_fit: bool = False) -> Config | None:
    """Return a config as it computes groups, with as many stages as fit; None if it cannot."""
    if config.splits != 1 or config.cluster_splits != 1:
        return None
    plain = config.replace(serpentine=False, sync_clusters=False)
    if binding.problem.grouping and binding.problem.grouping.along == "k":
        plain = plain.replace(alias_epilogue=False)
    try:
        spec = (binding.transposed() if plain.swap_ab else binding).kernel_spec(plain)
        fitted = fit_stages(spec)
    except ConfigError:
        if must_fit:
            raise
        return None
    return fitted if fitted.stages >= MIN_STAGES and promotion_leaves_registers(spec) else None


@lru_cache(maxsize=256)
def _rank(
    problem: Problem, epilogue: EpilogueSpec, gpu: Gpu, gathers: bool, swap_ab: bool | None
) -> tuple[Config, ...]:
    """Return the configs with the least estimated time for groups of uniformly distributed sizes, best first.

    `problem`: the batched product of groups of the mean size. `gathers`: rows are gathered by index. If `swap_ab` is
    not None, all configs have it.
    """
    largest = as_16bit_problem(_with_rows(problem, 2 * problem.m))
    table = configs_for(epilogue, largest, splits=False, sms=gpu.sms)
    is_valid = table.valid_for(largest) & table.fixed_k_order
    if swap_ab is not None:
        is_valid &= table.swap_ab == swap_ab
    table = table.select(np.flatnonzero(is_valid))
    best = np.argsort(total_cycles(problem, table, epilogue, gpu, gathers), kind="stable")[:MAX_CONFIGS]
    configs = (table.configs[i].replace(stages=int(table.stages[i])) for i in best)
    return tuple(config_for_dtype(config, problem.a.dtype) for config in configs)


def total_cycles(
    problem: Problem, table: ConfigTable, epilogue: EpilogueSpec, gpu: Gpu, gathers: bool = False
) -> Array:
    """Return the estimated cycles of each config, added up over groups of SIZES sizes.

    `problem` is the batched product of groups of their mean.
    """
    sizes = (max(1, problem.m * (2 * i + 1) // SIZES) for i in range(SIZES))
    return sum((_cycles(problem, table, epilogue, gpu, size, gathers) for size in sizes), np.zeros(1))


def mean_rows(p: Problem) -> Problem:
    """Return the batched GEMM of groups of the mean size, rounded up so that similar sizes share a choice.

    Of a masked GEMM only the most rows of a group are known, so the mean is taken to be half of that.
    """
    problem = equal_groups(p)
    rows = max(1, p.m // 2) if p.grouping and p.grouping.is_masked else problem.m
    return _with_rows(problem, _rounded(rows))


def _cycles(problem: Problem, table: ConfigTable, epilogue: EpilogueSpec, gpu: Gpu, rows: int, gathers: bool) -> Array:
    """Return the estimated cycles of each config for groups of `rows` rows: the model's, corrected for groups.

    Gathered rows take longer (`_gather_slowdown`). Otherwise the time of reads from the L2 is a further bound, which
    the model does not have.
    """
    sized, partial = _with_rows(problem, rows), _with_partial_tiles(table, rows)
    # tries-grouped-h200 does not show the one; the other was not measured for groups
    gpu = replace(gpu, exposed_epilogue_cycles=0, short_flops=float("inf"))
    cycles = estimate(sized, partial, epilogue, gpu).cycles
    if gathers:
        return cycles * _gather_slowdown(sized, table, cycles)
    p = L2_NORM_EXPONENT
    return np.asarray((cycles**p + _l2_cycles(as_16bit_problem(sized), table, partial) ** p) ** (1 / p))


def _l2_cycles(problem: Problem, table: ConfigTable, partial: ConfigTable) -> Array:
    """Return the cycles in which the L2 serves the reads of all tiles. `partial`: see `_with_partial_tiles`."""
    _, read = copied_bytes(problem, table)
    tiles_m, tiles_n = partial.grid(problem.m, problem.n)
    ctas = problem.batch * tiles_m * tiles_n * partial.cluster_shape_m * partial.cluster_shape_n
    return np.asarray(ctas * np.ceil(problem.k / table.tile_k) * read / L2_BYTES_PER_CYCLE)


def _gather_slowdown(problem: Problem, table: ConfigTable, cycles: Array) -> Array:
    """Return the factor by which gathered rows slow down each config. `cycles`: its estimate without gathering.

    It is a smooth maximum (a norm with exponent 4) of two factors: GATHER_COST, for the copies by cp.async instead of
    TMA; and the time of the L2 reads over `cycles`, where gathered rows count once per tile, since CTAs do not
    multicast them.
    """
    m, n, k, size = problem.m, problem.n, problem.k, problem.a.dtype.bytes
    tiles_m = np.ceil(m / np.where(table.swap_ab, table.tile_n, table.tile_m))
    tiles_n = np.ceil(n / np.where(table.swap_ab, table.tile_m, table.tile_n))
    multicast = np.where(table.swap_ab, table.cluster_shape_n, table.cluster_shape_m)
    nbytes = problem.batch * k * size * (m * tiles_n + n * tiles_m / multicast)
    return np.asarray((GATHER_COST**4 + (nbytes / GATHER_L2_BYTES_PER_CYCLE / cycles) ** 4) ** 0.25)


def _with_partial_tiles(table: ConfigTable, rows: int) -> ConfigTable:
    """Return the table with smaller tile extents, for which the model's time is that of groups of `rows` rows.

    A tile that a group fills partly takes less time: it multiplies fewer blocks of 64 rows or, with `swap_ab`, fewer
    columns. The extents are means over a group's tiles: its rows divided by its tiles, rounded up to what is
    multiplied, plus a part of the rest, which is loaded all the same (PARTIAL_TILE_GAIN, UNMULTIPLIED_COLUMN_COST).
    """
    tiles = np.ceil(rows / table.cluster_tile_m)
    even_m = ceil_div(rows, WGMMA_M) * WGMMA_M / (tiles * table.cluster_shape_m)
    tile_m = table.tile_m - PARTIAL_TILE_GAIN * np.maximum(0, table.tile_m - even_m)
    width = np.ceil(table.tile_n / (8 * WIDTHS)) * 8
    even_n = np.minimum(table.tile_n, np.ceil(rows / (tiles * table.cluster_shape_n * width)) * width)
    tile_n = even_n + UNMULTIPLIED_COLUMN_COST * (table.tile_n - even_n)
    cluster_tile_m = np.where(table.swap_ab, tile_n * table.cluster_shape_n, tile_m * table.cluster_shape_m)
    return replace(
        table, tile_m=np.where(table.swap_ab, table.tile_m, tile_m), cluster_tile_m=cluster_tile_m,
        tile_n=np.where(table.swap_ab, tile_n, table.tile_n),
    )  # fmt: skip


def _rounded(rows: int) -> int:
    """Return the number rounded up to three significant bits, so that choices for similar numbers are made once."""
    unit = 1 << max(0, rows.bit_length() - 3)
    return ceil_div(rows, unit) * unit


def _with_rows(p: Problem, rows: int) -> Problem:
    a, d = (replace(x, rows=rows, batch_stride=rows * x.row_stride) for x in (p.a, p.d))
    return p.with_matrices(a, p.b, d, p.scales)


def equal_groups(p: Problem) -> Problem:
    """Return the batched product that is a grouped GEMM whose groups have equal sizes; masked groups are full."""
    grouping, groups = p.grouping, p.groups
    assert grouping
    if grouping.along == "m" and grouping.role == "b":
        return equal_groups(p.T).T
    a, b, d = p.a, p.b, p.d
    if grouping.along == "k":
        k = ceil_div(p.k, groups)
        a = replace(a, cols=k, batch=groups, batch_stride=k * a.col_stride)
        b = replace(b, rows=k, batch=groups, batch_stride=k * b.row_stride)
    elif not grouping.is_masked:
        m = ceil_div(p.m, groups)
        a = replace(a, rows=m, batch=groups, batch_stride=m * a.row_stride)
        d = replace(d, rows=m, batch=groups, batch_stride=m * d.row_stride)
    return replace(p.with_matrices(a, b, d, p.scales), extents=None, grouping=None, groups=0)
