"""quantize() and dequantize(): conversion of arrays to 8 bits with scales, and back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from math import prod
from typing import Any, Literal, cast

from gemmsmith.arrays import ArrayInfo, ArrayLike, ArrayT, cache_key_and_address, describe
from gemmsmith.backends import Backend, resolve_backend
from gemmsmith.backends.reference import quantize as reference
from gemmsmith.binding import checks
from gemmsmith.binding.groups import make_grouping
from gemmsmith.binding.matrices import to_matrix
from gemmsmith.core.dicts import BoundedCache
from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, INT8, INT32, UE8M0, DType, as_dtype
from gemmsmith.core.errors import ArgumentError, EpilogueError
from gemmsmith.core.grouping import Grouping
from gemmsmith.core.problem import MAX_EXTENT, Matrix
from gemmsmith.core.scalars import as_bools, as_integer, ceil_div
from gemmsmith.graph.frontend.values import Traced, is_compile_proxy
from gemmsmith.graph.frontend.values import quantize as quantize_traced
from gemmsmith.graph.source_location import epilogue_error
from gemmsmith.host.output_kernels import (
    MAX_CACHED_RUNS,
    OutputKernels,
    OutputSpec,
    describe_no_grad,
    get_or_create,
    has_vector_rows,
    to_canonical_matrix,
)
from gemmsmith.kernels.dequantize import BoundDequantize, DequantizeSpec
from gemmsmith.kernels.dequantize import dequantize as dequantize_kernel
from gemmsmith.kernels.quantize import MAX_AMAX_PARTIALS, BoundQuantize, QuantizeSpec, ScaleGranularity
from gemmsmith.kernels.quantize import amax as amax_kernel
from gemmsmith.kernels.quantize import quantize as quantize_kernel
from gemmsmith.kernels.quantize_groups import FILLED, BoundQuantizeGroups, filled_rows
from gemmsmith.kernels.quantize_groups import quantize_groups as quantize_groups_kernel
from gemmsmith.kernels.register_tile import QUANTIZATION_BLOCK
from gemmsmith.lang.launch import WORKSPACE, Launch, Launches

VALUE_DTYPES = (E4M3, E5M2, INT8)
"""Dtypes of quantized values."""
Recipe = Literal["tensor", "rows", "columns", "1x128", "128x1", "128x128"]
RECIPES: dict[str, tuple[ScaleGranularity, ScaleGranularity]] = {
    "tensor": ("tensor", "tensor"), "rows": ("row", "column"), "1x128": ("row", "column"), "128x128": ("tile", "tile"),
}  # fmt: skip
"""Scale granularity by recipe, for the copy in the source's layout and for the transposed copy."""
TRANSPOSED_RECIPES = {"columns": "rows", "128x1": "1x128"}
"""Recipes implemented as another recipe on the transposed array."""
DEFAULT_SCALE_LAYOUT = {"1x128": ("M", 4), "128x128": ("K", 4)}
"""Default (order, padding) of the scales by recipe; ("K", 1) for recipes not listed."""
OPPOSITE_ORDER: dict[Any, Literal["K", "M"] | None] = {"K": "M", "M": "K", None: None}
"""Order of the scales of the transposed array, by order."""
ROW_TILE_COLUMNS = (128, 512, 2048, 4096, 8192, 16384)
"""Columns of a tile that has full rows; the smallest that fits is used. Chosen; not measured."""
_Run = Callable[..., tuple[Any, ...]]
_NO_TABLES: Mapping[str, ArrayInfo] = {}
_QUANTIZE_CACHE: dict[Hashable, _Run] = BoundedCache(MAX_CACHED_RUNS)
"""Functions that quantize an array (and get the table of its groups, if any), by signatures and options."""


def quantize(
    x: ArrayLike | Traced, recipe: Recipe | str = "1x128", dtype: Any = "fp8_e4m3", *, transposed: bool = False,
    scale_dtype: Any = "fp32", scale_order: Literal["K", "M"] | None = None, scale_padding: int | None = None,
    offsets: ArrayLike | None = None, sizes: ArrayLike | None = None, backend: Backend = "auto",
) -> tuple[Any, ...]:  # fmt: skip
    """Quantize an array to 8 bits with scales, so that x is about values * scales.

    The amax of elements that share a scale is the largest of their absolute values. The scale is amax / 448 (57344 for
    e5m2, 127 for int8), computed as amax * fp32(1 / 448), and at least 2^-126; but it is 1 if amax is 0. Values are
    x * (448 / amax), or x / scale with ue8m0 scales, rounded to nearest even. If one of the elements is NaN the scale
    is NaN; if one is infinite the scale is infinite, or NaN with ue8m0. All of the elements then dequantize to NaN.

    In an epilogue x is a traced matrix; recipe is "1x128", or "1xC" for another number C of columns; and (values,
    scales) are results.

    Args:
        x: (m, k) or (batch, m, k), bf16, fp16 or fp32, with any strides >= 0.
        recipe: Granularity of the scales, whose shape is as `gemm` accepts it: "tensor" (), "rows" (m, 1), "columns"
            (1, k), "1x128" (m, ceil(k / 128)), "128x1" (ceil(m / 128), k), "128x128" (ceil(m / 128), ceil(k / 128));
            with the batch in front for all but "tensor".
        dtype: "fp8_e4m3", "fp8_e5m2" or "int8".
        transposed: Whether to return (values, scales, values_t, scales_t), the latter two being those of x transposed
            with the same recipe: with "1x128" they have separate scales, along the other dimension. x is read once for
            both; with "rows" and "columns" twice.
        scale_dtype: "fp32", or "ue8m0": powers of two, rounded up.
        scale_order: The dimension along which scales are contiguous: "K", the last, or "M", the other. Default: "M" for
            "1x128", padded to 4, which `gemm` reads fastest; "K" for "128x128", padded to 4, as in torch; "K" for
            others.
        scale_padding: The contiguous dimension is padded to a multiple of this number of scales. Default: see
            `scale_order`; 1 with an explicit order.
        offsets: (groups,), int32, on x's device: the ends of groups of rows, which are quantized for `grouped_gemm`
            along K. Only with "128x1", without a batch, and not with `transposed`. Each group is filled with rows of
            zeros to a multiple of 128, and the third result is offsets of the filled groups. The results have room
            for m + 127 * min(m, groups) rows, rounded down to a multiple of 128; those behind the last group, and
            their scales, are not written. A table that is invalid for `grouped_gemm` gives offsets of -1, and nothing
            else is written.
        sizes: The rows of the groups, instead of offsets.
        backend: As in `gemm`.

    Returns:
        (values, scales), on x's device, in x's library. Values are row-major, with rows padded to 16 bytes; those of
        "columns" and "128x1" are column-major, as `gemm` reads b. For b with another recipe quantize b.T, and pass .T
        of both.

    Raises:
        ArgumentError: If an argument has a wrong type, dtype, shape or device.
        DeviceError: If the GPU or driver does not support it.
        HazardError: With backend="sim", if the simulator finds hazards.
    """
    if isinstance(x, Traced) or is_compile_proxy(x):
        for name, value, default in (
            ("transposed", transposed, False), ("scale_dtype", scale_dtype, "fp32"), ("scale_order", scale_order, None),
            ("scale_padding", scale_padding, None), ("backend", backend, "auto"), ("offsets", offsets, None),
            ("sizes", sizes, None),
        ):  # fmt: skip
            if value is not default and not (isinstance(value, (str, bool)) and value == default):
                raise EpilogueError(f"epilogue: quantize: {name}: got {value!r}; leave it out, it is for arrays")
        return quantize_traced(x, dtype, _block_columns(recipe))
    (transposed,) = as_bools(transposed=transposed)
    grouping, table = None, dict[str, Any]()
    if offsets is not None or sizes is not None:
        grouping, table = make_grouping({"offsets": offsets, "sizes": sizes})
    options = recipe, dtype, transposed, scale_dtype, scale_order, scale_padding
    signature, address = cache_key_and_address(x, "x")
    key: Hashable = signature, address & 15, *options, backend
    for name, array in table.items():
        signature, address = cache_key_and_address(array, name)
        key = key, name, signature, address & 15

    def make() -> _Run:
        infos = {name: describe(array, name) for name, array in table.items()}
        return _make_run(describe(x, "x"), options, backend, grouping, infos)

    return get_or_create(_QUANTIZE_CACHE, key, make)(x, *table.values())


def _make_run(
    x: ArrayInfo, options: tuple[Any, ...], backend: Backend, grouping: Grouping | None = None,
    tables: Mapping[str, ArrayInfo] = _NO_TABLES,
) -> _Run:  # fmt: skip
    """Return a function that quantizes arrays with x's dtype, layout and device, and returns what `quantize` does.

    `options`: the arguments of `quantize` from `recipe` to `scale_padding`, in order. With a `grouping` the function
    gets the table as its second argument.
    """
    checked, resolved = _Options(x, *options), resolve_backend(backend, x, "x")
    recipe, dtype, transposed, scale_dtype, scale_order, scale_padding = options
    of_transpose = dtype, transposed, scale_dtype, OPPOSITE_ORDER[scale_order], scale_padding
    x_transposed = x._replace(shape=_swapped(x.shape), strides=_swapped(x.strides))
    if grouping:
        name = grouping.table
        if recipe != "128x1" or transposed or len(x.shape) != 2:
            described = f"shape {tuple(x.shape)}, {recipe!r}" + ", transposed" * transposed
            raise ArgumentError(f"{name}: got it with {described}; use (m, k) and '128x1', not transposed")
        of_groups = _make_quantize_groups(_Options(x, "1x128", *of_transpose), tables[name], grouping)

        def run_groups(x: Any, table: Any) -> tuple[Any, ...]:
            values, scales, ends = of_groups(resolved, {"source": x, name: table}, x).values()
            return _transposed(values), _transposed(scales), ends

        return run_groups
    if recipe in TRANSPOSED_RECIPES:
        run = _make_run(x_transposed, (TRANSPOSED_RECIPES[recipe], *of_transpose), backend)
        return lambda x: tuple(map(_transposed, run(_transposed(x))))
    if recipe == "rows" and transposed:
        once = recipe, dtype, False, scale_dtype, scale_order, scale_padding
        run, run_transposed = (_make_run(y, once, backend) for y in (x, x_transposed))
        return lambda x: (*run(x), *run_transposed(_transposed(x)))
    kernels = _make_quantize(checked)
    return lambda x: tuple(kernels(resolved, {"source": x}, x).values())


class _Options:
    """The arguments of `quantize`, checked, with defaults replaced; `x` describes the array."""

    def __init__(
        self, x: ArrayInfo, recipe: Any, dtype: Any, transposed: bool, scale_dtype: Any, scale_order: Any,
        scale_padding: Any,
    ) -> None:  # fmt: skip
        checks.check_addressable({"x": x})
        if len(x.shape) not in (2, 3):
            raise ArgumentError(f"x: got shape {tuple(x.shape)}; use (m, k) or (batch, m, k)")
        if x.dtype not in (BF16, FP16, FP32):
            raise ArgumentError(f"x: got dtype {x.dtype}; use bf16, fp16 or fp32")
        if not isinstance(recipe, str) or recipe not in (*RECIPES, *TRANSPOSED_RECIPES):
            raise ArgumentError(f"recipe: got {recipe!r}; use one of {', '.join((*RECIPES, *TRANSPOSED_RECIPES))}")
        self.dtype = as_dtype(dtype, "dtype", among=VALUE_DTYPES)
        self.scale_dtype = as_dtype(scale_dtype, "scale_dtype", among=(FP32, UE8M0))
        default = DEFAULT_SCALE_LAYOUT.get(recipe, ("K", 1)) if scale_order is None else (scale_order, 1)
        scale_order, scale_padding = default[0], default[1] if scale_padding is None else scale_padding
        if not isinstance(scale_order, str) or scale_order not in ("K", "M"):
            raise ArgumentError(
                f"scale_order: got {scale_order!r}; use 'K' (scales contiguous along K) or 'M' (along M)"
            )
        self.x, self.recipe, self.transposed = x, recipe, transposed
        self.scale_order, self.scale_padding = scale_order, as_integer("scale_padding", scale_padding, least=1)

    def output_specs(self, shape: tuple[int, ...]) -> tuple[OutputSpec, OutputSpec]:
        """Return the specs of the two outputs, the values and the scales, of an array of that shape."""
        *batch, rows, columns = shape
        scales: dict[str, tuple[int, ...]] = {
            "tensor": (),
            "rows": (*batch, rows, 1),
            "1x128": (*batch, rows, num_blocks(columns)),
            "128x128": (*batch, num_blocks(rows), num_blocks(columns)),
        }
        scale_spec = OutputSpec(scales[self.recipe], self.scale_dtype, self.scale_order == "M", self.scale_padding)
        return OutputSpec.for_tma(shape, self.dtype), scale_spec


def _make_quantize(options: _Options) -> OutputKernels:
    """Return the kernels for the values and scales of an array, and for those of its transpose if these are asked for.

    A kernel reads rows, so that a column-major array is read as its transpose: the outputs "rowwise" and "columnwise",
    relative to the matrix in memory, are exchanged.
    """
    matrix = to_canonical_matrix(options.x)
    directions = ("columnwise", "rowwise") if matrix.is_column_major else ("rowwise", "columnwise")
    outputs, shape = {}, tuple(options.x.shape)
    for direction, extents in zip(directions[: 1 + options.transposed], (shape, _swapped(shape)), strict=False):
        outputs[direction], outputs[f"{direction}_scales"] = options.output_specs(extents)
    launches = _build_launches(options, matrix.T if matrix.is_column_major else matrix, outputs)

    def run_reference(x: Any, *results: Any) -> None:
        for source, values, scales in zip((x, x.swapaxes(-1, -2)), results[::2], results[1::2], strict=False):
            values[...], scales[...] = reference.quantize(source, options.recipe, options.dtype, options.scale_dtype)

    return OutputKernels(launches, outputs, run_reference)


def _make_quantize_groups(options: _Options, table: ArrayInfo, grouping: Grouping) -> OutputKernels:
    """Return the kernels for the values and scales of the transpose of x (m, n), and for the ends of the filled groups.

    `options`: those of the transpose, with recipe "1x128". `table`: the groups of x's rows, each of which is filled
    with zeros to a multiple of 128 rows.
    """
    x, name, (m, n) = options.x, grouping.table, options.x.shape
    checks.check_addressable({"x": x, name: table})
    if table.dtype != INT32 or len(table.shape) != 1 or not checks.is_contiguous(table):
        raise ArgumentError(
            f"{name}: got {table.dtype} of shape {tuple(table.shape)}; use a contiguous int32 array (groups,)"
        )
    (groups,) = table.shape
    grouping, rows = grouping.with_room_for(groups), filled_rows(m, groups)
    if rows > MAX_EXTENT:
        raise ArgumentError(f"x: got {m} rows of {groups} groups; use at most {MAX_EXTENT} when they are filled")
    values, scales = options.output_specs((n, rows))
    source = to_canonical_matrix(x)
    spec = QuantizeSpec(
        x.dtype, options.dtype, options.scale_dtype, None, "column", vectorizable=has_vector_rows(source)
    )
    arrays = {"source": source, "columnwise": values.matrix, "columnwise_scales": scales.matrix}
    bound = BoundQuantizeGroups(arrays, grouping, groups)
    launches = Launches(None, False, (Launch.from_kernel(quantize_groups_kernel(spec, grouping), bound),))
    outputs = {"columnwise": values, "columnwise_scales": scales, FILLED.name: OutputSpec((groups,), INT32)}

    def run_reference(x: Any, table: Any, *results: Any) -> None:
        reference.quantize_groups(x, table, grouping, options.dtype, options.scale_dtype, *results)

    return OutputKernels(launches, outputs, run_reference)


def _build_launches(options: _Options, source: Matrix, outputs: dict[str, OutputSpec]) -> Launches:
    """Return the launches that quantize a matrix that is row-major or has no contiguous dimension.

    `outputs`: "rowwise" and "rowwise_scales" for those of the matrix, "columnwise" and "columnwise_scales" for those of
    its transpose, or both. Recipe "tensor" has a launch before, for the amax of the tensor.
    """
    rowwise, columnwise = (
        RECIPES[options.recipe][i] if direction in outputs else None
        for i, direction in enumerate(("rowwise", "columnwise"))
    )
    full_rows, tile_columns = options.recipe == "rows", QUANTIZATION_BLOCK
    if full_rows and rowwise:  # one tile for a full row, if it fits: a CTA reads several tiles twice
        tile_columns = next((x for x in ROW_TILE_COLUMNS if x >= source.cols), ROW_TILE_COLUMNS[-1])
    vectorized = has_vector_rows(source)
    spec = QuantizeSpec(
        source.dtype, options.dtype, options.scale_dtype, rowwise, columnwise, full_rows, tile_columns, vectorized
    )
    arrays = {"source": source, **{name: x.matrix for name, x in outputs.items()}}
    bound = BoundQuantize(arrays, spec, WORKSPACE)
    launches = [Launch.from_kernel(quantize_kernel(spec), bound)]
    if options.recipe != "tensor":
        return Launches(None, False, tuple(launches) if prod(bound.grid) else ())
    first = Launch.from_kernel(amax_kernel(source.dtype, vectorized), bound)
    return Launches(None, False, (first, *launches), 4 * MAX_AMAX_PARTIALS)


def dequantize(values: ArrayT, scales: ArrayLike, dtype: Any = "bf16", *, backend: Backend = "auto") -> ArrayT:
    """Return values * scales, each rounded to fp32 and then to dtype.

    Args:
        values: (m, k) or (batch, m, k), fp8_e4m3, fp8_e5m2 or int8, with any strides >= 0.
        scales: fp32 or ue8m0, with any strides >= 0, of a shape that `quantize` returns for any recipe: (), (1,), or
            (r, c), where r is 1, m or ceil(m / 128) and c is 1, k or ceil(k / 128), with or without the values' batch
            in front.
        dtype: bf16, fp16 or fp32.
        backend: As in `gemm`.

    Returns:
        (m, k) or (batch, m, k), row-major or column-major as the values are, with rows (columns) padded to 16 bytes.

    Raises:
        ArgumentError: If an argument has a wrong type, dtype, shape or device.
        DeviceError: If the GPU or driver does not support it.
        HazardError: With backend="sim", if the simulator finds hazards.
    """
    infos = {name: describe_no_grad(x, name) for name, x in (("values", values), ("scales", scales))}
    checks.check_addressable(infos)
    x, s, out = infos["values"], infos["scales"], as_dtype(dtype)
    if x.dtype not in VALUE_DTYPES:
        raise ArgumentError(f"values: got dtype {x.dtype}; use one of {', '.join(map(str, VALUE_DTYPES))}")
    if s.dtype not in (FP32, UE8M0):
        raise ArgumentError(f"scales: got dtype {s.dtype}; use fp32 or ue8m0")
    if out not in (BF16, FP16, FP32):
        raise ArgumentError(f"dtype: got {dtype!r}; use bf16, fp16 or fp32")
    if len(x.shape) not in (2, 3):
        raise ArgumentError(f"values: got shape {tuple(x.shape)}; use (m, k) or (batch, m, k)")
    elements_per_scale = _elements_per_scale(x, s)
    backend = resolve_backend(backend, x, "values")
    key: Hashable = x._replace(address=x.alignment), s._replace(address=0), out
    kernels = get_or_create(_DEQUANTIZE_CACHE, key, lambda: _make_dequantize(x, s, elements_per_scale, out))
    return cast("ArrayT", kernels(backend, {"source": values, "scales": scales}, values)["out"])


_DEQUANTIZE_CACHE: dict[Hashable, OutputKernels] = BoundedCache(MAX_CACHED_RUNS)
"""Kernels of `dequantize`, by the arrays' signatures and the result's dtype."""


def _elements_per_scale(x: ArrayInfo, scales: ArrayInfo) -> tuple[int, int]:
    """Return how many rows and columns of x share a scale: 1, 128, or all. Raises ArgumentError for other shapes."""
    shape = tuple(scales.shape)
    if shape in ((), (1,)):
        shape = (1, 1)
    elements_per_scale = [
        1 if count == extent else QUANTIZATION_BLOCK if count == num_blocks(extent) else extent if count == 1 else None
        for count, extent in zip(shape[-2:], x.shape[-2:], strict=False)
    ]
    batches = (1, x.shape[0]) if len(x.shape) == 3 else ()
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] not in batches) or None in elements_per_scale:
        raise ArgumentError(
            f"scales: got shape {tuple(scales.shape)} for values {tuple(x.shape)}; use (), (r, c) or (batch, r, c), "
            "where r is 1, the rows or ceil(rows / 128), and c likewise for the columns"
        )
    return elements_per_scale[0] or 1, elements_per_scale[1] or 1


def _make_dequantize(x: ArrayInfo, s: ArrayInfo, elements_per_scale: tuple[int, int], out: DType) -> OutputKernels:
    """Return the kernels that dequantize arrays like x with scales like s to dtype `out`."""
    source = to_canonical_matrix(x)
    output = OutputSpec.for_tma(tuple(x.shape), out, source.is_column_major)
    scales = to_matrix(s, source.batch, broadcast=True)
    matrices = [source, scales, output.matrix]
    # The kernel shifts an index by log2(128) = 7 for a scale's index; a dimension of one scale has stride 0 instead
    shifts = [7 * (count == QUANTIZATION_BLOCK) for count in elements_per_scale]
    if output.column_major:
        matrices, shifts = [matrix.T for matrix in matrices], shifts[::-1]
    arrays = dict(zip(("source", "scales", "out"), matrices, strict=True))
    per_column = shifts[1] == 0 and arrays["scales"].col_stride != 0
    spec = DequantizeSpec(x.dtype, s.dtype, out, per_column, has_vector_rows(arrays["source"]))
    bound = BoundDequantize(arrays, (shifts[0], shifts[1]))
    launch = (Launch.from_kernel(dequantize_kernel(spec), bound),) if prod(bound.grid) else ()

    def run_reference(values: Any, scales: Any, result: Any) -> None:
        result[...] = reference.dequantize(values, scales.reshape(scales.shape or (1, 1)), elements_per_scale, out)

    return OutputKernels(Launches(None, False, launch), {"out": output}, run_reference)


def num_blocks(extent: int) -> int:
    """Return the number of blocks of 128, the last of which may be shorter."""
    return ceil_div(extent, QUANTIZATION_BLOCK)


def _swapped(extents: tuple[int, ...]) -> tuple[int, ...]:
    return *extents[:-2], extents[-1], extents[-2]


def _transposed(x: Any) -> Any:
    if not hasattr(x, "swapaxes"):
        raise ArgumentError(f"x: got {type(x).__name__}, which has no swapaxes; use an array of torch, CuPy or numpy")
    return x.swapaxes(-1, -2)


def _block_columns(recipe: Any) -> int:
    """Return the columns per scale of an epilogue's recipe "1xC". Raises EpilogueError for another recipe."""
    rows, _, columns = str(recipe).partition("x")
    if rows != "1" or not columns.isdecimal():
        raise epilogue_error(
            f"quantize: recipe: got {recipe!r}; in an epilogue use '1x128', or another number of columns"
        )
    return int(columns)
