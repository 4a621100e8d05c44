"""Evaluation of a GEMM and its epilogues in float64, rounded to the results' dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gemmsmith.arrays import ArrayInfo, as_numpy
from gemmsmith.backends.reference.epilogue import execute
from gemmsmith.backends.reference.grouped import (
    accumulate,
    gathered,
    group_rows,
    group_slices,
    of_no_group,
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


@dataclass(frozen=True)
class Evaluation:
    """A GEMM's product in float64, of which `execute` computes epilogues.

    Attributes:
        accumulator: (m, n) or (batch, m, n); for groups of rows, those of all groups. None: the table is invalid.
        groups: The slice of each group.
        scatter: Where rows of a grouped GEMM are stored, or None.
        deterministic: Whether scattered rows are stored; otherwise they are added to the result.
    """

    accumulator: Array | None
    operands: Mapping[str, Any]
    grouping: Grouping | None = None
    groups: Sequence[slice] = ()
    scatter: Array | None = None
    deterministic: bool = True

    def execute(self, graph: EpilogueGraph, results: Mapping[str, Array]) -> None:
        """Compute an epilogue and store its results, rounded to the dtypes of `results`, of which float64 is one.

        If the groups' table is invalid, all results are NaN, or int32's least value.
        """
        if self.accumulator is None:
            for out in results.values():
                out[...] = np.iinfo(np.int32).min if out.dtype == np.int32 else np.nan
        elif self.grouping:
            self._execute_groups(graph, self.grouping, self.accumulator, results)
        else:
            values = execute(graph, self.accumulator, self.operands)
            for name, out in results.items():
                _store(out, values[name])

    def _execute_groups(
        self, graph: EpilogueGraph, grouping: Grouping, accumulator: Array, results: Mapping[str, Array]
    ) -> None:
        groups, operands = list(self.groups), self.operands
        index: Any = np.arange(len(groups))[:, None, None]
        reduce = partial(reduced_by_group, grouping, groups) if grouping.clips_rows else None
        reductions = {r.name: graph.nodes[r.node].attribute[0] for r in graph.results if graph.is_reduction(r)}
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
                out[...] = of_no_group(reductions[name])
                _store(out, values[name], slice(len(values[name])))
            elif self.scatter is not None:
                indices = self.scatter[:end]
                is_row = (indices >= 0) & (indices < len(out))
                scatter = _store if self.deterministic else _add
                scatter(out, values[name][is_row], indices[is_row])
            else:
                _store(out, values[name], slice(end))
            if grouping.fills_rows and name not in reductions:
                out[end:] = 0


def evaluate(
    graph: EpilogueGraph, mma: Mma, arguments: Mapping[str, ArrayInfo | float],
    scale_granularity: Mapping[Role, int] | None = None, *, is_3xtf32: bool = False, grouping: Grouping | None = None,
    deterministic: bool = True,
) -> Evaluation:  # fmt: skip
    """Return the product of a GEMM, computed in float64.

    `graph`: the epilogue, whose operands are read. `mma` determines how the operands are read. `arguments`: arrays on
    the CPU and numbers, by their Pointers' names. `scale_granularity`: for each operand with block scales, the rows
    (columns, for b) that one scale covers. With `is_3xtf32` operands are not truncated to TF32. Unless `deterministic`,
    scattered rows are added to the result.
    """
    scale_arguments = {role: operand_argument(name) for role, name in SCALE_NAMES.items()}
    results = {result_argument(r.name) for r in graph.results}
    arrays: dict[str, Any] = {
        name: as_numpy(x, name) if isinstance(x, ArrayInfo) else x
        for name, x in arguments.items() if name not in results
    }  # fmt: skip
    operands = {o.name: arrays[operand_argument(o.name)] for o in graph.operands}
    a, b = arrays["a"], arrays["b"]
    for name in scale_arguments.values():
        if isinstance(x := arguments.get(name), ArrayInfo) and x.interleave_stride:
            arrays[name] = alternating_scales(arrays[name], b.shape[-1])
    scales = [arrays[name] if role in (scale_granularity or {}) else None for role, name in scale_arguments.items()]

    def multiply(a: Array, b: Array, scale_a: Array | None, scale_b: Array | None) -> Array:
        if scale_granularity:
            return blockwise_scaled_matmul(a, b, scale_a, scale_b)
        return matmul_float64(a, b) if is_3xtf32 else instruction_matmul(a, b, mma)

    if not grouping:
        return Evaluation(multiply(a, b, *scales), operands)
    scatter = arrays[operand_argument(SCATTER)] if grouping.scatters else None
    if grouping.gathers:
        indices = arrays[operand_argument(GATHER)]
        rows_of_a, scale = len(a), SCALE_NAMES["a"]
        a, scales[0] = gathered(a, indices), gathered(scales[0], indices, rows_of_a)
        if scale in operands:
            operands = {**operands, scale: gathered(operands[scale], indices, rows_of_a)}
    extent = a.shape[-1] if grouping.along == "k" else a.shape[-2]
    end_multiple = grouping.end_multiple(as_dtype(a.dtype, allow_integers=True))
    groups = group_slices(grouping, arrays[operand_argument(grouping.table)], extent, end_multiple)
    if groups is None:
        return Evaluation(None, operands)
    accumulator = accumulate(grouping, groups, multiply, a, b, *scales)
    return Evaluation(accumulator, operands, grouping, groups, scatter, deterministic)


def _store(out: Array, values: Array, where: Any = ...) -> None:
    """Store values, rounded once to the dtype of `out`, where that index is; float64 is not rounded."""
    is_exact = out.dtype == np.float64
    out[where] = values if is_exact else rounded(values, as_dtype(out.dtype, allow_integers=True))


def _add(out: Array, values: Array, rows: Array) -> None:
    """Add values to the rows of `out` at the indices `rows`, which may repeat; each sum is rounded once."""
    changed, index = np.unique(rows, return_inverse=True)
    total = out[changed].astype(np.float64)
    np.add.at(total, index.reshape(-1), values)
    _store(out, total, changed)
