"""Configs that fit: the spec of a config for a problem, and as many stages as shared memory holds."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from gemmsmith.core.chip import find_chip
from gemmsmith.core.config import Config
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import BARRIER_BYTES, EpilogueSpec, KernelSpec
from gemmsmith.epilogue.device.layout import ALIGNMENT, has_32_bits, least_bytes
from gemmsmith.kernels.pack import packed

IN_FLIGHT = 128 << 10
"""Bytes of stages that come before the second piece of an epilogue's matrices: of five matrices 128x256 with three
stages and one piece is among the fastest, with two stages not."""


def stages_that_fit(config: Config, epilogue: EpilogueSpec, stage_bytes: int, taken: int = 0) -> int:
    """As many of the config's stages as shared memory holds beside what its epilogue should be left and what else is
    `taken`, but at least two. Of matrices that it loads it is left two pieces, or, for the first `IN_FLIGHT` bytes of
    stages, one: of elements of 32 bits two, for the tiles that would leave one spill."""
    free, stage, graph = find_chip(config.chip).shared_bytes - taken, stage_bytes + BARRIER_BYTES, epilogue.graph
    beside_two = (free - least_bytes(graph, epilogue.tma, config)) // stage
    beside_one = (free - least_bytes(graph, epilogue.tma, config, loaded=1 + has_32_bits(graph))) // stage
    return max(2, min(config.stages, max(min(beside_one, -(-IN_FLIGHT // stage_bytes)), beside_two)))


@lru_cache(maxsize=4096)
def fitting(config: Config, spec: KernelSpec) -> Config:
    """The config with as many of its stages as fit a kernel, whose tiles may be padded (MN-major rows to whole lines)
    and whose epilogue may be computed transposed."""
    exchange = spec.exchange_bytes + ALIGNMENT * (spec.exchange_bytes > 0)  # its barriers
    for stages in range(config.stages, 1, -1):
        fewer, taken = config.replace(stages=stages), exchange + spec.scale_bytes(stages)
        if stages_that_fit(fewer, spec.epilogue, spec.stage_bytes, taken) == stages:
            break
    return fewer


def spec_for(config: Config, problem: Problem, epilogue: EpilogueSpec | None = None) -> KernelSpec:
    """The spec of a config, whose `swap_ab` transposes a problem and its epilogue (by default the bare product's) as
    far as that is known without its matrices. ConfigError where the config cannot work."""
    if not config.swap_ab:
        return KernelSpec.of(packed(problem, config), config, epilogue)
    return KernelSpec.of(packed(problem.T, config), config, transposed(epilogue) if epilogue else None)


@lru_cache(maxsize=64)
def transposed(epilogue: EpilogueSpec) -> EpilogueSpec:
    """The epilogue for the transposed product, with all that TMA may reach there: columns of 8 bits become rows."""
    columns = {r.name for r in epilogue.graph.results if r.dtype and r.dtype.bits < 16} & epilogue.column_major
    return replace(epilogue, graph=epilogue.graph.transposed(), tma=epilogue.tma | columns)
