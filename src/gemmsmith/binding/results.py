"""The results of a GEMM: their names, shapes, strides, and the form in which the epilogue returned them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gemmsmith.arrays import ArrayInfo, Spec, describe, is_array
from gemmsmith.binding import checks
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.errors import ArgumentError, EpilogueError
from gemmsmith.core.graph import EpilogueGraph, Result, reduced_dims
from gemmsmith.core.integers import ceil_div, round_up
from gemmsmith.core.problem import TMA_ALIGNMENT_BYTES

DEFAULT_NAMES = ("out", *(f"out{i}" for i in range(1, 1024)))
"""Names of results that an epilogue returns without names."""


def primary_result_name(graph: EpilogueGraph) -> str:
    """Return the name of the result that a single `out` array is for: the first that is not a reduction."""
    return next((r.name for r in graph.results if not graph.is_reduction(r)), "out")


def outputs_by_name(out: Any, primary: str = "out", allow_several: bool = True) -> dict[str, Any]:
    """Normalize `out` (an array, or, with `allow_several`, a tuple, list or dict) to a dict by result name."""
    if out is None:
        return {}
    if not allow_several or is_array(out) or not isinstance(out, (Mapping, tuple, list)):
        return {primary: out}
    return dict(out) if isinstance(out, Mapping) else dict(zip(DEFAULT_NAMES, out, strict=False))


def arrange_results(results: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the results as one array, a tuple or a dict, depending on their names."""
    if len(names) == 1 and names[0] == "out":
        return results["out"]
    if tuple(names) == DEFAULT_NAMES[: len(names)]:
        return tuple([results[name] for name in names])
    return {name: results[name] for name in names}


def describe_results(
    graph: EpilogueGraph, outputs: Mapping[str, Any], shape: tuple[int, ...], groups_of_rows: int
) -> dict[str, ArrayInfo]:
    """Return the ArrayInfo of every result, by name: of the given array, which is checked, or of one to allocate."""
    names = graph.result_names
    if unknown := set(outputs) - set(names):
        raise ArgumentError(
            f"out: got arrays for {', '.join(sorted(unknown))}; the epilogue's results are {', '.join(names)}"
        )
    infos = {}
    for r in graph.results:
        expected_shape = result_shape(graph, r, shape, groups_of_rows)
        assert r.dtype
        if r.name in outputs:
            infos[r.name] = describe(outputs[r.name], r.name)
            checks.check_result(r.name, infos[r.name], expected_shape, r.dtype, contiguous=graph.is_reduction(r))
        else:
            strides = result_strides(graph, r, expected_shape)
            infos[r.name] = describe(Spec(expected_shape, r.dtype, strides))
    return infos


def result_shape(
    graph: EpilogueGraph, result: Result, shape: tuple[int, ...], groups_of_rows: int = 0
) -> tuple[int, ...]:
    """Return the shape of a result of a GEMM of `shape`. Raises EpilogueError for a result without the accumulator.

    `groups_of_rows`: into how many groups the rows are divided, of which each is reduced by itself.
    """
    *batch, m, n = shape
    node = graph.nodes[result.node]
    broadcast_dims = graph.broadcast_dims
    if node.op == "reduce":
        reduced = reduced_dims(node.attribute[1])
        if groups_of_rows and "m" in reduced:
            batch = [groups_of_rows]
        n = n // broadcast_dims[node.inputs[0]].column_divisor
        dims = [*(("b", size) for size in batch), ("m", m), ("n", n)]
        if result.keepdim:
            return tuple(1 if dim in reduced else size for dim, size in dims)
        return tuple(size for dim, size in dims if dim not in reduced)
    result_dims = broadcast_dims[result.node]
    if node.op == "scale":
        quantize = graph.nodes[node.inputs[0]]
        columns = n // broadcast_dims[node.inputs[0]].columns_per_value
        return (*batch, m, ceil_div(columns, quantize.attribute[1]))
    if not result_dims.is_matrix:
        raise EpilogueError(
            f"{result.name}: the result does not depend on the accumulator; return something computed from it"
        )
    return (*batch, m, n // result_dims.columns_per_value)


def result_strides(graph: EpilogueGraph, result: Result, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides of a newly allocated result of that shape.

    Scales are M-major and padded to 16 bytes for the next GEMM's TMA loads; None (row-major) otherwise.
    """
    if graph.nodes[result.node].op != "scale":
        return None
    *batch, m, columns = shape
    pitch = round_up(m, TMA_ALIGNMENT_BYTES // (result.dtype or FP32).bytes)
    return (*(columns * pitch for _ in batch), 1, pitch)
