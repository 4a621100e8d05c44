"""Checks of a product's arrays: dtypes, shapes, memory, devices, overlap. All raise ArgumentError."""

from __future__ import annotations

from collections.abc import Mapping

from gemmsmith.arrays import ArrayInfo, overlap
from gemmsmith.core.dtypes import BF16, FP16, FP32, DType, as_dtype
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.problem import MAX_EXTENT

Infos = Mapping[str, ArrayInfo]


def accumulator(a: ArrayInfo, b: ArrayInfo, accumulate: object) -> DType:
    """The accumulator's dtype."""
    for name, info in (("a", a), ("b", b)):
        if info.dtype not in (BF16, FP16):
            raise ArgumentError(f"{name}: got dtype {info.dtype}; operands are bf16 or fp16")
    if a.dtype != b.dtype:
        raise ArgumentError(f"b: got dtype {b.dtype} with a of {a.dtype}; use the same for both")
    try:
        found = as_dtype(accumulate, "accumulate")
    except ArgumentError:
        raise ArgumentError(f"accumulate: got {accumulate!r}; use fp32, or fp16 for fp16 operands") from None
    if found == FP16 and a.dtype != FP16:
        raise ArgumentError(
            f"accumulate: got fp16 for operands of {a.dtype}, and no such instruction exists; "
            "use fp32, or fp16 operands"
        )
    if found not in (FP16, FP32):
        raise ArgumentError(f"accumulate: got {found}; use fp32, or fp16 for fp16 operands")
    return found


def output(a: ArrayInfo, out: ArrayInfo | None, out_dtype: object) -> DType:
    """The dtype in which the product is stored where nothing else is said."""
    if out is not None and out.dtype.is_integer:
        raise ArgumentError(f"out: got dtype {out.dtype}; use bf16, fp16 or fp32")
    if out_dtype is None:
        return a.dtype if out is None else out.dtype
    asked = as_dtype(out_dtype, "out_dtype")
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
    if x.dtype.bits == 8 and not x.dtype.is_integer:
        raise ArgumentError(f"{name}: got dtype {x.dtype}; operands are fp32, fp16, bf16, int32, int64 or bool")
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
