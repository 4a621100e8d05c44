"""Pool of zero-initialized flag words with which clusters that share a tile synchronize.

Every stream has its own flags, and so has every launch captured into a graph, since a graph may run on any stream.
Kernels reset the flags to zero before they end.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import Any

from gemmsmith.backends.cuda.cuda_graph import Stream
from gemmsmith.backends.cuda.driver import bindings, check
from gemmsmith.backends.cuda.kernel_loader import device_guard, is_capturing, relaxed_capture_mode
from gemmsmith.core.scalars import round_up

POOL_BLOCK_BYTES = 1 << 20
"""Device memory is allocated in blocks of this size. Chosen, not measured."""
FLAG_ALIGNMENT_BYTES = 128
"""Chosen, not measured: an L2 line."""


@dataclass
class _Blocks:
    """Blocks of zeroed device memory, of which parts are handed out in order.

    `sizes`: bytes of each block by its address. `end`: the next free address in the newest block. `rest`: bytes free
    there.
    """

    sizes: dict[int, int] = field(default_factory=dict)
    end: int = 0
    rest: int = 0

    def allocate(self, nbytes: int) -> int:
        """Return the address of `nbytes` zeroed bytes that nobody else has."""
        nbytes = round_up(nbytes, FLAG_ALIGNMENT_BYTES)
        if nbytes > self.rest:
            size = max(POOL_BLOCK_BYTES, nbytes)
            self.end, self.rest = _allocate_zeros(size), size
            self.sizes[self.end] = size
        self.end, self.rest = self.end + nbytes, self.rest - nbytes
        return self.end - nbytes

    def free(self) -> int:
        freed, self.end, self.rest = sum(self.sizes.values()), 0, 0
        while self.sizes:
            address, _ = self.sizes.popitem()
            check(bindings().cuMemFree(address), "cuMemFree")
        return freed


@dataclass
class FlagPool:
    """The flags of one device.

    A launching thread holds `lock` from `get` until it has launched, so that `free` cannot free its flags in between.
    `streams`: address and bytes of each stream's flags, by the stream's id. `of_streams`, `of_graphs`: the memory of
    the flags of streams, and of launches captured into graphs.
    """

    device: int
    lock: Any = field(default_factory=threading.Lock)
    streams: dict[int, tuple[int, int]] = field(default_factory=dict)
    of_streams: _Blocks = field(default_factory=_Blocks)
    of_graphs: _Blocks = field(default_factory=_Blocks)

    def get(self, stream: int, nbytes: int) -> int:
        """Return the address of at least `nbytes` zeroed bytes for a launch on the stream. Raises DeviceError.

        A captured launch gets flags of its own; others get those of the stream, where one launch follows the other. The
        pool's device is current.
        """
        if is_capturing(stream):
            return self.of_graphs.allocate(nbytes)
        stream_id = int(check(bindings().cuStreamGetId(stream), f"cuStreamGetId({stream:#x})"))  # handles are reused
        address, size = self.streams.get(stream_id, (0, 0))
        if size < nbytes:
            address, size = self.streams[stream_id] = self.of_streams.allocate(nbytes), nbytes
        return address

    def free(self, graphs: bool) -> int:
        """Wait for the device, free the flags of all streams, and return the bytes freed.

        With `graphs` those of captured launches, too; their graphs may not be launched afterwards.
        """
        with self.lock, device_guard(self.device):
            check(bindings().cuCtxSynchronize(), "cuCtxSynchronize")
            self.streams.clear()
            with relaxed_capture_mode():
                return self.of_streams.free() + (self.of_graphs.free() if graphs else 0)


_POOLS: dict[int, FlagPool] = {}
if hasattr(os, "register_at_fork"):  # a child cannot use the parent's memory, and another thread may hold a lock
    os.register_at_fork(after_in_child=_POOLS.clear)


def pool_of(device: int) -> FlagPool:
    """Return the pool of a device."""
    return _POOLS.get(device) or _POOLS.setdefault(device, FlagPool(device))


def free_flags(graphs: bool) -> int:
    """Free the flags on all devices and return the bytes freed. Raises DeviceError."""
    return sum(pool.free(graphs) for pool in list(_POOLS.values()))


def _allocate_zeros(nbytes: int) -> int:
    """Return the address of new device memory that holds zeros. Also works while a stream is being captured.

    A stream of its own clears it, since the default stream would wait for streams that may be being captured.
    """
    driver = bindings()
    with relaxed_capture_mode():
        address = int(check(driver.cuMemAlloc(nbytes), f"cuMemAlloc({nbytes})"))
        stream = Stream()
        check(driver.cuMemsetD8Async(address, 0, nbytes, stream.handle), f"cuMemsetD8Async({nbytes})")
        check(driver.cuStreamSynchronize(stream.handle), "cuStreamSynchronize")
    return address
