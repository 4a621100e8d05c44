"""Stage counts that fit into shared memory (CUTLASS: StageCountAuto), and the kernel spec of a config for a problem."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from gemmsmith.core.config import Config
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.make_spec import make_spec
from gemmsmith.core.problem import Problem
from gemmsmith.core.scalars import ceil_div
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.epilogue_plan import has_32bit_matrix, min_smem_bytes
from gemmsmith.kernels.pack import with_packed_operands

MIN_STAGES = 2
"""Stages that are chosen, at least: one is copied while another is multiplied."""
MIN_STAGE_BYTES_FOR_TWO_LOAD_BUFFERS = 128 << 10
"""Bytes of stages that take precedence over a second epilogue subtile of each matrix: with five matrices, 128x256 with
three stages and one subtile is among the fastest configs, with two stages it is not."""


def stages_that_fit(spec: KernelSpec) -> int:
    """Return how many stages fit into shared memory, at most the config's; MIN_STAGES if not even these fit.

    The epilogue has one or two load buffers (of a subtile each) per matrix that it loads. It gets the second only if
    the stages still take MIN_STAGE_BYTES_FOR_TWO_LOAD_BUFFERS then. 32-bit matrices always get two: with one, the
    kernel spills registers.
    """
    free = spec.chip.max_shared_bytes_per_cta
    free_with_two_buffers = free - min_smem_bytes(spec)
    free_with_one_buffer = free - min_smem_bytes(spec, 1 + has_32bit_matrix(spec.epilogue.graph))
    max_with_one_buffer = ceil_div(MIN_STAGE_BYTES_FOR_TWO_LOAD_BUFFERS, spec.stage_bytes)
    for stages in range(min(spec.config.stages, free_with_one_buffer // spec.stage_bytes), MIN_STAGES, -1):
        free = free_with_one_buffer if stages <= max_with_one_buffer else free_with_two_buffers
        if spec.mainloop_bytes(stages) <= free:
            return stages
    return MIN_STAGES


@lru_cache(maxsize=4096)
def fit_stages(spec: KernelSpec) -> Config:
    """Return the spec's config with as many of its stages as fit the kernel."""
    return spec.config.replace(stages=stages_that_fit(spec))


def spec_for(config: Config, problem: Problem, epilogue: EpilogueSpec | None = None) -> KernelSpec:
    """Return the kernel spec of a config for a problem and an epilogue; ConfigError if they do not suit each other.

    With `swap_ab` it is that of the transposed problem and epilogue. Without the caller's arrays, the transposed
    epilogue is a guess (`transposed_epilogue`).
    """
    if config.swap_ab:
        problem, epilogue = problem.T, transposed_epilogue(epilogue) if epilogue else None
    return make_spec(with_packed_operands(problem, config), config, epilogue)


@lru_cache(maxsize=64)
def transposed_epilogue(epilogue: EpilogueSpec) -> EpilogueSpec:
    """Return the epilogue of the transposed GEMM.

    TMA accesses matrices of 8-bit elements only along rows. The transpose turns column-major results into row-major
    ones, which therefore become eligible for TMA.
    """
    columns = {r.name for r in epilogue.graph.results if r.dtype and r.dtype.bits < 16} & epilogue.column_major
    bools = {o.name for o in epilogue.graph.operands if o.dtype and o.dtype.bits < 16}
    return replace(
        epilogue, graph=epilogue.graph.transposed, tma_eligible=epilogue.tma_eligible | columns,
        column_major=epilogue.column_major - bools,
    )  # fmt: skip
