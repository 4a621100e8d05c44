"""The spec of a problem with a config."""

from __future__ import annotations

from functools import lru_cache

from gemmsmith.core.check_spec import check_spec
from gemmsmith.core.config import Config
from gemmsmith.core.design import designs_for_dtype, get_design
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.mma import (
    Mma,
    select_mma,
)
from gemmsmith.core.operand import operand_major
from gemmsmith.core.problem import Problem
from gemmsmith.core.product import ROLES
from gemmsmith.core.scale_spec import ScaleSpec
from gemmsmith.core.spec import KernelSpec


def mma_of(problem: Problem, config: Config) -> Mma:
    """Return the instruction of a config's design for a problem. Raises ConfigError if it has none."""
    op, dtype = get_design(config.design).mma_op, problem.a.dtype
    if op.multiplies(FP32) != (dtype == FP32):
        raise ConfigError(
            f"design: got {config.design} for operands of {dtype}; fp32 operands without `precision` need the design "
            f"{designs_for_dtype(FP32)}, which takes nothing else"
        )
    return select_mma(dtype, problem.b.dtype, problem.accumulator_dtype, op)


def make_spec(problem: Problem, config: Config, epilogue: EpilogueSpec | None = None) -> KernelSpec:
    """Return the spec of a problem, by default with the identity epilogue.

    Raises ConfigError if the config cannot work with the problem.
    """
    mma = mma_of(problem, config)
    majors = tuple(map(operand_major, problem.operands))
    scale_a, scale_b = (
        scale.in_groups(problem.grouping, role) if scale and problem.grouping else scale
        for role, scale in zip(ROLES, map(ScaleSpec.from_scale, problem.scales), strict=True)
    )
    epilogue = epilogue or EpilogueSpec.identity(problem.d)
    grouping = problem.grouping
    if grouping and grouping.clips_rows:
        epilogue = epilogue.with_clipped_rows(grouping.role)
    if get_design(config.design).clips_rows:
        if any(epilogue.graph.is_reduction(r) for r in epilogue.graph.results):
            raise ConfigError(f"epilogue: got a reduction with {config.design}; return the matrix")
        epilogue = epilogue.with_clipped_rows()
        if majors[0] == "MN" and problem.m:
            raise ConfigError(f"a: got column-major with {config.design}, whose tiles begin anywhere; use row-major")
    interleaved = next((role for role, x in zip(ROLES, problem.operands, strict=True) if x.interleave_stride), None)
    options = problem.promoted, (scale_a, scale_b), problem.is_3xtf32, grouping, interleaved
    spec = _checked(KernelSpec(config, mma, majors, epilogue, *options))
    columns = spec.warpgroup_columns
    if spec.epilogue.graph.requires_full_rows and problem.n > columns:
        per_warpgroup = f", {columns} per warpgroup," if columns < config.tile[1] else ""
        raise ConfigError(
            f"tile N: got {config.tile[1]}{per_warpgroup} for n = {problem.n}; this epilogue needs a row in one "
            "tile, up to 256 columns"
        )
    return spec


@lru_cache(maxsize=4096)
def _checked(spec: KernelSpec) -> KernelSpec:
    """Validate the spec; return the first equal one, since many problems share one."""
    check_spec(spec)
    return spec
