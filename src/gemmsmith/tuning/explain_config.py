"""Explanation of a config: the text of `plan.why`, by the cost model of wgmma, or by that of CUDA cores."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gemmsmith.core.chip import HOPPER, get_chip
from gemmsmith.core.config import Config
from gemmsmith.core.design import get_design
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.mma import select_mma
from gemmsmith.core.problem import Matrix, Problem
from gemmsmith.core.scalars import ceil_div
from gemmsmith.core.spec import KernelSpec
from gemmsmith.graph.precision import epilogue_cost
from gemmsmith.kernels.pack import Packing, operand_packings, tf32_residual_packings, with_packed_operands
from gemmsmith.tuning.candidates import spec_for
from gemmsmith.tuning.choose import rank_configs
from gemmsmith.tuning.choose_sm80 import KernelCost, SgemmEstimate, rank_sm80, sgemm_estimate
from gemmsmith.tuning.config_table import ConfigTable
from gemmsmith.tuning.costs import SM_CLOCK_MHZ, packing_us
from gemmsmith.tuning.dtype_equivalence import as_16bit_problem, config_for_16bit
from gemmsmith.tuning.gpus import H100, H200, Gpu
from gemmsmith.tuning.grouped import equal_groups
from gemmsmith.tuning.model import Estimate, estimate, tile_bytes
from gemmsmith.tuning.tuned_table import find_entry

WIDTH = 100
"""Columns of the text."""
LATENCY_FACTOR = 1.2
"""Ratio of a k-tile's cycles to those of its math and of its copies from which its latency limits it. Chosen."""

MIN_SHARE = 0.02
"""Share of the estimate from which a part is listed. Chosen."""


class Part(NamedTuple):
    """A part of a kernel's estimated time.

    Attributes:
        cycles: SM cycles that it would take alone.
        bound: What the kernel is called if this part takes the most time.
        note: What the time comes from.
    """

    name: str
    cycles: float
    bound: str
    note: str


def explain_config(
    problem: Problem, config: Config, epilogue: EpilogueSpec | None, origin: str, gpu: Gpu = H200, names: str = "ab"
) -> str:
    """Return the text of `plan.why`: what the kernel's time consists of by the model, and the best other config.

    `swap_ab` transposes the problem, whose groups are estimated as if they were equally large. `names`: what the caller
    calls A and B of the kernel.
    """
    oriented, further, others = problem.T if config.swap_ab else problem, list[str](), list[Config]()
    if problem.grouping:
        further.append(groups_line(problem))
        problem = equal_groups(problem)
    else:
        others = [c for c in rank_configs(problem, epilogue, 2, gpu=gpu) if c != config][:1]
    table = ConfigTable.from_configs(
        [config_for_16bit(c, problem.a.dtype) for c in (config, *others)], epilogue, gpu.sms
    )
    e = estimate(problem, table, epilogue, gpu)
    bound, parts = _parts(problem, table, e, epilogue, gpu)
    total = float(e.cycles[0])
    entry = find_entry(problem, epilogue, gpu) if origin.startswith("tuned") else None
    measured = "not measured"
    if entry:
        plain = "" if origin == "tuned" else ", no epilogue"
        time = f"measured {entry.us:.1f} us" if entry.us else "fastest measured"
        measured = f"{time} ({entry.gpu.name if entry.gpu else 'another GPU'}, M = {entry.m}{plain})"
    summary = f"{bound}: estimated {microseconds(total)} us ({gpu.name}, {SM_CLOCK_MHZ} MHz), {measured}"
    operands = zip(names, with_packed_operands(oriented, config).operands, config.tile, strict=False)
    further += [line for x in operands if (line := _mn_major_line(*x))]
    design = get_design(config.design)
    packings = zip(names, operand_packings(oriented, design), strict=True)
    residuals = zip(names, tf32_residual_packings(oriented, design), strict=False)
    further += [_packing_line(name, x, oriented) for name, x in (*packings, *residuals) if x]
    further += [
        f"best other config: estimated {microseconds(cycles)} us with {changes(config, other)}"
        for cycles, other in zip(e.cycles[1:], others, strict=True)
    ]
    return explanation(config, origin, summary, parts, total, further)


def explanation(
    config: Config, origin: str, summary: str, parts: Sequence[Part], total: float, further: Sequence[str]
) -> str:
    """Return a text of lines: the config, the summary, the parts with their shares of `total` cycles, and the rest."""
    lines = [f"{config}: {origin}"] if len(f"{config}: {origin}") <= WIDTH else [f"{config}:", f"    {origin}"]
    us = [microseconds(part.cycles) for part in parts]
    width = max(map(len, us), default=0)
    lines += [summary]
    lines += [
        f"  {part.name:<15} {text:>{width}} us {part.cycles / total:4.0%}  {part.note}".rstrip()
        for part, text in zip(parts, us, strict=True)
    ]
    lines += further
    return "\n".join(textwrap.fill(x, WIDTH, subsequent_indent="    ", break_on_hyphens=False) for x in lines)


def groups_line(problem: Problem) -> str:
    """Return a line on what groups the explanation of a grouped GEMM assumes."""
    equal, grouping = equal_groups(problem), problem.grouping
    assert grouping
    size = f"K = {equal.k}" if grouping.along == "k" else f"{equal.n if grouping.role == 'b' else equal.m} rows"
    line = f"as if each of the {problem.groups} groups had {size}"
    if grouping.gathers:
        line += "; gathering them, which takes longer, is left out"
    return line


def microseconds(cycles: float) -> str:
    """Return cycles in microseconds."""
    return f"{cycles / SM_CLOCK_MHZ:.1f}"


def changes(config: Config, other: Config) -> str:
    """Return the call by which another config is made: of `Config.replace` of this one, or of `Config.parse`."""
    fields = (f"{name}={x!r}" for name, x in vars(other).items() if x != getattr(config, name))
    return min(f"config.replace({', '.join(fields)})", f"Config.parse({f'{other}'!r})", key=len)


def _parts(
    problem: Problem, table: ConfigTable, e: Estimate, epilogue: EpilogueSpec | None, gpu: Gpu
) -> tuple[str, list[Part]]:  # fmt: skip
    """Return what bounds the first config of a table, and the parts of its time of at least MIN_SHARE.

    Latencies add up, and so do the mainloop, idle SMs and the epilogue, with which DRAM and power overlap. The bound is
    that of the longest part of the longest of these four.
    """
    math, copies, k_tile = (float(x[0]) for x in (e.math_cycles, e.copy_cycles, e.k_tile_cycles))
    count, tiles = float(e.k_tiles_per_cta[0]), float(table.tiles(problem)[0] * np.maximum(table.splits[0], 1))
    k_tiles = np.ceil(as_16bit_problem(problem).k / table.tile_k[0])
    ctas = table.cluster_shape_m[0] * table.cluster_shape_n[0]
    share = min(count, float(table.tiles(problem)[0] * ctas * k_tiles) / gpu.sms)  # of a CTA, if all had the same
    bound = "compute-bound" if math >= copies else "bound by copies from the L2"
    per_k_tile = f"tensor cores {math:.0f}, copies {copies:.0f}"
    if k_tile > LATENCY_FACTOR * max(math, copies):
        bound, per_k_tile = "latency-bound", f"{per_k_tile}, else waiting"
    cost = epilogue and epilogue_cost(epilogue.graph, epilogue.fast_math)
    has_functions, functions = bool(cost and cost.instructions), "what no mainloop hides"
    if cost and cost.instructions:
        functions += f"; {cost.instructions:.0f} instructions an element, {cost.special:.0f} special"
    parts = [
        Part("launch, fill", float(e.launch_and_fill[0]), "latency-bound", "until the pipeline's first stage is full"),
        Part("reduction", float(e.split_reduction[0]), "bound by the split-K reduction", "of partial sums"),
        Part("mainloop", share * k_tile, bound, f"{share:.1f} k-tiles an SM of {k_tile:.0f} cycles: {per_k_tile}"),
        Part("uneven waves", (count - share) * k_tile, "bound by wave quantization",
             f"{tiles:.0f} tiles of clusters, {table.max_active_clusters[0]:.0f} at once; "
             f"{1 - share / max(count, 1):.0%} of SM time idle"),
        Part("epilogue", float(e.exposed_stores[0]), "epilogue-bound", functions),
        Part("DRAM", float(e.memory_cycles[0]), "memory-bound", f"{e.dram_bytes[0] / 1e6:.1f} MB"),
        Part("power", float(e.power_limited_cycles[0]), "power-bound", "its energy at the limit of 700 W"),
    ]  # fmt: skip
    shown = [x for x in parts if x.cycles >= MIN_SHARE * e.cycles[0] or (x.name == "epilogue" and has_functions)]
    groups = parts[:2], parts[2:5], parts[5:6], parts[6:]
    longest = max(groups, key=lambda group: sum(part.cycles for part in group))
    return max(longest, key=lambda part: part.cycles).bound, shown


def _mn_major_line(name: str, operand: Matrix, width: int) -> str:
    """Return a line on what it costs to read an MN-major operand in tiles of `width` rows (of M or N); "": nothing."""
    if operand.major != "MN":
        return ""
    nbytes, slowdown = tile_bytes(operand, np.array([float(width)]), np.ones(1))
    used = min(width, operand.rows) * operand.dtype.bytes
    if nbytes[0] <= used and slowdown[0] <= 1:
        return ""
    line = f"{name} is MN-major: its k-tiles read {nbytes[0]:.0f} bytes per row, {used} of them used"
    if slowdown[0] > 1:
        line += f"; L2 reads take {slowdown[0]:.2f} times as long, since rows begin within lines"
    return line


def _packing_line(name: str, packing: Packing, problem: Problem) -> str:
    """Return a line on why operand `name` is copied before each run, and what that costs."""
    source, moved = packing.source, 2 * packing.bytes
    transposes = source.row_stride < source.col_stride
    reason = f"{source.dtype} is read K-major only" if transposes else "TMA cannot read its rows"
    if transposes and not problem.promoted:
        mma = select_mma(source.dtype, source.dtype, problem.accumulator_dtype)
        if mma.register_majors:
            reason = f"with {source.dtype} only one operand may be MN-major"
    if problem.grouping and problem.grouping.along == "k":
        reason = "groups along K are read MN-major"
    done = f"{name} is {'transposed' if transposes else 'copied'} before each run, since {reason}"
    if packing.tf32_residual:
        done = f"the TF32 residual of {name} is computed before each run"
    return f"{done}: {moved / 1e6:.1f} MB, {packing_us(packing):.1f} us"


def estimate_sm80(problem: Problem, spec: KernelSpec) -> SgemmEstimate | None:
    """Return the estimate of a kernel without wgmma; None if no model covers it: it must be sgemm's, on Hopper."""
    if spec.config.design != "sgemm" or get_chip(spec.config.chip) != HOPPER:
        return None
    return sgemm_estimate(problem, problem.m, spec, HOPPER)


def explain_sm80(problem: Problem, epilogue: EpilogueSpec, origin: str, spec: KernelSpec) -> str:
    """Return the text of `plan.why`: what bounds the kernel by the model of CUDA cores; without a model, its tiles."""
    config, chip = spec.config, get_chip(spec.config.chip)
    e = estimate_sm80(problem, spec)
    further = [groups_line(problem)] if problem.grouping else []
    others: list[Config] = []
    if not problem.grouping and config.design in ("sgemm", "mma_multistage"):
        others = [x for x in rank_sm80(problem, epilogue, chip)[:2] if x != config][:1]
    if e is None:
        what = "CUDA cores of an H100 and H200" if config.design == "sgemm" else "wgmma and for CUDA cores"
        summary = f"no estimate: the cost models are for {what}, and this is {config.design} on {chip}"
        further = [*_tiles(problem, config, chip.sm_count), *further]
        further += [f"next in the ranking by waves and copies: {changes(config, x)}" for x in others]
        return explanation(config, origin, summary, [], 0, further)
    parts = [
        Part("mainloop", e.mainloop_cycles, _mainloop_bound(e.cost),
             f"a CTA's k-tile: instructions {e.cost.issue_cycles:.0f} cycles, copies {e.cost.copy_cycles:.0f}; "
             f"{e.cost.ctas_per_sm} CTA{'s' * (e.cost.ctas_per_sm > 1)} an SM"),
        Part("DRAM", e.memory_cycles, "memory-bound", f"{e.dram_bytes / 1e6:.1f} MB"),
        Part("epilogue", e.epilogue_cycles, "epilogue-bound", "stores, partial sums, and filling the pipeline"),
    ]  # fmt: skip
    bound = max(parts, key=lambda part: part.cycles).bound
    summary = f"{bound}: estimated {microseconds(e.cycles)} us ({H100.name}, {SM_CLOCK_MHZ} MHz), not measured"
    for other in others:
        cycles = sgemm_estimate(problem, problem.m, spec_for(other, problem, epilogue), chip).cycles
        further.append(f"best other config: estimated {microseconds(cycles)} us with {changes(config, other)}")
    shown = [x for x in parts if x.cycles >= MIN_SHARE * e.cycles]
    return explanation(config, origin, summary, shown, e.cycles, further)


def _mainloop_bound(cost: KernelCost) -> str:
    """Return what the kernel is called if its mainloop takes the most time."""
    if cost.k_tile_cycles(cost.ctas_per_sm) <= cost.min_k_tile_cycles:
        return "latency-bound"
    return "compute-bound" if cost.issue_cycles >= cost.copy_cycles else "bound by copies"


def _tiles(problem: Problem, config: Config, sms: int) -> list[str]:
    """Return lines on what is known without a model: the tiles of an SM, and FLOPs per byte."""
    p = equal_groups(problem) if problem.grouping else problem
    m, n = (p.n, p.m) if config.swap_ab else (p.m, p.n)
    tiles = ceil_div(m, config.tile[0]) * ceil_div(n, config.tile[1]) * p.batch
    nbytes = sum(x.dtype.bytes_of(x.rows * x.cols * x.batch) for x in (p.a, p.b, p.d))
    return [
        f"  {tiles} tiles on {sms} SMs, {tiles / sms:.1f} for each",
        f"  {nbytes / 1e6:.1f} MB of operands and results, {p.flops / max(nbytes, 1):.0f} FLOPs per byte",
    ]
