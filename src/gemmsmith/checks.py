"""Checks of a product's arrays: names, dtypes, shapes, memory, devices, overlap. All raise ArgumentError."""

from __future__ import annotations

from collections.abc import Mapping
from keyword import kwlist
from typing import Any

from gemmsmith.arrays import ArrayInfo, overlap
from gemmsmith.core.design import listed
from gemmsmith.core.dtypes import BF16, BOOL, E4M3, E5M2, FP16, FP32, INT8, INT32, TF32, DType, as_dtype
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.mma import Mma, find_mma
from gemmsmith.core.problem import MAX_EXTENT

Infos = Mapping[str, ArrayInfo]

_KEYWORDS = frozenset(kwlist)
_FP8 = (E4M3, E5M2)
_ACCUMULATE: Mapping[DType, Mapping[str, DType]] = {
    BF16: {"fp32": FP32},
    FP16: {"fp32": FP32, "fp16": FP16},
    E4M3: {"promoted": FP32, "fast": FP32},
    E5M2: {"promoted": FP32, "fast": FP32},
    INT8: {"int32": INT32},
    FP32: {"fp32": FP32},
}
"""By the operands' dtype what may be asked for, first what None is, and the dtype of the accumulator."""


def operands(listed: Mapping[str, Any] | None, named: Mapping[str, Any]) -> Mapping[str, Any]:
    """An epilogue's operands by name: those of the argument `operands`, and those that are given by name."""
    if listed is None and not named:
        return named
    if listed is not None and not isinstance(listed, Mapping):
        raise ArgumentError(f"operands: got {type(listed).__name__}; use a dict, of arrays and numbers by name")
    given = {**listed, **named} if listed else named
    for name in given:
        if not isinstance(name, str) or not name.isidentifier() or name in _KEYWORDS:
            raise ArgumentError(f"operands: got the name {name!r}; use one that could be a variable's")
    if listed and named and len(given) < len(listed) + len(named):
        name = next(name for name in named if name in listed)
        raise ArgumentError(f"{name}: got it in `operands` and by name; use either")
    return given


def instruction(a: ArrayInfo, b: ArrayInfo, accumulate: object, precision: object) -> Mma:
    """The instruction that multiplies these operands."""
    for name, info in (("a", a), ("b", b)):
        if info.dtype not in _ACCUMULATE:
            raise ArgumentError(f"{name}: got dtype {info.dtype}; operands are {listed(_ACCUMULATE)}")
    if a.dtype != b.dtype and not {a.dtype, b.dtype} <= {*_FP8}:
        raise ArgumentError(f"b: got dtype {b.dtype} with a of {a.dtype}; use the same for both")
    if a.dtype == FP32 and precision not in (None, "tf32", "3xtf32"):
        raise ArgumentError(f"precision: got {precision!r}; use 'tf32' or '3xtf32', or None for products in fp32")
    if a.dtype != FP32 and precision is not None:
        raise ArgumentError(f"precision: got {precision!r} for operands of {a.dtype}; it is for fp32 operands")
    if a.dtype == FP32 and precision is None:
        _accumulation(a, accumulate)
        return find_mma(FP32, FP32, FP32, "fma")
    multiplied = (TF32, TF32) if a.dtype == FP32 else (a.dtype, b.dtype)
    return find_mma(*multiplied, _ACCUMULATE[a.dtype][_accumulation(a, accumulate)])


def promoted(a: ArrayInfo, accumulate: object, precision: object) -> bool:
    """Whether the instruction's sums of few elements of K are added in full fp32."""
    return _accumulation(a, accumulate) == "promoted" or precision == "3xtf32"


def _accumulation(a: ArrayInfo, accumulate: object) -> str:
    choices = _ACCUMULATE[a.dtype]
    found = next(iter(choices)) if accumulate is None else _name(accumulate)
    if found not in choices:
        raise ArgumentError(f"accumulate: got {accumulate!r} for operands of {a.dtype}; use {listed(choices)}")
    return found


def _name(dtype: object) -> str:
    """The name of what may be a dtype."""
    try:
        return as_dtype(dtype, integers=True).name
    except ArgumentError:
        return str(dtype)


def output(mma: Mma, out: ArrayInfo | None, out_dtype: object, fused: bool) -> DType:
    """The dtype in which the product, or a `fused` epilogue's matrix, is stored where nothing else is said."""
    whole = mma.d == INT32 and not fused  # integers leave the kernel as they are
    default = {FP16: FP16, TF32: FP32, FP32: FP32, INT8: INT32 if whole else BF16}.get(mma.a, BF16)
    asked = as_dtype(out_dtype, "out_dtype", integers=whole) if out_dtype is not None else out.dtype if out else default
    if asked.is_integer and not (whole and asked == INT32):
        name = "out" if out_dtype is None else "out_dtype"
        raise ArgumentError(f"{name}: got dtype {asked}; use bf16, fp16 or fp32" + ", or int32" * whole)
    if out is not None and out.dtype != asked:
        raise ArgumentError(f"out: got dtype {out.dtype} with out_dtype {asked}; use one of them, or the same")
    return asked


def product_shape(a: ArrayInfo, b: ArrayInfo) -> tuple[int, ...]:
    """(m, n) or (batch, m, n), by torch.matmul's rules."""
    for name, info, want in (("a", a, "(m, k) or (batch, m, k)"), ("b", b, "(k, n) or (batch, k, n)")):
        if len(info.shape) not in (2, 3):
            hint = "; a vector needs a dimension of 1" if len(info.shape) == 1 else ""
            raise ArgumentError(f"{name}: got shape {tuple(info.shape)}; use {want}{hint}")
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


def memory(infos: Infos) -> None:
    """Arrays that a kernel can address, all on one device."""
    for name, x in infos.items():
        if max(x.shape, default=0) > MAX_EXTENT:
            raise ArgumentError(f"{name}: got shape {tuple(x.shape)}; use extents of at most {MAX_EXTENT}")
        if min(x.strides, default=0) < 0 and any(s < 0 and n > 1 for n, s in zip(x.shape, x.strides, strict=True)):
            raise ArgumentError(f"{name}: got strides {tuple(x.strides)}; use strides >= 0, for instance a copy")
        if sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True) if n) * x.itemsize >= 2**63:
            raise ArgumentError(
                f"{name}: got shape {tuple(x.shape)}, strides {tuple(x.strides)}; use less than 2^63 bytes"
            )
        if x.address % x.itemsize:
            raise ArgumentError(
                f"{name}: got address {x.address:#x}; use a multiple of the element's {x.itemsize} bytes"
            )
    if len({(x.device, x.index) for x in infos.values() if x.device != "spec"}) > 1:
        devices = {name: x.device_name for name, x in infos.items() if x.device != "spec"}
        listed = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ArgumentError(f"{', '.join(devices)}: got {listed}; use arrays of one device")


def operand(name: str, x: ArrayInfo, a: ArrayInfo) -> None:
    """An epilogue's operand, which kernels can read."""
    if x.dtype.bits == 8 and x.dtype != BOOL:
        raise ArgumentError(f"{name}: got dtype {x.dtype}; operands are fp32, fp16, bf16, int32, int64 or bool")
    beside(name, x, a)


def beside(name: str, x: ArrayInfo, a: ArrayInfo) -> None:
    """An array whose elements are read one by one: at an aligned address, on a's device."""
    if x.address % x.itemsize:
        raise ArgumentError(f"{name}: got address {x.address:#x}; use a multiple of an element's {x.itemsize}")
    if "spec" not in (x.device, a.device) and x.device_name != a.device_name:
        raise ArgumentError(
            f"{name}: got an array on {x.device_name} with a on {a.device_name}; use arrays of one device"
        )


def result(name: str, x: ArrayInfo, want: tuple[int, ...], dtype: DType, *, contiguous: bool) -> None:
    """A result's array has that shape and dtype and can be written; `contiguous`: it has no other strides."""
    if tuple(x.shape) != want:
        raise ArgumentError(f"{name}: got shape {tuple(x.shape)}; use {want}")
    if x.dtype != dtype:
        raise ArgumentError(f"{name}: got dtype {x.dtype}; the epilogue gives {dtype}")
    if not x.writable:
        raise ArgumentError(f"{name}: got a read-only array; use one that can be written")
    if contiguous and not _contiguous(x):
        raise ArgumentError(f"{name}: got strides {tuple(x.strides)}; a reduction's result is contiguous")


def apart(name: str, x: ArrayInfo, inputs: Infos, operands: Infos, others: Infos) -> None:
    """A result has no element twice, and shares no byte with A and B, the `inputs`, nor with other results, nor with an
    operand, unless it is that operand's array."""
    reach = 0
    for stride, extent in sorted(zip(x.strides, x.shape, strict=True)):
        if extent > 1 and 0 not in x.shape:
            if stride <= reach:
                raise ArgumentError(
                    f"{name}: got strides {tuple(x.strides)} for shape {tuple(x.shape)}, which may put elements on "
                    "the same memory; use an array without overlap"
                )
            reach += (extent - 1) * stride
    for other, y in inputs.items():
        if overlap(x, y):
            raise ArgumentError(f"{name}: shares memory with {other}; use an array of its own")
    for other, y in [*operands.items(), *others.items()]:
        same = x.address == y.address and x.strides == y.strides and x.dtype == y.dtype and x.shape == y.shape
        if overlap(x, y) and (not same or other in others):
            raise ArgumentError(f"{name}: shares memory with {other}; use an array of its own, or exactly {other}'s")


def _contiguous(x: ArrayInfo) -> bool:
    """Whether its strides are a contiguous array's; a dimension of length 1 may have any."""
    step = 1
    for extent, stride in zip(reversed(x.shape), reversed(x.strides), strict=True):
        if extent > 1 and stride != step:
            return False
        step *= max(extent, 1)
    return True
