"""The spec of a problem with a config."""

from __future__ import annotations

from functools import lru_cache

from gemmsmith.core.check_spec import check_spec
from gemmsmith.core.config import Config
from gemmsmith.core.design import Design, get_design, join_alternatives, registered_designs
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.mma import Mma
from gemmsmith.core.problem import Problem
from gemmsmith.core.product import ROLES, Role
from gemmsmith.core.scale_spec import ScaleSpec
from gemmsmith.core.spec import KernelSpec


def mma_of(problem: Problem, design: Design) -> Mma:
    """Return the instruction with which a design computes a problem. Raises ConfigError if it has none."""
    dtypes = problem.a.dtype, problem.b.dtype, problem.accumulator_dtype
    if mma := design.mma_for(*dtypes):
        return mma
    a, b, d = dtypes
    designs = [x for x in registered_designs().values() if x.mma_for(*dtypes)]
    names, archs = join_alternatives(sorted(x.name for x in designs)), {x.required_arch for x in designs}
    where = "" if archs & {design.required_arch, "sm_80"} else f" on {join_alternatives(sorted(archs))}"
    hint = ', or precision="tf32" or "3xtf32"' if a == b == FP32 else ""
    raise ConfigError(
        f"design: got {design.name} for operands of {a if a == b else f'{a} x {b}'} accumulated in {d}; "
        + (f"use the design {names}{where}{hint}" if designs else "no design multiplies these")
    )


def make_spec(problem: Problem, config: Config, epilogue: EpilogueSpec | None = None) -> KernelSpec:
    """Return the spec of a problem, by default with the identity epilogue.

    Raises ConfigError if the config cannot work with the problem.
    """
    design, stored = get_design(config.design), (problem.a.dtype, problem.b.dtype)
    mma = mma_of(problem, design)
    scale_a, scale_b = (_scale_spec(problem, role) for role in ROLES)
    spec = _checked(
        KernelSpec(
            config, mma, tuple(x.major for x in problem.operands),
            _with_clipped_rows(epilogue or EpilogueSpec.identity(problem.d), problem, design),
            promoted=problem.promoted,
            scales=(scale_a, scale_b),
            is_3xtf32=problem.is_3xtf32,
            grouping=problem.grouping,
            interleaved=next((x for x in ROLES if problem.operands[ROLES.index(x)].interleave_stride), None),
            stored=None if stored == (mma.a, mma.b) else stored,
        )
    )  # fmt: skip
    _check_full_rows(spec, problem.n)
    return spec


def _scale_spec(problem: Problem, role: Role) -> ScaleSpec | None:
    scale = ScaleSpec.from_scale(problem.scales[ROLES.index(role)])
    return scale.in_groups(problem.grouping, role) if scale and problem.grouping else scale


def _with_clipped_rows(epilogue: EpilogueSpec, problem: Problem, design: Design) -> EpilogueSpec:
    """Return the epilogue for tiles that may end before their last row, if the groups or the design have such tiles.

    Raises ConfigError for a reduction that these tiles do not support.
    """
    if problem.grouping and problem.grouping.clips_rows:
        epilogue = epilogue.with_clipped_rows(problem.grouping.role)
    if design.clips_rows:
        if any(epilogue.graph.is_reduction(r) for r in epilogue.graph.results):
            raise ConfigError(f"epilogue: got a reduction with {design.name}; return the matrix")
        epilogue = epilogue.with_clipped_rows()
    return epilogue


def _check_full_rows(spec: KernelSpec, n: int) -> None:
    """Raise ConfigError if the epilogue needs a whole row of D (`n` columns) in one tile, and the tile is narrower."""
    columns, tile_n = spec.warpgroup_columns, spec.config.tile[1]
    if spec.epilogue.graph.requires_full_rows and n > columns:
        per_warpgroup = f", {columns} per warpgroup," if columns < tile_n else ""
        raise ConfigError(
            f"tile N: got {tile_n}{per_warpgroup} for n = {n}; this epilogue needs a row in one tile, up to 256 columns"
        )


@lru_cache(maxsize=4096)
def _checked(spec: KernelSpec) -> KernelSpec:
    """Check the spec and return it. Many problems share a spec: an equal one that was checked before is returned."""
    check_spec(spec)
    return spec
