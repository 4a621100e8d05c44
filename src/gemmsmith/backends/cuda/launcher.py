"""Loading kernels, once a device, and launching them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.cuda.driver import check, encode_tensor_map, require_hopper
from gemmsmith.core.errors import DeviceError

_CTYPES = {
    "i32": ctypes.c_int32, "u32": ctypes.c_uint32, "i64": ctypes.c_int64, "u64": ctypes.c_uint64,
    "f32": ctypes.c_float, "pointer": ctypes.c_uint64,
}  # fmt: skip
STATIC_LIMIT = 48 * 1024
"""Dynamic shared memory above this is asked for by an attribute (CUDA programming guide)."""


@dataclass(eq=False)
class LoadedKernel:
    """A kernel on one device. `cluster` is compiled into it; the grid counts CTAs."""

    function: Any
    threads: int
    cluster: tuple[int, int, int]
    shared_bytes: int
    parameter_kinds: tuple[str, ...]
    _clusters: int = field(default=0)

    def max_active_clusters(self) -> int:
        """How many clusters the device holds at once, as the driver says."""
        if not self._clusters:
            self._clusters = _occupancy(self)
        return self._clusters

    def launch(self, grid: int, arguments: Sequence[Any], stream: int) -> None:
        """Starts `grid` CTAs on `stream`; arguments are ints, floats and TensorMaps, in the parameters' order."""
        from cuda.bindings import driver

        kept: list[Any] = []
        addresses = (ctypes.c_void_p * len(arguments))()
        for i, (kind, value) in enumerate(zip(self.parameter_kinds, arguments, strict=True)):
            if kind == "tensor_map":
                kept.append(encode_tensor_map(value))
                addresses[i] = kept[-1].getPtr()
            else:
                kept.append(_CTYPES[kind](value))
                addresses[i] = ctypes.addressof(kept[-1])
        check(
            driver.cuLaunchKernel(
                self.function, grid, 1, 1, self.threads, 1, 1, self.shared_bytes, stream,
                ctypes.addressof(addresses), 0,
            ),
            "cuLaunchKernel",
        )  # fmt: skip


_LOADED: dict[tuple[str, int], LoadedKernel] = {}
_LOADING = threading.Lock()


def load(
    source: str, name: str, device: int, stream: int, *,
    threads: int, cluster: tuple[int, int, int], shared_bytes: int, parameter_kinds: tuple[str, ...],
) -> LoadedKernel:  # fmt: skip
    """The kernel on `device`, which is current; compiled and loaded at its first use there.

    Raises DeviceError where that would happen while `stream` is being captured into a graph.
    """
    key = (source, device)
    found = _LOADED.get(key)
    if found is not None:
        return found
    if is_capturing(stream):
        raise DeviceError(
            f"{name} is not loaded yet and the stream is being captured into a graph; call it once before the capture"
        )
    from cuda.bindings import driver

    with _LOADING:
        if key not in _LOADED:
            module = check(driver.cuModuleLoadData(compile_source(source, name).cubin), "cuModuleLoadData")
            function = check(driver.cuModuleGetFunction(module, name.encode()), "cuModuleGetFunction")
            if shared_bytes > STATIC_LIMIT:
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                check(driver.cuFuncSetAttribute(function, attribute, shared_bytes), "cuFuncSetAttribute")
            _LOADED[key] = LoadedKernel(function, threads, cluster, shared_bytes, parameter_kinds)
    return _LOADED[key]


def _occupancy(kernel: LoadedKernel) -> int:
    from cuda.bindings import driver

    if kernel.cluster == (1, 1, 1):
        per_sm = check(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel.function, kernel.threads, kernel.shared_bytes)
        )
        which = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return int(per_sm * check(driver.cuDeviceGetAttribute(which, check(driver.cuCtxGetDevice()))))
    config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dimension = attribute.value.clusterDim
    dimension.x, dimension.y, dimension.z = kernel.cluster
    config.gridDimX, config.gridDimY, config.gridDimZ = kernel.cluster
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
    config.sharedMemBytes = kernel.shared_bytes
    config.attrs, config.numAttrs = [attribute], 1
    return int(check(driver.cuOccupancyMaxActiveClusters(kernel.function, config), "cuOccupancyMaxActiveClusters"))


def is_capturing(stream: int) -> bool:
    """Whether the stream is being captured into a graph."""
    from cuda.bindings import driver

    status = check(driver.cuStreamIsCapturing(stream), "cuStreamIsCapturing")
    return bool(status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


@lru_cache(maxsize=64)
def _primary_context(device: int) -> Any:
    from cuda.bindings import driver

    require_hopper(device)
    return check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(device))), "cuDevicePrimaryCtxRetain")


@contextmanager
def device_guard(device: int) -> Iterator[None]:
    """Makes a device's primary context current, and the former one again afterwards."""
    from cuda.bindings import driver

    wanted, now = _primary_context(device), check(driver.cuCtxGetCurrent())
    if int(now) == int(wanted):
        yield
        return
    check(driver.cuCtxPushCurrent(wanted), "cuCtxPushCurrent")
    try:
        yield
    finally:
        check(driver.cuCtxPopCurrent(), "cuCtxPopCurrent")


def time_launches(call: Callable[[], Any], stream: int, repeats: int) -> float:
    """Microseconds a call, over `repeats` of them back to back after a warm-up."""
    from cuda.bindings import driver

    events = [check(driver.cuEventCreate(0)) for _ in range(2)]
    for _ in range(max(1, repeats // 5)):
        call()
    check(driver.cuEventRecord(events[0], stream))
    for _ in range(repeats):
        call()
    check(driver.cuEventRecord(events[1], stream))
    check(driver.cuEventSynchronize(events[1]))
    milliseconds = check(driver.cuEventElapsedTime(*events))
    for event in events:
        check(driver.cuEventDestroy(event))
    return float(milliseconds) * 1e3 / repeats
