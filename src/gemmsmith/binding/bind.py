"""Binding of arrays and an epilogue to a checked problem. Without an epilogue the graph is the identity."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

from gemmsmith.arrays import ArrayInfo, Spec, describe, empty_like_kind, is_array
from gemmsmith.binding import checks, scaling
from gemmsmith.binding.groups import (
    check_added_rows,
    check_scales_of_groups,
    classify_in_groups,
    scattered_shape,
    with_group_dimension,
    with_reductions_of_groups,
)
from gemmsmith.binding.matrices import orient_problem
from gemmsmith.binding.request import Request
from gemmsmith.binding.scaling import argument_name
from gemmsmith.core.bounded_cache import BoundedCache
from gemmsmith.core.config import Config
from gemmsmith.core.design import get_design
from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, DType, validate_fp32_scalar
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.errors import ArgumentError, ConfigError, EpilogueError, did_you_mean
from gemmsmith.core.frozen import changed
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph, Operand, Result, identity_graph, reduced_dims
from gemmsmith.core.grouping import TABLES, Grouping
from gemmsmith.core.integers import ceil_div, round_up
from gemmsmith.core.make_spec import make_spec
from gemmsmith.core.mma import Mma
from gemmsmith.core.problem import MAX_EXTENT, SCALE_NAMES, TMA_ALIGNMENT_BYTES, Matrix, Problem
from gemmsmith.core.product import Product
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.epilogue_plan import check_quantize_blocks
from gemmsmith.epilogue.inputs import operand_argument
from gemmsmith.epilogue.outputs import result_argument
from gemmsmith.graph.frontend.classify import classify
from gemmsmith.graph.frontend.fingerprint import fingerprint
from gemmsmith.graph.frontend.snapshot import snapshot
from gemmsmith.graph.frontend.tracer import trace_with_shape_dependence
from gemmsmith.graph.passes import optimize
from gemmsmith.graph.source_location import epilogue_error
from gemmsmith.kernels.pack import operand_packings, replace_packed_operands, tf32_residual_packings


@dataclass(frozen=True)
class Binding:
    """A GEMM and its epilogue, bound to arrays.

    Attributes:
        shape: (m, n) or (batch, m, n).
        out_dtype: Dtype of matrix results for which the epilogue names none.
        mma: The instruction that multiplies a and b.
        promoted: Whether sums are promoted to fp32 every 128 bytes of k.
        scale_granularity: Rows (columns, of b) per block scale, 1 or 128, by the names of the block scales.
        source_graph: The epilogue as the user wrote it, in the user's orientation.
        graph: The epilogue after the passes, in the user's orientation.
        arguments: Every array and number, by its Pointer's name. A result that the caller does not give has its
            `result_strides` and address 0; only results are writable.
        results: The given arrays of results, by name.
        problem: The GEMM that the kernel computes; its D is the first matrix result.
        product: The product that is computed, if it is not torch.matmul's: the design's, or a grouped GEMM's.
        swapped: Whether the kernel computes D^T = B^T @ A^T, so that the problem's `a` is the user's b.
        spec: The epilogue of the kernel.
        arrays: Matrix operands and results of the kernel, and arrays of the product, by name.
    """

    shape: tuple[int, ...]
    out_dtype: DType
    mma: Mma
    promoted: bool
    scale_granularity: Mapping[str, int]
    source_graph: EpilogueGraph
    graph: EpilogueGraph
    arguments: Mapping[str, ArrayInfo | float]
    results: Mapping[str, Any]
    product: Product | None
    problem: Problem
    swapped: bool
    spec: EpilogueSpec
    arrays: Mapping[str, Matrix]

    @property
    def a(self) -> ArrayInfo:
        """The array a."""
        a = self.arguments["a"]
        assert isinstance(a, ArrayInfo)
        return a

    @property
    def grouping(self) -> Grouping | None:
        """The groups of the user's product."""
        grouping = self.problem.grouping
        return grouping.transposed() if grouping and self.swapped else grouping

    @property
    def names(self) -> list[str]:
        """The results' names."""
        return [r.name for r in self.graph.results]

    @property
    def value(self) -> Any:
        """The results in the form in which the epilogue returned them: one, a tuple, or a dict."""
        return arrange_results(self.results, self.names)

    @property
    def scales(self) -> list[str]:
        """Descriptions of the granularity of the scales of a and b."""
        return [scaling.describe_granularity(name, self.graph, self.scale_granularity) for name in SCALE_NAMES]

    @property
    def unallocated_results(self) -> dict[str, ArrayInfo]:
        """The results that have no array yet, by name."""
        if len(self.results) == len(self.graph.results):
            return {}
        arguments = {name: self.arguments[result_argument(name)] for name in self.names if name not in self.results}
        return {name: x for name, x in arguments.items() if isinstance(x, ArrayInfo)}

    def transposed(self) -> Binding:
        """Return the binding computed as its transpose. Raises ConfigError if that is impossible."""
        if self.product and not self.product.is_transposable:
            raise ConfigError(f"swap_ab: got True for {self.product.name}, which supports False only")
        if not self.graph.is_transposable:
            raise ConfigError("swap_ab: got True for an epilogue that needs full rows; use False")
        p = self.problem
        if len(self.shape) == 2 and (p.m > 1) + (p.n > 1) + (p.k > 1) > 1:
            # No batch was folded, and canonical strides stay canonical, since no matrix has one element.
            arrays = {name: x.T for name, x in self.arrays.items()}
            spec = self.spec.with_graph(self.spec.graph.transposed()).for_arrays(arrays)
            return changed(self, problem=p.T, swapped=not self.swapped, spec=spec, arrays=arrays)
        spec = self.spec.with_graph(self.graph)
        oriented = orient_problem(
            spec, self.arguments, self.shape, self.out_dtype, self.mma, self.promoted, self.scale_granularity,
            self.product, self.grouping, self.problem.groups, swapped=not self.swapped,
        )  # fmt: skip
        return changed(self, **oriented._asdict())

    def kernel_spec(self, config: Config) -> KernelSpec:
        """Return the GEMM kernel's compile-time parameters, with operands packed that TMA cannot load.

        Raises ConfigError if the config cannot work, ArgumentError if a packed operand would be too large.
        """
        packings = operand_packings(self.problem, config)
        for name, packing in zip("ab", packings, strict=True):
            if packing and packing.total_vectors > MAX_EXTENT:
                raise ArgumentError(
                    f"{name}: TMA cannot read its strides or address and it is too large to pack; "
                    "use rows that are multiples of 16 bytes at a 16-byte aligned address"
                )
        for name, packing in zip("ab", tf32_residual_packings(self.problem, config), strict=False):
            if packing.total_vectors > MAX_EXTENT:
                raise ArgumentError(f"{name}: its TF32 residual is too large to pack; use precision='tf32'")
        return make_spec(replace_packed_operands(self.problem, packings), config, self.spec)

    def in_orientation_of(self, other: Binding) -> Binding:
        """Return the binding in `other`'s orientation, with the strides of length-1 dimensions taken from `other`."""
        binding = self if self.swapped == other.swapped else self.transposed()
        arrays = dict(binding.arrays)
        for name in binding.spec.graph.matrix_names:
            arrays[name] = arrays[name].with_degenerate_strides_of(other.arrays.get(name, arrays[name]))
        problem = binding.problem.with_degenerate_strides_of(other.problem)
        spec = binding.spec.for_arrays(arrays)
        return changed(binding, problem=problem, arrays=arrays, spec=spec)

    def allocate_results(self, like: Any) -> Binding:
        """Allocate the missing results in `like`'s library. Raises ArgumentError for a max or min over nothing."""
        for r in self.graph.results:
            node, argument = self.graph.nodes[r.node], self.arguments[result_argument(r.name)]
            is_max_or_min = node.op == "reduce" and node.attribute[0] in ("max", "min")
            if 0 in self.shape and is_max_or_min and isinstance(argument, ArrayInfo) and 0 not in argument.shape:
                raise ArgumentError(
                    f"a, b: the GEMM's shape {self.shape} is empty; {r.name}, a {node.attribute[0]}, has no value"
                )
        unallocated = self.unallocated_results
        if not unallocated:
            return self
        allocated = {name: empty_like_kind(like, x.shape, x.dtype, x.strides) for name, x in unallocated.items()}
        arguments = {result_argument(name): describe(x, name) for name, x in allocated.items()}
        return changed(self, results={**self.results, **allocated}, arguments={**self.arguments, **arguments})


def bind(request: Request, planned_granularity: Mapping[str, int] | None = None) -> Binding:
    """Bind out = epilogue(a @ b) to arrays, as a problem of strided matrices, with everything checked.

    Nothing is allocated. Two changes make the problem faster. If D is column-major and its epilogue can be transposed,
    D^T is computed, so that the kernel's D has unit column stride whenever out has a unit stride. And without an
    epilogue the batch is folded into M if b, with its block scales, is the same for the whole batch and the batch
    continues the rows of a, of its block scales and of D: one problem of batch * m rows.

    Args:
        request: What the caller asks for. A batch of 1, or none, is broadcast (stride 0); extents may be 0. Each array
            of `out` must have its result's shape, be writable, and not overlap itself, a, b or another result. Without
            an epilogue the default of `out_dtype` is out's dtype.
        planned_granularity: The `scale_granularity` of the plan that the binding is for, to resolve ambiguous shapes.

    Returns:
        The binding.

    Raises:
        ArgumentError: If an argument is invalid; the message names it, what was given and what would work.
        EpilogueError: If the epilogue cannot be traced.
    """
    out, epilogue = request.out, request.epilogue
    scales = {name: x for name, x in request.operands.items() if name in SCALE_NAMES}
    grouping, product = request.grouping, get_design(request.config.design).product if request.config else None
    if grouping:
        if not isinstance(grouping, Grouping):
            raise ArgumentError(f"grouping: got {type(grouping).__name__}; use gemmsmith.Grouping({grouping!r})")
        product = grouping.product
    product_arrays = product.arrays if product else {}
    operands = {name: x for name, x in request.operands.items() if name not in (*scales, *product_arrays)}
    if epilogue is None and operands:
        names, hint = ", ".join(operands), next(filter(None, map(did_you_mean, operands)), "")
        if tables := [name for name in operands if name in TABLES]:
            hint = f'; the table of a grouped GEMM needs grouping=Grouping("{tables[0]}")'
        raise ArgumentError(f"{names}: operands need an `epilogue` that reads them{hint}")
    a_info, b_info = describe(request.a, "a"), describe(request.b, "b")
    mma = checks.resolve_mma(a_info, b_info, request.accumulate, request.precision)
    out_info = None if out is None or epilogue is not None else describe(out, "out")
    array_infos = _describe_arrays(product_arrays, request.operands, a_info)
    shape = checks.gemm_shape(a_info, b_info, product, array_infos)
    groups = array_infos[grouping.table].shape[0] if grouping else 0
    grouping = grouping.with_room_for(groups) if grouping else None
    promoted = checks.is_promoted(a_info, request.accumulate, request.precision)
    if planned_granularity is None and grouping and grouping.along == "k" and promoted:
        # (m, 1) of 128 of k may not be written where no group is: it is a block's, which only groups read
        planned_granularity = dict.fromkeys(SCALE_NAMES, 1)
    factors, block_scales, granularity = _split_scales(
        scales, a_info, b_info, (groups,) if groups else shape[:-2], promoted, planned_granularity or {}
    )
    if grouping:
        check_scales_of_groups(grouping, granularity)
    elif product:
        checks.check_product_scales(product, {argument_name(x): i for x, i in factors.items()}, block_scales)
    dtype = checks.resolve_out_dtype(mma, out_info, request.out_dtype, fused=epilogue is not None or bool(factors))
    operand_infos = {name: _describe_operand(name, x, a_info) for name, x in operands.items()}
    if groups:
        operand_infos = {
            name: with_group_dimension(name, x, shape, groups) if isinstance(x, ArrayInfo) else x
            for name, x in operand_infos.items()
        }
    source_graph = graph = identity_graph(dtype)
    if epilogue is not None or factors:
        source_graph, graph = _build_graphs(
            epilogue or source_graph, request.fingerprint, shape, operand_infos, factors, dtype, grouping, groups,
            (groups, a_info.shape[-2], shape[-1]) if groups else shape,
        )  # fmt: skip
    outputs = outputs_by_name(out, primary_result_name(graph), allow_several=epilogue is not None)
    given_results = {"out": out_info} if out_info else outputs
    shape_of_results = scattered_shape(shape, given_results, graph) if grouping and grouping.scatters else shape
    groups_of_rows = groups if grouping and grouping.clips_rows and not grouping.is_masked else 0
    result_infos = _describe_results(graph, given_results, shape_of_results, groups_of_rows)
    operand_infos |= factors
    arrays = {  # a user's operand may be named like the argument of a scale
        name if argument_name(name) in operands else argument_name(name): x
        for name, x in operand_infos.items() if isinstance(x, ArrayInfo)
    }  # fmt: skip
    inputs = {"a": a_info, "b": b_info} | {argument_name(name): x for name, x in (block_scales | array_infos).items()}
    checks.check_addressable({"a": a_info, "b": b_info} | array_infos | {name: result_infos[name] for name in outputs})
    for name in outputs:
        others = {other: result_infos[other] for other in outputs if other != name}
        # Tiles of a group read the operands' rows of the next one, which other tiles write
        read_elsewhere = inputs | arrays if grouping and not grouping.has_batch else inputs
        checks.check_no_overlap(name, result_infos[name], read_elsewhere, arrays, others)

    arguments: dict[str, ArrayInfo | float] = {"a": a_info, "b": b_info}
    arguments |= {operand_argument(name): x for name, x in (operand_infos | block_scales | array_infos).items()}
    arguments = {name: x._replace(writable=False) if isinstance(x, ArrayInfo) else x for name, x in arguments.items()}
    arguments |= {result_argument(name): x for name, x in result_infos.items()}
    # Without operations the options make no difference: one kernel for all
    fast_math = request.fast_math or not graph.has_operations
    adds_rows = grouping is not None and grouping.scatters and not request.deterministic
    if adds_rows:
        check_added_rows(graph)
    deterministic = request.deterministic or not (graph.has_operations or adds_rows)
    spec = EpilogueSpec(graph, frozenset(), frozenset(), fast_math, deterministic)
    oriented = orient_problem(spec, arguments, shape, dtype, mma, promoted, granularity, product, grouping, groups)
    return Binding(
        shape, dtype, mma, promoted, granularity, source_graph, graph, arguments, outputs, product, *oriented
    )  # fmt: skip


def primary_result_name(graph: EpilogueGraph) -> str:
    """Return the name of the result that a single `out` array is for: the first that is not a reduction."""
    return next((r.name for r in graph.results if not graph.is_reduction(r)), "out")


def outputs_by_name(out: Any, primary: str = "out", allow_several: bool = True) -> dict[str, Any]:
    """Normalize `out` (an array, or, with `allow_several`, a tuple, list or dict) to a dict by result name."""
    if out is None:
        return {}
    if not allow_several or is_array(out) or not isinstance(out, (Mapping, tuple, list)):
        return {primary: out}
    return dict(out) if isinstance(out, Mapping) else dict(zip(_default_names(len(out)), out, strict=True))


def arrange_results(results: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the results as one array, a tuple or a dict, depending on their names."""
    if len(names) == 1 and names[0] == "out":
        return results["out"]
    if list(names) == _default_names(len(names)):
        return tuple(results[name] for name in names)
    return {name: results[name] for name in names}


def _default_names(count: int) -> list[str]:
    """Return the names of `count` results that the epilogue returned without names."""
    return ["out", *(f"out{i}" for i in range(1, count))][:count]


def _describe_operand(name: str, x: Any, a: ArrayInfo) -> ArrayInfo | float:
    if isinstance(x, Real):
        return validate_fp32_scalar(name, x)
    info = describe(x, name)
    checks.check_operand(name, info, a)
    return info


def _describe_arrays(dtypes: Mapping[str, DType], operands: Mapping[str, Any], a: ArrayInfo) -> dict[str, ArrayInfo]:
    """Describe the arrays of the design."""
    infos = {}
    for name, dtype in dtypes.items():
        if name not in operands:
            raise ArgumentError(f"{name}: got none; the kernel reads this array of {dtype}, pass it by name")
        info = infos[name] = describe(operands[name], name)
        checks.check_alignment_and_device(name, info, a)
        if info.dtype != dtype or not checks.is_contiguous(info):
            raise ArgumentError(f"{name}: got {info.dtype} with strides {info.strides}; use contiguous {dtype}")
    return infos


_GRAPH_CACHE: dict[Hashable, tuple[EpilogueGraph, EpilogueGraph]] = BoundedCache(1024)
"""Graphs of epilogues that do not depend on the number of rows."""


def _split_scales(
    scales: Mapping[str, Any], a: ArrayInfo, b: ArrayInfo, batch: tuple[int, ...], promoted: bool,
    planned_granularity: Mapping[str, int],
) -> tuple[dict[str, ArrayInfo | float], dict[str, ArrayInfo], dict[str, int]]:  # fmt: skip
    """Return the scales applied in the epilogue, the block scales, and the granularity of the block scales."""
    factors: dict[str, ArrayInfo | float] = {}
    block_scales, granularity = {}, {}
    for name, x in scales.items():
        info, operand = scaling.describe_scale(x, name, a), a if name == SCALE_NAMES[0] else b
        rows = scaling.scale_granularity(info, name, operand, batch, planned_granularity.get(name))
        if rows is None or not isinstance(info, ArrayInfo):
            factors[name] = info
        elif promoted and operand.dtype in (E4M3, E5M2):
            block_scales[name], granularity[name] = info, rows
        else:
            raise ArgumentError(
                f"{argument_name(name)}: got block scales, of shape {tuple(info.shape)}; they need fp8 "
                'operands and accumulate="promoted"'
            )
    return factors, block_scales, granularity


def _build_graphs(
    epilogue: Any, source: Hashable, shape: tuple[int, ...], operands: Mapping[str, ArrayInfo | float],
    factors: Mapping[str, ArrayInfo | float], out_dtype: DType, grouping: Grouping | None, groups: int,
    scaled_shape: tuple[int, ...],
) -> tuple[EpilogueGraph, EpilogueGraph]:  # fmt: skip
    """Return the source graph, with the accumulator multiplied by the `factors`, and the graph after the passes.

    `source`: the fingerprint of an epilogue that is a snapshot; else None. `scaled_shape`: the product's, with the rows
    of the array a, before any are gathered.
    """
    classify_operand = partial(classify_in_groups, groups=groups) if groups else classify
    kinds = {
        name: (broadcast_dims(name, x.shape, of), x.dtype) if isinstance(x, ArrayInfo) else (BroadcastDims(), None)
        for broadcast_dims, of, infos in (
            (classify_operand, shape, operands), (scaling.scale_broadcast_dims, scaled_shape, factors)
        )
        for name, x in infos.items()
    }  # fmt: skip
    key = len(shape), shape[-1], tuple(kinds.items()), out_dtype, grouping
    if cached := _GRAPH_CACHE.get((source or fingerprint(epilogue), key)):
        return cached
    if source is None:
        epilogue, source = snapshot(epilogue)
    operand_kinds = {name: kinds[name] for name in operands}
    source_graph, depends_on_rows = build_source_graph(epilogue, shape, operand_kinds, groups > 0)
    source_graph = with_reductions_of_groups(source_graph, grouping) if grouping else source_graph
    source_graph = scaling.multiply_by_scales(source_graph, [Operand(name, *kinds[name]) for name in factors])
    graph = _with_result_dtypes(optimize(source_graph), out_dtype)
    check_quantize_blocks(graph)
    if source is not None and not depends_on_rows:
        _GRAPH_CACHE[source, key] = source_graph, graph
    return source_graph, graph


def build_source_graph(
    epilogue: Any, shape: tuple[int, ...], kinds: Mapping[str, tuple[BroadcastDims, DType | None]],
    has_groups: bool = False,
) -> tuple[EpilogueGraph, bool]:  # fmt: skip
    """Return the graph as the user wrote it, and whether it may depend on the number of rows."""
    if isinstance(epilogue, EpilogueGraph):
        if any(node.op in ("chunk", "interleave") and node.attribute[-1] != "n" for node in epilogue.nodes):
            raise EpilogueError("epilogue: got a chunk of rows; use one of columns, (0, 'n') and (1, 'n')")
        if not has_groups and any(node.op == "group_index" for node in epilogue.nodes):
            raise EpilogueError("epilogue: got the index of a group; use grouped_gemm, or a grouping")
        return epilogue, False
    if isinstance(epilogue, type):
        raise EpilogueError(f"epilogue: got the class {epilogue.__name__}; use an instance of it")
    if callable(graph := getattr(epilogue, "graph", None)):
        from gemmsmith.graph.frontend.arguments import bind_operands as bind_visitor

        return bind_visitor(graph(), kinds, shape), True
    if callable(epilogue):
        return trace_with_shape_dependence(epilogue, shape, kinds, has_groups)
    raise ArgumentError(f"epilogue: got {type(epilogue).__name__}; use a function, a visitor tree, or None")


def _with_result_dtypes(graph: EpilogueGraph, out_dtype: DType) -> EpilogueGraph:
    """Give every result a dtype: by default `out_dtype` for matrices, fp32 for reductions and scales."""
    results = []
    for r in graph.results:
        node = graph.nodes[r.node]
        is_reduction_or_scale = node.op in ("reduce", "scale")
        if is_reduction_or_scale and r.dtype not in (None, FP32, FP16, BF16):
            kind = "a reduction's result" if node.op == "reduce" else "scales"
            raise epilogue_error(f"{r.name}: got dtype {r.dtype} for {kind}; use fp32, fp16 or bf16", node.location)
        results.append(replace(r, dtype=r.dtype or (FP32 if is_reduction_or_scale else out_dtype)))
    return replace(graph, results=tuple(results))


def _describe_results(
    graph: EpilogueGraph, outputs: Mapping[str, Any], shape: tuple[int, ...], groups_of_rows: int
) -> dict[str, ArrayInfo]:
    """Return the ArrayInfo of every result, by name: of the given array, which is checked, or of one to allocate."""
    names = [r.name for r in graph.results]
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
    broadcast_dims = graph.broadcast_dims()
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
