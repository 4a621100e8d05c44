"""Stage counts that fit into shared memory (CUTLASS: StageCountAuto), and the kernel spec of a config for a problem."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from gemmsmith.core.chip import get_chip
from gemmsmith.core.config import Config
from gemmsmith.core.integers import ceil_div
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import BARRIER_PAIR_BYTES, EpilogueSpec, KernelSpec
from gemmsmith.epilogue.epilogue_plan import SWIZZLE_ALIGNMENT_BYTES, has_32bit_matrix, min_smem_bytes
from gemmsmith.kernels.pack import with_packed_operands

MIN_STAGE_BYTES_FOR_TWO_LOAD_BUFFERS = 128 << 10
"""Bytes of stages that take precedence over a second epilogue subtile of each matrix: with five matrices, 128x256 with
three stages and one subtile is among the fastest configs, with two stages it is not."""


def stages_that_fit(config: Config, epilogue: EpilogueSpec, stage_bytes: int, reserved_bytes: int = 0) -> int:
    """Return the stages, at most the config's and at least two, that fit with the epilogue and `reserved_bytes`.

    The epilogue gets one load buffer (of a subtile) per matrix until the stages take
    MIN_STAGE_BYTES_FOR_TWO_LOAD_BUFFERS, then two. 32-bit matrices always get two: with one, the kernel spills
    registers.
    """
    graph, stage_and_barrier_bytes = epilogue.graph, stage_bytes + BARRIER_PAIR_BYTES
    free = get_chip(config.chip).max_shared_bytes_per_cta - reserved_bytes
    two_buffers_bytes = min_smem_bytes(graph, epilogue.tma_eligible, config)
    one_buffer_bytes = min_smem_bytes(
        graph, epilogue.tma_eligible, config, min_load_buffers=1 + has_32bit_matrix(graph)
    )
    stages_with_one_buffer = min(
        (free - one_buffer_bytes) // stage_and_barrier_bytes,
        ceil_div(MIN_STAGE_BYTES_FOR_TWO_LOAD_BUFFERS, stage_bytes),
    )
    return max(
        2, min(config.stages, max(stages_with_one_buffer, (free - two_buffers_bytes) // stage_and_barrier_bytes))
    )


@lru_cache(maxsize=4096)
def fit_stages(config: Config, spec: KernelSpec) -> Config:
    """Return the config with as many of its stages as fit the kernel of `spec`.

    The spec gives the bytes per stage, which include the padding of MN-major rows to whole 128-byte lines, and the
    epilogue, which may be transposed.
    """
    alignment_reserve = SWIZZLE_ALIGNMENT_BYTES * (spec.cluster_reduction_bytes > 0)
    exchange_bytes = spec.cluster_reduction_bytes + alignment_reserve
    for stages in range(config.stages, 1, -1):
        candidate, reserved_bytes = config.replace(stages=stages), exchange_bytes + spec.scale_bytes(stages)
        if stages_that_fit(candidate, spec.epilogue, spec.stage_bytes, reserved_bytes) == stages:
            break
    return candidate


def spec_for(config: Config, problem: Problem, epilogue: EpilogueSpec | None = None) -> KernelSpec:
    """Return the kernel spec of a config for a problem.

    `swap_ab` transposes the problem and the epilogue (None: the plain GEMM), as far as that is known without the
    arrays.

    Raises:
        ConfigError: The config does not suit the problem.
    """
    if not config.swap_ab:
        return KernelSpec.from_problem(with_packed_operands(problem, config), config, epilogue)
    return KernelSpec.from_problem(
        with_packed_operands(problem.T, config), config, transposed_epilogue(epilogue) if epilogue else None
    )


@lru_cache(maxsize=64)
def transposed_epilogue(epilogue: EpilogueSpec) -> EpilogueSpec:
    """Return the epilogue of the transposed GEMM, with all matrices that TMA may access: 8-bit columns become rows."""
    columns = {r.name for r in epilogue.graph.results if r.dtype and r.dtype.bits < 16} & epilogue.column_major
    return replace(epilogue, graph=epilogue.graph.transposed(), tma_eligible=epilogue.tma_eligible | columns)
