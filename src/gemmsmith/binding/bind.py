"""Binding of arrays and an epilogue to a checked problem. Without an epilogue the graph is the identity."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from gemmsmith.arrays import ArrayInfo, describe
from gemmsmith.binding import checks, scaling
from gemmsmith.binding.binding import Binding
from gemmsmith.binding.graphs import build_graphs
from gemmsmith.binding.groups import check_added_rows, check_scales_of_groups, scattered_shape, with_group_dimension
from gemmsmith.binding.matrices import orient_problem
from gemmsmith.binding.request import Request
from gemmsmith.binding.results import describe_results, outputs_by_name, primary_result_name
from gemmsmith.binding.scaling import argument_name
from gemmsmith.core.design import get_design
from gemmsmith.core.dtypes import E4M3, E5M2, DType, validate_fp32_scalar
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.errors import ArgumentError, did_you_mean
from gemmsmith.core.graph import identity_graph
from gemmsmith.core.grouping import TABLES, Grouping
from gemmsmith.core.problem import SCALE_NAMES
from gemmsmith.epilogue.inputs import operand_argument
from gemmsmith.epilogue.outputs import result_argument


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
    design = get_design(request.config.design) if request.config else None
    grouping, product = request.grouping, design.product if design else None
    if grouping is not None:
        if not isinstance(grouping, Grouping):
            raise ArgumentError(f"grouping: got {type(grouping).__name__}; use gemmsmith.Grouping({grouping!r})")
        if grouping.role != "a":
            raise ArgumentError(f"role: got {grouping.role!r}; use 'a', since the config says whether D^T is computed")
        product = grouping.product
    product_arrays = product.arrays if product else {}
    operands = {name: x for name, x in request.operands.items() if name not in (*scales, *product_arrays)}
    if epilogue is None and operands:
        names, hint = ", ".join(operands), next(filter(None, map(did_you_mean, operands)), "")
        if tables := [name for name in operands if name in TABLES]:
            hint = f'; the table of a grouped GEMM needs grouping=Grouping("{tables[0]}")'
        raise ArgumentError(f"{names}: operands need an `epilogue` that reads them{hint}")
    a_info, b_info = describe(request.a, "a"), describe(request.b, "b")
    multiplication = checks.resolve_multiplication(a_info, b_info, request.accumulate, request.precision, design)
    a_elements, b_elements = multiplication.as_elements(a_info, b_info)
    out_info = None if out is None or epilogue is not None else describe(out, "out")
    array_infos = _describe_arrays(product_arrays, request.operands, a_info)
    shape = checks.gemm_shape(a_elements, b_elements, product, array_infos)
    groups = array_infos[grouping.table].shape[0] if grouping else 0
    grouping = grouping.with_room_for(groups) if grouping else None
    if planned_granularity is None and grouping and grouping.along == "k" and multiplication.promoted:
        # (m, 1) of 128 of k may not be written where no group is: it is a block's, which only groups read
        planned_granularity = dict.fromkeys(SCALE_NAMES, 1)
    factors, block_scales, granularity = _split_scales(
        scales, a_elements, b_elements, (groups,) if groups else shape[:-2], multiplication.promoted,
        planned_granularity or {},
    )  # fmt: skip
    if grouping:
        check_scales_of_groups(grouping, granularity)
    elif product:
        checks.check_product_scales(product, {argument_name(x): i for x, i in factors.items()}, block_scales)
    is_fused = epilogue is not None or bool(factors)
    dtype = checks.resolve_out_dtype(multiplication.mma, out_info, request.out_dtype, fused=is_fused)
    operand_infos = {name: _describe_operand(name, x, a_info) for name, x in operands.items()}
    if groups:
        operand_infos = {
            name: with_group_dimension(name, x, shape, groups) if isinstance(x, ArrayInfo) else x
            for name, x in operand_infos.items()
        }
    source_graph = graph = identity_graph(dtype)
    if epilogue is not None or factors:
        function, source = (source_graph, source_graph) if epilogue is None else (epilogue, request.fingerprint)
        source_graph, graph = build_graphs(
            function, source, shape, operand_infos, factors, dtype, grouping, groups,
            (groups, a_info.shape[-2], shape[-1]) if groups else shape,
        )  # fmt: skip
    outputs = outputs_by_name(out, primary_result_name(graph), allow_several=epilogue is not None)
    given_results = {"out": out_info} if out_info else outputs
    shape_of_results = scattered_shape(shape, given_results, graph) if grouping and grouping.scatters else shape
    groups_of_rows = groups if grouping and grouping.clips_rows and not grouping.is_masked else 0
    result_infos = describe_results(graph, given_results, shape_of_results, groups_of_rows)
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
    oriented = orient_problem(spec, arguments, shape, dtype, multiplication, granularity, product, grouping, groups)
    return Binding(
        shape, dtype, multiplication, granularity, source_graph, graph, arguments, outputs, product, *oriented
    )  # fmt: skip


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
