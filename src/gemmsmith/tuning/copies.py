"""What packing an operand costs beside a kernel: it may depend on the orientation of the product."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmsmith.core.config import Config
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import operand_major
from gemmsmith.kernels.pack import Packing, packed, packings

MHZ = 1600
"""About the clock of an H100 or H200 under sustained load."""
PACKED_BYTES_PER_US = 4_200_000
"""What packing reads and writes of memory, at best."""
LAUNCH_US = 2
"""About what one small kernel more takes beside its copies, 1.2 of it the launch (docs/notebook.md)."""


def copy_us(packing: Packing) -> float:
    """Microseconds that a copy takes at best, without its launch."""
    return 2 * packing.bytes / PACKED_BYTES_PER_US


def copy_cycles(problem: Problem, swap_ab: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """For each orientation, the cycles before the kernel starts: of TF32 only the kernel's B is copied if it is
    MN-major."""
    straight, swapped = (MHZ * sum(LAUNCH_US + copy_us(x) for x in packings(p) if x) for p in (problem, problem.T))
    return np.where(swap_ab, swapped, straight)


def copies_needlessly(config: Config, problem: Problem) -> bool:
    """Whether packing takes longer in a config's orientation than in the other one."""
    own, other = copy_cycles(problem, np.array([config.swap_ab, not config.swap_ab]))
    return bool(own > other)


def loads_a(problem: Problem, swap_ab: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """For each orientation, whether threads load A's fragments: of TF32, if the kernel's A is MN-major."""
    if problem.a.dtype.bits < 32 or problem.promoted:
        return np.zeros(len(swap_ab), bool)
    straight, swapped = (operand_major(packed(p).a) == "MN" for p in (problem, problem.T))
    return np.where(swap_ab, swapped, straight)
