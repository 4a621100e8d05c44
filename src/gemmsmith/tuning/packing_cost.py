"""Cost of packing operands before a kernel, which may depend on the orientation of the GEMM."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmsmith.core.config import Config
from gemmsmith.core.problem import Problem
from gemmsmith.kernels.pack import Packing, operand_packings, with_packed_operands

SM_CLOCK_MHZ = 1600
"""SM clock of an H100 or H200 under sustained load (power-limited), about."""
PACKED_BYTES_PER_US = 4_200_000
"""Bytes per microsecond that packing reads and writes at best, just below the 4.33 TB/s of docs/ladder.md."""
PACKING_LAUNCH_US = 2
"""Microseconds of a packing kernel besides its copies; a launch takes 1.2 (docs/notebook/where-time-goes.md)."""


def packing_us(packing: Packing) -> float:
    """Return the microseconds that packing takes at best, without its launch."""
    return 2 * packing.bytes / PACKED_BYTES_PER_US


def packing_cycles(problem: Problem, swap_ab: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the cycles of packing the operands, for each config.

    They depend on it since TF32 needs a packed copy of an MN-major operand only if it is the kernel's B.
    """
    straight, swapped = (
        SM_CLOCK_MHZ * sum(PACKING_LAUNCH_US + packing_us(x) for x in operand_packings(p) if x)
        for p in (problem, problem.T)
    )
    return np.where(swap_ab, swapped, straight)


def packs_needlessly(config: Config, problem: Problem) -> bool:
    """Return whether packing takes longer in a config's orientation than in the other one."""
    cycles, other_cycles = packing_cycles(problem, np.array([config.swap_ab, not config.swap_ab]))
    return bool(cycles > other_cycles)


def loads_a_fragments(problem: Problem, swap_ab: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return for each config whether threads load A's fragments: with TF32, if the kernel's A is MN-major."""
    if problem.a.dtype.bits < 32 or problem.promoted:
        return np.zeros(len(swap_ab), bool)
    straight, swapped = (with_packed_operands(p).a.major == "MN" for p in (problem, problem.T))
    return np.where(swap_ab, swapped, straight)
