"""Loading kernels, once per device, and launching them."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from gemmsmith.backends.cuda.cluster_placement import cluster_permutation
from gemmsmith.backends.cuda.compiler import compile_ptx, compile_source
from gemmsmith.backends.cuda.cuda_graph import COLLECTED
from gemmsmith.backends.cuda.driver import (
    bindings,
    check,
    device_attributes,
    launch_config,
    load_function,
    newest_supported_chip,
)
from gemmsmith.core.errors import ArgumentError, DeviceError, MissingPackageError
from gemmsmith.lang.kernel import Kernel

_FORMATS = {
    "i32": "i4x", "u32": "I4x", "i64": "q", "u64": "Q", "f32": "f4x", "pointer": "Q", "fast_divmod": "Q",
    "tensor_map": "", "cluster_permutation": "",
}  # fmt: skip
"""Format characters of `struct` by parameter kind, padded to 8 bytes; empty for kinds passed by their own address."""


@dataclass(eq=False)
class LoadedKernel:
    """A kernel loaded on one device.

    `function`: the driver's CUfunction. `threads`: per CTA. `cluster`: CTAs in (x, y, z), compiled into the kernel.
    `shared_bytes`: dynamic shared memory per CTA. `parameter_kinds`: see `Kernel.parameter_kinds`.
    """

    name: str
    function: Any
    device: int
    threads: int
    cluster: tuple[int, int, int]
    shared_bytes: int
    parameter_kinds: tuple[str, ...]
    _max_active_clusters: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver  # an import statement in `launch` would cost 0.2 us
        count = len(self.parameter_kinds)
        self._layout = struct.Struct(f"={count}Q" + "".join(_FORMATS[kind] for kind in self.parameter_kinds))
        self._pdl_configs = threading.local()  # one CUlaunchConfig per thread: making one costs as much as a launch

    def max_active_clusters(self) -> int:
        """Return how many clusters are resident on the device at once, by the driver; DeviceError if none is."""
        if not self._max_active_clusters:
            self._max_active_clusters = _query_max_active_clusters(self)
            if not self._max_active_clusters:
                raise DeviceError(
                    f"{self.name}: device {self.device} cannot hold one cluster {self.cluster} of {self.threads} "
                    f"threads and {self.shared_bytes} bytes of shared memory per CTA"
                )
        return self._max_active_clusters

    def cluster_permutation(self, clusters: int) -> ctypes.Array[ctypes.c_uint16]:
        """Return the permutation of `clusters` clusters by which neighboring tiles go to clusters of one GPC."""
        return cluster_permutation(self.device, self.cluster[0], self.max_active_clusters(), clusters)

    def launch(self, grid: int, arguments: int, stream: int, pdl: bool) -> None:
        """Launch the kernel. Raises DeviceError.

        `grid`: CTAs. `arguments`: host address of an array of pointers to the arguments, as cuLaunchKernel takes it.
        `pdl`: programmatic dependent launch: the kernel may start while the stream's previous one runs, and executes
        griddepcontrol.wait before it accesses memory.
        """
        if stream in COLLECTED:
            return COLLECTED[stream].add(self.function, grid, self.threads, self.shared_bytes, arguments, pdl)
        if pdl:
            config = getattr(self._pdl_configs, "config", None)
            if config is None:
                config = self._pdl_configs.config = launch_config(1, self.threads, self.shared_bytes, None)
            config.gridDimX, config.hStream = grid, stream
            result = self._driver.cuLaunchKernelEx(config, self.function, arguments, 0)
        else:
            result = self._driver.cuLaunchKernel(
                self.function, grid, 1, 1, self.threads, 1, 1, self.shared_bytes, stream, arguments, 0
            )
        if result[0]:
            check(result, f"the launch of {self.name}: grid {grid}, {self.threads} threads, stream {stream:#x}")

    def pack_arguments(self, buffer: Any, values: Sequence[Any]) -> None:
        """Write an argument block into `buffer`; ArgumentError if a value does not fit its parameter.

        `values`: for each parameter the pointer to its argument, then the arguments that are stored in the block
        itself, each padded to 8 bytes.
        """
        try:
            self._layout.pack_into(buffer, 0, *values)
        except (struct.error, OverflowError) as error:
            raise ArgumentError(f"{self.name}: {error}; got {values} for {self.parameter_kinds}") from None


def add_nvtx_range(kernel: LoadedKernel) -> None:
    """Give every launch of the kernel an NVTX range of its name. Raises MissingPackageError without nvtx."""
    try:
        import nvtx
    except ImportError as missing:
        raise MissingPackageError("GEMMSMITH_NVTX: ranges need the package nvtx: pip install nvtx") from missing
    in_range = nvtx.annotate(kernel.name, domain="gemmsmith")
    kernel.launch = in_range(kernel.launch)  # type: ignore[method-assign] # of this kernel: others stay as fast


_LOADED: dict[tuple[str, int], LoadedKernel] = {}
_LOAD_LOCKS: dict[tuple[str, int], threading.Lock] = {}
"""One lock per kernel, so that threads can compile different kernels concurrently."""


def load_kernel(kernel: Kernel, device: int, stream: int) -> LoadedKernel:
    """Return the kernel on `device`, which is current. At its first use there it is compiled and loaded.

    Raises DeviceError if it must be loaded while `stream` is being captured into a graph.
    """
    key, name, shared_bytes = (kernel.source, device), kernel.name, kernel.shared_bytes
    cached = _LOADED.get(key)
    if cached is not None:
        return cached
    if is_capturing(stream):
        raise DeviceError(
            f"{name} is not loaded yet and the stream is being captured into a graph; call it once before the capture"
        )
    with _LOAD_LOCKS.setdefault(key, threading.Lock()), relaxed_capture_mode():
        if key not in _LOADED:
            function = load_function(_build_image(kernel, device), name, shared_bytes)
            loaded = LoadedKernel(
                name, function, device, kernel.threads, kernel.cluster, shared_bytes, kernel.parameter_kinds
            )
            if os.environ.get("GEMMSMITH_NVTX"):
                add_nvtx_range(loaded)
            if "cluster_permutation" in kernel.parameter_kinds:
                loaded.cluster_permutation(1)  # probes the device, which a stream that is captured later cannot
            _LOADED[key] = loaded
    return _LOADED[key]


def _build_image(kernel: Kernel, device: int) -> bytes:
    """Return the image that the driver loads: a cubin if the kernel was built for the device's chip, else PTX.

    The driver compiles the PTX of an earlier chip for the device.
    """
    gpu, target = device_attributes(device), kernel.chip.target
    chip = newest_supported_chip(gpu)
    if chip is not None and chip.target == target and chip.capability // 10 == gpu.capability[0]:
        return compile_source(kernel.source, kernel.name, target).cubin
    return compile_ptx(kernel.source, kernel.name, target).encode() + b"\0"


def _query_max_active_clusters(kernel: LoadedKernel) -> int:
    """Return how many clusters of a kernel the driver says are resident on its device at once.

    The driver has separate queries for a kernel without clusters (CTAs per SM) and for one with them.
    """
    from cuda.bindings import driver

    if kernel.cluster == (1, 1, 1):
        per_sm = check(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel.function, kernel.threads, kernel.shared_bytes),
            f"cuOccupancyMaxActiveBlocksPerMultiprocessor({kernel.name})",
        )
        return int(per_sm) * device_attributes(kernel.device).sm_count
    config = launch_config(1, kernel.threads, kernel.shared_bytes, kernel.cluster)
    config.gridDimX, config.gridDimY, config.gridDimZ = kernel.cluster
    result = driver.cuOccupancyMaxActiveClusters(kernel.function, config)
    return int(check(result, f"cuOccupancyMaxActiveClusters({kernel.name}, {kernel.cluster})"))


def is_capturing(stream: int) -> bool:
    """Return whether launches on the stream are being collected into a graph. Called in every prepared run."""
    if stream in COLLECTED:
        return True
    result = bindings().cuStreamIsCapturing(stream)
    if not result[0]:
        return bool(result[1])  # CU_STREAM_CAPTURE_STATUS_NONE is 0
    if result[0].name == "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT":
        return True  # the legacy stream would join another stream's capture
    return bool(check(result, f"cuStreamIsCapturing({stream:#x})"))  # raises


@contextmanager
def relaxed_capture_mode() -> Iterator[None]:
    """Put this thread in the relaxed capture mode within the block.

    The thread may then allocate memory and load modules while another thread captures a stream. These calls are not
    captured.
    """
    driver = bindings()
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    mode = check(driver.cuThreadExchangeStreamCaptureMode(relaxed), "cuThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        check(driver.cuThreadExchangeStreamCaptureMode(mode), "cuThreadExchangeStreamCaptureMode")


@lru_cache(maxsize=64)
def _primary_context(device: int) -> Any:
    """Return a device's primary context, which the CUDA runtime, and so torch, uses. It is created if there is none."""
    from cuda.bindings import driver

    device_attributes(device)  # raises DeviceError if there is no such device
    handle = check(driver.cuDeviceGet(device), f"cuDeviceGet({device})")
    return check(driver.cuDevicePrimaryCtxRetain(handle), f"cuDevicePrimaryCtxRetain({device})")


def is_current(device: int) -> bool:
    """Return whether a device's primary context is current.

    Every run asks, so this is fast; the answer is nearly always yes.
    """
    get, handle = _current_context(device)
    result, context = get()
    return not result and int(context) == handle


@lru_cache(maxsize=64)
def _current_context(device: int) -> tuple[Callable[[], Any], int]:
    """Return the function cuCtxGetCurrent, and the handle of the device's primary context; cached for `is_current`."""
    return bindings().cuCtxGetCurrent, int(_primary_context(device))


class device_guard:  # noqa: N801 - named as contextlib names its own
    """A context manager that makes a device's primary context current, and restores the previous one.

    A class, since a generator of contextlib takes twice as long.
    """

    __slots__ = ("_device", "_pushed")

    def __init__(self, device: int) -> None:
        self._device, self._pushed = device, False

    def __enter__(self) -> None:
        if not is_current(self._device):
            from cuda.bindings import driver

            check(driver.cuCtxPushCurrent(_primary_context(self._device)), "cuCtxPushCurrent()")
            self._pushed = True

    def __exit__(self, *_: object) -> None:
        if self._pushed:
            from cuda.bindings import driver

            self._pushed = False
            check(driver.cuCtxPopCurrent(), "cuCtxPopCurrent()")
