"""The spec of a problem with a config, and rules for a config that depend on the operands."""

from __future__ import annotations

from functools import lru_cache

from gemmsmith.core.arguments import INTERLEAVED_ROWS
from gemmsmith.core.check_config import check_config, fills_swizzle_rows
from gemmsmith.core.config import Config
from gemmsmith.core.design import (
    Design,
    designs_supporting,
    designs_that,
    get_design,
    join_alternatives,
    registered_designs,
)
from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP32
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.grouping import GROUP_END_MULTIPLE, Grouping
from gemmsmith.core.mma import Mma
from gemmsmith.core.problem import Problem
from gemmsmith.core.product import ROLES, Role
from gemmsmith.core.register_budgets import MAX_ACC_REGISTERS_WITH_GATHER, MAX_ACC_REGISTERS_WITH_SCATTER
from gemmsmith.core.scale_spec import ScaleSpec
from gemmsmith.core.spec import KernelSpec
from gemmsmith.core.tile import ATOM_ROWS


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


def check_spec(spec: KernelSpec) -> None:
    """Raise ConfigError if the config is invalid for these operands; the message says what would work."""
    check_config(spec.config)
    _check_supported(spec)
    _check_tile(spec)
    _check_slices_and_majors(spec)
    _check_conversions(spec)
    if spec.grouping:
        _check_grouping(spec, spec.grouping)
    if spec.promoted:
        _check_promotion(spec)
    _check_registers(spec)


def _check_supported(spec: KernelSpec) -> None:
    """Raise ConfigError if the chip lacks the instruction, or the design an option that the caller asks for."""
    mma, op = spec.mma, spec.design.mma_op
    if not spec.chip.supports(mma.required_arch):
        raise ConfigError(f"chip: got {spec.chip} for {mma.a} x {mma.b}; {op.name} needs {mma.required_arch} for these")
    for option, is_asked, message, hint in (
        ("block_scales", any(spec.scales), "scale_a, scale_b: got block scales", ""),
        ("3xtf32", spec.is_3xtf32, 'precision: got "3xtf32"', ""),
        ("interleaved_b", spec.interleaved is not None, "b: got a tuple", "interleave(*b), or "),
    ):
        if is_asked and option not in spec.design.supported_options:
            raise ConfigError(f"{message} with {spec.design.name}; use {hint}the design {designs_supporting(option)}")
    if spec.interleaved and spec.is_3xtf32:
        raise ConfigError('b: got a tuple with precision="3xtf32", which takes one array; use interleave(*b)')
    if spec.interleaved == "b" and spec.slice_columns % INTERLEAVED_ROWS:
        raise ConfigError(f"tile N: got {spec.config.tile[1]} for a tuple b; use a multiple of {INTERLEAVED_ROWS}")


def _check_tile(spec: KernelSpec) -> None:
    """Raise ConfigError if the tile's extents do not fit its swizzle, the instruction or the number of threads."""
    c, op, bits = spec.config, spec.design.mma_op, spec.mma.a.bits
    for dtype in dict.fromkeys(tile.dtype for tile in spec.tiles):
        if not fills_swizzle_rows(c.tile[2], dtype.bits):
            raise ConfigError(
                f"tile K: got {c.tile[2]} with operands of {dtype}; use {dtype.elements_in(32)}, "
                f"{dtype.elements_in(64)}, or a multiple of {dtype.elements_in(128)} up to {dtype.elements_in(512)}"
            )
    warpgroups_n = c.warpgroups[1]
    if c.tile[1] % warpgroups_n or not spec.mma.supports_n(spec.warpgroup_columns):
        per_warpgroup = f" for each of {warpgroups_n} warpgroups" if warpgroups_n > 1 else ""
        supported = f"{spec.mma.supported_n_text}{per_warpgroup}"
        raise ConfigError(f"tile N: got {c.tile[1]}; {spec.mma} supports {supported}")
    if c.tile[2] % (multiple := op.tile_k_bytes * 8 // bits):
        raise ConfigError(f"tile K: got {c.tile[2]} of {spec.mma.a}; {c.design} needs a multiple of {multiple}")
    if not op.uses_tensor_cores and any(
        (spec.threads % tile.mn and tile.mn % spec.threads) or spec.threads % tile.k or spec.threads > 8 * tile.mn
        for tile in spec.tiles
    ):
        raise ConfigError(
            f"tile: got {c.tile} for {spec.threads} threads; {c.design} needs tile M, N and K that "
            "divide the thread count (M and N may also be multiples of it), and M and N >= threads / 8"
        )


def _check_slices_and_majors(spec: KernelSpec) -> None:
    """Raise ConfigError if a tile of A or B cannot be divided among the CTAs that share it, or has a wrong layout."""
    for role, tile, ctas in zip(ROLES, spec.tiles, spec.multicast_ctas, strict=True):
        slice_rows = INTERLEAVED_ROWS if role == spec.interleaved else ATOM_ROWS
        if tile.outer % (slice_rows * ctas):
            raise ConfigError(
                f"cluster: {ctas} CTAs share the {role.upper()} tile, whose {tile.outer} rows do not split into "
                f"multicast slices of {slice_rows}; use a larger tile or a smaller cluster"
            )
        majors = spec.design.readable_majors(role, spec.mma, promoted=spec.promoted, grouping=spec.grouping)
        if tile.major not in majors:
            raise ConfigError(
                f"{role.upper()}: got {tile.major}-major elements of {tile.dtype} with {spec.design.name}; "
                f"use {' or '.join(majors)}-major ones"
            )


def _check_conversions(spec: KernelSpec) -> None:
    """Raise ConfigError if the chip cannot convert a dtype of the epilogue."""
    graph = spec.epilogue.graph
    named = [(x.name, x.dtype) for x in graph.operands] + [(x.name, x.dtype) for x in graph.results]
    named += [("cast", node.attribute) for node in graph.nodes if node.op == "cast"]
    for name, dtype in named:
        if dtype in (E4M3, E5M2) and not spec.chip.supports("sm_89"):
            raise ConfigError(f"{name}: got {dtype} for {spec.chip}, which cannot convert it; use sm_89 or later")


def _check_grouping(spec: KernelSpec, grouping: Grouping) -> None:
    c = spec.config
    if not spec.design.mma_op.uses_tensor_cores:
        raise ConfigError(f'precision: got None for fp32 with {grouping}; use "tf32" or "3xtf32"')
    if grouping.along not in spec.design.groups_along:
        designs = designs_that(lambda design: grouping.along in design.groups_along)
        raise ConfigError(f"design: got {c.design} with {grouping}; use {designs}")
    for name, default in (("splits", 1), ("cluster_splits", 1), ("serpentine", False), ("sync_clusters", False)):
        if getattr(c, name) != default:
            raise ConfigError(f"{name}: got {getattr(c, name)} with {grouping}; use {default}")
    if spec.adds_rows and not spec.chip.supports("sm_90"):
        for r in spec.epilogue.graph.results:
            if r.dtype == BF16:
                raise ConfigError(
                    f"{r.name}: got bf16 with deterministic=False for {spec.chip}, which cannot add it "
                    "by atomics; use fp16 or fp32"
                )
    if grouping.along == "k" and spec.mma.a.bits == 32:
        raise ConfigError("a, b: got fp32 with groups along k; use 16-bit or 8-bit operands")
    if grouping.along == "k" and c.alias_epilogue:
        raise ConfigError("alias_epilogue: got True with groups along k; use False")
    if grouping.gathers and spec.mmas_per_k_tile > 1:
        raise ConfigError(f'precision: got "3xtf32" with a gather and {c.design}; use "tf32"')
    if grouping.gathers and spec.multicast_ctas[ROLES.index(grouping.role)] > 1:
        cluster = (c.cluster[0], 1) if grouping.role == "a" else (1, c.cluster[1])
        raise ConfigError(f"cluster: got {c.cluster} with a gather, whose rows are not multicast; use {cluster}")
    if grouping.along == "k" and spec.mma.a.bits == 8 and GROUP_END_MULTIPLE % c.tile[2]:
        raise ConfigError(f"tile K: got {c.tile[2]} with {grouping}; use a divisor of {GROUP_END_MULTIPLE}")


def _check_promotion(spec: KernelSpec) -> None:
    """Raise ConfigError if the design does not promote sums, or if a k-tile is not the K between two promotions."""
    c, mma, block = spec.config, spec.mma, spec.design.mma_op.promotion_k_bytes // spec.mma.a.bytes
    argument, value = ("precision", "3xtf32") if spec.is_3xtf32 else ("accumulate", "promoted")
    if c.consumers not in spec.design.max_promoted_registers:
        hint = "" if spec.is_3xtf32 else ', or accumulate="fast"'
        designs = designs_that(lambda x: x.max_promoted_registers and x.mma_op.find(mma.a, mma.b, mma.d))
        raise ConfigError(f'{argument}: got "{value}" with {c.design}; use the design {designs}{hint}')
    if c.tile[2] != block:
        raise ConfigError(f'tile K: got {c.tile[2]} with {argument}="{value}"; use {block}')


def _check_registers(spec: KernelSpec) -> None:
    """Raise ConfigError if a thread's accumulator and fragments do not fit in its registers.

    Kernels with TMA that gather or scatter rows have lower limits, since their consumers have fewer registers.
    """
    design, needed = spec.design, spec.accumulator_registers + spec.a_registers
    consumers = spec.config.consumers
    limit = design.max_accumulator_registers[consumers]
    if spec.grouping and spec.grouping.has_row_indices and design.uses_tma:
        has_32_bit_result = any(r.dtype and r.dtype.bits == 32 for r in spec.epilogue.graph.results)
        is_low = spec.grouping.scatters or has_32_bit_result
        limit = min(limit, MAX_ACC_REGISTERS_WITH_SCATTER if is_low else MAX_ACC_REGISTERS_WITH_GATHER)
    if spec.promoted:
        needed, limit = spec.promotion.registers_per_thread, design.max_promoted_registers[consumers]
    if needed > limit:
        label = "accumulators" if spec.promoted else "accumulator"
        fragments = " and A's fragments" if spec.a_in_registers else ""
        verb = "need" if spec.promoted or spec.a_in_registers else "needs"
        hint = ", or a scale per 128 columns instead of per column" if spec.has_per_column_scales else ""
        raise ConfigError(
            f"registers: the {label} of {spec.warpgroup_rows}x{spec.warpgroup_columns}{fragments} {verb} {needed} "
            f"per thread, {needed - limit} more than fit; use more consumers or a smaller tile{hint}"
        )
