"""quantize and dequantize: arrays to 8 bits with scales, and back."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from gemmsmith import checks
from gemmsmith.arrays import ArrayInfo, as_numpy, describe, empty_like_kind, signature
from gemmsmith.core.bounded import Bounded
from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, INT8, UE8M0, DType, as_dtype
from gemmsmith.core.errors import ArgumentError, EpilogueError
from gemmsmith.core.problem import Matrix
from gemmsmith.core.switches import switches
from gemmsmith.epilogue.frontend.values import Traced, is_recorded
from gemmsmith.epilogue.frontend.values import quantize as quantize_traced
from gemmsmith.epilogue.lines import refused
from gemmsmith.kernels.dequantize import BoundDequantize, DequantizeSpec
from gemmsmith.kernels.dequantize import dequantize as dequantize_kernel
from gemmsmith.kernels.held import BLOCK, CHUNK
from gemmsmith.kernels.quantize import SLOTS, BoundQuantize, Kind, QuantizeSpec
from gemmsmith.kernels.quantize import amax as amax_kernel
from gemmsmith.kernels.quantize import quantize as quantize_kernel
from gemmsmith.lang.launch import WORKSPACE, Launch, Launches
from gemmsmith.matrices import matrix_of as as_matrix
from gemmsmith.runs import MOST_RUNS, Made, Run, chosen, matrix_of, remembered, without_gradient

VALUES = (E4M3, E5M2, INT8)
Recipe = Literal["tensor", "rows", "columns", "1x128", "128x1", "128x128"]
RECIPES: dict[str, tuple[Kind, Kind]] = {
    "tensor": ("all", "all"), "rows": ("row", "column"), "1x128": ("row", "column"), "128x128": ("tile", "tile"),
}  # fmt: skip
"""What shares a scale in a kernel's copy that is laid out as its source, and in the transposed one."""
TRANSPOSED = {"columns": "rows", "128x1": "1x128"}
"""Recipes that are others of the transposed array."""
LAYOUTS = {"1x128": ("M", 4), "128x128": ("K", 4)}
"""The order and the padding of scales, by recipe, unless they are asked for; of others ("K", 1)."""
OTHER: dict[Any, Literal["K", "M"] | None] = {"K": "M", "M": "K", None: None}
"""The order of the transposed scales."""
WIDTHS = (128, 512, 2048, 4096, 8192, 16384)
"""Columns of a tile of whole rows."""
_KNOWN: dict[Hashable, _Quantizing] = Bounded(MOST_RUNS)
"""What has run, by the arrays' signature and the options."""


def quantize(
    x: Any, recipe: Recipe | str = "1x128", dtype: Any = "fp8_e4m3", *, transposed: bool = False,
    scale_dtype: Any = "fp32", scale_order: Literal["K", "M"] | None = None, scale_padding: int | None = None,
    backend: str = "auto",
) -> tuple[Any, ...]:  # fmt: skip
    """(values, scales): x in 8 bits, about values * scales.

    x: (m, k) or (batch, m, k) of bf16, fp16 or fp32, any strides >= 0.
    recipe: what shares a scale, and so the shape of the scales, which is as `gemm` takes them: "tensor", everything,
    (); "rows", (m, 1); "columns", (1, k); "1x128", 128 neighbors of a row, (m, ceil(k / 128)); "128x1", of a column,
    (ceil(m / 128), k); "128x128", (ceil(m / 128), ceil(k / 128)); a batch in front of all but "tensor".
    dtype: "fp8_e4m3", "fp8_e5m2" or "int8". The values are row-major, their rows padded to 16 bytes. Those of "columns"
    and "128x1" are column-major, as `gemm` takes b; for b with another recipe quantize b.T, and pass .T of both.
    transposed: (values, scales, values_t, scales_t) instead, the latter being what quantize gives of x transposed with
    the same recipe: with "1x128" they have scales of their own, along the other index. x is read once for both; with
    "rows" and "columns" twice.
    scale_dtype: "fp32", or "ue8m0", powers of two, which are rounded up.
    scale_order: along which index scales are contiguous, "K", the last, or "M", the other; padded to a multiple of
    `scale_padding` scales. Without an order those of "1x128" lie along M, padded to 4, as `gemm` reads them fastest, of
    "128x128" along K, padded to 4, as torch has them, others along K; with one there is no padding unless asked for.

    A scale is amax / 448 (57344 for e5m2, 127 for int8), computed as amax * fp32(1 / 448), and at least 2^-126, but 1
    where amax is 0.
    Values are x * (448 / amax), with ue8m0 x / scale, rounded to nearest even. Where x has an infinity the scale is
    infinite, where it has NaN the scale is NaN, with ue8m0 NaN in both cases: all that shares it dequantizes to NaN.

    In an epilogue x is a traced matrix, recipe "1x128" or another number of columns; (values, scales) are the result's.

    Arrays and `backend` as in `gemm`; results are on x's device, of x's library. Raises ArgumentError, DeviceError;
    HazardError with backend="sim".
    """
    if isinstance(x, Traced) or is_recorded(x):
        for name, given, usual in (
            ("transposed", transposed, False), ("scale_dtype", scale_dtype, "fp32"), ("scale_order", scale_order, None),
            ("scale_padding", scale_padding, None), ("backend", backend, "auto"),
        ):  # fmt: skip
            if given != usual:
                raise EpilogueError(f"epilogue: quantize: {name}: got {given!r}; leave it out, it is for arrays")
        return quantize_traced(x, dtype, _block(recipe))
    (transposed,) = switches(transposed=transposed)
    signed, address = signature(x, "x")
    options = recipe, dtype, transposed, scale_dtype, scale_order, scale_padding
    key: Hashable = signed, address & 15, *options, backend
    try:
        known = _KNOWN.get(key)
    except TypeError:  # an option is not hashable, and refused below
        known = key = None
    if known is not None:
        return known.run(x)
    found = _Options(describe(x, "x"), *options)
    if found.recipe in TRANSPOSED:
        straight = quantize(
            _transposed(x), TRANSPOSED[found.recipe], dtype, transposed=transposed, scale_dtype=scale_dtype,
            scale_order=OTHER[scale_order], scale_padding=scale_padding, backend=backend,
        )  # fmt: skip
        return tuple(map(_transposed, straight))
    if found.recipe == "rows" and transposed:
        alone: dict[str, Any] = {"scale_dtype": scale_dtype, "scale_order": scale_order,
                                 "scale_padding": scale_padding, "backend": backend}  # fmt: skip
        return *quantize(x, recipe, dtype, **alone), *quantize(_transposed(x), recipe, dtype, **alone)
    return remembered(_KNOWN, key, lambda: _Quantizing(found, chosen(backend, found.x, "x"))).run(x)


@dataclass(frozen=True)
class _Options:
    """The arguments of `quantize`, checked."""

    x: ArrayInfo
    recipe: str
    dtype: DType
    transposed: bool
    scale_dtype: DType
    scale_order: str
    scale_padding: int

    def __init__(
        self, x: ArrayInfo, recipe: Any, dtype: Any, transposed: Any, scale_dtype: Any, order: Any, padding: Any
    ) -> None:
        checks.memory({"x": x})
        if len(x.shape) not in (2, 3):
            raise ArgumentError(f"x: got shape {tuple(x.shape)}; use (m, k) or (batch, m, k)")
        if x.dtype not in (BF16, FP16, FP32):
            raise ArgumentError(f"x: got dtype {x.dtype}; use bf16, fp16 or fp32")
        if recipe not in (*RECIPES, *TRANSPOSED):
            raise ArgumentError(f"recipe: got {recipe!r}; use one of {', '.join((*RECIPES, *TRANSPOSED))}")
        values, scales = (
            as_dtype(x, name, integers=True) for x, name in ((dtype, "dtype"), (scale_dtype, "scale_dtype"))
        )
        if values not in VALUES:
            raise ArgumentError(f"dtype: got {dtype!r}; use one of {', '.join(map(str, VALUES))}")
        if scales not in (FP32, UE8M0):
            raise ArgumentError(f"scale_dtype: got {scale_dtype!r}; use fp32 or ue8m0")
        fastest = LAYOUTS.get(recipe, ("K", 1)) if order is None else (order, 1)
        order, padding = fastest[0], fastest[1] if padding is None else padding
        if order not in ("K", "M"):
            raise ArgumentError(f"scale_order: got {order!r}; use 'K', the last index, or 'M', the other")
        if not isinstance(padding, int) or padding < 1:
            raise ArgumentError(f"scale_padding: got {padding!r}; use a number of scales, such as 4")
        for name, value in (("x", x), ("recipe", recipe), ("dtype", values), ("transposed", transposed),
                            ("scale_dtype", scales), ("scale_order", order), ("scale_padding", padding)):  # fmt: skip
            object.__setattr__(self, name, value)

    def made(self, shape: tuple[int, ...]) -> tuple[Made, Made]:
        """The values and the scales of an array of that shape."""
        *batch, rows, columns = shape
        scales: dict[str, tuple[int, ...]] = {
            "tensor": (),
            "rows": (*batch, rows, 1),
            "1x128": (*batch, rows, blocks(columns)),
            "128x128": (*batch, blocks(rows), blocks(columns)),
        }
        of_scales = Made(scales[self.recipe], self.scale_dtype, self.scale_order == "M", self.scale_padding)
        return Made.for_tma(shape, self.dtype), of_scales


class _Quantizing:
    """`quantize` for arrays of one signature."""

    def __init__(self, options: _Options, backend: str) -> None:
        self.options, self.backend = options, backend
        matrix = matrix_of(options.x)
        flipped = matrix.contiguous == "rows"
        ways = ("across", "along") if flipped else ("along", "across")
        self.ways = ways if options.transposed else ways[:1]
        made, *batch, m, k = {}, *options.x.shape
        for way, shape in zip(self.ways, ((*batch, m, k), (*batch, k, m)), strict=False):
            made[way], made[f"{way}_scales"] = options.made(shape)
        self.quantize = Run(_launches(options, matrix.T if flipped else matrix, made), made)

    def run(self, x: Any) -> tuple[Any, ...]:
        if self.backend == "reference":
            return self._reference(x)
        made = self.quantize(self.backend, {"source": x}, x)
        return tuple(made[name] for way in self.ways for name in (way, f"{way}_scales"))

    def _reference(self, x: Any) -> tuple[Any, ...]:
        from gemmsmith.backends.reference.quantize import quantize as reference

        o, source = self.options, as_numpy(x, "x")
        results: list[Any] = []
        for array in (source, source.swapaxes(-1, -2))[: len(self.ways)]:
            found = reference(array, o.recipe, o.dtype, o.scale_dtype)
            for made, data in zip(o.made(array.shape), found, strict=True):
                memory = empty_like_kind(x, made.memory, made.dtype)
                results.append(made.view(memory))
                as_numpy(results[-1])[...] = data
        return tuple(results)


def _launches(options: _Options, source: Matrix, made: dict[str, Made]) -> Launches:
    """What runs for a matrix whose contiguous index, if it has one, is the columns."""
    along, across = (RECIPES[options.recipe][i] if way in made else None for i, way in enumerate(("along", "across")))
    whole, columns = options.recipe == "rows", BLOCK
    if whole and along:
        columns = next((x for x in WIDTHS if x >= source.cols), WIDTHS[-1])
    chunked = is_chunked(source)
    spec = QuantizeSpec(source.dtype, options.dtype, options.scale_dtype, along, across, whole, columns, chunked)
    arrays = {"source": source, **{name: x.matrix for name, x in made.items()}}
    bound = BoundQuantize(arrays, columns, spec.walk, WORKSPACE)
    launches = [Launch.of(quantize_kernel(spec), bound)]
    if options.recipe != "tensor":
        return Launches(None, False, tuple(launches) if prod(bound.grid) else ())
    first = Launch.of(amax_kernel(source.dtype, chunked), bound)
    return Launches(None, False, (first, *launches), 4 * SLOTS)


def dequantize(values: Any, scales: Any, dtype: Any = "bf16", *, backend: str = "auto") -> Any:
    """values * scales, each product rounded to fp32, then to dtype.

    values: (m, k) or (batch, m, k) of fp8_e4m3, fp8_e5m2 or int8, any strides >= 0.
    scales: fp32 or ue8m0, of a shape that `quantize` gives for any recipe: (), (1,) or (1, 1), or for each of the last
    two indices 1, its extent or its blocks of 128, with the values' batch in front or none; any strides >= 0.
    dtype: bf16, fp16 or fp32. The result is row-major or column-major as the values are, its rows (columns) padded to
    16 bytes. Arrays, `backend` and errors as in `quantize`.
    """
    infos = {name: without_gradient(x, name) for name, x in (("values", values), ("scales", scales))}
    checks.memory(infos)
    x, s, out = infos["values"], infos["scales"], as_dtype(dtype)
    if x.dtype not in VALUES:
        raise ArgumentError(f"values: got dtype {x.dtype}; use one of {', '.join(map(str, VALUES))}")
    if s.dtype not in (FP32, UE8M0):
        raise ArgumentError(f"scales: got dtype {s.dtype}; use fp32 or ue8m0")
    if out not in (BF16, FP16, FP32):
        raise ArgumentError(f"dtype: got {dtype!r}; use bf16, fp16 or fp32")
    if len(x.shape) not in (2, 3):
        raise ArgumentError(f"values: got shape {tuple(x.shape)}; use (m, k) or (batch, m, k)")
    shares = _shares(x, s)
    if (where := chosen(backend, x, "values")) == "reference":
        from gemmsmith.backends.reference.quantize import dequantize as reference

        made = Made.for_tma(tuple(x.shape), out, matrix_of(x).contiguous == "rows")
        result = made.view(empty_like_kind(values, made.memory, out))
        factors = as_numpy(scales, "scales")
        as_numpy(result)[...] = reference(
            as_numpy(values, "values"), factors.reshape(factors.shape or (1, 1)), shares, out
        )
        return result
    key: Hashable = x._replace(address=x.alignment), s._replace(address=0), out
    run = remembered(_DEQUANTIZING, key, lambda: _dequantizing(x, s, shares, out))
    return run(where, {"source": values, "scales": scales}, values)["out"]


_DEQUANTIZING: dict[Hashable, Run] = Bounded(MOST_RUNS)
"""What has run, by the arrays' signatures and the result's dtype."""


def _shares(x: ArrayInfo, scales: ArrayInfo) -> tuple[int, int]:
    """Rows and columns that share a scale: 1, 128, or all."""
    shape = tuple(scales.shape)
    if shape in ((), (1,)):
        shape = (1, 1)
    found = [
        1 if own == extent else BLOCK if own == blocks(extent) else extent if own == 1 else None
        for own, extent in zip(shape[-2:], x.shape[-2:], strict=False)
    ]
    batches = (1, x.shape[0]) if len(x.shape) == 3 else ()
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] not in batches) or None in found:
        raise ArgumentError(
            f"scales: got shape {tuple(scales.shape)} for values {tuple(x.shape)}; use (), or for each of the last two "
            "indices 1, its extent or its blocks of 128, with the values' batch in front or none"
        )
    return found[0] or 1, found[1] or 1


def _dequantizing(x: ArrayInfo, s: ArrayInfo, shares: tuple[int, int], out: DType) -> Run:
    source, made = matrix_of(x), Made.for_tma(tuple(x.shape), out, matrix_of(x).contiguous == "rows")
    scales = as_matrix(s, source.batch, whole=False)
    matrices, shifts = [source, scales, made.matrix], [7 * (share == BLOCK) for share in shares]
    if made.column_major:
        matrices, shifts = [matrix.T for matrix in matrices], shifts[::-1]
    arrays = dict(zip(("source", "scales", "out"), matrices, strict=True))
    per_column = shifts[1] == 0 and arrays["scales"].col_stride != 0
    spec = DequantizeSpec(x.dtype, s.dtype, out, per_column, is_chunked(arrays["source"]))
    bound = BoundDequantize(arrays, (shifts[0], shifts[1]))
    launch = (Launch.of(dequantize_kernel(spec), bound),) if prod(bound.grid) else ()
    return Run(Launches(None, False, launch), {"out": made})


def is_chunked(matrix: Matrix) -> bool:
    """Whether rows are whole aligned chunks, as kernels load them."""
    return matrix.contiguous == "cols" and matrix.tma_ready and matrix.cols % CHUNK == 0


def blocks(extent: int) -> int:
    """Blocks of 128, the last one perhaps shorter."""
    return -(-extent // BLOCK)


def _transposed(x: Any) -> Any:
    if not hasattr(x, "swapaxes"):
        raise ArgumentError(f"x: got {type(x).__name__}, which has no swapaxes; use an array of torch, CuPy or numpy")
    return x.swapaxes(-1, -2)


def _block(recipe: Any) -> int:
    """The columns of an epilogue's recipe."""
    rows, _, columns = str(recipe).partition("x")
    if rows != "1" or not columns.isdecimal():
        raise refused(f"quantize: recipe: got {recipe!r}; in an epilogue use '1x128', or another number of columns")
    return int(columns)
