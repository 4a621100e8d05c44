"""Runs launches on a GPU.

Everything that depends only on shapes and layouts is prepared once; a call only fills in addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

from gemmsmith.arrays import ArrayInfo, adapter_of, address_of, byte_range, current_stream, describe, empty_like_kind
from gemmsmith.backends.cuda import driver, kernel_loader
from gemmsmith.backends.cuda.cuda_graph import CudaGraph, Stream
from gemmsmith.backends.cuda.flag_pool import pool_of
from gemmsmith.backends.cuda.launch_template import LaunchTemplate
from gemmsmith.core.chip import HOPPER
from gemmsmith.core.dtypes import BF16
from gemmsmith.core.errors import ArgumentError, DeviceError
from gemmsmith.core.frozen import cached_property
from gemmsmith.epilogue.outputs import result_argument
from gemmsmith.lang.launch import Launch, Launches

Arguments = Mapping[str, ArrayInfo | float]


def pointer_values(arguments: Arguments) -> dict[str, Any]:
    """Return the arrays' addresses, and the numbers, by Pointer name."""
    return {name: x.address if isinstance(x, ArrayInfo) else x for name, x in arguments.items()}


class BoundLaunches:
    """The launches of a GEMM for all arrays with the dtypes, shapes and strides of `arguments`.

    Everything but the addresses is prepared once. `arguments`: arrays and numbers by Pointer name. `like`: an array of
    the library, and on the device, that allocates results and workspace. `unallocated_results`: those for which calls
    pass no array.
    """

    def __init__(
        self, launches: Launches, arguments: Arguments, like: Any, unallocated_results: Mapping[str, ArrayInfo]
    ) -> None:
        """Load the kernels on the device of `like`. Raises DeviceError if it cannot run them."""
        self._arrays = adapter_of(like)
        device, stream = describe(like).device_index, current_stream(like)
        driver.require_chip(device, next((x.kernel.chip for x in launches.all), HOPPER))
        self.device, self.workspace_bytes, self.flag_bytes = device, launches.workspace_bytes, launches.flag_bytes
        self.swapped = launches.swapped
        layouts = {name: (tuple(x.shape), x.dtype, x.strides) for name, x in unallocated_results.items()}
        self.unallocated_results = [(name, result_argument(name), layout) for name, layout in layouts.items()]
        with kernel_loader.device_guard(device):
            self.launches = [
                load_launch_template(x, device, stream, pdl=launches.is_dependent or i > 0)
                for i, x in enumerate(launches.all)
            ]
        self._arguments = arguments

    def for_one_call(self) -> BoundLaunches:
        """Return a copy with argument blocks of its own, for one place in a program."""
        launches = copy(self)
        launches.launches = [x.for_one_call() for x in self.launches]
        return launches

    @cached_property
    def _overlap_checks(self) -> list[tuple[str, str, int, int, int]]:
        """The pairs of an output and another array, which must not overlap: (output, other, low, high, bound).

        Both are Pointer names. Their bytes overlap if low < address(other) - address(output) < high. `bound` is that
        distance for the arrays that were bound. There the byte ranges may overlap, since columns of one array may
        alternate; the elements do not, since `bind` has compared them.
        """
        arrays = {name: x for name, x in self._arguments.items() if isinstance(x, ArrayInfo) and 0 not in x.shape}
        unallocated = {pointer for _, pointer, _ in self.unallocated_results}
        spans = [
            (name, first - x.address, end - x.address)
            for name, x in arrays.items() if name not in unallocated
            for first, end in map(byte_range, x.parts)
        ]  # fmt: skip
        outputs = {name for name, _, _ in spans if arrays[name].writable}
        return [
            (output, name, first_of_output - end, end_of_output - first, arrays[name].address - arrays[output].address)
            for output, first_of_output, end_of_output in spans if output in outputs
            for name, first, end in spans
            if name != output and (name not in outputs or name > output)  # each pair of outputs once
        ]  # fmt: skip

    def outputs_do_not_overlap(self, addresses: Mapping[str, Any]) -> bool:
        """Return whether the memory of no output that the caller passed overlaps that of another argument.

        Byte ranges are compared. Arrays at the distance of those that were bound pass: `bind` compared their elements.
        """
        for output, name, low, high, bound in self._overlap_checks:  # all() takes three times as long
            if low < addresses[name] - addresses[output] < high and addresses[name] - addresses[output] != bound:
                return False
        return True

    def workspace_or_allocate(self, like: Any, workspace: Any) -> Any:
        """Return the caller's workspace.

        If it is None, return one that `like`'s library allocates, or None if none is needed.
        """
        return self._allocate_workspace(like) if workspace is None and self.workspace_bytes else workspace

    def _allocate_workspace(self, like: Any) -> Any:
        return empty_like_kind(like, (self.workspace_bytes // 2,), BF16, (1,))

    def run(self, addresses: dict[str, Any], like: Any, workspace: Any = None) -> list[Any]:
        """Allocate the results for which the caller passed no array, launch, and return these results."""
        empty, address, results = self._arrays.empty, self._arrays.address, []
        for _, pointer, layout in self.unallocated_results:
            results.append(array := empty(like, *layout))
            addresses[pointer] = address(array)
        self.launch(addresses, like, workspace)
        return results

    def launch(self, addresses: dict[str, Any], like: Any, workspace: Any, stream: int | None = None) -> None:
        """Launch all kernels.

        `addresses`: addresses and numbers by Pointer name; modified. `like`: an array of the library whose current
        stream is used unless a `stream` is given, and which allocates a `workspace` if None is given and it is needed.
        """
        if stream is None:
            stream = self._arrays.stream(like)
        if self.swapped:  # the kernel computes D^T = B^T A^T
            addresses["a"], addresses["b"] = addresses["b"], addresses["a"]
        if self.workspace_bytes:
            # Alive until the launches: memory that is freed before may be unmapped.
            if workspace is None:
                workspace = self._allocate_workspace(like)
                addresses["workspace"] = address_of(workspace)
            else:
                addresses["workspace"] = _workspace_address(workspace, self.workspace_bytes, self.device)
        if self.flag_bytes:
            pool = pool_of(self.device)
            with pool.lock, kernel_loader.device_guard(self.device):
                addresses["flags"] = pool.get(stream, self.flag_bytes)
                self._launch_all(addresses, stream)
        elif kernel_loader.is_current(self.device):
            self._launch_all(addresses, stream)
        else:
            with kernel_loader.device_guard(self.device):
                self._launch_all(addresses, stream)

    def _launch_all(self, addresses: Mapping[str, Any], stream: int) -> None:
        for launch in self.launches:
            launch.launch(addresses, stream)


class PreparedRun:
    """A run bound to fixed arrays, replayed as a CUDA graph on the current stream of `like`'s library.

    While that stream is being captured, the launches themselves are captured instead, with the caller's workspace or
    one allocated in the capture. `keepalive`: further objects that must not be freed.
    """

    def __init__(
        self, launches: Launches, arguments: Arguments, like: Any, workspace: Any, results: Any, keepalive: Any
    ) -> None:
        """Capture the launches into a CUDA graph. Raises DeviceError if the stream is being captured already."""
        self._array, self._given_workspace, self._results, self._keepalive = like, workspace, results, keepalive
        self._device, self._addresses = describe(like).device_index, pointer_values(arguments)
        with kernel_loader.device_guard(self._device):
            if kernel_loader.is_capturing(current_stream(like)):
                raise DeviceError("the stream is being captured into a graph; prepare a run before the capture")
            self._launches = BoundLaunches(launches, arguments, like, {})
            self._workspace = self._launches.workspace_or_allocate(like, workspace)
            if self._workspace is not None:
                _workspace_address(self._workspace, self._launches.workspace_bytes, self._device)
            stream = Stream()
            self._graph = CudaGraph(lambda: self._launch_on(stream.handle, self._workspace), stream)

    def _launch_on(self, stream: int, workspace: Any) -> None:
        self._launches.launch(dict(self._addresses), self._array, workspace, stream)

    def __call__(self) -> Any:
        if kernel_loader.is_current(self._device):
            self._replay()
        else:
            with kernel_loader.device_guard(self._device):
                self._replay()
        return self._results

    def _replay(self) -> None:
        """Launch the graph on the current stream or, while that is being captured, the launches themselves."""
        stream = current_stream(self._array)
        if kernel_loader.is_capturing(stream):
            self._launch_on(stream, self._given_workspace)
        else:
            self._graph.launch(stream)


def load_launch_template(launch: Launch, device: int, stream: int, *, pdl: bool) -> LaunchTemplate:
    """Return the template of a launch on a device, which is current; loads the kernel at its first use there.

    A persistent kernel gets at most as many clusters as are resident at once. If `stream` is being captured, no kernel
    can be loaded. `pdl`: see `LoadedKernel.launch`.
    """
    kernel = launch.kernel
    loaded = kernel_loader.load_kernel(kernel, device, stream)
    clusters = min(launch.work_clusters, loaded.max_active_clusters()) if kernel.persistent else launch.work_clusters
    if kernel.max_clusters and clusters > kernel.max_clusters:  # whole waves, so that every SM gets the same number
        clusters_per_wave = driver.device_attributes(device).sm_count // kernel.cluster[0]
        clusters = kernel.max_clusters // clusters_per_wave * clusters_per_wave or kernel.max_clusters
    values = [
        loaded.cluster_permutation(clusters) if kind == "cluster_permutation" else launch.arguments[p.name or ""]
        for p, kind in zip(kernel.parameters, kernel.parameter_kinds, strict=True)
    ]
    return LaunchTemplate(loaded, clusters * kernel.cluster[0], values, pdl and kernel.chip.supports("sm_90"))


def _workspace_address(workspace: Any, required_bytes: int, device: int) -> int:
    """Return the address of the caller's workspace, which must be contiguous on the device. Raises ArgumentError.

    It fits with at least `required_bytes` bytes at a multiple of 16.
    """
    if hasattr(workspace, "data_ptr"):
        if workspace.get_device() != device or not workspace.is_contiguous():
            raise ArgumentError(f"workspace: got a tensor on {workspace.device}; use a contiguous one on cuda:{device}")
        address, size = int(workspace.data_ptr()), workspace.numel() * workspace.element_size()
    elif hasattr(workspace, "__cuda_array_interface__"):
        address, size = int(workspace.__cuda_array_interface__["data"][0]), int(workspace.nbytes)
    else:
        raise ArgumentError(f"workspace: got {type(workspace).__name__}; use an array on the GPU")
    if size < required_bytes or address % 16:
        raise ArgumentError(
            f"workspace: got {size} bytes at {address:#x}; use at least {required_bytes}, aligned to 16 bytes"
        )
    return address
