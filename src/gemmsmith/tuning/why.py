"""Why a config was chosen, in words."""

from __future__ import annotations

import numpy as np

from gemmsmith.core.config import Config
from gemmsmith.core.mma import find_mma
from gemmsmith.core.problem import Matrix, Problem
from gemmsmith.core.spec import EpilogueSpec, operand_major
from gemmsmith.kernels.pack import Packing, low_parts, packed, packings
from gemmsmith.tuning.choose import ranked
from gemmsmith.tuning.copies import MHZ, copy_us, loads_a
from gemmsmith.tuning.correction import corrected
from gemmsmith.tuning.depth import for_16_bits, in_16_bits
from gemmsmith.tuning.gpus import H200, Gpu
from gemmsmith.tuning.model import estimate, tile_bytes
from gemmsmith.tuning.space import Space

OTHERS = 3


def why(
    problem: Problem, config: Config, epilogue: EpilogueSpec | None, origin: str, *, gpu: Gpu = H200,
    swapped: bool = False,
) -> str:  # fmt: skip
    """The text of `plan.why`: the model's estimate for the config and for the best alternatives, on a GPU.

    `problem` and `epilogue` are those of the product that `swap_ab` transposes; `swapped`: its A is the caller's b.
    """
    beside = [c for c in ranked(problem, epilogue, OTHERS + 1, gpu=gpu) if c != config][:OTHERS]
    space = Space.of([for_16_bits(c, problem.a.dtype) for c in (config, *beside)], epilogue)
    e = estimate(in_16_bits(problem), space, epilogue, gpu, loads_a(problem, space.swap_ab))
    cycles = corrected(problem, space, e)
    math, copies, step = (float(x[0]) for x in (e.math, e.copies, e.step))
    bounds = {"work": float(e.work[0]), "memory": float(e.memory[0]), "power": float(e.power[0])}
    alone = ", ".join(f"{name} alone {x:.0f}" for name, x in bounds.items())
    limit = "math" if math >= copies else "copies"
    if step > 1.2 * max(math, copies):
        limit = "their latency"
    lines = [
        f"{config}: {origin}",
        f"a k-tile: math {math:.0f} cycles, copies {copies:.0f}; each CTA works on {e.k_steps[0]:.0f}, "
        f"limited by {limit}",
        f"stores not hidden {e.stores[0]:.0f}, shares brought together {e.share[0]:.0f}; {alone}: "
        f"{max(bounds, key=bounds.__getitem__)}-bound",
        f"model: {e.cycles[0]:.0f} cycles, and {cycles[0] / e.cycles[0] - 1:+.1%} by what it missed of measured times: "
        f"{cycles[0] / MHZ:.1f} us at {MHZ} MHz",
    ]
    oriented, names = problem.T if config.swap_ab else problem, "ab" if swapped == config.swap_ab else "ba"
    lines += [
        _across(name, x, width)
        for name, x, width in zip(names, packed(oriented, config).operands, config.tile, strict=False)
        if operand_major(x) == "MN"
    ]
    lines += [_packed(name, x, oriented) for name, x in zip(names, packings(oriented, config), strict=True) if x]
    lines += [_packed(name, x, oriented) for name, x in zip(names, low_parts(oriented, config), strict=False)]
    lines += [f"beside it: {us / MHZ:.1f} us {c}" for us, c in zip(cycles[1:], beside, strict=True)]
    return "\n".join(lines)


def _across(name: str, operand: Matrix, width: int) -> str:
    """What it costs that a tile's rows lie along M or N."""
    nbytes, slower = tile_bytes(operand, np.array([float(width)]), np.ones(1))
    used = min(width, operand.rows) * operand.dtype.bytes
    said = f"{name} is MN-major: of its k-tiles {nbytes[0]:.0f} bytes are read a row, {used} of them used"
    return said + f"; the L2 takes {slower[0]:.2f} times as long, for they begin within lines" * bool(slower[0] > 1)


def _packed(name: str, packing: Packing, problem: Problem) -> str:
    """What it costs to pack an operand of a problem."""
    source, moved = packing.source, 2 * packing.bytes
    across = source.row_stride < source.col_stride
    reason = f"{source.dtype} is read K-major only" if across else "TMA cannot read its rows"
    if across and not problem.promoted and find_mma(source.dtype, source.dtype, problem.accumulate).register_majors:
        reason = f"of {source.dtype} only one operand may be MN-major"
    done = f"{name} is {'transposed' if across else 'copied'} before each run, since {reason}"
    if packing.low:
        done = f"the low part of {name} is computed before each run"
    return f"{done}: {moved / 1e6:.1f} MB moved, {copy_us(packing):.1f} us and a launch"
