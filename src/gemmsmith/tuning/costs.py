"""Costs besides the mainloop: of packing operands before a kernel, and of an epilogue per element."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.graph import EpilogueGraph, reduced_dims
from gemmsmith.core.problem import Problem
from gemmsmith.graph.precision import epilogue_cost, reduction_cost
from gemmsmith.graph.reductions import REDUCTIONS
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


EPILOGUE_CYCLES_PER_INSTRUCTION = 1.0
"""Cycles of a warp per instruction of an epilogue's functions. This and the next two: fitted to 2300 times of eleven
epilogues (tries-heavy-h100, tries-subtiles-h100, tries-subtiles-h200)."""
EPILOGUE_CYCLES_PER_SPECIAL_FUNCTION = 8.3
"""Additional cycles per special function. An SM has 16 results a cycle, so a warp's take its scheduler 8 (CUDA C++
Programming Guide, "Arithmetic Instructions")."""
REDUCTION_CYCLES_ACROSS_LANES = 37.0
"""Additional cycles per element and component of a reduction along the tile's rows, which lie in several lanes: those
of shuffles, and of a store for every 16 rows."""


class EpilogueCost(NamedTuple):
    """An epilogue's cost per element of the accumulator.

    Attributes:
        bytes_per_element: Bytes of matrices in global memory.
        cycles: Cycles of a warp for functions and reductions.
        cycles_if_swapped: The same for the transposed epilogue, of `swap_ab`.
        matrices: Matrices that are loaded or stored.
    """

    bytes_per_element: float
    cycles: float
    cycles_if_swapped: float
    matrices: int

    @staticmethod
    def from_epilogue(epilogue: EpilogueSpec) -> EpilogueCost:
        """Return the cost of an epilogue."""
        graph = epilogue.graph
        dims = graph.broadcast_dims
        arrays = [(o.broadcast_dims, o.dtype) for o in graph.operands]
        arrays += [(dims[r.node], FP32 if graph.is_reduction(r) else r.dtype) for r in graph.results]
        bytes_per_element = sum(
            dtype.bytes / (x.columns_per_value * x.rows_per_value) for x, dtype in arrays if x.is_matrix and dtype
        )
        functions, reductions = epilogue_cost(graph, epilogue.fast_math, vector_share=0.5), reduction_cost(graph)
        cycles = EPILOGUE_CYCLES_PER_INSTRUCTION * (functions.instructions + reductions.instructions)
        cycles += EPILOGUE_CYCLES_PER_SPECIAL_FUNCTION * (functions.special + reductions.special)
        across_lanes, across_lanes_if_swapped = (
            REDUCTION_CYCLES_ACROSS_LANES * _components_reduced_along(graph, axis) for axis in "mn"
        )
        return EpilogueCost(
            bytes_per_element, cycles + across_lanes, cycles + across_lanes_if_swapped, len(graph.matrix_names)
        )


def _components_reduced_along(graph: EpilogueGraph, index: str) -> int:
    """Return how many fp32 values the states have, in total, of the reductions along `index` ("m" or "n") only.

    A reduction that also covers the batch counts, one along both M and N does not.
    """
    reduced = [graph.nodes[r.node].attribute for r in graph.results if graph.is_reduction(r)]
    kinds = [REDUCTIONS[kind] for kind, axis in reduced if reduced_dims(axis).strip("b") == index]
    return sum(len(kind.monoid.identity) for kind in kinds)
