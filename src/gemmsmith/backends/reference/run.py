"""Execution of a GEMM and its epilogue in float64, rounded to the results' dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from gemmsmith.arrays import ArrayInfo, as_numpy
from gemmsmith.backends.reference.epilogue import execute
from gemmsmith.backends.reference.grouped import (
    Multiply,
    accumulate,
    gathered,
    group_rows,
    group_slices,
    reduced_by_group,
    rows_of,
)
from gemmsmith.backends.reference.matmul import (
    Array,
    alternating_scales,
    blockwise_scaled_matmul,
    instruction_matmul,
    matmul_float64,
    rounded,
)
from gemmsmith.core.dtypes import as_dtype
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.core.grouping import GATHER, SCATTER, Grouping
from gemmsmith.core.mma import Mma
from gemmsmith.core.problem import SCALE_NAMES
from gemmsmith.core.product import Role
from gemmsmith.epilogue.inputs import operand_argument
from gemmsmith.epilogue.outputs import result_argument


def run(
    graph: EpilogueGraph, mma: Mma, arguments: Mapping[str, ArrayInfo | float],
    scale_granularity: Mapping[Role, int] | None = None, *, is_3xtf32: bool = False, grouping: Grouping | None = None,
    deterministic: bool = True,
) -> None:  # fmt: skip
    """Execute a GEMM and the epilogue graph in float64 and write the results.

    Args:
        graph: The epilogue.
        mma: The instruction that kernels multiply with, which determines how operands are read.
        arguments: Arrays on the CPU and numbers, by their Pointers' names.
        scale_granularity: For each operand with block scales, the rows (columns, for b) that one scale covers.
        is_3xtf32: Whether operands are not truncated to TF32 (3xTF32).
        grouping: The groups of a grouped GEMM.
        deterministic: Whether scattered rows are stored; otherwise they are added to the result.
    """
    arrays: dict[str, Any] = {
        name: as_numpy(x, name) if isinstance(x, ArrayInfo) else x for name, x in arguments.items()
    }
    operands = {o.name: arrays[operand_argument(o.name)] for o in graph.operands}
    a, b = arrays["a"], arrays["b"]
    scale_arguments = {role: operand_argument(name) for role, name in SCALE_NAMES.items()}
    for name in scale_arguments.values():
        if isinstance(x := arguments.get(name), ArrayInfo) and x.interleave_stride:
            arrays[name] = alternating_scales(arrays[name], b.shape[-1])
    scales = [arrays[name] if role in (scale_granularity or {}) else None for role, name in scale_arguments.items()]

    def multiply(a: Array, b: Array, scale_a: Array | None, scale_b: Array | None) -> Array:
        if scale_granularity:
            return blockwise_scaled_matmul(a, b, scale_a, scale_b)
        return matmul_float64(a, b) if is_3xtf32 else instruction_matmul(a, b, mma)

    results = {r.name: arrays[result_argument(r.name)] for r in graph.results}
    if grouping:
        _run_groups(
            graph, grouping, multiply, (a, b, *scales),
            {name: arrays[operand_argument(name)] for name in grouping.product.arrays}, operands, results,
            deterministic,
        )  # fmt: skip
        return
    values = execute(graph, multiply(a, b, *scales), operands)
    for name, out in results.items():
        _store(out, values[name])


def _run_groups(
    graph: EpilogueGraph, grouping: Grouping, multiply: Multiply, inputs: Sequence[Any],
    product_arrays: Mapping[str, Array], operands: Mapping[str, Any], results: Mapping[str, Array], deterministic: bool,
) -> None:  # fmt: skip
    """Execute a grouped GEMM and its epilogue, and store the rows of the groups.

    `multiply`: computes the product of a group. `inputs`: a, b, and their scales or None. `product_arrays`: the
    grouping's table and row indices, by name. If the table is invalid, all results are NaN, or int32's least value. The
    other arguments are those of `run`.
    """
    a, b, *scales = inputs
    if grouping.gathers:
        indices, rows_of_a, scale = product_arrays[GATHER], len(a), SCALE_NAMES["a"]
        a, scales[0] = gathered(a, indices), gathered(scales[0], indices, rows_of_a)
        if scale in operands:
            operands = {**operands, scale: gathered(operands[scale], indices, rows_of_a)}
    extent = a.shape[-1] if grouping.along == "k" else a.shape[-2]
    end_multiple = grouping.end_multiple(as_dtype(a.dtype, allow_integers=True))
    groups = group_slices(grouping, product_arrays[grouping.table], extent, end_multiple)
    if groups is None:
        for out in results.values():
            out[...] = np.iinfo(np.int32).min if out.dtype == np.int32 else np.nan
        return
    accumulator = accumulate(grouping, groups, multiply, a, b, *scales)
    index: Any = np.arange(len(groups))[:, None, None]
    reduce = partial(reduced_by_group, grouping, groups) if grouping.clips_rows else None
    reductions = {r.name for r in graph.results if graph.is_reduction(r)}
    if grouping.has_batch:
        values = execute(graph, accumulator, operands, index, reduce)
        for name, out in results.items():
            masked = grouping.is_masked and name not in reductions
            for rows in group_rows(grouping, groups) if masked else [...]:
                _store(out, values[name][rows], rows)
        return
    end = groups[-1].stop
    rows_of_groups = {
        name: x[:end] if np.ndim(x) == 2 and len(x) == len(accumulator) != 1 else x for name, x in operands.items()
    }
    index = np.repeat(index[:, 0], [x.stop - x.start for x in groups], axis=0)
    values = execute(graph, accumulator[:end], rows_of(groups, rows_of_groups), index, reduce)
    for name, out in results.items():
        if name in reductions:
            out[...] = 0
            _store(out, values[name], slice(len(values[name])))
        elif grouping.scatters:
            indices = product_arrays[SCATTER][:end]
            is_row = (indices >= 0) & (indices < len(out))
            scatter = _store if deterministic else _add
            scatter(out, values[name][is_row], indices[is_row])
        else:
            _store(out, values[name], slice(end))
        if grouping.fills_rows and name not in reductions:
            out[end:] = 0


def _store(out: Array, values: Array, where: Any = ...) -> None:
    """Store values, rounded once to the dtype of `out`, where that index is."""
    out[where] = rounded(values, as_dtype(out.dtype, allow_integers=True))


def _add(out: Array, values: Array, rows: Array) -> None:
    """Add values to the rows of `out` at the indices `rows`, which may repeat; each sum is rounded once."""
    changed, index = np.unique(rows, return_inverse=True)
    total = out[changed].astype(np.float64)
    np.add.at(total, index.reshape(-1), values)
    _store(out, total, changed)
