"""CUDA graphs: launches captured once and replayed, in less host time than one launch takes."""

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


class CudaGraph:
    """A CUDA graph of the launches that `call()` makes on `stream`, which is captured meanwhile."""

    def __init__(self, call: Callable[[], Any], stream: Stream) -> None:
        """Capture `call()` on the stream. Raises DeviceError if the driver cannot capture it."""
        from cuda.bindings import driver

        self._driver, self.stream = driver, stream
        self._lock = threading.Lock()  # the driver requires one thread at a time
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(driver.cuStreamBeginCapture(stream.handle, mode), "cuStreamBeginCapture")
        try:
            call()
        finally:
            ended = driver.cuStreamEndCapture(stream.handle)
        graph = check(ended, "cuStreamEndCapture")
        self._graph = check(driver.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")
        check(driver.cuGraphDestroy(graph), "cuGraphDestroy")

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
