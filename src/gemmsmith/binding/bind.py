"""Binding of arrays and an epilogue to a checked problem. Without an epilogue the graph is the identity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemmsmith.arrays import ArrayInfo, describe
from gemmsmith.backends import check_backend
from gemmsmith.binding import checks, scaling
from gemmsmith.binding.binding import Binding
from gemmsmith.binding.graphs import build_graphs
from gemmsmith.binding.groups import check_added_rows, check_scales_of_groups, scattered_shape, with_group_dimension
from gemmsmith.binding.matrices import orient_problem
from gemmsmith.binding.request import Request
from gemmsmith.binding.results import describe_results, outputs_by_name, primary_result_name
from gemmsmith.core.config import Config
from gemmsmith.core.design import get_design
from gemmsmith.core.dtypes import E4M3, E5M2, DType, validate_fp32_scalar
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.errors import ArgumentError, did_you_mean
from gemmsmith.core.graph import identity_graph
from gemmsmith.core.grouping import TABLES, Grouping
from gemmsmith.core.problem import SCALE_NAMES
from gemmsmith.core.product import ROLES, Role
from gemmsmith.core.scalars import as_bools, is_number
from gemmsmith.epilogue.inputs import operand_argument
from gemmsmith.epilogue.outputs import result_argument


def bind(request: Request, planned: Binding | None = None) -> Binding:
    """Check a request out = epilogue(a @ b), and return it as a GEMM of strided matrices with the epilogue's graph.

    Nothing is allocated. Two changes make the problem faster. If D is column-major, its transpose D^T = B^T @ A^T is
    computed, since kernels store rows faster; not so if the epilogue cannot be transposed, or the call is
    batch-invariant. Without an epilogue, the batch is folded into M: one GEMM of batch * m rows. That needs the same b,
    and the same block scales of b, for the whole batch, and one row stride for all rows of a, of its block scales and
    of D.

    In a request a batch of 1, or none, is broadcast (stride 0); extents may be 0. Each array of `out` must have its
    result's shape, be writable, and not overlap itself, a, b or another result. Without an epilogue the default of
    `out_dtype` is out's dtype.

    `planned`: the binding of the plan that will compute the request; None to make a plan. It decides whether D^T is
    computed, which granularity scales of an ambiguous shape have, and the strides of dimensions of length 1, so that
    the plan's kernel fits.

    Raises ArgumentError if an argument is invalid, with its name, what was given and what would work; EpilogueError if
    the epilogue cannot be traced.
    """
    fast_math, deterministic = _check_options(request)
    out, epilogue = request.out, request.epilogue
    design = get_design(request.config.design) if request.config else None
    grouping = request.grouping
    product = _check_grouping(grouping).product if grouping is not None else design.product if design else None
    product_arrays = product.arrays if product else {}
    operands = {name: x for name, x in request.operands.items() if name not in product_arrays}
    if epilogue is None and operands:
        raise _unread_operands(operands)
    a_info, b_info = describe(request.a, "a"), describe(request.b, "b")
    multiplication = checks.resolve_multiplication(a_info, b_info, request.accumulate, request.precision, design)
    a_elements, b_elements = multiplication.as_elements(a_info, b_info)
    out_info = None if out is None or epilogue is not None else describe(out, "out")
    array_infos = _describe_arrays(product_arrays, request.operands, a_info)
    shape = checks.gemm_shape(a_elements, b_elements, product, array_infos)
    groups = array_infos[grouping.table].shape[0] if grouping else 0
    grouping = grouping.with_room_for(groups) if grouping else None
    planned_granularity = planned.scale_granularity if planned else {}
    if planned is None and grouping and grouping.along == "k" and multiplication.promoted:
        # With k <= 128 scales of shape (m, 1) could be row scales or block scales. They count as block scales, which
        # only groups read: if no group has any k, the scales may not have been written
        planned_granularity = dict.fromkeys(ROLES, 1)
    factors, block_scales, granularity = _split_scales(
        request, a_elements, b_elements, (groups,) if groups else shape[:-2], multiplication.promoted,
        planned_granularity,
    )  # fmt: skip
    if grouping:
        check_scales_of_groups(grouping, granularity)
    elif product:
        checks.check_product_scales(product, factors, block_scales)
    is_fused = epilogue is not None or bool(factors)
    dtype = checks.resolve_out_dtype(multiplication.mma, out_info, request.out_dtype, fused=is_fused)
    operand_infos = {name: _describe_operand(name, x, a_info, shape, groups) for name, x in operands.items()}
    factors_by_name = {SCALE_NAMES[role]: x for role, x in factors.items()}
    source_graph = graph = identity_graph(dtype)
    depends_on_rows = False
    if is_fused:
        function, source = (source_graph, source_graph) if epilogue is None else (epilogue, request.fingerprint)
        source_graph, graph, depends_on_rows = build_graphs(
            function, source, shape, operand_infos, factors_by_name, dtype, grouping, groups,
            (groups, a_info.shape[-2], shape[-1]) if groups else shape,
        )  # fmt: skip
    outputs = outputs_by_name(out, primary_result_name(graph), allow_several=epilogue is not None)
    given_results = {"out": out_info} if out_info else outputs
    shape_of_results = scattered_shape(shape, given_results, graph) if grouping and grouping.scatters else shape
    groups_of_rows = groups if grouping and grouping.clips_rows and not grouping.is_masked else 0
    result_infos = describe_results(graph, given_results, shape_of_results, groups_of_rows)
    inputs, given_infos = {"a": a_info, "b": b_info} | array_infos, {name: result_infos[name] for name in outputs}
    checks.check_addressable(inputs | given_infos)
    scales = ((f"scale_{role}", x) for role, x in factors.items())
    read_with_result = [(name, x) for name, x in (*operand_infos.items(), *scales) if isinstance(x, ArrayInfo)]
    read_before = [*inputs.items(), *((f"scale_{role}", x) for role, x in block_scales.items())]
    if grouping and not grouping.has_batch:
        # A group's last tile also reads operands' rows of the next group, which another tile may have overwritten
        read_before += read_with_result
    # Tiles may add to these, which were zeroed before, while others still read operands
    added_to = set() if deterministic else {r.name for r in graph.results if graph.is_reduction(r)}
    for name, x in given_infos.items():
        others = {other: y for other, y in given_infos.items() if other != name}
        before = read_before + read_with_result if name in added_to else read_before
        checks.check_no_overlap(name, x, before, read_with_result, others)

    blocks_by_name = {SCALE_NAMES[role]: x for role, x in block_scales.items()}
    inputs_by_name = operand_infos | factors_by_name | blocks_by_name | array_infos
    arguments: dict[str, ArrayInfo | float] = {"a": a_info, "b": b_info}
    arguments |= {operand_argument(name): x for name, x in inputs_by_name.items()}
    arguments = {name: x._replace(writable=False) if isinstance(x, ArrayInfo) else x for name, x in arguments.items()}
    arguments |= {result_argument(name): x for name, x in result_infos.items()}
    # Without operations the options make no difference: one kernel for all
    fast_math = fast_math or not graph.has_operations
    adds_rows = grouping is not None and grouping.scatters and not deterministic
    if adds_rows:
        check_added_rows(graph)
    deterministic = deterministic or not (graph.has_operations or adds_rows)
    spec = EpilogueSpec(graph, frozenset(), frozenset(), fast_math, deterministic)
    swapped = planned.swapped if planned else False if request.batch_invariant else None
    oriented = orient_problem(
        spec, arguments, shape, dtype, multiplication, granularity, product, grouping, groups, swapped
    )
    binding = Binding(
        shape, dtype, multiplication, granularity, source_graph, graph, arguments, outputs, product, *oriented,
        request.a, depends_on_rows,
    )  # fmt: skip
    return binding.with_degenerate_strides_of(planned) if planned else binding


def _check_options(request: Request) -> tuple[bool, bool]:
    """Check the flags, the backend and the config; return `fast_math` and `deterministic`."""
    fast_math, deterministic, _ = as_bools(
        fast_math=request.fast_math, deterministic=request.deterministic, batch_invariant=request.batch_invariant
    )
    check_backend(request.backend)
    if request.config is not None and not isinstance(request.config, Config):
        raise ArgumentError(f"config: got {type(request.config).__name__}; use a gemmsmith.Config")
    return fast_math, deterministic


def _check_grouping(grouping: object) -> Grouping:
    """Return the caller's grouping. Raises ArgumentError if it is no Grouping, or if its role is not "a"."""
    if not isinstance(grouping, Grouping):
        raise ArgumentError(f"grouping: got {type(grouping).__name__}; use gemmsmith.Grouping({grouping!r})")
    if grouping.role != "a":
        raise ArgumentError(f"role: got {grouping.role!r}; use 'a', since the config says whether D^T is computed")
    return grouping


def _unread_operands(operands: Mapping[str, Any]) -> ArgumentError:
    """Return the error for operands that nothing reads, as there is no epilogue; it suggests a name if one is close."""
    hint = next(filter(None, map(did_you_mean, operands)), "")
    if tables := [name for name in operands if name in TABLES]:
        hint = f'; the table of a grouped GEMM needs grouping=Grouping("{tables[0]}")'
    return ArgumentError(f"{', '.join(operands)}: operands need an `epilogue` that reads them{hint}")


def _describe_operand(
    name: str, x: Any, a: ArrayInfo, shape: tuple[int, ...], groups: int
) -> ArrayInfo | float:  # fmt: skip
    """Return an epilogue's operand as a number or an ArrayInfo. Raises ArgumentError if kernels cannot read it.

    An operand with a value or a row for each of `groups` gets the shape (groups, 1, n).
    """
    if is_number(x):
        return validate_fp32_scalar(name, x)
    info = describe(x, name)
    checks.check_operand(name, info, a)
    return with_group_dimension(name, info, shape, groups) if groups else info


def _describe_arrays(dtypes: Mapping[str, DType], operands: Mapping[str, Any], a: ArrayInfo) -> dict[str, ArrayInfo]:
    """Return the arrays that a design, or a grouped GEMM, reads besides a and b, such as the ends of groups.

    Raises ArgumentError if one is missing, has another dtype, is not contiguous, or is not on a's device.
    """
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
    request: Request, a: ArrayInfo, b: ArrayInfo, batch: tuple[int, ...], promoted: bool,
    planned_granularity: Mapping[Role, int],
) -> tuple[dict[Role, ArrayInfo | float], dict[Role, ArrayInfo], dict[Role, int]]:  # fmt: skip
    """Divide scale_a and scale_b into those that the epilogue applies and block scales.

    `batch`: the sizes that a leading dimension of the scales may have, besides 1. `promoted`: the kernel can apply
    block scales. `planned_granularity`: for shapes that could have several. Returns, by operand: the scales of the
    whole operand or of its rows, for the epilogue; the block scales; and the rows (columns, of b) per block scale, 1 or
    128.
    """
    factors: dict[Role, ArrayInfo | float] = {}
    block_scales: dict[Role, ArrayInfo] = {}
    granularity: dict[Role, int] = {}
    for role, x, operand in zip(ROLES, (request.scale_a, request.scale_b), (a, b), strict=True):
        if x is None:
            continue
        info = scaling.describe_scale(x, role, a)
        rows = scaling.scale_granularity(info, role, operand, batch, planned_granularity.get(role))
        if rows is None or not isinstance(info, ArrayInfo):
            factors[role] = info
        elif promoted and operand.dtype in (E4M3, E5M2):
            block_scales[role], granularity[role] = info, rows
        else:
            raise ArgumentError(
                f"scale_{role}: got block scales, of shape {tuple(info.shape)}; they need fp8 "
                'operands and accumulate="promoted"'
            )
    return factors, block_scales, granularity
