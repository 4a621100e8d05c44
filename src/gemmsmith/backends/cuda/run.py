"""Running launches on a GPU: all that depends on arrays' shapes and layouts alone is done once, a call puts addresses
in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemmsmith.arrays import ArrayInfo, byte_range, current_stream, describe, empty_like_kind
from gemmsmith.backends.cuda import driver, launcher
from gemmsmith.backends.cuda.flags import flags
from gemmsmith.backends.cuda.graphs import Graph, Stream
from gemmsmith.backends.cuda.prepared import Prepared
from gemmsmith.core.chip import HOPPER
from gemmsmith.core.dtypes import BF16
from gemmsmith.core.errors import ArgumentError, DeviceError
from gemmsmith.epilogue.device.outputs import result_argument
from gemmsmith.lang.launch import Launch, Launches
from gemmsmith.lang.types import ORDER_LENGTH

Arguments = Mapping[str, ArrayInfo | float]


def addresses_of(arguments: Arguments) -> dict[str, Any]:
    """The arrays' addresses, and the numbers, by the names of their Pointers."""
    return {name: x.address if isinstance(x, ArrayInfo) else x for name, x in arguments.items()}


class Call:
    """Launches for arrays at `arguments`, and for all later ones with the same signatures. `missing`: results that the
    caller gives no array for, by name."""

    def __init__(self, launches: Launches, arguments: Arguments, like: Any, missing: Mapping[str, ArrayInfo]) -> None:
        device, stream = describe(like).index, current_stream(like)
        driver.require_chip(device, next((x.kernel.chip for x in launches.all), HOPPER))
        self.device, self.workspace_bytes, self.flag_bytes = device, launches.workspace_bytes, launches.flag_bytes
        self.swapped = launches.swapped
        layouts = {name: (tuple(x.shape), x.dtype, x.strides) for name, x in missing.items()}
        self.missing = [(name, result_argument(name), layout) for name, layout in layouts.items()]
        early = launches.spec is not None and launches.spec.config.pdl
        with launcher.device_guard(device):
            self.launches = [prepared(x, device, stream, pdl=early or i > 0) for i, x in enumerate(launches.all)]
        arrays = {name: x for name, x in arguments.items() if isinstance(x, ArrayInfo) and 0 not in x.shape}
        spans = {
            name: (first - x.address, end - x.address) for name, x in arrays.items() for first, end in [byte_range(x)]
        }
        made = {pointer for _, pointer, _ in self.missing}
        written = [name for name in spans if arrays[name].writable and name not in made]
        self._pairs = [  # and the distances between which two that overlap lie
            (w, name, spans[w][0] - spans[name][1], spans[w][1] - spans[name][0])
            for w in written
            for name in spans
            if name not in made and name != w and (name not in written or name > w)
        ]

    def apart(self, addresses: Mapping[str, Any]) -> bool:
        """Whether no result that is given shares a byte with another array, as far as their ranges tell."""
        for w, name, first, end in self._pairs:  # noqa: SIM110 all() takes three times as long
            if first < addresses[name] - addresses[w] < end:
                return False
        return True

    def space(self, like: Any, workspace: Any) -> Any:
        """The workspace: what the caller gives, or one of `like`'s library; None where none is needed."""
        if workspace is None and self.workspace_bytes:
            return empty_like_kind(like, (self.workspace_bytes // 2,), BF16)
        return workspace

    def start(self, addresses: dict[str, Any], like: Any, workspace: Any, stream: int | None = None) -> None:
        """Launches on a stream, by default on the one that `like`'s library works on, for addresses and numbers by the
        names of their Pointers. `workspace` is made where it is needed and None. Changes `addresses`."""
        if stream is None:
            stream = current_stream(like)
        if self.swapped:
            addresses["a"], addresses["b"] = addresses["b"], addresses["a"]
        if self.workspace_bytes:
            space = self.space(like, workspace)  # held until the launches: what is freed before may be unmapped
            addresses["workspace"] = _workspace_address(space, self.workspace_bytes)
        if self.flag_bytes:
            addresses["flags"] = flags(self.device, stream, self.flag_bytes)
        if launcher.is_current(self.device):
            self._launch(addresses, stream)
        else:
            with launcher.device_guard(self.device):
                self._launch(addresses, stream)

    def _launch(self, addresses: Mapping[str, Any], stream: int) -> None:
        for launch in self.launches:
            launch.launch(addresses, stream)


class PreparedRun:
    """Launches for arrays that stay where they are: calling it launches them on the stream that is current for `like`.

    A CUDA graph of its own; into a stream that is being captured go the launches themselves, with a workspace that is
    the capture's or the caller's. `kept` is what must live as long beside the results, `value`, and `like`.
    """

    def __init__(
        self, launches: Launches, arguments: Arguments, like: Any, workspace: Any, value: Any, kept: Any
    ) -> None:
        self._like, self._given, self._value, self._kept = like, workspace, value, kept
        self._device, self._addresses = describe(like).index, addresses_of(arguments)
        with launcher.device_guard(self._device):
            if launcher.is_capturing(current_stream(like)):
                raise DeviceError("the stream is being captured into a graph; prepare a run before the capture")
            self._call = Call(launches, arguments, like, {})
            self._workspace = self._call.space(like, workspace)
            if self._workspace is not None:
                _workspace_address(self._workspace, self._call.workspace_bytes)
            own = Stream()
            self._graph = Graph(lambda: self._record(own.handle, self._workspace), own)

    def _record(self, stream: int, workspace: Any) -> None:
        self._call.start(dict(self._addresses), self._like, workspace, stream)

    def __call__(self) -> Any:
        """Launches it; gives the results."""
        if launcher.is_current(self._device):
            self._launch()
        else:
            with launcher.device_guard(self._device):
                self._launch()
        return self._value

    def _launch(self) -> None:
        stream = current_stream(self._like)
        if launcher.is_capturing(stream):
            self._record(stream, self._given)
        else:
            self._graph.launch(stream)


def prepared(launch: Launch, device: int, stream: int, *, pdl: bool) -> Prepared:
    """A launch on a device, which is current; the kernel is compiled and loaded at its first use there.

    `pdl`: it may be scheduled while the stream's last kernel ends; it waits for that one's results itself.
    """
    kernel = launch.kernel
    loaded = launcher.load(
        kernel.source, kernel.name, device, stream, target=kernel.chip.target,
        threads=kernel.threads, cluster=kernel.cluster, shared_bytes=kernel.shared_bytes,
        parameter_kinds=kernel.parameter_kinds,
    )  # fmt: skip
    clusters = min(launch.clusters, loaded.max_active_clusters()) if kernel.persistent else launch.clusters
    arguments = dict(launch.arguments)
    if "order" in arguments:
        if clusters > ORDER_LENGTH:  # as many on each SM
            of_sms = driver.attributes(device).multiprocessors // kernel.cluster[0]
            clusters = ORDER_LENGTH // of_sms * of_sms or ORDER_LENGTH
        if "flags" not in arguments:  # who waits for others waits for lower blocks, which are started first
            arguments["order"] = loaded.order(clusters)
    in_order = [arguments[p.name or ""] for p in kernel.parameters]
    return Prepared(loaded, clusters * kernel.cluster[0], in_order, pdl and kernel.chip.has("sm_90"))


def _workspace_address(workspace: Any, need: int) -> int:
    if hasattr(workspace, "data_ptr"):
        address, size = int(workspace.data_ptr()), workspace.numel() * workspace.element_size()
    elif hasattr(workspace, "__cuda_array_interface__"):
        address, size = int(workspace.__cuda_array_interface__["data"][0]), int(workspace.nbytes)
    else:
        raise ArgumentError(f"workspace: got {type(workspace).__name__}; use an array on the GPU")
    if size < need or address % 16:
        raise ArgumentError(f"workspace: got {size} bytes at {address:#x}; use {need} at a multiple of 16")
    return address
