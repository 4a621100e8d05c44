"""Loading kernels, once a device, and launching them."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from gemmsmith.backends.cuda.compiler import compile_ptx, compile_source, nvrtc_version
from gemmsmith.backends.cuda.driver import attributes, check, chip_of
from gemmsmith.backends.cuda.placement import walk_order
from gemmsmith.core.chip import HOPPER
from gemmsmith.core.errors import ArgumentError, DeviceError

_FORMATS = {
    "i32": "i4x",
    "u32": "I4x",
    "i64": "q",
    "u64": "Q",
    "f32": "f4x",
    "pointer": "Q",
    "tensor_map": "",
    "order": "",
}
"""struct's letters, each kind in 8 bytes; a tensor map and an order are passed from where it was encoded."""
STATIC_LIMIT = 48 * 1024
"""Dynamic shared memory above this is asked for by an attribute (CUDA programming guide)."""


@dataclass(eq=False)
class LoadedKernel:
    """A kernel on one device. `cluster` is compiled into it; the grid counts CTAs."""

    name: str
    function: Any
    device: int
    threads: int
    cluster: tuple[int, int, int]
    shared_bytes: int
    parameter_kinds: tuple[str, ...]
    _clusters: int = field(default=0, init=False)
    _orders: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver  # an import statement in `start` would cost 0.2 us
        count = len(self.parameter_kinds)
        self._layout = struct.Struct(f"={count}Q" + "".join(_FORMATS[kind] for kind in self.parameter_kinds))
        self._programmatic = threading.local()  # a thread's CUlaunchConfig: making one costs as much as a launch

    def order(self, clusters: int) -> tuple[int, ...]:
        """The order for a grid of that many clusters, which gives neighboring tiles to clusters of one GPC."""
        if clusters not in self._orders:
            sms = attributes(self.device).multiprocessors
            resident = min(self.max_active_clusters(), sms // self.cluster[0])
            self._orders[clusters] = walk_order(self.device, self.cluster[0], resident, clusters)
        return self._orders[clusters]

    def max_active_clusters(self) -> int:
        """The number of clusters that are resident at once, from the driver. Raises DeviceError if it is 0."""
        if not self._clusters:
            self._clusters = _occupancy(self)
            if not self._clusters:
                raise DeviceError(
                    f"{self.name}: device {self.device} cannot hold one cluster {self.cluster} of {self.threads} "
                    f"threads and {self.shared_bytes} bytes of shared memory a CTA"
                )
        return self._clusters

    def start(self, grid: int, arguments: int, stream: int, pdl: bool) -> None:
        """Starts `grid` CTAs on `stream`; `arguments` is where the pointers to them lie.

        `pdl` lets it start while the stream's previous kernel still runs, for a kernel that waits with griddepcontrol
        before it touches memory. Raises DeviceError.
        """
        if pdl:
            config = getattr(self._programmatic, "config", None)
            if config is None:
                config = self._programmatic.config = _launch_config(self, "PROGRAMMATIC_STREAM_SERIALIZATION")
            config.gridDimX, config.hStream = grid, stream
            result = self._driver.cuLaunchKernelEx(config, self.function, arguments, 0)
        else:
            result = self._driver.cuLaunchKernel(
                self.function, grid, 1, 1, self.threads, 1, 1, self.shared_bytes, stream, arguments, 0
            )
        if result[0]:
            check(result, f"the launch of {self.name}: grid {grid}, {self.threads} threads, stream {stream:#x}")

    def pack(self, block: Any, values: Sequence[Any]) -> None:
        """Writes pointers and scalars as the parameters' kinds want them."""
        try:
            self._layout.pack_into(block, 0, *values)
        except (struct.error, OverflowError) as error:
            raise ArgumentError(f"{self.name}: {error}; got {values} for {self.parameter_kinds}") from None


_LOADED: dict[tuple[str, int], LoadedKernel] = {}
_LOADING: dict[tuple[str, int], threading.Lock] = {}
"""A lock for each kernel, so that threads can compile different kernels at the same time."""


def load(
    source: str, name: str, device: int, stream: int, *, target: str = HOPPER.target,
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

    with _LOADING.setdefault(key, threading.Lock()), beside_captures():
        if key not in _LOADED:
            image = _image(source, name, device, target)
            module = check(driver.cuModuleLoadData(image), f"cuModuleLoadData({name}, by NVRTC {nvrtc_version()})")
            function = check(driver.cuModuleGetFunction(module, name.encode()), f"cuModuleGetFunction({name})")
            if shared_bytes > STATIC_LIMIT:
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                check(
                    driver.cuFuncSetAttribute(function, attribute, shared_bytes),
                    f"cuFuncSetAttribute({name}, dynamic shared memory, {shared_bytes} bytes)",
                )
            loaded = LoadedKernel(name, function, device, threads, cluster, shared_bytes, parameter_kinds)
            if "order" in parameter_kinds:
                loaded.order(1)  # probes the device now: later the stream may be captured
            _LOADED[key] = loaded
    return _LOADED[key]


def _image(source: str, name: str, device: int, target: str) -> bytes:
    """What the driver loads: a cubin for the device, or, of a kernel for an earlier chip, PTX, which it compiles."""
    found = attributes(device)
    chip = chip_of(found)
    if chip is not None and chip.target == target and chip.capability // 10 == found.capability[0]:
        return compile_source(source, name, target).cubin
    return compile_ptx(source, name, target).encode() + b"\0"


def _occupancy(kernel: LoadedKernel) -> int:
    from cuda.bindings import driver

    if kernel.cluster == (1, 1, 1):
        per_sm = check(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel.function, kernel.threads, kernel.shared_bytes),
            f"cuOccupancyMaxActiveBlocksPerMultiprocessor({kernel.name})",
        )
        return int(per_sm) * attributes(kernel.device).multiprocessors
    config = _launch_config(kernel, "CLUSTER_DIMENSION")
    config.gridDimX, config.gridDimY, config.gridDimZ = kernel.cluster
    result = driver.cuOccupancyMaxActiveClusters(kernel.function, config)
    return int(check(result, f"cuOccupancyMaxActiveClusters({kernel.name}, {kernel.cluster})"))


def _launch_config(kernel: LoadedKernel, name: str) -> Any:
    """A CUlaunchConfig with one attribute: CLUSTER_DIMENSION or PROGRAMMATIC_STREAM_SERIALIZATION."""
    from cuda.bindings import driver

    config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    attribute.id = getattr(driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    if name == "CLUSTER_DIMENSION":
        dimension = attribute.value.clusterDim
        dimension.x, dimension.y, dimension.z = kernel.cluster
    else:
        attribute.value.programmaticStreamSerializationAllowed = 1
    config.gridDimX, config.gridDimY, config.gridDimZ = 1, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
    config.sharedMemBytes = kernel.shared_bytes
    config.attrs, config.numAttrs = [attribute], 1
    return config


def is_capturing(stream: int) -> bool:
    """Whether the stream is being captured into a graph. On a prepared run's path."""
    result = _bindings().cuStreamIsCapturing(stream)
    if not result[0]:
        return bool(result[1])  # CU_STREAM_CAPTURE_STATUS_NONE is 0
    if result[0].name == "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT":
        return True  # the legacy stream would join another stream's capture
    check(result, f"cuStreamIsCapturing({stream:#x})")
    return False


@contextmanager
def beside_captures() -> Iterator[None]:
    """This thread may allocate memory and load modules although another one is capturing a stream: what it does there
    becomes no part of any graph."""
    driver = _bindings()
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    mode = check(driver.cuThreadExchangeStreamCaptureMode(relaxed), "cuThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        check(driver.cuThreadExchangeStreamCaptureMode(mode), "cuThreadExchangeStreamCaptureMode")


@lru_cache(maxsize=1)
def _bindings() -> Any:
    """The driver's bindings, imported once: an import statement would take as long as a call."""
    from cuda.bindings import driver

    return driver


@lru_cache(maxsize=64)
def _primary_context(device: int) -> Any:
    from cuda.bindings import driver

    attributes(device)  # raises where there is no such device
    handle = check(driver.cuDeviceGet(device), f"cuDeviceGet({device})")
    return check(driver.cuDevicePrimaryCtxRetain(handle), f"cuDevicePrimaryCtxRetain({device})")


def device_guard(device: int) -> AbstractContextManager[None]:
    """Makes a device's primary context current, and the former one again afterwards. Raises DeviceError."""
    return _Guard(device)


def is_current(device: int) -> bool:
    """Whether a device's primary context is current, which it nearly always is. Executed in every call."""
    get, handle = _current_context(device)
    result, context = get()
    return not result and int(context) == handle


@lru_cache(maxsize=64)
def _current_context(device: int) -> tuple[Callable[[], Any], int]:
    """cuCtxGetCurrent, and the primary context's handle."""
    return _bindings().cuCtxGetCurrent, int(_primary_context(device))


class _Guard:
    """A context manager; a class, since contextlib's generators take twice as long."""

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


def time_launches(call: Callable[[], Any], stream: int, repeats: int) -> float:
    """Microseconds a call, over `repeats` of them back to back after a warm-up. The stream's device is current."""
    from cuda.bindings import driver

    begin, end = (check(driver.cuEventCreate(0), "cuEventCreate(0)") for _ in range(2))
    try:
        for _ in range(max(1, repeats // 5)):
            call()
        check(driver.cuEventRecord(begin, stream), "cuEventRecord")
        for _ in range(repeats):
            call()
        check(driver.cuEventRecord(end, stream), "cuEventRecord")
        check(driver.cuEventSynchronize(end), "cuEventSynchronize")  # errors of the kernel are raised here
        return float(check(driver.cuEventElapsedTime(begin, end), "cuEventElapsedTime")) * 1e3 / repeats
    finally:
        for event in (begin, end):
            driver.cuEventDestroy(event)
