"""Checks of a GEMM's arrays: names, dtypes, shapes, memory, devices, overlap. All raise ArgumentError."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from keyword import kwlist
from typing import Any, NamedTuple

from gemmsmith.arrays import ArrayInfo, arrays_overlap, row_major
from gemmsmith.core.design import Design, designs_that, join_alternatives
from gemmsmith.core.dtypes import BF16, BOOL, E4M3, E5M2, FP16, FP32, INT8, INT32, TF32, UE8M0, DType, as_dtype
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.mma import FMA, WGMMA, Mma, select_mma
from gemmsmith.core.problem import MAX_EXTENT
from gemmsmith.core.product import Product, Role

Infos = Mapping[str, ArrayInfo]

_KEYWORDS = frozenset(kwlist)
_FP8 = (E4M3, E5M2)
_ARRAY_INTERFACES = ("__cuda_array_interface__", "__array_interface__")
K_AXIS: Mapping[Role, int] = {"a": -1, "b": -2}
"""The dimension of k of the arrays a and b."""
_ACCUMULATE: Mapping[DType, Mapping[str, DType]] = {
    BF16: {"fp32": FP32}, FP16: {"fp32": FP32, "fp16": FP16}, FP32: {"fp32": FP32}, INT8: {"int32": INT32},
    E4M3: {"promoted": FP32, "fast": FP32}, E5M2: {"promoted": FP32, "fast": FP32},
}  # fmt: skip
"""Allowed `accumulate` options by operand dtype, the default first, with the accumulator dtype."""


def merge_operands(operands: Mapping[str, Any] | None, named: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an epilogue's operands by name: those in the argument `operands`, and `named`, the keyword arguments.

    Raises ArgumentError for names that are no identifiers, and for a name in both.
    """
    if operands is None and not named:
        return named
    if operands is not None and not isinstance(operands, Mapping):
        raise ArgumentError(f"operands: got {type(operands).__name__}; use a dict, of arrays and numbers by name")
    merged = {**operands, **named} if operands else named
    for name in merged:
        if not isinstance(name, str) or not name.isidentifier() or name in _KEYWORDS:
            raise ArgumentError(f"operands: got the name {name!r}; use a Python identifier")
    if operands and named and len(merged) < len(operands) + len(named):
        name = next(name for name in named if name in operands)
        raise ArgumentError(f"{name}: got it in `operands` and by name; use either")
    return merged


class Multiplication(NamedTuple):
    """How a and b are multiplied.

    Attributes:
        stored: The dtypes of the elements of a and b in memory; fp32 that is multiplied as TF32 counts as TF32.
        promoted: Whether the tensor cores' sums are added to fp32 registers ("promoted") every 128 bytes of k.
    """

    mma: Mma
    stored: tuple[DType, DType]
    promoted: bool

    @property
    def is_mixed(self) -> bool:
        """True if an operand is converted before it is multiplied."""
        return self.stored != (self.mma.a, self.mma.b)

    def as_elements(self, a: ArrayInfo, b: ArrayInfo) -> tuple[ArrayInfo, ArrayInfo]:
        """Return the arrays a and b described with the dtypes in `stored`, such as int4 instead of bytes."""
        return a.as_elements(self.stored[0], K_AXIS["a"]), b.as_elements(self.stored[1], K_AXIS["b"])


def resolve_multiplication(
    a: ArrayInfo, b: ArrayInfo, accumulate: object, precision: object, design: Design | None
) -> Multiplication:
    """Return how the operands are multiplied: as the design declares, or by the instruction for their dtypes.

    Elements of 4 bits come in arrays of 8-bit integers, signed or not. `accumulate`, `precision`: the options of
    `gemm`. Raises ArgumentError if no instruction multiplies these dtypes, or not with these options.
    """
    stored = next((x for x in _mixed_dtypes(design) if _hold(a, b, x)), None) if design else None
    if design and stored:
        _check_packed(a, b, stored)
        dtypes, op, by_precision = (design.dtypes[stored],) * 2, design.mma_op, False
    else:
        _check_dtypes(a, b)
        dtypes, op, by_precision = (a.dtype, b.dtype), WGMMA, a.dtype == FP32
    if by_precision:
        if precision not in (None, "tf32", "3xtf32"):
            raise ArgumentError(f"precision: got {precision!r}; use 'tf32' or '3xtf32', or None for fp32")
        dtypes, op = ((FP32, FP32), FMA) if precision is None else ((TF32, TF32), WGMMA)
    elif precision is not None:
        raise ArgumentError(f"precision: got {precision!r} for operands of {a.dtype}; it is for fp32 operands")
    option, d = _resolve_accumulation(dtypes[0], accumulate)
    promoted = option == "promoted" or precision == "3xtf32"
    return Multiplication(select_mma(*dtypes, d, op), stored or dtypes, promoted)


def _mixed_dtypes(design: Design) -> list[tuple[DType, DType]]:
    """Return the pairs of dtypes of a and b that a design reads and converts before it multiplies them."""
    return [stored for stored, dtype in design.dtypes.items() if stored != (dtype, dtype)]


def _hold(a: ArrayInfo, b: ArrayInfo, stored: tuple[DType, DType]) -> bool:
    """Return whether the arrays may hold elements of the dtypes in `stored`; those of less than 8 bits share a byte."""
    integers = INT8, UE8M0  # an array of uint8 is described as UE8M0
    return all(x.dtype == y or (y.bits < 8 and x.dtype in integers) for x, y in zip((a, b), stored, strict=True))


def _check_packed(a: ArrayInfo, b: ArrayInfo, stored: tuple[DType, DType]) -> None:
    """Check that elements of less than 8 bits, which share a byte, are neighbors along k, by the strides."""
    for (name, axis), x, dtype in zip(K_AXIS.items(), (a, b), stored, strict=True):
        if dtype.bits < 8 and (len(x.shape) < 2 or x.strides[axis] != 1 < x.shape[axis]):
            raise ArgumentError(f"{name}: got strides {tuple(x.strides)}; use 1 along k, where {dtype} share a byte")


def _check_dtypes(a: ArrayInfo, b: ArrayInfo) -> None:
    """Check that an instruction multiplies these dtypes without a conversion; the error names designs that convert."""
    known = a.dtype in _ACCUMULATE and b.dtype in _ACCUMULATE
    if known and (a.dtype == b.dtype or {a.dtype, b.dtype} <= {*_FP8}):
        return
    designs = designs_that(lambda design: any(_hold(a, b, x) for x in _mixed_dtypes(design)))
    hint = f", or the design {designs}" if designs else ""
    for name, info in (("a", a), ("b", b)):
        if info.dtype not in _ACCUMULATE:
            raise ArgumentError(
                f"{name}: got dtype {_described(info.dtype)}; operands are {join_alternatives(_ACCUMULATE)}{hint}"
            )
    raise ArgumentError(
        f"b: got dtype {b.dtype} with a of {a.dtype}; use the same for both, fp8_e4m3 with fp8_e5m2{hint}"
    )


def _resolve_accumulation(dtype: DType, accumulate: object) -> tuple[str, DType]:
    """Return the name of the `accumulate` option for products of elements of a dtype, and the accumulator's dtype."""
    dtype = FP32 if dtype == TF32 else dtype  # as in memory
    choices = _ACCUMULATE[dtype]
    option = next(iter(choices)) if accumulate is None else _dtype_name(accumulate)
    if option not in choices:
        raise ArgumentError(f"accumulate: got {accumulate!r} for operands of {dtype}; use {join_alternatives(choices)}")
    return option, choices[option]


def _dtype_name(dtype: object) -> str:
    try:
        return as_dtype(dtype, allow_integers=True).name
    except ArgumentError:
        return str(dtype)


def resolve_out_dtype(mma: Mma, out: ArrayInfo | None, out_dtype: object, fused: bool) -> DType:
    """Return the dtype of the result: that of `out`, or `out_dtype`, or the default for the instruction's operands.

    `fused`: there is an epilogue or a scale. The result is then fp32 before it is converted, so it cannot be int32; of
    several result matrices, the dtype is that of those for which the epilogue names none. Raises ArgumentError if the
    dtypes disagree, or are no dtype of results.
    """
    may_store_int32 = mma.d == INT32 and not fused
    default = {FP16: FP16, TF32: FP32, FP32: FP32, INT8: INT32 if may_store_int32 else BF16}.get(mma.a, BF16)
    dtype = out.dtype if out else default
    if out_dtype is not None:
        dtype = as_dtype(out_dtype, "out_dtype", allow_integers=may_store_int32)
    if dtype.is_integer and not (may_store_int32 and dtype == INT32):
        name = "out" if out_dtype is None else "out_dtype"
        allowed = "bf16, fp16, fp32 or int32" if may_store_int32 else "bf16, fp16 or fp32"
        raise ArgumentError(f"{name}: got dtype {dtype}; use {allowed}")
    if out is not None and out.dtype != dtype:
        raise ArgumentError(f"out: got dtype {out.dtype} with out_dtype {dtype}; use one of them, or the same")
    return dtype


def gemm_shape(a: ArrayInfo, b: ArrayInfo, product: Product | None, arrays: Infos) -> tuple[int, ...]:
    """Return the result's shape (m, n) or (batch, m, n), by the product's shapes if there is one, else as torch.matmul.

    `arrays`: further arrays of the product, by name. Raises ArgumentError if the shapes do not fit.
    """
    if product:
        return _product_shape(product, {"a": a, "b": b, **arrays})
    for name, info, expected in (("a", a, "(m, k) or (batch, m, k)"), ("b", b, "(k, n) or (batch, k, n)")):
        if len(info.shape) not in (2, 3):
            hint = "; a vector needs a dimension of 1" if len(info.shape) == 1 else ""
            raise ArgumentError(f"{name}: got shape {tuple(info.shape)}; use {expected}{hint}")
    if a.shape[-1] != b.shape[-2]:
        raise ArgumentError(
            f"b: got shape {tuple(b.shape)}, whose k is {b.shape[-2]}, with a of shape {tuple(a.shape)}, "
            f"whose k is {a.shape[-1]}; use the same k"
        )
    batches = {info.shape[0] for info in (a, b) if len(info.shape) == 3}
    if len(batches - {1}) > 1:
        raise ArgumentError(
            f"b: got a batch of {b.shape[0]} with a's batch of {a.shape[0]}; use the same, or 1 on either side"
        )
    batch = (max(batches - {1}, default=1),) if batches else ()
    return (*batch, a.shape[-2], b.shape[-1])


def check_product_scales(product: Product, factors: Mapping[Role, ArrayInfo | float], blocks: Any) -> None:
    """Check that the product of a design can be scaled; a design may have shapes other than (m, k) @ (k, n).

    `factors`: the scales that the epilogue applies, by operand; `blocks`: block scales, of which there may be none. A
    scale per row of a (column of b) needs these to be the result's rows (columns).
    """
    if blocks:
        raise ArgumentError(f"scale_a, scale_b: got block scales; {product.name} takes tensor scales")
    for role, x in factors.items():
        if isinstance(x, ArrayInfo) and max(x.shape, default=1) > 1 and not product.has_operand_rows(role):
            raise ArgumentError(
                f"scale_{role}: got shape {tuple(x.shape)}; {role}'s are not the product's in {product.name}, "
                "use a tensor scale"
            )


def _product_shape(product: Product, arrays: Infos) -> tuple[int, ...]:
    """Return the result's shape by the letters of the product's `shapes`, such as "mk,gkn,g->mn".

    `arrays`: a, b and the further arrays, in the order of the letters. Raises ArgumentError if one does not fit.
    """
    inputs, output = product.shapes.split("->")
    extents: dict[str, int] = {}
    for (name, x), letters in zip(arrays.items(), inputs.split(","), strict=True):
        expected = ", ".join(f"{letter} = {extents[letter]}" if letter in extents else letter for letter in letters)
        fits = len(x.shape) == len(letters)
        if not fits or any(extents.setdefault(key, n) != n for key, n in zip(letters, x.shape, strict=True)):
            raise ArgumentError(f"{name}: got shape {tuple(x.shape)}; {product.name} needs ({expected})")
    return tuple(extents[letter] for letter in output)


def check_addressable(infos: Infos) -> None:
    """Check the extents, strides, addresses and sizes that kernels can use, and that all arrays are on one device."""
    for name, x in infos.items():
        if max(x.shape, default=0) > MAX_EXTENT:
            raise ArgumentError(f"{name}: got shape {tuple(x.shape)}; use extents of at most {MAX_EXTENT}")
        last = 0
        for n, s in zip(x.shape, x.strides, strict=True):
            if s < 0 and n > 1:
                raise ArgumentError(f"{name}: got strides {tuple(x.strides)}; use strides >= 0, for instance a copy")
            last += (n - 1) * s if n else 0
        if last * x.itemsize >= 2**63:
            raise ArgumentError(
                f"{name}: got shape {tuple(x.shape)}, strides {tuple(x.strides)}; use less than 2^63 bytes"
            )
        if x.address % x.itemsize:
            raise ArgumentError(
                f"{name}: got address {x.address:#x}; use a multiple of the element's {x.itemsize} bytes"
            )
    if len({(x.device, x.device_index) for x in infos.values() if x.has_data}) > 1:
        devices = {name: x.device_name for name, x in infos.items() if x.has_data}
        locations = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ArgumentError(f"{', '.join(devices)}: got {locations}; use arrays of one device")


def _described(dtype: DType) -> str:
    """Return a dtype's name for a message on an operand: arrays of uint8 are read as ue8m0."""
    return "uint8, or ue8m0, which are scales" if dtype == UE8M0 else str(dtype)


def check_operand(name: str, x: ArrayInfo, a: ArrayInfo) -> None:
    """Check the dtype, address and device (that of a) of an epilogue's operand."""
    if x.dtype.bits == 8 and x.dtype != BOOL:
        dtype = _described(x.dtype)
        raise ArgumentError(f"{name}: got dtype {dtype}; operands are fp32, fp16, bf16, int32, int64 or bool")
    check_alignment_and_device(name, x, a)


def check_alignment_and_device(name: str, x: ArrayInfo, a: ArrayInfo) -> None:
    """Check an array that is read element by element: aligned to an element, on the device of a."""
    if x.address % x.itemsize:
        raise ArgumentError(f"{name}: got address {x.address:#x}; use a multiple of an element's {x.itemsize}")
    if x.has_data and a.has_data and x.device_name != a.device_name:
        raise ArgumentError(
            f"{name}: got an array on {x.device_name} with a on {a.device_name}; use arrays of one device"
        )


def check_result(name: str, x: ArrayInfo, shape: tuple[int, ...], dtype: DType, *, contiguous: bool) -> None:
    """Check a result's array: shape, dtype, writable, and, if `contiguous`, its strides."""
    if tuple(x.shape) != shape:
        raise ArgumentError(f"{name}: got shape {tuple(x.shape)}; use {shape}")
    if x.dtype != dtype:
        raise ArgumentError(
            f"{name}: got dtype {x.dtype}; the epilogue returns {dtype}: use that, or out_dtype, or x.to(...) in it"
        )
    if not x.writable:
        raise ArgumentError(f"{name}: got a read-only array; use one that can be written")
    if contiguous and not is_contiguous(x):
        raise ArgumentError(f"{name}: got strides {tuple(x.strides)}; a reduction's result is contiguous")


def check_no_overlap(
    name: str, x: ArrayInfo, inputs: Iterable[tuple[str, ArrayInfo]], operands: Iterable[tuple[str, ArrayInfo]],
    others: Infos,
) -> None:  # fmt: skip
    """Check that a result does not overlap itself, the inputs or other results.

    It may overlap an operand of the epilogue only if it is the same array: then a thread reads each element before it
    overwrites it. The `inputs` a, b and block scales may still be read by other tiles when a tile is stored.
    """
    last_offset = 0  # of the dimensions with smaller strides: each next stride must step beyond it
    for stride, extent in sorted(zip(x.strides, x.shape, strict=True)):
        if extent > 1 and 0 not in x.shape:
            if stride <= last_offset:
                raise ArgumentError(
                    f"{name}: got strides {tuple(x.strides)} for shape {tuple(x.shape)}, which may overlap itself; "
                    "use an array without overlap"
                )
            last_offset += (extent - 1) * stride
    for other, y in inputs:
        if arrays_overlap(x, y):
            raise ArgumentError(f"{name}: overlaps {other}; pass a separate array")
    for other, y in [*operands, *others.items()]:
        layouts = [(z.address, z.strides, z.shape, z.dtype.bits) for z in (x, y)]
        is_same = layouts[0] == layouts[1]
        if arrays_overlap(x, y) and (not is_same or other in others):
            or_same = "" if other in others else f", or exactly {other}'s"
            raise ArgumentError(f"{name}: overlaps {other}; pass a separate array{or_same}")


def check_workspace(workspace: Any) -> None:
    """Check that a workspace is an array, or None. Only runs on a GPU use it; they also check its size and device."""
    if workspace is not None and not any(hasattr(workspace, x) for x in ("data_ptr", *_ARRAY_INTERFACES)):
        raise ArgumentError(f"workspace: got {type(workspace).__name__}; use an array on the GPU")


def is_contiguous(x: ArrayInfo) -> bool:
    """Return whether the strides are those of a contiguous array; a dimension of length 1 may have any."""
    return all(n < 2 or s == expected for n, s, expected in zip(x.shape, x.strides, row_major(x.shape), strict=True))
