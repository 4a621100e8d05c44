"""The results of a GEMM: their names, shapes, strides, and the form in which the epilogue returned them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gemmsmith.arrays import ArrayInfo, Spec, describe, is_array
from gemmsmith.binding import checks
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.errors import ArgumentError, EpilogueError
from gemmsmith.core.graph import EpilogueGraph, Result, reduced_dims
from gemmsmith.core.problem import TMA_ALIGNMENT_BYTES
from gemmsmith.core.scalars import ceil_div, round_up

DEFAULT_NAMES = ("out", *(f"out{i}" for i in range(1, 1024)))
"""Names of results that an epilogue returns without names."""


def primary_result_name(graph: EpilogueGraph) -> str:
    """Return the name of the result that a single `out` array is for: the first that is not a reduction."""
    return next((r.name for r in graph.results if not graph.is_reduction(r)), "out")


def outputs_by_name(out: Any, primary: str = "out", allow_several: bool = True) -> dict[str, Any]:
    """Return the caller's `out` as a dict by result name; {} if it is None.

    A single array is the result `primary`. `allow_several`: a tuple, list or dict has several arrays; otherwise (for a
    GEMM without an epilogue) it counts as one array, which `describe` refuses.
    """
    if out is None:
        return {}
    if not allow_several or is_array(out) or not isinstance(out, (Mapping, tuple, list)):
        return {primary: out}
    return dict(out) if isinstance(out, Mapping) else dict(zip(DEFAULT_NAMES, out, strict=False))


def arrange_results(results: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the results in the form that the epilogue returned: one array, a tuple, or a dict.

    An epilogue without names for its results has "out", or DEFAULT_NAMES in order.
    """
    if len(names) == 1 and names[0] == "out":
        return results["out"]
    if tuple(names) == DEFAULT_NAMES[: len(names)]:
        return tuple([results[name] for name in names])
    return {name: results[name] for name in names}


def describe_results(
    graph: EpilogueGraph, outputs: Mapping[str, Any], shape: tuple[int, ...], groups_of_rows: int
) -> dict[str, ArrayInfo]:
    """Return the ArrayInfo of every result, by name: of the caller's array, which is checked, or of one to allocate.

    `outputs`: the caller's arrays, some or all of the results. `shape`: the product's, (m, n) or (batch, m, n).
    `groups_of_rows`: in how many groups the rows are, each of which is reduced by itself; or 0.
    """
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
    """Return the shape of a result of a GEMM whose product has `shape`, (m, n) or (batch, m, n).

    Raises EpilogueError for a result that does not depend on the accumulator.
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
    """Return the strides, in elements, of a result of that shape that is to be allocated; None: row-major.

    Scales of a quantized result are column-major, with columns padded to 16 bytes, as the next GEMM's TMA loads them.
    """
    if graph.nodes[result.node].op != "scale":
        return None
    *batch, m, columns = shape
    pitch = round_up(m, TMA_ALIGNMENT_BYTES // (result.dtype or FP32).bytes)
    return (*(columns * pitch for _ in batch), 1, pitch)
