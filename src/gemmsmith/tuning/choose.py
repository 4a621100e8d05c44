"""Analytic choice of a config: the cost model ranks the candidates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from gemmsmith.core.chip import get_chip
from gemmsmith.core.config import Config
from gemmsmith.core.design import designs_for_chip, get_design
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.mma import WGMMA_M
from gemmsmith.core.problem import Problem
from gemmsmith.tuning.candidates import MIN_STAGES, fit_stages, promotion_leaves_registers, spec_for
from gemmsmith.tuning.config_table import ConfigTable, configs_for, has_l2_reuse, round_up_m, splits_pay
from gemmsmith.tuning.costs import SM_CLOCK_MHZ, packing_cycles
from gemmsmith.tuning.dtype_equivalence import as_16bit_problem, config_for_16bit, config_for_dtype
from gemmsmith.tuning.gpus import H200, Gpu
from gemmsmith.tuning.l2 import prefers_streaming_stores, wave_bytes
from gemmsmith.tuning.model import covers_config, estimate

DEFAULT_MAX_STAGES = 8
"""Maximum stages if the user gives a tile but no stages; only the smallest problems gain from more."""
CONFIGS_WITHOUT_K = 64
"""Configs that are ranked for K = 0. Chosen, not measured."""


def complete_config(config: Config, given: Iterable[str]) -> Config:
    """Return the config with those fields adapted that the user has not given.

    The others are adapted: the design to the chip; the consumers, cluster and stages to the tile; and options that the
    design does not support are switched off. The stages are the most to try: `fit_stages` removes those that do not fit
    into shared memory.
    """
    changes: dict[str, object] = {}
    if "design" not in given:
        designs = designs_for_chip(get_chip(config.chip))
        if config.design not in designs:
            config = config.replace(design=designs[0])
    design = get_design(config.design)
    defaults = {name: x for name, x in design.defaults.items() if name not in given}
    if defaults:
        changes |= defaults
    elif "consumers" not in given and "tile" in given:
        counts = (c for c in (2, 3, 1) if c in design.max_accumulator_registers and config.tile[0] % (WGMMA_M * c) == 0)
        changes["consumers"] = next(counts, 1)
    if "cluster" not in given and "tile" in given:
        changes["cluster"] = (1, 1)
    if "stages" not in given:
        changes["stages"] = DEFAULT_MAX_STAGES
    disabled = {"splits": 1, "cluster_splits": 1, "alias_epilogue": False}
    changes |= {name: x for name, x in disabled.items() if name not in given and name not in design.supported_options}
    if "sync_clusters" not in given:
        changes["sync_clusters"] = config.sync_clusters and config.can_sync_clusters
    return config.replace(**changes)


def rank_configs(
    problem: Problem,
    epilogue: EpilogueSpec | None = None,
    limit: int = 64,
    fixed_k_order: bool = False,
    gpu: Gpu = H200,
    any_splits: bool = False,
) -> list[Config]:
    """Return the `limit` configs with the least estimated time on a GPU, best first.

    `fixed_k_order`: only configs that accumulate a tile in one CTA, from its first k-tile to its last. `any_splits`:
    consider split-K and stream-K through global memory even where they are slower by measurement (`splits_pay`).

    Options that do not change the ranking are set here. Single-wave configs have `alias_epilogue` if they can: 1.1 %
    in the mean of 12 shapes (sweep-fifth-h200). Configs of several waves, if a wave needs more
    than the L2 holds and later waves read it again, have `serpentine`: 0.5 to 0.8 % of large GEMMs (tries-h200);
    and, if warpgroups share a tile, `sync_clusters`: 0.7 % in the mean of 29 (lockstep-h200). GEMMs that are bound
    by the stores of their results have `streaming_stores`.
    """
    epilogue = epilogue or EpilogueSpec.identity(problem.d)
    ranked: list[Config] = []
    problem_16bit = as_16bit_problem(problem)
    all_configs = configs_for(epilogue, problem_16bit, any_splits or splits_pay(problem), gpu.sms)
    is_valid = all_configs.valid_for(problem_16bit)
    if fixed_k_order:
        is_valid &= all_configs.fixed_k_order
    valid_configs = all_configs.select(np.flatnonzero(is_valid))
    is_single_wave = valid_configs.is_single_wave(problem_16bit)
    alias_epilogue = is_single_wave & (valid_configs.aliased_stages > 0)
    stages = np.where(alias_epilogue, valid_configs.aliased_stages, valid_configs.stages)
    raster_m = valid_configs.single_wave_raster_m(problem_16bit)
    valid_configs = replace(valid_configs, stages=stages, raster_m=raster_m)
    streaming = prefers_streaming_stores(problem, epilogue, gpu)
    cycles = estimate(problem, valid_configs, epilogue, gpu).cycles + packing_cycles(problem, valid_configs.swap_ab)
    for i in np.argsort(cycles, kind="stable"):
        if len(ranked) == limit:
            break
        config = valid_configs.configs[i].replace(
            stages=int(valid_configs.stages[i]), raster="m" if raster_m[i] else "n",
            alias_epilogue=bool(alias_epilogue[i]), streaming_stores=streaming,
        )  # fmt: skip
        if not is_single_wave[i]:
            oriented = problem_16bit.T if config.swap_ab else problem_16bit
            exceeds_l2 = has_l2_reuse(problem_16bit) and wave_bytes(oriented, config, gpu.sms) > gpu.l2_bytes
            if exceeds_l2 and config.splits == 0:  # stream-K's clusters cannot be synchronized, so they drift apart
                continue
            config = config.replace(
                serpentine=exceeds_l2 and not fixed_k_order, sync_clusters=exceeds_l2 and config.can_sync_clusters
            )
        try:
            config = config_for_dtype(config, problem.a.dtype)
            spec = spec_for(config, problem, epilogue)
        except ConfigError:
            continue
        if promotion_leaves_registers(spec) and not spec.releases_stages_to_peers:
            ranked.append(fit_stages(spec))
    return ranked


def choose(
    problem: Problem, epilogue: EpilogueSpec | None = None, fixed_k_order: bool = False, gpu: Gpu = H200
) -> Config:
    """Return the config with the least estimated time on a GPU.

    `fixed_k_order`: only of the configs that add the products of K in one order, whatever M and N are.

    If no config can be built, return the default config, which is rejected later, with the reason. The choice is cached
    for problems that are equal after `round_up_m`.
    """
    return _choose(round_up_m(problem), epilogue or EpilogueSpec.identity(problem.d), fixed_k_order, gpu)


@lru_cache(maxsize=4096)
def _choose(problem: Problem, epilogue: EpilogueSpec, fixed_k_order: bool, gpu: Gpu) -> Config:
    """Return the choice for a problem whose M is rounded up, by which choices are cached."""
    configs = rank_configs(problem, epilogue, 1 if problem.k else CONFIGS_WITHOUT_K, fixed_k_order, gpu)
    if not configs:
        return config_for_dtype(Config(), problem.a.dtype)
    return configs[0] if problem.k else _without_k(configs)


def _without_k(configs: Sequence[Config]) -> Config:
    """Return the config for K = 0, where a kernel runs its epilogue only, of ranked configs.

    It is the first without clusters, since nothing is multicast, and with a tile N of a multiple of 64: then the boxes
    of row-major matrices have whole lines, which takes a fifth less time (tries-without-k). It has the fewest stages,
    which leaves the shared memory to the epilogue.
    """
    best = next((c for c in configs if c.cluster == (1, 1) and c.tile[1] % 64 == 0), configs[0])
    return best.replace(stages=MIN_STAGES)


def estimate_us(problem: Problem, config: Config, epilogue: EpilogueSpec | None = None, gpu: Gpu = H200) -> float:
    """Return the model's estimate of a kernel's time on a GPU, in microseconds."""
    return estimates_us(problem, [config], epilogue, gpu)[0]


def estimates_us(
    problem: Problem, configs: Sequence[Config], epilogue: EpilogueSpec | None = None, gpu: Gpu = H200
) -> list[float]:  # fmt: skip
    """Return the estimates of several configs, in less time than one by one."""
    cycles = estimate(problem, _table(problem, configs, epilogue, gpu), epilogue, gpu).cycles
    return [float(x) / SM_CLOCK_MHZ for x in cycles]


def sustained_us(problem: Problem, epilogue: EpilogueSpec, config: Config, us: float) -> float:
    """Return a GEMM's time at the clock of its own power, given its time in short blocks between other configs' blocks.

    These share one clock, while the clock of a power-limited GEMM follows its own power (model.py, `_sm_slowdown`): its
    time is the geometric mean of the cycles' and the energy's. In long blocks the ratio of two configs' times differs
    from that of these by 1.5 % (root mean square; power-h200), from that in short blocks by 6.4 %.
    """
    if problem.grouping or not covers_config(config):
        return us
    estimated = estimate(problem, _table(problem, [config], epilogue), epilogue)
    energy_us = float(estimated.power_limited_cycles[0]) / SM_CLOCK_MHZ
    return (us * energy_us) ** 0.5 if estimated.is_power_limited else us


def _table(
    problem: Problem, configs: Sequence[Config], epilogue: EpilogueSpec | None, gpu: Gpu = H200
) -> ConfigTable:  # fmt: skip
    """Return a table of configs for the model."""
    configs_16bit = [config_for_16bit(config, problem.a.dtype) for config in configs]
    return ConfigTable.from_configs(configs_16bit, epilogue, gpu.sms)
