"""Explanation of a config without wgmma: the text of `plan.why` for CUDA cores and for mma.sync."""

from __future__ import annotations

from gemmsmith.core.chip import HOPPER, get_chip
from gemmsmith.core.config import Config
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.problem import Problem
from gemmsmith.core.scalars import ceil_div
from gemmsmith.core.spec import KernelSpec
from gemmsmith.tuning.choose_sm80 import KernelCost, SgemmEstimate, rank_sm80, sgemm_estimate
from gemmsmith.tuning.explain_config import MIN_SHARE, Part, changes, explanation, groups_line, microseconds
from gemmsmith.tuning.gpus import H100
from gemmsmith.tuning.grouped import equal_groups
from gemmsmith.tuning.packing_cost import SM_CLOCK_MHZ
from gemmsmith.tuning.stage_count import spec_for


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
