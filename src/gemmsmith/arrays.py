"""Arrays of any library, described without importing that library: dtype, shape, strides, address, device.

torch tensors, numpy arrays, anything with `__cuda_array_interface__` (CuPy, Numba), anything with `__dlpack__`
(JAX, TensorFlow), and `Spec`, a stand-in for an array that does not exist yet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gemmsmith.core.dtypes import BF16, BOOL, E4M3, E5M2, FP16, FP32, INT8, INT32, INT64, UE8M0, DType, as_dtype
from gemmsmith.core.errors import ArgumentError, did_you_mean
from gemmsmith.core.mma import N8_COLUMNS
from gemmsmith.dlpack import read_capsule


class ArrayInfo(NamedTuple):
    """Description of an array, with strides in elements; `address` is 0 for a `Spec`.

    `device` is "cpu", "cuda" or "spec" (no data); `device_index` is CUDA's device number, 0 otherwise.
    `interleave_stride`: not 0 for two arrays whose columns alternate: the elements from the first to the second, each
    with these strides and half of the columns. `address` is the lower one. `interleave_columns`: columns of one array
    that are contiguous, 8 as `interleave` copies them; 1 for scales, each of 128 columns.
    """

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    device: str
    device_index: int
    writable: bool
    interleave_stride: int = 0
    interleave_columns: int = N8_COLUMNS

    @property
    def itemsize(self) -> int:
        """Size of an element in bytes."""
        return self.dtype.bytes

    @property
    def alignment(self) -> int:
        """The largest power of two, at most 16, that divides the address."""
        return (self.address | 16) & -(self.address | 16)

    @property
    def parts(self) -> tuple[ArrayInfo, ...]:
        """The two arrays whose columns alternate; the array itself if it is one."""
        if not (stride := self.interleave_stride * self.itemsize):
            return (self,)
        half = self._replace(shape=(*self.shape[:-1], self.shape[-1] // 2), interleave_stride=0)
        first = self.address - min(stride, 0)
        return half._replace(address=first), half._replace(address=first + stride)

    @property
    def has_data(self) -> bool:
        """False for a `Spec`."""
        return self.device != "spec"

    @property
    def device_name(self) -> str:
        """The device as text: "cpu", "cuda:0", "spec"."""
        return f"cuda:{self.device_index}" if self.device == "cuda" else self.device


@dataclass(frozen=True)
class Spec:
    """A stand-in for an array, to plan for arrays that do not exist yet.

    The base address is assumed to be a multiple of 16 bytes.

    Attributes:
        shape: Extents, each >= 0.
        dtype: A name ("bf16"), or a torch, numpy or ml_dtypes dtype, also of integers.
        strides: Strides in elements. Default: row-major.

    Raises:
        ArgumentError: If the shape or strides are invalid for an array.
    """

    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.shape) if isinstance(self.shape, Iterable) else (None,)
        if not all(isinstance(n, (int, np.integer)) and n >= 0 for n in shape):
            raise ArgumentError(f"Spec.shape: got {self.shape!r}; use a tuple of integers >= 0")
        strides = row_major(shape) if self.strides is None else tuple(self.strides)
        if len(strides) != len(shape) or not all(isinstance(s, (int, np.integer)) for s in strides):
            raise ArgumentError(f"Spec.strides: got {self.strides!r}; use {len(shape)} integers, in elements")
        object.__setattr__(self, "shape", tuple(map(int, shape)))
        object.__setattr__(self, "strides", tuple(map(int, strides)))
        object.__setattr__(self, "dtype", as_dtype(self.dtype, "Spec.dtype", allow_integers=True))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous row-major array, in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def describe(x: Any, argument: str = "array") -> ArrayInfo:
    """Return the description of an array of any library; an ArrayInfo is returned as it is.

    Raises ArgumentError naming `argument` for other objects, dtypes that are not in core/dtypes.py, sparse or masked
    arrays, and arrays on a device that is neither a CPU nor CUDA.
    """
    adapter = _ADAPTERS.get(type(x)) or _adapter_for(x, argument)
    try:
        return adapter.array_info(x)
    except _UnsupportedArrayError as error:
        raise ArgumentError(f"{argument}: {error}") from None


def cache_key_and_address(x: Any, argument: str = "array") -> tuple[Hashable, int]:
    """Return a hashable key (dtype, shape, strides, device) and the address.

    Raises ArgumentError naming `argument`, also for a torch tensor whose gradient would be lost.
    """
    adapter = _ADAPTERS.get(type(x)) or _adapter_for(x, argument)
    try:
        return adapter.cache_key_and_address(x)
    except _UnsupportedArrayError as error:
        raise ArgumentError(f"{argument}: {error}") from None


def is_array(x: Any) -> bool:
    """Return whether an array of x's type has been described before. Fast; False does not mean that x is no array."""
    return type(x) in _ADAPTERS


def current_stream(x: Any) -> int:
    """Return the current CUDA stream (a handle) of x's library on x's device, or 0, the default stream."""
    return (_ADAPTERS.get(type(x)) or _adapter_for(x, "array")).stream(x)


def address_of(x: Any) -> int:
    """Return the address of an array that `empty_like_kind` allocated, without checks."""
    return (_ADAPTERS.get(type(x)) or _adapter_for(x, "array")).address(x)


def empty_like_kind(x: Any, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...] | None = None) -> Any:
    """Allocate an uninitialized array in x's library on x's device; `strides` in elements, by default row-major.

    Supports torch, CuPy and anything on the CPU. Raises ArgumentError for libraries that cannot allocate a writable
    array: `out` must then be passed.
    """
    return (_ADAPTERS.get(type(x)) or _adapter_for(x, "array")).empty(x, shape, dtype, strides or row_major(shape))


def as_numpy(x: Any, argument: str = "array") -> np.ndarray[Any, Any]:
    """Return a numpy view (no copy) of an array on the CPU, which keeps x alive; bf16 becomes ml_dtypes.bfloat16.

    Two arrays whose columns alternate are copied.

    Raises ArgumentError naming `argument` for an array that is not on the CPU.
    """
    info = describe(x, argument)
    if info.device != "cpu":
        raise ArgumentError(f"{argument}: got an array on {info.device_name}; use one on the CPU")
    if isinstance(x, np.ndarray):
        return np.asarray(x)
    if info.interleave_stride:
        first, second = (as_numpy(x).reshape(*x.shape[:-1], -1, info.interleave_columns) for x in info.parts)
        return np.stack([first, second], -2).reshape(info.shape)
    if 0 in info.shape:
        return np.empty(info.shape, info.dtype.numpy)
    return np.asarray(_ArrayInterface(info, x)).view(info.dtype.numpy)


MAX_OVERLAP_STEPS = 10_000
"""Steps of numpy's solver after which only address ranges are compared. Chosen; not measured."""


def arrays_overlap(x: ArrayInfo, y: ArrayInfo) -> bool:
    """Return whether some byte belongs to both arrays; if numpy cannot decide, whether their address ranges overlap."""
    if not x.has_data or (x.device, x.device_index) != (y.device, y.device_index) or 0 in x.shape or 0 in y.shape:
        return False
    if y.interleave_stride:
        return any(arrays_overlap(x, part) for part in y.parts)
    (x_first, x_end), (y_first, y_end) = byte_range(x), byte_range(y)
    if x_end <= y_first or y_end <= x_first:
        return False
    effort: Any = MAX_OVERLAP_STEPS  # numpy's stubs have only 0 and -1
    try:  # solved on addresses alone: nothing is read, so device memory is allowed, too
        return bool(np.shares_memory(np.asarray(_ArrayInterface(x)), np.asarray(_ArrayInterface(y)), max_work=effort))
    except np.exceptions.TooHardError:
        return True


def byte_range(x: ArrayInfo) -> tuple[int, int]:
    """Return the first address of a nonempty array and the one past the last."""
    first, last, size = x.address, x.address, x.itemsize
    for n, s in zip(x.shape, x.strides, strict=True):
        if s < 0:
            first += (n - 1) * s * size
        else:
            last += (n - 1) * s * size
    return first, last + size


class _ArrayInterface:
    """An object with numpy's __array_interface__ on an address, as integers of the element's size."""

    def __init__(self, x: ArrayInfo, owner: Any = None) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (x.address, not x.writable),
            "typestr": f"<u{x.itemsize}",
            "shape": tuple(x.shape),
            "strides": tuple(s * x.itemsize for s in x.strides),
        }


class _UnsupportedArrayError(Exception):
    """Raised for an array that cannot be used; `describe` adds the argument's name to the message."""


class _Adapter(NamedTuple):
    """Functions for one type of array."""

    array_info: Callable[[Any], ArrayInfo]
    cache_key_and_address: Callable[[Any], tuple[Hashable, int]]
    address: Callable[[Any], int]
    stream: Callable[[Any], int] = lambda x: 0
    empty: Callable[[Any, tuple[int, ...], DType, tuple[int, ...]], Any] = lambda *arguments: _empty(*arguments)


def _make_adapter(array_info: Callable[[Any], ArrayInfo], *others: Any) -> _Adapter:
    """Return an adapter whose signature is what `array_info` returns, without the address."""

    def cache_key_and_address(x: Any) -> tuple[Hashable, int]:
        info = array_info(x)
        return info._replace(shape=tuple(info.shape), strides=tuple(info.strides), address=0), info.address

    return _Adapter(array_info, cache_key_and_address, lambda x: array_info(x).address, *others)


_ADAPTERS: dict[type, _Adapter] = {}
"""Adapters by type, so that a type that was seen before costs one look-up. `_adapter_for` fills it; if two threads do
so concurrently, both write equal adapters."""


def _adapter_for(x: Any, argument: str) -> _Adapter:
    if type(x) is tuple and argument in _INTERLEAVED:
        return _INTERLEAVED[argument]
    torch = sys.modules.get("torch")
    if isinstance(x, ArrayInfo):
        adapter = _make_adapter(lambda info: info)
    elif isinstance(x, Spec):
        adapter = _make_adapter(lambda s: ArrayInfo(s.dtype, s.shape, s.strides, 0, "spec", 0, True))
    elif torch is not None and isinstance(x, torch.Tensor):
        adapter = _make_torch_adapter(torch)
    elif isinstance(x, np.ma.MaskedArray):
        raise ArgumentError(f"{argument}: got a masked array; use x.filled(...)")
    elif isinstance(x, np.ndarray):
        adapter = _make_adapter(_read_numpy)
    elif type(x).__module__.partition(".")[0] == "cupy":
        adapter = _make_cupy_adapter(sys.modules["cupy"])
    elif hasattr(x, "__cuda_array_interface__"):
        adapter = _make_adapter(_read_interface, _interface_stream)
    elif hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        adapter = _make_adapter(_read_dlpack)
    else:
        raise ArgumentError(
            f"{argument}: got {type(x).__module__}.{type(x).__qualname__}; use a torch tensor, a numpy or CuPy array, "
            f"or an object with __cuda_array_interface__ or __dlpack__{did_you_mean(argument)}"
        )
    return _ADAPTERS.setdefault(type(x), adapter)


# -- two arrays whose columns alternate ------------------------------------------------------------------------------
INTERLEAVE_COLUMNS = N8_COLUMNS
"""Columns of one array that are contiguous: then a thread has both arrays' elements of a column."""


def _read_interleaved(argument: str, group: int, arrays: Any) -> ArrayInfo:
    """Return the description of a tuple of two arrays whose columns alternate in groups."""
    if len(arrays) != 2:
        raise _UnsupportedArrayError(f"got a tuple of {len(arrays)} arrays; use one array, or a tuple of two")
    first, second = (describe(x, argument) for x in arrays)
    for name in ("dtype", "shape", "strides", "device", "device_index"):
        if (x := getattr(first, name)) != (y := getattr(second, name)):
            raise _UnsupportedArrayError(f"got two arrays of {name} {x} and {y}; use the same")
    *leading, columns = first.shape or (0,)
    if columns % group:
        raise _UnsupportedArrayError(
            f"got two arrays of {columns} columns, which alternate in groups of {group}; use a multiple"
        )
    stride, remainder = divmod(second.address - first.address, first.itemsize)
    if remainder:
        raise _UnsupportedArrayError(f"got an address that is not a multiple of the element's {first.itemsize} bytes")
    if not stride and first.has_data and 0 not in first.shape:
        raise _UnsupportedArrayError("got the same array twice; use two arrays")
    if not stride:  # Specs, which have no address: as if they followed one another
        stride = max([n * s for n, s in zip(first.shape, first.strides, strict=True)])
    return first._replace(
        shape=(*leading, 2 * columns), address=min(first.address, second.address), interleave_stride=stride,
        interleave_columns=group,
    )  # fmt: skip


def _make_interleaved_adapter(argument: str, group: int) -> _Adapter:
    read = partial(_read_interleaved, argument, group)

    def cache_key_and_address_of_both(arrays: Any) -> tuple[Hashable, int]:
        info, keys = read(arrays), [cache_key_and_address(x, argument)[0] for x in arrays]
        return (*keys, info.interleave_stride), info.address

    return _Adapter(read, cache_key_and_address_of_both, lambda arrays: read(arrays).address)


_INTERLEAVED = {name: _make_interleaved_adapter(name, n) for name, n in (("b", INTERLEAVE_COLUMNS), ("scale_b", 1))}
"""Adapters of the arguments that may be a tuple."""


def _empty(x: Any, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...]) -> Any:
    if describe(x).device == "cpu":
        memory = np.empty(_storage_elements(shape, strides), dtype.numpy)
        return np.ndarray(shape, dtype.numpy, memory, 0, _byte_strides(strides, dtype))
    raise ArgumentError(
        f"out: cannot allocate an array of type {type(x).__module__}.{type(x).__qualname__}; pass `out`"
    )


def _storage_elements(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the number of elements from an array's first to its last in memory."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _byte_strides(strides: tuple[int, ...], dtype: DType) -> tuple[int, ...]:
    return tuple(s * dtype.bytes for s in strides)


# -- torch ---------------------------------------------------------------------------------------------------------


def _make_torch_adapter(torch: Any) -> _Adapter:
    dtypes = {
        torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32,
        torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2,
        torch.int8: INT8, torch.int32: INT32, torch.int64: INT64, torch.bool: BOOL,
        torch.uint8: UE8M0,
    }  # fmt: skip
    if hasattr(torch, "float8_e8m0fnu"):
        dtypes[torch.float8_e8m0fnu] = UE8M0
    names = {dtype: name for name, dtype in dtypes.items()}
    readable = ", ".join(map(str, dtypes))
    strided = torch.strided

    def array_info(x: Any) -> ArrayInfo:
        dtype = dtypes.get(x.dtype)
        if x.layout is not strided:
            raise _UnsupportedArrayError(f"got a {x.layout} tensor; use a dense one, for instance x.to_dense()")
        if x.is_nested:
            raise _UnsupportedArrayError("got a nested tensor; use a dense one, for instance x.to_padded_tensor(0)")
        if dtype is None:
            raise _UnsupportedArrayError(f"got a dense tensor of {x.dtype}; use one of {readable}")
        if x.is_neg():
            raise _UnsupportedArrayError("got a tensor with its negative bit set; use x.resolve_neg()")
        if not (x.is_cuda or x.is_cpu):
            raise _UnsupportedArrayError(f"got a tensor on {x.device}; use one on a CUDA device or the CPU")
        try:
            address = x.data_ptr()
        except RuntimeError:  # a functorch tensor
            address = None
        if address is None or (not address and x.numel()):
            raise _UnsupportedArrayError(
                f"got a {type(x).__qualname__} without memory (a fake tensor, one in torch.func, a wrapper); "
                "use an ordinary tensor"
            )
        device, index = ("cuda", x.get_device()) if x.is_cuda else ("cpu", 0)
        return ArrayInfo(dtype, x.shape, x.stride(), address, device, index, True)

    # a tenth of the cost of torch.cuda.current_stream(device).cuda_stream; Triton and Inductor use it, too
    get_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def stream(x: Any) -> int:
        if not x.is_cuda:
            return 0
        return int(
            get_raw_stream(x.get_device()) if get_raw_stream else torch.cuda.current_stream(x.device).cuda_stream
        )

    # a third of the cost of torch.empty, on the current device; Inductor uses it
    fast_empty = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None)
    get_device = getattr(torch._C, "_cuda_getDevice", None)

    def empty(x: Any, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...]) -> Any:
        if fast_empty and get_device and x.is_cuda and x.get_device() == get_device():
            return fast_empty(tuple(shape), strides, names[dtype])  # does not accept a torch.Size
        return torch.empty_strided(shape, strides, dtype=names[dtype], device=x.device)

    grad_enabled = torch.is_grad_enabled

    def cache_key_and_address(x: Any) -> tuple[Hashable, int]:
        if x.requires_grad and grad_enabled():
            raise _UnsupportedArrayError(
                "got a tensor that requires grad, and this function computes no gradients; "
                "use gemmsmith.torch.gemm or grouped_gemm, torch.no_grad() around the call, or x.detach()"
            )
        try:
            address = x.data_ptr()
            key = x.dtype, x.shape, x.stride(), x.get_device(), x.is_neg()
        except RuntimeError:  # sparse, nested or functorch's: array_info raises for these
            return array_info(x)._replace(address=0), 0
        if not address:
            array_info(x)  # raises unless the tensor is empty
        return key, address

    return _Adapter(array_info, cache_key_and_address, torch.Tensor.data_ptr, stream, empty)


# -- numpy ---------------------------------------------------------------------------------------------------------

_NUMPY = {dtype.numpy: dtype for dtype in (BF16, FP16, FP32, E4M3, E5M2, INT8, INT32, INT64, BOOL, UE8M0)}
_NUMPY[np.dtype(np.uint8)] = UE8M0


def _supported_dtype(dtype: np.dtype[Any]) -> DType:
    if dtype not in _NUMPY:
        readable = ", ".join(map(str, dict.fromkeys(_NUMPY.values())))
        raise _UnsupportedArrayError(
            f"got dtype {dtype}; use one of {readable} (bf16 and fp8: ml_dtypes), in native byte order"
        )
    return _NUMPY[dtype]


def _element_strides(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    if any(s % itemsize for s in strides):
        raise _UnsupportedArrayError(f"got strides of {strides} bytes; use multiples of the element's {itemsize}")
    return tuple(s // itemsize for s in strides)


def _read_numpy(x: np.ndarray[Any, Any]) -> ArrayInfo:
    address, read_only = x.__array_interface__["data"]
    return ArrayInfo(
        _supported_dtype(x.dtype), x.shape, _element_strides(x.strides, x.itemsize), address, "cpu", 0, not read_only
    )


# -- CuPy, and anything else with __cuda_array_interface__ -----------------------------------------------------------


def _make_cupy_adapter(cupy: Any) -> _Adapter:
    def array_info(x: Any) -> ArrayInfo:
        strides = _element_strides(x.strides, x.itemsize)
        return ArrayInfo(_supported_dtype(x.dtype), x.shape, strides, x.data.ptr, "cuda", x.device.id, True)

    def stream(x: Any) -> int:
        with x.device:
            return int(cupy.cuda.get_current_stream().ptr)

    def empty(x: Any, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...]) -> Any:
        with x.device:
            memory = cupy.empty(_storage_elements(shape, strides), dtype.numpy)
            return cupy.ndarray(shape, dtype.numpy, memory.data, _byte_strides(strides, dtype))

    return _make_adapter(array_info, stream, empty)


def _read_interface(x: Any) -> ArrayInfo:
    """Read `__cuda_array_interface__`, which has neither the device nor bf16.

    Source: Numba, "CUDA Array Interface (Version 3)".
    """
    interface = x.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise _UnsupportedArrayError("got a masked array; use one without a mask")
    dtype = _supported_dtype(np.dtype(getattr(x, "dtype", None) or interface["typestr"]))
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    elements = row_major(shape) if strides is None else _element_strides(tuple(strides), dtype.bytes)
    address, read_only = interface["data"]
    return ArrayInfo(dtype, shape, elements, address or 0, "cuda", _device_of(x, address), not read_only)


def _interface_stream(x: Any) -> int:
    return int(x.__cuda_array_interface__.get("stream") or 0)


def _device_of(x: Any, address: int) -> int:
    if hasattr(x, "__dlpack_device__"):
        return int(x.__dlpack_device__()[1])
    if not address:
        return 0
    from cuda.bindings import driver  # only for arrays of libraries without DLPack

    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    error, index = driver.cuPointerGetAttribute(attribute, address)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise _UnsupportedArrayError(
            f"address {address:#x} is not known to the driver ({error.name}); use device memory"
        )
    return int(index)


# -- DLPack --------------------------------------------------------------------------------------------------------


_DLPACK_DTYPES = {
    (2, 16, 1): FP16, (2, 32, 1): FP32, (4, 16, 1): BF16, (10, 8, 1): E4M3, (12, 8, 1): E5M2,
    (0, 8, 1): INT8, (0, 32, 1): INT32, (0, 64, 1): INT64, (6, 8, 1): BOOL,
    (1, 8, 1): UE8M0, (14, 8, 1): UE8M0,
}  # fmt: skip
_DLPACK_DEVICES = {1: "cpu", 3: "cpu", 2: "cuda", 13: "cuda"}  # 3: pinned, 13: managed


def _read_dlpack(x: Any) -> ArrayInfo:
    info = read_capsule(x)
    dtype, device = _DLPACK_DTYPES.get(info.dtype), _DLPACK_DEVICES.get(info.device[0])
    if dtype is None or device is None:
        code, bits, lanes = info.dtype
        raise _UnsupportedArrayError(
            f"got DLPack dtype (code {code}, {bits} bits, {lanes} lanes) on device type {info.device[0]}; "
            "use bf16, fp16 or fp32 on the CPU or a CUDA device"
        )
    index = info.device[1] if device == "cuda" else 0
    return ArrayInfo(
        dtype, info.shape, info.strides or row_major(info.shape), info.address, device, index, info.writable
    )
