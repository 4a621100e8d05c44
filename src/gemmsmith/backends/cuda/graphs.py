"""CUDA graphs, for timing: calls are captured once and replayed without their host time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemmsmith.backends.cuda.driver import check


class Stream:
    """A stream of its own on the current device; destroyed with the object."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        flag = driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        self._driver, self._stream = driver, check(driver.cuStreamCreate(flag), "cuStreamCreate")
        self.handle = int(self._stream)

    def __del__(self) -> None:
        self._driver.cuStreamDestroy(self._stream)


class Graph:
    """What `call` launches on a stream."""

    def __init__(self, call: Callable[[], Any], stream: Stream) -> None:
        from cuda.bindings import driver

        self._driver, self.stream = driver, stream
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(driver.cuStreamBeginCapture(stream.handle, mode), "cuStreamBeginCapture")
        try:
            call()
        finally:
            graph = check(driver.cuStreamEndCapture(stream.handle), "cuStreamEndCapture")
        self._graph = check(driver.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")
        check(driver.cuGraphDestroy(graph), "cuGraphDestroy")
        self._events = [check(driver.cuEventCreate(0), "cuEventCreate") for _ in range(2)]

    def replay(self, times: int) -> float:
        """Microseconds that so many replays take together."""
        begin, end = self._events
        check(self._driver.cuEventRecord(begin, self.stream.handle), "cuEventRecord")
        for _ in range(times):
            check(self._driver.cuGraphLaunch(self._graph, self.stream.handle), "cuGraphLaunch")
        check(self._driver.cuEventRecord(end, self.stream.handle), "cuEventRecord")
        check(self._driver.cuEventSynchronize(end), "cuEventSynchronize")
        return 1e3 * float(check(self._driver.cuEventElapsedTime(begin, end), "cuEventElapsedTime"))

    def __del__(self) -> None:
        for event in getattr(self, "_events", ()):
            self._driver.cuEventDestroy(event)
        if hasattr(self, "_graph"):
            self._driver.cuGraphExecDestroy(self._graph)
