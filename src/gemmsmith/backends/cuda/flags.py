"""Words of device memory that are zero between kernels: the flags of clusters that share a tile.

Every stream has its own, and so has every launch that is captured into a graph, for a graph may run on any stream.
Kernels set them to zero again before they end.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from gemmsmith.backends.cuda.driver import check
from gemmsmith.backends.cuda.graphs import Stream
from gemmsmith.backends.cuda.launcher import beside_captures, device_guard, is_capturing

CHUNK = 1 << 20
"""Bytes of an allocation, from which launches get theirs; it is never freed."""
ALIGNMENT = 128


@dataclass
class _Pool:
    """The flags of one device. `address` and `free` are the address and the bytes that an allocation still has."""

    address: int = 0
    free: int = 0
    streams: dict[int, tuple[int, int]] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def take(self, nbytes: int) -> int:
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if nbytes > self.free:
            self.free = max(CHUNK, nbytes)
            self.address = _zeros(self.free)
        self.address, self.free = self.address + nbytes, self.free - nbytes
        return self.address - nbytes


@lru_cache(maxsize=64)
def _pool(device: int) -> _Pool:
    return _Pool()


def flags(device: int, stream: int, nbytes: int) -> int:
    """The address of at least that many bytes of zeros for a launch on the stream. Raises DeviceError."""
    from cuda.bindings import driver

    pool = _pool(device)
    with pool.lock, device_guard(device):
        if is_capturing(stream):
            return pool.take(nbytes)
        identifier = int(check(driver.cuStreamGetId(stream), f"cuStreamGetId({stream:#x})"))  # handles are reused
        address, size = pool.streams.get(identifier, (0, 0))
        if size < nbytes:
            address, size = pool.streams[identifier] = pool.take(nbytes), nbytes
        return address


def _zeros(nbytes: int) -> int:
    """Device memory, zeroed; also while some stream is being captured."""
    from cuda.bindings import driver

    with beside_captures():
        address = int(check(driver.cuMemAlloc(nbytes), f"cuMemAlloc({nbytes})"))
        own = Stream()
        check(driver.cuMemsetD8Async(address, 0, nbytes, own.handle), f"cuMemsetD8Async({nbytes})")
        check(driver.cuStreamSynchronize(own.handle), "cuStreamSynchronize")
    return address
