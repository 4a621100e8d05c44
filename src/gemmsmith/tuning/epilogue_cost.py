"""What an epilogue costs per element, for the cost model."""

from __future__ import annotations

from typing import NamedTuple

from gemmsmith.core.dtypes import FP32
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.graph import EpilogueGraph, reduced_dims
from gemmsmith.graph.precision import epilogue_cost, reduction_cost
from gemmsmith.graph.reductions import REDUCTIONS

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
