"""Cost model: the estimated time of configs for a problem, in SM cycles, for any number of configs at once.

CTAs work in waves of tiles. A wave takes as long as the largest of three bounds: its tiles, each k-tile as long as the
slower of copies and math; its fraction of the bytes over the DRAM bandwidth; its fraction of the energy over the power
limit. A large GEMM's clock follows its power instead (`_sm_slowdown`). A cycle is 1/1600 us.

"Fitted by fit.py" means: by benchmarks/fit/fit.py to survey-h200 (A row-major, B column-major), survey-??-h100
(all layouts), public-models-h200 and the power-limited shapes of sweep-{third,fourth,fifth,seventh,eighth}-h200 and
sweep-layouts-h100; the power limit to power-h200 and these sweeps. All are in benchmarks/results.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gemmsmith.core.chip import Chip, get_chip
from gemmsmith.core.config import Config
from gemmsmith.core.design import get_design
from gemmsmith.core.dtypes import DType
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.mma import THREADS_PER_WARPGROUP, WGMMA, WGMMA_M
from gemmsmith.core.problem import SCALE_BLOCK, Matrix, Problem
from gemmsmith.core.tile import LINE_BYTES, SECTOR_BYTES
from gemmsmith.tile_scheduler.stream_k import INVERSE_MAX_IDLE_FRACTION, MAX_SPLITS_PER_TILE
from gemmsmith.tuning.config_table import Array, ConfigTable
from gemmsmith.tuning.costs import SM_CLOCK_MHZ, EpilogueCost, loads_a_fragments
from gemmsmith.tuning.dtype_equivalence import as_16bit_problem
from gemmsmith.tuning.gpus import H200, NUM_SMS, Gpu

FLOPS_PER_CYCLE = 3990
"""Dense 16-bit FLOPs per cycle of one SM's tensor cores; m64n256k16 takes 128 cycles, which would be 4096."""
L2_TO_SM_BYTES_PER_CYCLE = 69.6
"""Bytes per cycle from the L2 to one SM. Fitted by fit.py."""
SMEM_FILL_BYTES_PER_CYCLE = 91.1
"""Bytes per cycle written to one SM's shared memory, including what its cluster multicasts. Fitted by fit.py."""
GPC_MERGED_READ_FRACTION = 0.27
"""Fraction of the simultaneous reads of one address by a GPC's SMs, without multicast, that the chip merges. Fitted by
fit.py."""
CONSECUTIVE_MERGED_READ_FRACTION = 0.6
"""The same of CTAs without clusters, not of a batch, for rows at multiples of 128 bytes. Chosen of three values by the
regret on eleven sets, which falls by 10 %. By counters 0.7 to 1 (merged-reads-h200)."""
UNALIGNED_OVERHEAD = 0.6
"""Relative slowdown of the L2 if all SMs read rows that do not begin at multiples of 128 bytes (its lines)."""
UNALIGNED_SECTOR_OVERHEAD = 0.7
"""Additional slowdown if these do not begin at multiples of 32 bytes (its sectors) either. Both were chosen by the
errors on 21 shapes (survey-h200 and others)."""
UNALIGNED_TILE_OVERHEAD = 1.76
"""The slowdown if the tiles of an MN-major operand do not begin at multiples of 128 bytes. Fitted by fit.py."""
REREAD_FRACTION = 0.1
"""DRAM time of a byte that another cluster reads again, relative to a first read: an H200's L2 has two partitions, and
clusters drift apart. Fitted by fit.py."""
MAX_REREADS = 3
"""The most clusters for which it counts. Chosen of nine values by the regret on choice-middle-h200."""
SHORT_ROW_OVERHEAD = 0.021
"""Relative DRAM slowdown for row segments of 128 bytes (tile K 64); a quarter of it for 256 bytes. Fitted by fit.py."""
SHORT_ROW_MAX_M = 64
"""M up to which `SHORT_ROW_OVERHEAD` applies. Chosen, not fitted."""
CLUSTER_ALONG_N_OVERHEAD = 0.05
"""Relative DRAM slowdown for each time that a cluster is twice as long along N, so that its CTAs read more columns of B
at once; not of batches or beyond `Gpu.short_flops`. Chosen of eight values by the regret, which falls by 9 %."""
LAUNCH_AND_FILL_CYCLES = 4902
"""Cycles to start a kernel and to fill the pipeline. Fitted by fit.py."""
CLUSTER_SYNC_CYCLES = 157
"""Additional cycles at the start per further CTA of a cluster. Fitted by fit.py."""
FILL_CYCLES_PER_STAGE = 20.4
"""Additional cycles at the start per stage. Fitted by fit.py."""
EPILOGUE_BYTES_PER_CYCLE = 32.4
"""Bytes of matrices per cycle that an epilogue moves which overlaps no mainloop. Fitted by fit.py."""
EPILOGUE_CYCLES_PER_ELEMENT = 1.84
"""Cycles of an epilogue per element of a thread. Fitted by fit.py."""
LOAD_LATENCY_CYCLES = 1190
"""Cycles of a load from DRAM under load: of a k-tile, of which all stages but one are in flight, and of an epilogue's
subtile if it is issued during the epilogue. Fitted with the constants of epilogue_cost.py, as the next ones are until
OVERLAP_SLOWDOWN, unless they say otherwise."""
LATENCY_GROWTH = 0.65
"""Relative growth of a k-tile's latency if DRAM takes as long for the epilogue's matrices, but one of D's size, as the
tensor cores take for the GEMM; less in proportion."""
SUBTILE_OVERLAP = 0.5
"""Fraction of the time of the subtiles in between by which the wait for a subtile's load is shorter."""
SINGLE_STORE_CYCLES = 230
"""Cycles that a subtile waits for its predecessor's store if there is one buffer for them."""
PARTIAL_LINE_OVERHEAD = 0.25
"""Relative slowdown of a row's stores by each L2 line that the tile shares with its neighbor. Chosen of four values by
45 GEMMs whose choice changes: 11 % faster for K below 128, 6 % up to 512, 1 % beyond (model-pairs-h200)."""
NARROW_STORE_OVERHEAD = 0.1
"""Relative slowdown of stores by subtiles of 16 columns, which tiles of an odd multiple of 16 columns have
(epilogue_plan.py). Chosen of four values by the errors on model-pairs-h200, survey-tn-h100 and autotuned-h200."""
MAX_FUNCTION_SHARE = 0.1
"""Cycles of an epilogue's functions, relative to the tensor cores', up to which a GEMM can be power-limited. Chosen:
heavier ones were not measured in long blocks."""
UNLIMITED_ENERGY = 0.5
"""Fraction of its energy that counts if a GEMM is not power-limited. Chosen of eight values by the regret on surveys
and tries."""
MIN_SLOWDOWN = SM_CLOCK_MHZ / 1980
"""Time of an SM cycle at the highest clock, relative to one at SM_CLOCK_MHZ: 1980 MHz (nvidia-smi, clocks.max.sm)."""
EPILOGUE_CYCLES_PER_MATRIX = 3.0
"""Cycles of an epilogue that overlaps no mainloop per element of each matrix but one: subtiles of more matrices have
fewer buffers, for which warps wait. Fitted to 38 GEMMs of heavy-wide-h100."""
OVERLAP_SLOWDOWN = 0.45
"""Cycles by which other warpgroups' mainloops are late per cycle of functions that they overlap with: those compete for
the register file and for issue slots."""
TRANSPOSED_STORE_BYTES_PER_CYCLE = 0.7
"""Bytes per cycle of a transposed tile that threads, not TMA, store along D's contiguous dimension. Set by hand
after the eighth sweep (sweep-eighth-h200), not fitted."""
SPLIT_REDUCTION_CYCLES = 5342
"""Cycles of a split-K or stream-K reduction through global memory for its flags, per tile. Fitted by fit.py."""
CLUSTER_SPLIT_CYCLES = 461
"""Cycles of a split-K reduction within a cluster for its barriers, per tile. Fitted by fit.py."""
SPLIT_REDUCTION_BYTES_PER_CYCLE = 15
"""Bytes of partial sums per cycle that a reducing CTA reads. Fitted by fit.py."""
MATH_COPY_NORM_EXPONENT = 7.64
"""Exponent of the norm that combines a k-tile's math and copies, which wait for each other at times. Fitted by
fit.py."""
BOUND_NORM_EXPONENT = 3.45
"""Exponent of the norm that combines the bounds by work, memory and power. Fitted by fit.py."""
LOOP_CYCLES = 147
"""Minimum cycles of a mainloop iteration: the latency of a barrier and of a wgmma. Fitted by fit.py."""
LOOP_CYCLES_PER_K = 0.533
"""Additional minimum cycles of an iteration per element of tile K. Fitted by fit.py."""
TILE_K_128_SLOWDOWN = 1.086
"""Time of a k-tile of 128 relative to its bounds: fewer of them are in flight. Fitted by fit.py."""
FEW_STAGES_SLOWDOWN = 0.05
"""Relative slowdown of a k-tile for each stage below 5, unless sums are promoted or power limits the clock. Chosen of
seven values by the regret, which falls by 11 %."""
A_LOAD_SLOWDOWN_PER_64_ROWS = 0.12
"""Relative slowdown of a k-tile whose fragments of A threads load, per 64 rows of a warpgroup beyond the first 64.
Nearest to the times in tries-tf32-h100."""
A_LOAD_SLOWDOWN_ONE_WARPGROUP = 0.12
"""Relative slowdown of such a k-tile if one warpgroup multiplies at a time. Nearest to tries-tf32-h100."""
A_LOAD_SLOWDOWN_NO_MULTICAST = 0.25
"""Relative slowdown of such a k-tile if B is not multicast. From one GEMM, 2048 x 11008 x 5120 tt
(kinds-h100)."""
PROMOTION_CYCLES = 50.5
"""Cycles of a warpgroup to promote a subtile, besides its FFMAs. Fitted to survey-fp8-h200."""
PROMOTION_ISSUE_CYCLES = 12.5
"""Cycles between two subtiles in which no wgmma of the warpgroup runs. Fitted to survey-fp8-h200."""
SCALE_BOUNDARY_CYCLES = 33.3
"""Additional such cycles per halving of the 64 columns that share a scale of B. Fitted to survey-fp8-h200."""
COLUMN_SCALE_CYCLES = 3.86
"""Cycles per column with block scales of its own. Fitted to survey-fp8-h200."""
MMA_PROMOTION_NORM_EXPONENT = 2.27
"""Exponent of the norm that combines the tensor cores' cycles and a warpgroup's own, which may coincide. Fitted to
survey-fp8-h200."""
PROMOTION_ENERGY_FACTOR = 1.73
"""Energy of a promoted FLOP relative to one that is not. Fitted to survey-fp8-h200."""
FLOPS_PER_CYCLE_AT_700W = 538_600
"""FLOPs per cycle of the chip that alone would draw 700 W. Fitted by fit.py."""
L2_BYTES_PER_CYCLE_AT_700W = 39_840
"""Bytes read from the L2 per cycle that alone would draw 700 W. Fitted by fit.py."""
SMEM_FILL_BYTES_PER_CYCLE_AT_700W = 22_250
"""Bytes written to shared memory per cycle that alone would draw 700 W. Fitted by fit.py."""
WGMMA_READ_BYTES_PER_CYCLE_AT_700W = 196_000
"""Bytes that wgmma reads from shared memory per cycle that alone would draw 700 W. Fitted by fit.py."""
DRAM_BYTES_PER_CYCLE_AT_700W = 6_874
"""Bytes of DRAM traffic per cycle that alone would draw 700 W. Scaled with the four constants before it, which fit.py
fits with --power."""
STREAM_K_ENERGY_OVERHEAD = 0.0858
"""Relative additional energy of stream-K with several waves, which then cannot have `sync_clusters`. Fitted by
fit.py."""


def covers(dtype: DType, chip: Chip) -> bool:
    """Return whether the model is for GEMMs of operands of `dtype` on a chip: those with wgmma."""
    return chip.has_wgmma and WGMMA.multiplies(dtype)


def covers_config(config: Config) -> bool:
    """Return whether the model is for a config: one of a design with wgmma."""
    return get_chip(config.chip).has_wgmma and get_design(config.design).mma_op is WGMMA


def _is_power_limited(problem: Problem, cost: EpilogueCost, gpu: Gpu) -> bool:
    """Return whether a GEMM of 16-bit operands runs at the clock that its own power allows."""
    share = cost.cycles / THREADS_PER_WARPGROUP * FLOPS_PER_CYCLE / (2 * max(problem.k, 1))
    return problem.flops > gpu.short_flops and share <= MAX_FUNCTION_SHARE


class Estimate(NamedTuple):
    """What the model estimates for each config, in SM cycles except `k_tiles_per_cta`, `dram_bytes` and the last one.

    Attributes:
        math_cycles: Tensor-core cycles of a k-tile.
        k_tiles_per_cta: k-tiles that a CTA works on, one after the other.
        exposed_stores: Cycles of stores that no mainloop hides.
        work_cycles: k_tiles_per_cta * k_tile_cycles + exposed_stores.
        dram_bytes: Bytes of the operands and results, each moved once.
        memory_cycles: Cycles that DRAM takes for these bytes, and for those that are read again.
        power_limited_cycles: Cycles that all energy takes at the power limit, as far as it counts (UNLIMITED_ENERGY).
        split_reduction: Cycles of the split-K or stream-K reduction.
        launch_and_fill: Cycles until the pipeline is filled.
        is_power_limited: Whether the clock follows the power of all configs.
    """

    math_cycles: Array
    copy_cycles: Array
    k_tile_cycles: Array
    k_tiles_per_cta: Array
    exposed_stores: Array
    work_cycles: Array
    dram_bytes: Array
    memory_cycles: Array
    power_limited_cycles: Array
    wave_cycles: Array
    split_reduction: Array
    launch_and_fill: Array
    is_power_limited: bool

    @property
    def cycles(self) -> Array:
        """Estimated cycles of the kernel."""
        return np.asarray(self.wave_cycles + self.split_reduction + self.launch_and_fill)


def estimate(
    problem: Problem, table: ConfigTable, epilogue: EpilogueSpec | None = None, gpu: Gpu = H200
) -> Estimate:  # fmt: skip
    """Estimate the time of every config of a table on a GPU, without packing.

    `table`: the configs, as for the equivalent problem of 16-bit operands (`config_for_16bit`).
    """
    loads_a, problem = loads_a_fragments(problem, table.swap_ab), as_16bit_problem(problem)
    cost = EpilogueCost.from_epilogue(epilogue or EpilogueSpec.identity(problem.d))
    latency = LOAD_LATENCY_CYCLES * (1 + LATENCY_GROWTH * _further_traffic(problem, cost, gpu))
    limited = _is_power_limited(problem, cost, gpu)
    tile = _k_tile_cost(problem, table, loads_a, latency, limited)
    k_tiles = np.maximum(1, np.ceil(problem.k / table.tile_k))
    tiles_m, tiles_n = table.grid(problem.m, problem.n)
    tiles = problem.batch * tiles_m * tiles_n
    store, functions = _epilogue_cycles(problem, table, cost)
    is_short = problem.flops <= gpu.short_flops
    is_exposed = (tiles <= table.max_active_clusters) | (is_short & ~table.tile_per_warpgroup)
    store = store + gpu.exposed_epilogue_cycles * (is_exposed & (table.consumers > 1))
    full, last, split_reduction = _schedule_waves(table, tiles, k_tiles, tile.cycles, store, functions)

    # The part of a tile outside of D takes memory as long as the part inside (tries-stores-h100).
    stored = cost.bytes_per_element * tiles_m * table.cluster_tile_m * tiles_n * table.cluster_tile_n
    row = problem.d.dtype.bytes * np.where(table.swap_ab, table.tile_m, table.tile_n).astype(int)
    stored = stored * (1 + PARTIAL_LINE_OVERHEAD * (LINE_BYTES - np.gcd(row, LINE_BYTES)) / row)
    stored = stored * (1 + NARROW_STORE_OVERHEAD * (table.tile_n % 32 == 16))
    nbytes = problem.batch * (2 * problem.k * (problem.m + problem.n) + stored)
    rereads_m, rereads_n = (np.minimum(tiles - 1, MAX_REREADS) for tiles in (tiles_n, tiles_m))
    reread_bytes = 2 * problem.batch * problem.k * (problem.m * rereads_m + problem.n * rereads_n)
    slowdown: Array | float = 1.0
    if is_short and problem.batch == 1:
        along_n = np.where(table.swap_ab, table.cluster_shape_m, table.cluster_shape_n)
        slowdown = 1 + CLUSTER_ALONG_N_OVERHEAD * np.log2(along_n)
    if problem.m <= SHORT_ROW_MAX_M:
        slowdown = slowdown + SHORT_ROW_OVERHEAD * (64 / table.tile_k) ** 2
    memory = (nbytes + REREAD_FRACTION * reread_bytes) / gpu.dram_bytes_per_cycle * slowdown
    ctas_per_tile = table.cluster_shape_m * table.cluster_shape_n
    overhead = STREAM_K_ENERGY_OVERHEAD * ((table.splits == 0) & (tiles > table.max_active_clusters))
    energy = tiles * ctas_per_tile * k_tiles * tile.energy_cycles * (1 + overhead)
    power = (energy + nbytes / DRAM_BYTES_PER_CYCLE_AT_700W) * NUM_SMS / gpu.sms  # the limit of fewer SMs is lower
    power = power if limited else UNLIMITED_ENERGY * power

    def cycles_of(waves: _Waves, slowdown: Array | float = 1.0) -> Array:
        """Return the cycles of waves: the bounds by work, memory and power, combined by a norm (a smooth maximum).

        `slowdown`: time of an SM cycle, by which power limits work; otherwise it is one of the bounds.
        """
        work = (waves.k_tiles_per_cta * tile.cycles + waves.exposed_stores) * slowdown
        reads, p = memory * waves.fraction, BOUND_NORM_EXPONENT
        energy = 0.0 if limited else power * waves.fraction
        return np.asarray((work**p + reads**p + energy**p) ** (1 / p))

    wave_cycles = cycles_of(full) + cycles_of(last)
    if limited:
        sm_slowdown = _sm_slowdown(power, wave_cycles)
        wave_cycles = cycles_of(full, sm_slowdown) + cycles_of(last, sm_slowdown)
    k_tiles_per_cta = full.k_tiles_per_cta + last.k_tiles_per_cta
    exposed_stores = full.exposed_stores + last.exposed_stores
    work = k_tiles_per_cta * tile.cycles + exposed_stores
    sync = CLUSTER_SYNC_CYCLES * (table.cluster_size - 1)
    launch_and_fill = LAUNCH_AND_FILL_CYCLES + sync + FILL_CYCLES_PER_STAGE * table.stages
    return Estimate(
        tile.math_cycles, tile.copy_cycles, tile.cycles, k_tiles_per_cta, exposed_stores, work, nbytes, memory, power,
        wave_cycles, split_reduction, launch_and_fill, limited,
    )  # fmt: skip


def _sm_slowdown(power: Array, cycles: Array) -> Array:
    """Return the time of an SM cycle, in 1/1600 us, at the clock that leaves a GEMM of so many cycles below 700 W.

    `power`: cycles that its energy takes at 700 W and 1600 MHz. The energy of an operation falls with the square of the
    voltage, about as the clock does, so the time is the geometric mean of these cycles and of the GEMM's.
    """
    return np.maximum(np.sqrt(power / cycles), MIN_SLOWDOWN)


class _KTileCost(NamedTuple):
    """The cost of a CTA's k-tile, for each config.

    `math_cycles` and `copy_cycles`: if only math or copies took time. `energy_cycles`: cycles in which the whole chip
    at 700 W draws the k-tile's energy.
    """

    math_cycles: Array
    copy_cycles: Array
    cycles: Array
    energy_cycles: Array


def _further_traffic(problem: Problem, cost: EpilogueCost, gpu: Gpu) -> float:
    """Return the ratio of DRAM's time for the epilogue's further matrices to the tensor cores' time, at most 1.

    Further are all bytes but those of one matrix of D's size and dtype, which every GEMM stores.
    """
    nbytes = problem.m * problem.n * max(0.0, cost.bytes_per_element - problem.d.dtype.bytes)
    math = 2 * problem.m * problem.n * problem.k / FLOPS_PER_CYCLE / gpu.sms
    return min(1.0, nbytes / gpu.dram_bytes_per_cycle / max(math, 1.0))


def _k_tile_cost(
    problem: Problem, table: ConfigTable, loads_a: Array, latency: float, limited: bool
) -> _KTileCost:  # fmt: skip
    """Return the cost of a k-tile of each config.

    `problem`: of 16-bit operands. `loads_a`: whether threads load the fragments of A, since wgmma needs such an A in
    registers. `latency`: cycles until a k-tile's load is complete, of which all stages but one are in flight.
    `limited`: whether power limits the clock.
    """
    # wgmma reads A and B from shared memory, 128 bytes per cycle; A once per promotion subtile
    subtiles = table.tile_n / _promotion_parameters(problem, table)[0] if problem.promoted else 1
    operands = 128 * (16 * subtiles + table.tile_n / 4) * (table.tile_m / 64) * (table.tile_k / 16)
    math = np.maximum(2 * table.tile_m * table.tile_n * table.tile_k / FLOPS_PER_CYCLE, operands / 128)
    filled, read = copied_bytes(problem, table)
    copies = np.maximum(read / L2_TO_SM_BYTES_PER_CYCLE, filled / SMEM_FILL_BYTES_PER_CYCLE)
    loop = np.maximum(latency / (table.stages - 1), LOOP_CYCLES + LOOP_CYCLES_PER_K * table.tile_k)
    slowdown = np.where(table.tile_k == 128, TILE_K_128_SLOWDOWN, 1.0)
    if not (limited or problem.promoted):
        slowdown = slowdown * (1 + FEW_STAGES_SLOWDOWN * np.maximum(5 - table.stages, 0))
    energy = 2 * table.tile_m * table.tile_n * table.tile_k / FLOPS_PER_CYCLE_AT_700W
    energy = energy + read / L2_BYTES_PER_CYCLE_AT_700W + filled / SMEM_FILL_BYTES_PER_CYCLE_AT_700W
    energy = energy + operands / WGMMA_READ_BYTES_PER_CYCLE_AT_700W
    if problem.promoted:
        warpgroup_cycles, issue_cycles = _promotion_cycles(problem, table)
        p = MMA_PROMOTION_NORM_EXPONENT
        math = ((math + issue_cycles) ** p + warpgroup_cycles**p) ** (1 / p)
        energy = energy * PROMOTION_ENERGY_FACTOR
    p = MATH_COPY_NORM_EXPONENT
    cycles = np.maximum((math**p + copies**p) ** (1 / p), loop) * slowdown
    warpgroup_rows = table.tile_m / np.where(table.tile_per_warpgroup, 1, table.consumers)
    loading = cycles * (1 + A_LOAD_SLOWDOWN_PER_64_ROWS * (warpgroup_rows / WGMMA_M - 1))
    loading = loading * (1 + A_LOAD_SLOWDOWN_ONE_WARPGROUP * (table.tile_per_warpgroup | (table.consumers == 1)))
    loading = loading * (1 + A_LOAD_SLOWDOWN_NO_MULTICAST * (table.cluster_shape_m == 1))
    return _KTileCost(math, copies, np.where(loads_a, loading, cycles), energy)


def _promotion_cycles(problem: Problem, table: ConfigTable) -> tuple[Array, Array]:
    """Return (cycles of a warpgroup, idle cycles of the tensor cores) per k-tile, with promoted sums.

    A warpgroup multiplies and then promotes each of its subtiles (2 cycles of MMAs per column of 64 rows). Other
    warpgroups or k-tiles in flight can hide the promotion, but not the time to issue between two subtiles, in which the
    tensor cores are idle.
    """
    columns, k_tiles_in_flight, columns_per_scale = _promotion_parameters(problem, table)
    warpgroups = np.where(table.tile_per_warpgroup, 1, table.consumers)
    subtiles = table.tile_m / warpgroups / 64 * table.tile_n / columns
    scale_boundary_factor = (columns_per_scale == SCALE_BLOCK) * np.log2(64 / np.gcd(table.tile_n.astype(int), 64))
    promotion = columns * (0.5 + COLUMN_SCALE_CYCLES * (columns_per_scale == 1)) + PROMOTION_CYCLES
    issue = PROMOTION_ISSUE_CYCLES + SCALE_BOUNDARY_CYCLES * scale_boundary_factor
    warpgroup_cycles = subtiles * (2 * columns + (promotion + issue) / k_tiles_in_flight)
    return np.asarray(warpgroup_cycles), np.asarray(subtiles * warpgroups * issue / k_tiles_in_flight)


def _promotion_parameters(problem: Problem, table: ConfigTable) -> tuple[Array, Array, Array]:
    """Return the columns of a promotion subtile, the k-tiles in flight, and the columns per block scale (0: none)."""
    scale_a, scale_b = (scale.granularity if scale else 0 for scale in problem.scales)
    columns_per_scale = np.where(table.swap_ab, scale_a, scale_b)
    per_column, shapes = (columns_per_scale == 1)[:, None], table.promotion_shapes
    columns, k_tiles_in_flight = np.where(per_column, shapes[:, 1], shapes[:, 0]).T
    return columns, k_tiles_in_flight, columns_per_scale


def _epilogue_cycles(problem: Problem, table: ConfigTable, cost: EpilogueCost) -> tuple[Array, Array]:
    """Return (cycles of a tile's epilogue, those of its functions and reductions alone), for each config."""
    store = table.tile_m * table.tile_n * cost.bytes_per_element / EPILOGUE_BYTES_PER_CYCLE
    if not problem.d.can_tma_store:
        elements = table.tile_m * np.minimum(table.tile_n, problem.m)
        by_threads = elements * cost.bytes_per_element / TRANSPOSED_STORE_BYTES_PER_CYCLE
        store = np.where(table.swap_ab, by_threads, store)
    warpgroups = np.where(table.tile_per_warpgroup, 1, table.consumers)
    elements = table.tile_m * table.tile_n / (THREADS_PER_WARPGROUP * warpgroups)  # of a thread
    functions = elements * np.where(table.swap_ab, cost.cycles_if_swapped, cost.cycles)
    further = EPILOGUE_CYCLES_PER_MATRIX * max(cost.matrices - 1, 0) * ~table.tile_per_warpgroup
    per_element = EPILOGUE_CYCLES_PER_ELEMENT + further
    cycles = store + elements * per_element + functions
    between = SUBTILE_OVERLAP * (table.load_stages - 1) / table.subtiles * cycles
    waits = (table.subtiles / table.load_stages - 1) * np.maximum(0, LOAD_LATENCY_CYCLES - between)
    waits = waits + SINGLE_STORE_CYCLES * table.subtiles * ((table.store_stages == 1) & (table.subtiles > 1))
    cycles = cycles + waits
    return np.asarray(cycles / table.reducing_ctas), np.asarray(functions / table.reducing_ctas)


class _Waves(NamedTuple):
    """The work of a CTA in all full waves of clusters, or in the last, partial wave; arrays with a value per config.

    Attributes:
        fraction: Fraction of all tiles that they have.
        k_tiles_per_cta: k-tiles of a CTA in all of them.
        exposed_stores: Cycles of stores that no mainloop hides.
    """

    fraction: Array
    k_tiles_per_cta: Array
    exposed_stores: Array


def _schedule_waves(
    table: ConfigTable, tiles: Array, k_tiles: Array, k_tile_cycles: Array, store: Array, functions: Array
) -> tuple[_Waves, _Waves, Array]:
    """Return (work in full waves, work in the last wave, cycles of the split-K or stream-K reduction).

    With split-K and stream-K through global memory all work counts as full waves, since it is divided evenly. `tiles`:
    of all clusters. `k_tiles`: of a tile. `store`: cycles of a tile's epilogue; `functions`: of its functions alone.
    """
    capacity = table.max_active_clusters
    full_waves = np.floor(tiles / capacity)
    last_tiles, k_tiles_per_split = tiles - full_waves * capacity, np.ceil(k_tiles / table.cluster_splits)
    # with pingpong, `consumers` tiles take as long as all their mainloops, or as one of them and its epilogue
    mainloop = k_tiles * k_tile_cycles
    late = OVERLAP_SLOWDOWN * np.minimum(functions / table.consumers, mainloop)
    overlapped = np.maximum(0.0, (mainloop + store) / table.consumers - mainloop) + late
    exposed = np.where(table.tile_per_warpgroup, overlapped, store)
    has_last = last_tiles > 0
    exposed_stores = np.where(has_last, 0.0, store)
    exposed_stores = exposed_stores + (full_waves + has_last - 1) * exposed
    partial = 4 * table.tile_m * table.tile_n / SPLIT_REDUCTION_BYTES_PER_CYCLE
    in_cluster = CLUSTER_SPLIT_CYCLES + (table.cluster_splits - 1) * partial / table.reducing_ctas
    split_reduction = np.where(table.cluster_splits > 1, in_cluster, 0.0)

    # split-K and stream-K: one wave of work units, by the rules of StreamKTileScheduler
    stream_k, is_split = table.splits == 0, table.splits != 1
    clusters = np.maximum(1, np.minimum(capacity, tiles * np.where(stream_k, k_tiles, table.splits)))
    sk_tiles = np.where(stream_k & (tiles > capacity), last_tiles, 0)
    splits = np.minimum(np.minimum(np.floor(capacity / np.maximum(sk_tiles, 1)), k_tiles), MAX_SPLITS_PER_TILE)
    wastes = (capacity - sk_tiles * splits) * INVERSE_MAX_IDLE_FRACTION > capacity * splits * full_waves
    uniform = (sk_tiles > 0) & (splits > 1) & ~wastes
    equal_splits = full_waves * k_tiles + np.ceil(k_tiles / splits)
    split_k_tiles = np.where(uniform, equal_splits, np.ceil(tiles * k_tiles / clusters))
    peers = np.where(stream_k, np.where(uniform, splits - 1, 1), np.ceil(clusters / np.maximum(tiles, 1)) - 1)
    last_fraction = np.where(is_split, 0.0, last_tiles / np.maximum(tiles, 1))
    split_stores = np.maximum(1, np.floor(tiles / clusters)) * store
    full = _Waves(
        1 - last_fraction,
        np.where(is_split, split_k_tiles, full_waves * k_tiles_per_split),
        np.where(is_split, split_stores, exposed_stores),
    )
    has_last &= ~is_split
    last = _Waves(last_fraction, np.where(has_last, k_tiles_per_split, 0), np.where(has_last, store, 0.0))
    return full, last, np.where(is_split, SPLIT_REDUCTION_CYCLES + peers * partial, split_reduction)


def copied_bytes(problem: Problem, table: ConfigTable) -> tuple[Array, Array]:
    """Return, per k-tile of a CTA, (bytes written to its shared memory, bytes it reads from the L2), for each config.

    With multicast, the CTAs that share a tile of an operand divide its read among them. Without, a GPC merges a part of
    the equal reads of its SMs. Reads of layouts that the L2 as a whole delivers more slowly are multiplied by that
    factor and by the fraction of SMs that read.
    """
    clusters = np.where(table.splits == 0, np.inf, table.tiles(problem) * np.maximum(table.splits, 1))
    active = np.minimum(clusters / table.max_active_clusters, 1)
    (a, b), (sharers_of_a, sharers_of_b) = problem.operands, table.gpc_sharers(problem)
    has_lines = all(x.major == "MN" or _pitch_bytes(x) % LINE_BYTES == 0 for x in (a, b))
    is_consecutive = (table.cluster_size == 1) & has_lines & (problem.batch == 1)
    merged = np.where(is_consecutive, CONSECUTIVE_MERGED_READ_FRACTION, GPC_MERGED_READ_FRACTION)
    filled = read = np.zeros(1)
    for operand, swapped, width, multicast_ctas, sharers in (
        (a, b, table.tile_m, table.cluster_shape_n, sharers_of_a),
        (b, a, table.tile_n, table.cluster_shape_m, sharers_of_b),
    ):
        pairs = zip(tile_bytes(operand, width, table.tile_k), tile_bytes(swapped, width, table.tile_k), strict=True)
        nbytes, slowdown = (np.where(table.swap_ab, if_swapped, if_not) for if_not, if_swapped in pairs)
        read_fraction = np.where(multicast_ctas == 1, 1 - merged * (1 - 1 / sharers), 1)
        slowdown = np.maximum(active * slowdown, 1)
        filled, read = filled + nbytes, read + nbytes * slowdown * read_fraction / multicast_ctas
    return filled, read


def tile_bytes(operand: Matrix, width: Array, k: Array) -> tuple[Array, Array]:
    """Return (bytes of a k-tile of an (M or N) x K operand, factor by which its reads from the L2 are slower).

    Reads are slower if rows do not begin at multiples of L2 lines, or of sectors. Rows of an MN-major tile run along
    `width`, begin at multiples of it, and are read in whole lines.
    """
    size, pitch = operand.dtype.bytes, _pitch_bytes(operand)
    overhead = np.array(UNALIGNED_OVERHEAD * (pitch % LINE_BYTES > 0))
    rows = np.minimum(width, max(operand.rows, 1))
    if operand.major == "MN":
        # tiles begin at multiples of `step` bytes from a line, and are read in boxes of TMA
        step = np.where(width < operand.rows, np.gcd(width.astype(int) * size, LINE_BYTES), LINE_BYTES)
        overhead = np.maximum(overhead, UNALIGNED_TILE_OVERHEAD * (1 - step / LINE_BYTES))
        box_bytes = np.clip(2 ** np.ceil(np.log2(rows * size)), SECTOR_BYTES, LINE_BYTES)
        rows = np.ceil(rows * size / box_bytes) * box_bytes / size
    return size * k * rows, np.asarray(1 + overhead + UNALIGNED_SECTOR_OVERHEAD * (pitch % SECTOR_BYTES > 0))


def _pitch_bytes(operand: Matrix) -> int:
    """Return the bytes from a row, or a column, to the next; 0 if they are packed, and so aligned."""
    return operand.pitch_bytes if operand.is_tma_compatible else 0
