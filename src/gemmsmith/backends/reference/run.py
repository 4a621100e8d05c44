"""Execution of a GEMM and its epilogue in float64, rounded to the results' dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemmsmith.arrays import ArrayInfo, as_numpy
from gemmsmith.backends.reference.epilogue import execute
from gemmsmith.backends.reference.matmul import blockwise_scaled_matmul, instruction_matmul, matmul_float64, rounded
from gemmsmith.core.dtypes import as_dtype
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.core.mma import Mma
from gemmsmith.core.problem import SCALE_NAMES
from gemmsmith.epilogue.inputs import operand_argument
from gemmsmith.epilogue.outputs import result_argument


def run(
    graph: EpilogueGraph, mma: Mma, arguments: Mapping[str, ArrayInfo | float],
    scale_granularity: Mapping[str, int] | None = None, *, is_3xtf32: bool = False,
) -> None:  # fmt: skip
    """Execute a GEMM and the epilogue graph in float64 and write the results.

    Args:
        graph: The epilogue.
        mma: The instruction, as which operands are read.
        arguments: Arrays on the CPU and numbers, by their Pointers' names.
        scale_granularity: Rows (columns, for b) per block scale, by the names of the block scales.
        is_3xtf32: Whether operands are not truncated to TF32 (3xTF32).
    """
    arrays: dict[str, Any] = {
        name: as_numpy(x, name) if isinstance(x, ArrayInfo) else x for name, x in arguments.items()
    }
    operands = {o.name: arrays[operand_argument(o.name)] for o in graph.operands}
    a, b = arrays["a"], arrays["b"]
    if scale_granularity:
        scales = [arrays[operand_argument(name)] if name in scale_granularity else None for name in SCALE_NAMES]
        accumulator = blockwise_scaled_matmul(a, b, *scales)
    else:
        accumulator = matmul_float64(a, b) if is_3xtf32 else instruction_matmul(a, b, mma)
    values = execute(graph, accumulator, operands)
    for r in graph.results:
        out = arrays[result_argument(r.name)]
        out[...] = rounded(values[r.name], as_dtype(out.dtype, allow_integers=True))
