"""From arrays and an epilogue to a checked problem. It always has a graph: the bare product's has one node."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from gemmsmith import checks, scaling
from gemmsmith.arrays import ArrayInfo, Spec, describe, empty_like_kind, is_array
from gemmsmith.core.bounded import Bounded
from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, DType, number_operand
from gemmsmith.core.errors import ArgumentError, ConfigError, EpilogueError, meant
from gemmsmith.core.graph import Extent, Graph, Operand, Result, bare, over
from gemmsmith.core.mma import Mma
from gemmsmith.core.problem import SCALE_NAMES, TMA_ALIGNMENT, Matrix, Problem
from gemmsmith.core.spec import EpilogueSpec
from gemmsmith.epilogue.device.inputs import operand_argument
from gemmsmith.epilogue.device.layout import check_blocks
from gemmsmith.epilogue.device.outputs import result_argument
from gemmsmith.epilogue.frontend.classify import classify
from gemmsmith.epilogue.frontend.fingerprint import fingerprint
from gemmsmith.epilogue.frontend.snapshot import snapshot
from gemmsmith.epilogue.frontend.tracer import trace_sized
from gemmsmith.epilogue.lines import refused
from gemmsmith.epilogue.passes import optimize
from gemmsmith.matrices import oriented
from gemmsmith.scaling import argument_name

Epilogue = Callable[..., Any] | Graph | Any
"""A function, a graph, or a visitor tree: any object with a method `graph()` that returns a Graph; None for none."""


@dataclass(frozen=True)
class Binding:
    """A product and its epilogue, bound to arrays.

    `shape` is the product's, `output` the dtype of matrices for which the epilogue says none, `mma` the instruction
    that multiplies a and b, `promoted` whether its sums are, `block_rows` the granularity of block scales, by their
    names. `written` is the graph as the user wrote it, `graph` after the passes, both in the user's
    orientation. `arguments`: every array and number, by its Pointer's
    name; a result that the caller does not give has its `result_strides` and lies at address 0, and only results are
    writable. `results`: the arrays of those that are given, by name.

    The kernel computes `problem`, whose D is the first result that is a matrix, with the epilogue `spec`, on the
    matrices `arrays`: operands and results by name. Where `swapped` that is D^T = B^T @ A^T: its `a` lies where b is.
    """

    shape: tuple[int, ...]
    output: DType
    mma: Mma
    promoted: bool
    block_rows: Mapping[str, int]
    written: Graph
    graph: Graph
    arguments: Mapping[str, ArrayInfo | float]
    results: Mapping[str, Any]
    problem: Problem
    swapped: bool
    spec: EpilogueSpec
    arrays: Mapping[str, Matrix]

    @property
    def names(self) -> list[str]:
        """The results' names."""
        return [r.name for r in self.graph.results]

    @property
    def value(self) -> Any:
        """The results in the form in which the function returned them: one, a tuple, or a dict."""
        return arranged(self.results, self.names)

    @property
    def scales(self) -> list[str]:
        """What the scales of a and b are for, in words."""
        return [scaling.kind(name, self.graph, self.block_rows) for name in SCALE_NAMES]

    @property
    def missing(self) -> dict[str, ArrayInfo]:
        """The results that have no array yet, by name."""
        arguments = {name: self.arguments[result_argument(name)] for name in self.names if name not in self.results}
        return {name: x for name, x in arguments.items() if isinstance(x, ArrayInfo)}

    def transposed(self) -> Binding:
        """The same product, computed as the transpose of what it is now. ConfigError if its graph has no transpose."""
        if not self.graph.transposable:
            raise ConfigError("swap_ab: got True for an epilogue that needs a row's columns at once; use False")
        spec = self.spec.with_graph(self.graph)
        problem, swapped, spec, arrays = oriented(
            spec, self.arguments, self.shape, self.output, self.mma, self.promoted, self.block_rows,
            swapped=not self.swapped,
        )  # fmt: skip
        return replace(self, problem=problem, swapped=swapped, spec=spec, arrays=arrays)

    def like(self, other: Binding) -> Binding:
        """The same product, transposed as `other` is; matrices of one row or column lie as there if they may."""
        found = self if self.swapped == other.swapped else self.transposed()
        arrays = dict(found.arrays)
        for name in found.spec.graph.matrices:
            arrays[name] = arrays[name].read_like(other.arrays.get(name, arrays[name]))
        problem, spec = found.problem.read_like(other.problem), found.spec.over(arrays)
        return replace(found, problem=problem, arrays=arrays, spec=spec)

    def complete(self, like: Any) -> Binding:
        """The same with all results: those that are missing are made in `like`'s library, on its device. ArgumentError
        where one is the largest element of nothing."""
        for r in self.graph.results:
            node, argument = self.graph.nodes[r.node], self.arguments[result_argument(r.name)]
            extreme = node.op == "reduce" and node.value[0] in ("max", "min")
            if 0 in self.shape and extreme and isinstance(argument, ArrayInfo) and 0 not in argument.shape:
                raise ArgumentError(
                    f"a, b: the product is empty, {self.shape}; {r.name}, a {node.value[0]}, has no value"
                )
        missing = self.missing
        if not missing:
            return self
        made = {name: empty_like_kind(like, x.shape, x.dtype, x.strides) for name, x in missing.items()}
        arguments = {result_argument(name): describe(x, name) for name, x in made.items()}
        return replace(self, results={**self.results, **made}, arguments={**self.arguments, **arguments})


def bind(
    a: Any, b: Any, out: Any = None, operands: Mapping[str, Any] | None = None, *, epilogue: Epilogue = None,
    out_dtype: Any = None, accumulate: Any = None, precision: Any = None, exact: bool = False, atomic: bool = False,
    planned: Mapping[str, int] | None = None,
) -> Binding:  # fmt: skip
    """out = epilogue(a @ b) as a problem of strided matrices, with everything checked. Nothing is allocated.

    Shapes, as in torch.matmul: (m, k) @ (k, n) -> (m, n); with a batch on either side or both, (batch, m, k) @
    (batch, k, n) -> (batch, m, n), where a batch of 1, or none, is broadcast (stride 0). Extents may be 0.
    a and b are arrays, Specs or ArrayInfos of any strides >= 0, of dtypes, accumulate and precision as in `gemm`.
    out, if given, is the array of the first result that is no reduction, or, with an epilogue, a dict or tuple of
    arrays. Each has exactly its result's shape, can be written, has no element twice and shares no byte with a, b
    or another one. out_dtype as in `gemm`; without an epilogue that of out is its default.

    `planned`: the `block_rows` of the plan whose kernel it is for.

    Two changes make the problem faster. Where D is column-major and its graph has a transpose, D^T is computed, so
    that the kernel's D has unit column stride whenever out has a unit stride. And the bare product's batch is folded
    into M where b, with its block scales, is the same for the whole batch and the batch continues the rows of a, of its
    block scales and of D: one problem of batch * m rows.

    Raises ArgumentError, naming the argument, what was given and what would work; EpilogueError.
    """
    scales = {name: x for name, x in (operands or {}).items() if name in SCALE_NAMES}
    operands = {name: x for name, x in (operands or {}).items() if name not in scales}
    if epilogue is None and operands:
        listed, hint = ", ".join(operands), next(filter(None, map(meant, operands)), "")
        raise ArgumentError(f"{listed}: got an operand without an epilogue that reads it; give `epilogue`{hint}")
    a_info, b_info = describe(a, "a"), describe(b, "b")
    mma = checks.instruction(a_info, b_info, accumulate, precision)
    bare_out = None if out is None or epilogue is not None else describe(out, "out")
    shape = checks.product_shape(a_info, b_info)
    promoted = checks.promoted(a_info, accumulate, precision)
    factors, blocks, block_rows = _scales(scales, a_info, b_info, shape[:-2], promoted, planned or {})
    output = checks.output(mma, bare_out, out_dtype, fused=epilogue is not None or bool(factors))
    read = {name: _operand(name, x, a_info) for name, x in operands.items()}
    written = graph = bare(output)
    if epilogue is not None or factors:
        written, graph = _graphs(epilogue or written, shape, read, factors, output)
    given = by_name(out, first_name(graph), several=epilogue is not None)
    stored = _results(graph, {"out": bare_out} if bare_out else given, shape)
    read |= factors
    arrays = {  # an operand may have the name of the argument that is a scale
        name if argument_name(name) in operands else argument_name(name): x
        for name, x in read.items() if isinstance(x, ArrayInfo)
    }  # fmt: skip
    inputs = {"a": a_info, "b": b_info} | {argument_name(name): x for name, x in blocks.items()}
    checks.memory({"a": a_info, "b": b_info} | {name: stored[name] for name in given})
    for name in given:
        others = {other: stored[other] for other in given if other != name}
        checks.apart(name, stored[name], inputs, arrays, others)

    arguments: dict[str, ArrayInfo | float] = {"a": a_info, "b": b_info}
    arguments |= {operand_argument(name): x for name, x in (read | blocks).items()}
    arguments = {name: ArrayInfo(*x[:-1], False) if isinstance(x, ArrayInfo) else x for name, x in arguments.items()}
    arguments |= {result_argument(name): x for name, x in stored.items()}
    computes = graph.computes  # if nothing is computed, nothing is inexact or added up
    spec = EpilogueSpec(graph, frozenset(), frozenset(), exact and computes, atomic and computes)
    matrices = oriented(spec, arguments, shape, output, mma, promoted, block_rows)
    return Binding(shape, output, mma, promoted, block_rows, written, graph, arguments, given, *matrices)


def first_name(graph: Graph) -> str:
    """The name of the result for which an array is that is given alone."""
    return next((r.name for r in graph.results if not graph.is_reduced(r)), "out")


def by_name(out: Any, first: str = "out", several: bool = True) -> dict[str, Any]:
    """The arrays that a caller gives for results, by name: one for the `first`, or, where there may be `several`, a
    tuple or list in order, or a dict."""
    if out is None:
        return {}
    if not several or is_array(out) or not isinstance(out, (Mapping, tuple, list)):
        return {first: out}
    return dict(out) if isinstance(out, Mapping) else dict(zip(_positional(len(out)), out, strict=True))


def arranged(results: Mapping[str, Any], names: list[str]) -> Any:
    """The results as one array, a tuple or a dict, as their names say that the function returned them."""
    if names == _positional(len(names)):
        return results["out"] if len(names) == 1 else tuple(results[name] for name in names)
    return {name: results[name] for name in names}


def _positional(count: int) -> list[str]:
    """The names of `count` results that the function returned without names."""
    return ["out", *(f"out{i}" for i in range(1, count))][:count]


def _operand(name: str, x: Any, a: ArrayInfo) -> ArrayInfo | float:
    if isinstance(x, Real):
        return number_operand(name, x)
    info = describe(x, name)
    checks.operand(name, info, a)
    return info


_GRAPHS: dict[Hashable, tuple[Graph, Graph]] = Bounded(1024)
"""What `_graphs` made of functions that do not ask for shapes, whatever the number of rows."""


def _scales(
    given: Mapping[str, Any], a: ArrayInfo, b: ArrayInfo, batch: tuple[int, ...], promoted: bool,
    planned: Mapping[str, int],
) -> tuple[dict[str, ArrayInfo | float], dict[str, ArrayInfo], dict[str, int]]:  # fmt: skip
    """The scales that the epilogue multiplies by, block scales, and the granularity of these."""
    factors: dict[str, ArrayInfo | float] = {}
    blocks, rows = {}, {}
    for name, x in given.items():
        info, operand = scaling.described(x, name, a), a if name == SCALE_NAMES[0] else b
        found = scaling.block_rows(info, name, operand, batch, planned.get(name))
        if found is None or not isinstance(info, ArrayInfo):
            factors[name] = info
        elif promoted and operand.dtype in (E4M3, E5M2):
            blocks[name], rows[name] = info, found
        else:
            raise ArgumentError(
                f"{argument_name(name)}: got block scales, of shape {tuple(info.shape)}; they need fp8 "
                'operands and accumulate="promoted"'
            )
    return factors, blocks, rows


def _graphs(
    epilogue: Any, shape: tuple[int, ...], operands: Mapping[str, ArrayInfo | float],
    factors: Mapping[str, ArrayInfo | float], output: DType,
) -> tuple[Graph, Graph]:  # fmt: skip
    """The graph as the user wrote it, of a product that is multiplied by the `factors`, and after the passes."""
    kinds = {
        name: (extent(name, x.shape, shape), x.dtype) if isinstance(x, ArrayInfo) else (Extent(), None)
        for extent, given in ((classify, operands), (scaling.extent, factors)) for name, x in given.items()
    }  # fmt: skip
    rest = len(shape), shape[-1], tuple(kinds.items()), output
    if known := _GRAPHS.get((fingerprint(epilogue), rest)):
        return known
    epilogue, source = snapshot(epilogue)
    written, sized = written_graph(epilogue, shape, {name: kinds[name] for name in operands})
    written = scaling.scaled(written, [Operand(name, *kinds[name]) for name in factors])
    graph = _typed(optimize(written), output)
    check_blocks(graph)
    if source is not None and not sized:
        _GRAPHS[source, rest] = written, graph
    return written, graph


def written_graph(
    epilogue: Any, shape: tuple[int, ...], kinds: Mapping[str, tuple[Extent, DType | None]]
) -> tuple[Graph, bool]:
    """The graph as the user wrote it, and whether it may depend on the number of rows."""
    if isinstance(epilogue, Graph):
        if any(node.op in ("chunk", "interleave") and node.value[-1] != "n" for node in epilogue.nodes):
            raise EpilogueError("epilogue: got a chunk of rows; use one of columns, (0, 'n') and (1, 'n')")
        return epilogue, False
    if isinstance(epilogue, type):
        raise EpilogueError(f"epilogue: got the class {epilogue.__name__}; use an instance of it")
    if callable(graph := getattr(epilogue, "graph", None)):
        from gemmsmith.epilogue.frontend.arguments import bind as bind_visitor

        return bind_visitor(graph(), kinds, shape), True
    if callable(epilogue):
        return trace_sized(epilogue, shape, kinds)
    raise ArgumentError(f"epilogue: got {type(epilogue).__name__}; use a function, a visitor tree, or None")


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


def _results(graph: Graph, given: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, ArrayInfo]:
    """Every result by name: the array that is given, which has been checked, or one that does not exist yet."""
    names = [r.name for r in graph.results]
    if unknown := set(given) - set(names):
        raise ArgumentError(
            f"out: got arrays for {', '.join(sorted(unknown))}; the epilogue's results are {', '.join(names)}"
        )
    found = {}
    for r in graph.results:
        want = result_shape(graph, r, shape)
        assert r.dtype
        if r.name in given:
            found[r.name] = describe(given[r.name], r.name)
            checks.result(r.name, found[r.name], want, r.dtype, contiguous=graph.is_reduced(r))
        else:
            found[r.name] = describe(Spec(want, r.dtype, result_strides(graph, r, want)))
    return found


def result_shape(graph: Graph, result: Result, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a result of a product of `shape`. EpilogueError for one that does not depend on the product."""
    *batch, m, n = shape
    node = graph.nodes[result.node]
    extents = graph.extents()
    if node.op == "reduce":
        summed = over(node.value[1])
        n = n // max(extents[node.inputs[0]].width, 1)
        every = [*(("b", size) for size in batch), ("m", m), ("n", n)]
        if result.keepdim:
            return tuple(1 if index in summed else size for index, size in every)
        return tuple(size for index, size in every if index not in summed)
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


def result_strides(graph: Graph, result: Result, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Of a result of that shape for which there is no array: scales lie along M, padded to 16 bytes, as TMA brings them
    to the next product; None for others, which are row-major."""
    if graph.nodes[result.node].op != "scale":
        return None
    *batch, m, columns = shape
    step = TMA_ALIGNMENT // (result.dtype or FP32).bytes
    pitch = -(-m // step) * step
    return (*(columns * pitch for _ in batch), 1, pitch)
