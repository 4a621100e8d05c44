"""The analytic choice of a config: the model ranks the space."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import numpy as np

from gemmsmith.core.chip import find_chip
from gemmsmith.core.config import Config
from gemmsmith.core.design import find, for_chip
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.mma import WGMMA_M
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import EpilogueSpec
from gemmsmith.tuning.candidates import spares
from gemmsmith.tuning.copies import MHZ, copy_cycles, loads_a
from gemmsmith.tuning.correction import corrected
from gemmsmith.tuning.depth import for_16_bits, for_operands, in_16_bits
from gemmsmith.tuning.fitting import fitting, spec_for
from gemmsmith.tuning.gpus import H200, Gpu
from gemmsmith.tuning.l2 import streaming_stores, wave_bytes
from gemmsmith.tuning.model import estimate
from gemmsmith.tuning.space import Column, Space, considered, in_steps, reads_again

STAGES = 8
"""Stages asked for where the user gives a tile; only the smallest problems gain from more."""
NEAR = 128
"""As many of the model's first are ranked again, with the measured correction."""


def fitted(config: Config, given: Iterable[str], *, fp16: bool = False) -> Config:
    """A config with the fields that were not `given` adapted to those that were: the design and what it takes,
    consumers, cluster, and stages, of which `fitting` takes away those that do not fit shared memory."""
    changes: dict[str, object] = {}
    if "design" not in given:
        possible_designs = for_chip(find_chip(config.chip))
        if config.design not in possible_designs:
            config = config.replace(design=possible_designs[0])
    design = find(config.design)
    defaults = {name: x for name, x in design.defaults.items() if name not in given}
    if defaults:
        changes |= defaults
    elif "consumers" not in given and "tile" in given:
        m, n, _ = config.tile
        possible = [c for c in (2, 3, 1) if c in design.accumulators and m % (WGMMA_M * c) == 0]
        held = [c for c in possible if m // c * n // (256 if fp16 else 128) <= design.accumulators[c]]
        changes["consumers"] = next(iter(held or possible), 1)
    if "cluster" not in given and "tile" in given:
        changes["cluster"] = (1, 1)
    if "stages" not in given:
        changes["stages"] = STAGES
    off = {"splits": 1, "cluster_splits": 1, "alias_epilogue": False}
    changes |= {name: x for name, x in off.items() if name not in given and name not in design.takes}
    if "sync_clusters" not in given:
        changes["sync_clusters"] = config.sync_clusters and config.can_sync_clusters
    return config.replace(**changes)


def ranked(
    problem: Problem, epilogue: EpilogueSpec | None = None, most: int = 64, in_order: bool = False, gpu: Gpu = H200
) -> list[Config]:
    """The `most` promising configs on a GPU, best first. With `in_order` only those that sum a tile in one CTA, from
    its first k-tile to its last.

    Where each CTA has one tile at most, those that can have `alias_epilogue` do: 1.1 % in the mean of 12 shapes
    (benchmarks/results/sweep-fifth-h200.json). Where it has several, and a wave needs more than the L2 holds of what
    others read again, it has `serpentine`: 0.5 to 0.8 % of large products (tries-h200.json); and, if warpgroups share
    a tile, `sync_clusters`: 0.7 % in the mean of 29 (lockstep-h200.json). Results that memory takes longest
    for have `streaming_stores`.
    """
    epilogue = epilogue or EpilogueSpec.bare(problem.d)
    found: list[Config] = []
    alike = in_16_bits(problem)
    every = considered(epilogue, alike)
    good = every.sensible(alike)
    some = every.take(np.flatnonzero(good & every.in_order if in_order else good))
    once = some.once(alike)
    alias_epilogue = once & (some.reusing > 0)
    some = replace(some, stages=np.where(alias_epilogue, some.reusing, some.stages))
    streaming = streaming_stores(problem, epilogue, gpu)
    for i in _order(problem, some, epilogue, gpu):
        if len(found) == most:
            break
        config = some.configs[i].replace(
            stages=int(some.stages[i]), alias_epilogue=bool(alias_epilogue[i]), streaming_stores=streaming
        )
        if not once[i]:
            oriented = alike.T if config.swap_ab else alike
            overflows = reads_again(alike) and wave_bytes(oriented, config) > gpu.l2_bytes
            if overflows and config.splits == 0:  # its clusters, which cannot wait for one another, drift apart
                continue
            config = config.replace(
                serpentine=overflows and not in_order, sync_clusters=overflows and config.can_sync_clusters
            )
        try:
            config = for_operands(config, problem.a.dtype)
            spec = spec_for(config, problem, epilogue)
        except ConfigError:
            continue
        if spares(spec) and not spec.hands_back_to_peers:
            found.append(fitting(config, spec))
    return found


def _order(problem: Problem, s: Space, epilogue: EpilogueSpec, gpu: Gpu) -> Column:
    """Indices of the configs, the fastest first: by the model, and the first `NEAR` of it as corrected; with the copies
    before their kernels start."""
    copies = copy_cycles(problem, s.swap_ab)
    e = estimate(in_16_bits(problem), s, epilogue, gpu, loads_a(problem, s.swap_ab))
    order = np.argsort(e.cycles + copies, kind="stable")
    near = order[:NEAR]
    again = np.argsort(corrected(problem, s.take(near), e.take(near)) + copies[near], kind="stable")
    return np.concatenate([near[again], order[NEAR:]])


def choose(problem: Problem, epilogue: EpilogueSpec | None = None, in_order: bool = False, gpu: Gpu = H200) -> Config:
    """The config with the least estimated time on a GPU; `in_order` as in `ranked`. If none can be built: the default
    config, which is refused later, with the reason. Problems alike `in_steps` have one choice, made once."""
    return _choose(in_steps(problem), epilogue, in_order, gpu)


@lru_cache(maxsize=4096)
def _choose(problem: Problem, epilogue: EpilogueSpec | None, in_order: bool, gpu: Gpu) -> Config:
    return next(iter(ranked(problem, epilogue, 1, in_order, gpu)), for_operands(Config(), problem.a.dtype))


def microseconds(problem: Problem, config: Config, epilogue: EpilogueSpec | None = None, gpu: Gpu = H200) -> float:
    """The model's estimate of a kernel's time on a GPU."""
    space = Space.of([for_16_bits(config, problem.a.dtype)], epilogue)
    e = estimate(in_16_bits(problem), space, epilogue, gpu, loads_a(problem, space.swap_ab))
    return float(corrected(problem, space, e)[0]) / MHZ
