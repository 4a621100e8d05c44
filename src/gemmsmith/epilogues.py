"""From an epilogue and arrays to an EpilogueSpec: each operand's and result's kind, address and way of access."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gemmsmith.arrays import ArrayInfo, Spec, describe, empty_like_kind, overlap
from gemmsmith.core.dtypes import BF16, FP16, FP32, DType, number_operand
from gemmsmith.core.errors import ArgumentError, ConfigError, EpilogueError
from gemmsmith.core.graph import Extent, Graph, Result
from gemmsmith.core.problem import Matrix, Problem
from gemmsmith.core.spec import EpilogueSpec
from gemmsmith.epilogue.device.layout import check_blocks
from gemmsmith.epilogue.frontend.classify import classify
from gemmsmith.epilogue.frontend.tracer import trace
from gemmsmith.epilogue.lines import refused
from gemmsmith.epilogue.passes import optimise
from gemmsmith.problems import Formulation

Source = Callable[..., Any] | Graph | Any
"""A function, a graph, or a visitor tree: any object with a method `graph()` that returns a Graph."""


@dataclass(frozen=True)
class Bound:
    """An epilogue bound to arrays.

    `written` is the graph as the user wrote it, `graph` after the passes, both in the user's orientation; `spec` is
    the kernel's, which computes D^T where `swapped`. `arrays` (as the kernel sees them)
    and `places` are those of operands and results, by name; `first` is the name of D.
    """

    written: Graph
    graph: Graph
    spec: EpilogueSpec
    problem: Problem
    swapped: bool
    arrays: Mapping[str, Matrix]
    places: Mapping[str, ArrayInfo | float]
    operands: Mapping[str, Any]
    results: Mapping[str, Any]
    first: str

    @property
    def value(self) -> Any:
        """The results in the form in which the function returned them: one, a tuple, or a dict."""
        return arranged(self.results, [r.name for r in self.graph.results])


def arranged(results: Mapping[str, Any], names: list[str]) -> Any:
    """The results as one array, a tuple or a dict, as their names say that the function returned them."""
    if names == positional(len(names)):
        return results["out"] if len(names) == 1 else tuple(results[name] for name in names)
    return {name: results[name] for name in names}


def positional(count: int) -> list[str]:
    """The names of `count` results that the function returned without names."""
    return ["out", *(f"out{i}" for i in range(1, count))][:count]


def bind(
    source: Source,
    formulation: Formulation,
    like: Any,
    operands: Mapping[str, Any],
    out: Any,
    *,
    exact: bool = False,
    atomic: bool = False,
    swap_ab: bool = False,
) -> Bound:
    """The epilogue `source` of a product, with its operands, and its results allocated where `out` does not give them.

    `formulation` is literal; `like` is an array of the library that results are made in; out is an array for the
    first matrix result, or a dict or tuple of arrays. `swap_ab` asks for the transpose of what would be computed.
    Raises EpilogueError and ArgumentError; ConfigError where the graph cannot be transposed.
    """
    problem, _, shape, output = formulation
    for name in operands:
        if not name.isidentifier():
            raise ArgumentError(f"operands: got the name {name!r}; use one that could be a variable's")
    infos: dict[str, ArrayInfo | float] = {
        name: number_operand(name, x) if isinstance(x, numbers.Real) else describe(x, name)
        for name, x in operands.items()
    }
    _check_operands(infos, like)
    kinds = {
        name: (Extent(), None) if not isinstance(x, ArrayInfo) else (classify(name, x.shape, shape), x.dtype)
        for name, x in infos.items()
    }
    written = _graph(source, shape, kinds)
    graph = _typed(optimise(written), output)
    check_blocks(graph)
    first_name = next((r.name for r in graph.results if graph.nodes[r.node].op != "reduce"), "out")
    given = given_results([r.name for r in graph.results], first_name, out)
    results: dict[str, Any] = {}
    places = dict(infos)
    for r in graph.results:
        want = result_shape(graph, r, shape)
        array = given.get(r.name)
        if array is None:
            array = _new(like, want, r.dtype or output)
        results[r.name] = array
        described = describe(array, r.name)
        places[r.name] = described
        _check_result(r, described, want, places, given, graph)
    first = places.get(first_name)
    swapped = (isinstance(first, ArrayInfo) and _column_major(first) and graph.turns) != swap_ab
    if swapped and not graph.turns:
        raise ConfigError("swap_ab: got True for an epilogue that pairs or groups columns; use False")
    arrays: dict[str, Matrix] = {}
    for name, info in places.items():
        if not isinstance(info, ArrayInfo):
            continue
        reduced = any(r.name == name and graph.is_reduced(r) for r in graph.results)
        if not reduced:
            matrix = _matrix(info, problem.batch, name in results or kinds[name][0].is_matrix)
            arrays[name] = matrix.T if swapped else matrix
    if swapped:
        problem = problem.T
    problem = replace(problem, a=problem.a.canonical(), b=problem.b.canonical())
    inner = graph.transposed() if swapped else graph
    spec = EpilogueSpec(inner, frozenset(), frozenset(), exact, atomic)
    arrays |= {name: arrays[name].canonical() for name in spec.matrices}
    spec = spec.over(arrays)
    return Bound(written, graph, spec, problem, swapped, arrays, places, operands, results, first_name)


def _check_operands(infos: Mapping[str, ArrayInfo | float], like: Any) -> None:
    """Raises ArgumentError for operands that kernels cannot read."""
    home = describe(like, "a")
    for name, x in infos.items():
        if not isinstance(x, ArrayInfo):
            continue
        if x.dtype.bits == 8 and not x.dtype.is_integer:
            raise ArgumentError(f"{name}: got dtype {x.dtype}; operands are fp32, fp16, bf16, int32, int64 or bool")
        if x.address % x.itemsize:
            raise ArgumentError(f"{name}: got address {x.address:#x}; use a multiple of an element's {x.itemsize}")
        if "spec" not in (x.device, home.device) and x.place != home.place:
            raise ArgumentError(f"{name}: got an array on {x.place} with a on {home.place}; use arrays of one device")


def _new(like: Any, shape: tuple[int, ...], dtype: DType) -> Any:
    return Spec(shape, dtype) if isinstance(like, Spec) else empty_like_kind(like, shape, dtype)


def _graph(source: Source, shape: tuple[int, ...], kinds: Mapping[str, tuple[Extent, DType | None]]) -> Graph:
    if isinstance(source, Graph):
        return source
    if isinstance(source, type):
        raise EpilogueError(f"epilogue: got the class {source.__name__}; use an instance of it")
    if callable(graph := getattr(source, "graph", None)):
        from gemmsmith.epilogue.frontend.visitors import bind as bind_visitor

        return bind_visitor(graph(), kinds, shape)
    if callable(source):
        return trace(source, shape, kinds)
    raise ArgumentError(f"epilogue: got {type(source).__name__}; use a function, a visitor tree, or None")


def _typed(graph: Graph, output: DType) -> Graph:
    """Every result with a dtype: matrices the product's, reductions and scales fp32, by default."""
    results = []
    for r in graph.results:
        node = graph.nodes[r.node]
        small = node.op in ("reduce", "scale")
        if small and r.dtype not in (None, FP32, FP16, BF16):
            what = "a reduction's result" if node.op == "reduce" else "scales"
            raise refused(f"{r.name}: got dtype {r.dtype} for {what}; use fp32, fp16 or bf16", node.where)
        results.append(replace(r, dtype=r.dtype or (FP32 if small else output)))
    return replace(graph, results=tuple(results))


def result_shape(graph: Graph, result: Result, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a result of a product of `shape`."""
    *batch, m, n = shape
    node = graph.nodes[result.node]
    extents = graph.extents()
    if node.op == "reduce":
        kind_axis = node.value[1]
        n = n // max(extents[node.inputs[0]].width, 1)
        kept = {"n": (m,), "m": (n,), "all": ()}[kind_axis]
        if result.keepdim:
            kept = {"n": (m, 1), "m": (1, n), "all": (1, 1)}[kind_axis]
            return (*(batch if kind_axis != "all" else [1] * len(batch)), *kept)
        return (*batch, *kept) if kind_axis != "all" else ()
    extent = extents[result.node]
    if node.op == "scale":
        quantize = graph.nodes[node.inputs[0]]
        columns = n // extents[node.inputs[0]].width
        return (*batch, m, -(-columns // quantize.value[1]))
    if not extent.is_matrix:
        raise EpilogueError(
            f"{result.name}: the result does not depend on the product; return something computed from it"
        )
    return (*batch, m, n // extent.width)


def given_results(names: list[str], first: str, out: Any) -> dict[str, Any]:
    """The arrays that a caller gives for results, by name: one for D, the `first`, several in order, or a dict."""
    if out is None:
        return {}
    if isinstance(out, Mapping):
        given = dict(out)
    elif isinstance(out, (tuple, list)):
        given = dict(zip(positional(len(out)), out, strict=True))
    else:
        given = {first: out}
    unknown = set(given) - set(names)
    if unknown:
        raise ArgumentError(
            f"out: got arrays for {', '.join(sorted(unknown))}; the epilogue's results are {', '.join(names)}"
        )
    return given


def _check_result(
    r: Result, info: ArrayInfo, want: tuple[int, ...], places: Mapping[str, Any], given: Mapping[str, Any], graph: Graph
) -> None:
    if tuple(info.shape) != want:
        raise ArgumentError(f"{r.name}: got shape {tuple(info.shape)}; use {want}")
    if info.dtype != r.dtype:
        raise ArgumentError(f"{r.name}: got dtype {info.dtype}; the epilogue gives {r.dtype}")
    if r.name not in given:
        return
    if not info.writable:
        raise ArgumentError(f"{r.name}: got a read-only array; use one that can be written")
    if graph.is_reduced(r) and info.strides != describe_contiguous(info):
        raise ArgumentError(f"{r.name}: got strides {tuple(info.strides)}; a reduction's result is contiguous")
    for name, other in places.items():
        if name == r.name or not isinstance(other, ArrayInfo) or not overlap(info, other):
            continue
        same = info.address == other.address and info.strides == other.strides and info.dtype == other.dtype
        if not same or name in given or tuple(other.shape) != want:
            raise ArgumentError(f"{r.name}: shares memory with {name}; use an array of its own, or exactly {name}'s")


def describe_contiguous(info: ArrayInfo) -> tuple[int, ...]:
    """The strides of a contiguous array of that shape; a dimension of length 1 keeps the stride it has."""
    strides, step = [], 1
    for extent, own in zip(reversed(info.shape), reversed(info.strides), strict=True):
        strides.append(own if extent <= 1 else step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _column_major(info: ArrayInfo) -> bool:
    return len(info.shape) >= 2 and info.strides[-1] != 1 and info.strides[-2] == 1 and info.shape[-1] > 1


def _matrix(x: ArrayInfo, batch: int, whole: bool) -> Matrix:
    """An operand as (rows, columns), stride 0 along what it is broadcast over."""
    shape = (1,) * (3 - len(x.shape)) + tuple(x.shape)
    strides = (0,) * (3 - len(x.shape)) + tuple(x.strides)
    broadcast = [
        0 if extent == 1 and not (whole and i) else s for i, (extent, s) in enumerate(zip(shape, strides, strict=True))
    ]
    return Matrix(
        x.dtype, shape[1], shape[2], broadcast[1], broadcast[2], batch, broadcast[0] if batch > 1 else 0, x.alignment
    )
