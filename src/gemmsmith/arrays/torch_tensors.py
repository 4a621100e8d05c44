"""torch's tensors."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from gemmsmith.arrays.adapter import (
    Adapter,
    UnsupportedArrayError,
)
from gemmsmith.arrays.array_info import ArrayInfo
from gemmsmith.core.dtypes import BF16, BOOL, E4M3, E5M2, FP16, FP32, INT8, INT32, INT64, UE8M0, DType

MAX_OFFSET_BYTES = 1 << 40
"""An address from this on is that of memory; a smaller one may be a mere offset in a storage. Chosen: 1 TiB, which no
offset reaches; addresses of memory are hardly ever smaller."""


def make_torch_adapter(torch: Any) -> Adapter:
    """Return the adapter of torch's tensors. `torch`: the module, which the caller has imported."""
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
    floats = "torch.bfloat16, torch.float16, torch.float32, such as x.float()"
    strided = torch.strided

    def array_info(x: Any) -> ArrayInfo:
        """Describe a tensor. Raises UnsupportedArrayError for one that kernels cannot read, and says what to do."""
        dtype = dtypes.get(x.dtype)
        if x.is_nested:
            raise UnsupportedArrayError(
                "got a nested tensor; use a dense one: x.values() of a jagged one, or x.to_padded_tensor(0)"
            )
        if x.layout is not strided:
            raise UnsupportedArrayError(f"got a {x.layout} tensor; use a dense one, for instance x.to_dense()")
        if dtype is None:
            usable = floats if x.dtype == torch.float64 else readable
            raise UnsupportedArrayError(f"got a dense tensor of {x.dtype}; use one of {usable}")
        if x.is_neg():
            raise UnsupportedArrayError("got a tensor with its negative bit set; use x.resolve_neg()")
        if not (x.is_cuda or x.is_cpu):
            raise UnsupportedArrayError(f"got a tensor on {x.device}; use one on a CUDA device or the CPU")
        try:
            address = x.data_ptr()
        except RuntimeError:  # a functorch tensor
            address = None
        if address is None or (address < MAX_OFFSET_BYTES and has_no_memory(x, address)):
            raise UnsupportedArrayError(
                f"got a {type(x).__qualname__} without memory (a fake tensor, one in torch.func, a wrapper); "
                "use an ordinary tensor"
            )
        device, index = ("cuda", x.get_device()) if x.is_cuda else ("cpu", 0)
        return ArrayInfo(dtype, x.shape, x.stride(), address, device, index, True)

    # a tenth of the cost of torch.cuda.current_stream(device).cuda_stream; Triton and Inductor use it, too
    get_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # None without CUDA

    def stream(x: Any) -> int:
        """Return the handle of the current CUDA stream of a tensor's device; 0 on the CPU."""
        return int(get_raw_stream(x.get_device())) if x.is_cuda else 0

    # a third of the cost of torch.empty, on the current device; Inductor uses it
    fast_empty = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None)
    get_device = getattr(torch._C, "_cuda_getDevice", None)

    def empty(x: Any, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...]) -> Any:
        if fast_empty and get_device and x.is_cuda and x.get_device() == get_device():
            return fast_empty(tuple(shape), strides, names[dtype])  # does not accept a torch.Size
        return torch.empty_strided(shape, strides, dtype=names[dtype], device=x.device)

    grad_enabled = torch.is_grad_enabled

    def cache_key_and_address(x: Any) -> tuple[Hashable, int]:
        """Return the key by which launches are cached, and the address; faster than `array_info`.

        Raises UnsupportedArrayError also for a tensor that requires grad, while gradients are enabled.
        """
        if x.requires_grad and grad_enabled():
            raise UnsupportedArrayError(
                "got a tensor that requires grad, and this function computes no gradients; "
                "use gemmsmith.torch.gemm or grouped_gemm, torch.no_grad() around the call, or x.detach()"
            )
        try:
            address = x.data_ptr()
            key = x.dtype, x.shape, x.stride(), x.get_device(), x.is_neg()
        except RuntimeError:  # sparse, nested or functorch's: array_info raises for these
            return array_info(x)._replace(address=0), 0
        if address < MAX_OFFSET_BYTES:
            array_info(x)  # raises if the tensor has no memory
        return key, address

    return Adapter(array_info, cache_key_and_address, torch.Tensor.data_ptr, stream, empty)


def has_no_memory(x: Any, address: int) -> bool:
    """Return whether a tensor has elements, but no memory: `data_ptr()` is then 0 plus its offset in the storage.

    Fake tensors and wrapper subclasses are such tensors.
    """
    return bool(address == x.storage_offset() * x.element_size() and x.numel() > 0)
