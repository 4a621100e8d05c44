"""Explanation of a config: the text of `plan.why`."""

from __future__ import annotations

import numpy as np

from gemmsmith.core.config import Config
from gemmsmith.core.design import get_design
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.mma import select_mma
from gemmsmith.core.operand import operand_major
from gemmsmith.core.problem import Matrix, Problem
from gemmsmith.graph.precision import epilogue_cost
from gemmsmith.kernels.pack import Packing, operand_packings, tf32_residual_packings, with_packed_operands
from gemmsmith.tuning.choose import rank_configs
from gemmsmith.tuning.config_table import ConfigTable
from gemmsmith.tuning.dtype_equivalence import config_for_16bit
from gemmsmith.tuning.gpus import H200, Gpu
from gemmsmith.tuning.model import estimate, tile_bytes
from gemmsmith.tuning.packing_cost import SM_CLOCK_MHZ, packing_us

NUM_ALTERNATIVES = 3
"""Alternatives that are listed."""


def explain_config(
    problem: Problem, config: Config, epilogue: EpilogueSpec | None, origin: str, gpu: Gpu = H200, names: str = "ab"
) -> str:
    """Return the text of `plan.why`: the model's estimate for the config and for the best alternatives.

    Args:
        problem: The GEMM that `swap_ab` transposes.
        config: Its config.
        epilogue: Its epilogue; None: the plain GEMM.
        origin: Where the config comes from, in words.
        gpu: The GPU's constants.
        names: What the caller calls A and B of the kernel.
    """
    ranked = rank_configs(problem, epilogue, NUM_ALTERNATIVES + 1, gpu=gpu)
    alternatives = [c for c in ranked if c != config][:NUM_ALTERNATIVES]
    table = ConfigTable.from_configs([config_for_16bit(c, problem.a.dtype) for c in (config, *alternatives)], epilogue)
    e = estimate(problem, table, epilogue, gpu)
    math, copies, k_tile = (float(x[0]) for x in (e.math_cycles, e.copy_cycles, e.k_tile_cycles))
    cycles_of_bounds = e.work_cycles[0], e.memory_cycles[0], e.power_limited_cycles[0]
    bounds = dict(zip(("compute", "memory", "power"), map(float, cycles_of_bounds), strict=True))
    each_bound = ", ".join(f"{name} bound alone {x:.0f}" for name, x in bounds.items())
    limit = "math" if math >= copies else "copies"
    if k_tile > 1.2 * max(math, copies):
        limit = "copy latency"
    lines = [
        f"{config}: {origin}",
        f"k-tile: math {math:.0f} cycles, copies {copies:.0f}; {e.k_tiles_per_cta[0]:.0f} k-tiles per CTA, "
        f"limited by {limit}",
        f"exposed epilogue stores {e.exposed_stores[0]:.0f}, split-K reduction {e.split_reduction[0]:.0f}; "
        f"{each_bound}: {max(bounds, key=bounds.__getitem__)}-bound",
        f"model: {e.cycles[0]:.0f} cycles: {e.cycles[0] / SM_CLOCK_MHZ:.1f} us at {SM_CLOCK_MHZ} MHz",
    ]
    oriented = problem.T if config.swap_ab else problem
    lines += [
        _mn_major_line(name, x, width)
        for name, x, width in zip(names, with_packed_operands(oriented, config).operands, config.tile, strict=False)
        if operand_major(x) == "MN"
    ]
    design = get_design(config.design)
    packings = zip(names, operand_packings(oriented, design), strict=True)
    residuals = zip(names, tf32_residual_packings(oriented, design), strict=False)
    lines += [_packing_line(name, x, oriented) for name, x in (*packings, *residuals) if x]
    if epilogue and (cost := epilogue_cost(epilogue.graph, epilogue.fast_math)).instructions:
        lines.append(
            f"epilogue: its functions take {cost.instructions:.0f} instructions an element, {cost.special:.0f} of them "
            "of the special-function unit"
        )
    lines += [f"alternative: {x / SM_CLOCK_MHZ:.1f} us {c}" for x, c in zip(e.cycles[1:], alternatives, strict=True)]
    return "\n".join(lines)


def _mn_major_line(name: str, operand: Matrix, width: int) -> str:
    """Return a line on what it costs to read an MN-major operand in tiles of `width` rows (of M or N)."""
    nbytes, slowdown = tile_bytes(operand, np.array([float(width)]), np.ones(1))
    used = min(width, operand.rows) * operand.dtype.bytes
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
    done = f"{name} is {'transposed' if transposes else 'copied'} before each run, since {reason}"
    if packing.tf32_residual:
        done = f"the TF32 residual of {name} is computed before each run"
    return f"{done}: {moved / 1e6:.1f} MB moved, {packing_us(packing):.1f} us and a launch"
