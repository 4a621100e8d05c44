"""CUDA graphs: launches collected once and replayed, in less host time than one launch takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from gemmsmith.backends.cuda.driver import bindings, check


class Stream:
    """A new non-blocking stream on the current device, destroyed with the object. `handle`: its address as an int."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        flag = driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        self._driver, self._stream = driver, check(driver.cuStreamCreate(flag), "cuStreamCreate")
        self.handle = int(self._stream)

    def synchronize(self) -> None:
        """Wait for all work on the stream. Raises DeviceError if it failed."""
        check(self._driver.cuStreamSynchronize(self._stream), "cuStreamSynchronize")

    def __del__(self) -> None:
        self._driver.cuStreamDestroy(self._stream)


COLLECTED: dict[int, KernelNodes] = {}
"""Graphs in the making that get the launches on a stream, by its handle.

Stream capture would collect them, too, but meanwhile no thread could synchronize with the device.
"""


class KernelNodes:
    """A graph in the making, of kernels of which each depends on the one before. `graph`: the driver's CUgraph."""

    def __init__(self) -> None:
        """Make an empty graph. Raises DeviceError."""
        self.graph = check(bindings().cuGraphCreate(0), "cuGraphCreate")
        self._last: list[Any] = []

    def add(self, function: Any, grid: int, threads: int, shared_bytes: int, arguments: int, pdl: bool) -> None:
        """Add a kernel, with a copy of its arguments, as `LoadedKernel.launch` launches it. Raises DeviceError."""
        cu = bindings()
        node = cu.CUgraphNodeParams()
        node.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
        kernel = node.kernel
        kernel.func, kernel.kernelParams, kernel.sharedMemBytes = function, arguments, shared_bytes
        kernel.gridDimX, kernel.gridDimY, kernel.gridDimZ = grid, 1, 1
        kernel.blockDimX, kernel.blockDimY, kernel.blockDimZ = threads, 1, 1
        edge = cu.CUgraphEdgeData()
        if pdl:
            edge.type = cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC.value
            edge.from_port = cu.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
        added = cu.cuGraphAddNode(self.graph, self._last, [edge] * len(self._last), len(self._last), node)
        self._last = [check(added, "cuGraphAddNode")]

    def __del__(self) -> None:
        if hasattr(self, "graph"):
            bindings().cuGraphDestroy(self.graph)


class CudaGraph:
    """A CUDA graph of the launches that `call()` makes on `stream`, where they do not run."""

    def __init__(self, call: Callable[[], Any], stream: Stream) -> None:
        """Collect the launches of `call()` on the stream, which no other thread uses. Raises DeviceError."""
        self._driver, self.stream = bindings(), stream
        self._lock = threading.Lock()  # the driver requires one thread at a time
        nodes = COLLECTED[stream.handle] = KernelNodes()
        try:
            call()
        finally:
            del COLLECTED[stream.handle]
        self._graph = check(self._driver.cuGraphInstantiate(nodes.graph, 0), "cuGraphInstantiate")

    def launch(self, stream: int) -> None:
        """Launch the graph on a stream that is not being captured, whose device is current. Raises DeviceError."""
        with self._lock:
            result = self._driver.cuGraphLaunch(self._graph, stream)
        if result[0]:
            check(result, f"cuGraphLaunch on stream {stream:#x}")

    def time_replays(self, count: int) -> float:
        """Return the total microseconds of `count` replays."""
        return time_calls(partial(self.launch, self.stream.handle), self.stream.handle, count)

    def __del__(self) -> None:
        if hasattr(self, "_graph"):
            self._driver.cuGraphExecDestroy(self._graph)


def time_calls(call: Callable[[], Any], stream: int, count: int) -> float:
    """Return the GPU time in microseconds of what `count` calls of `call()` launch on a stream, in total.

    The stream's device is current.
    """
    cu = bindings()
    begin, end = events = [check(cu.cuEventCreate(0), "cuEventCreate") for _ in range(2)]
    try:
        check(cu.cuEventRecord(begin, stream), "cuEventRecord")
        for _ in range(count):
            call()
        check(cu.cuEventRecord(end, stream), "cuEventRecord")
        check(cu.cuEventSynchronize(end), "cuEventSynchronize")  # raises errors of the kernels
        return 1e3 * float(check(cu.cuEventElapsedTime(begin, end), "cuEventElapsedTime"))
    finally:
        for event in events:
            cu.cuEventDestroy(event)
