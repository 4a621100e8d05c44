"""Pool of zero-initialized flag words with which clusters that share a tile synchronize.

Every stream has its own flags, and so has every launch captured into a graph, since a graph may run on any stream.
Kernels reset the flags to zero before they end.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from gemmsmith.backends.cuda.cuda_graph import Stream
from gemmsmith.backends.cuda.driver import check
from gemmsmith.backends.cuda.kernel_loader import device_guard, is_capturing, relaxed_capture_mode
from gemmsmith.core.integers import round_up

POOL_BLOCK_BYTES = 1 << 20
"""Device memory is allocated in blocks of this size, and never freed. Chosen, not measured."""
FLAG_ALIGNMENT_BYTES = 128
"""Chosen, not measured: an L2 line."""


@dataclass
class _Pool:
    """Flags of one device. `address` and `free`: address and bytes of the rest of the current block."""

    address: int = 0
    free: int = 0
    streams: dict[int, tuple[int, int]] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def allocate(self, nbytes: int) -> int:
        nbytes = round_up(nbytes, FLAG_ALIGNMENT_BYTES)
        if nbytes > self.free:
            self.free = max(POOL_BLOCK_BYTES, nbytes)
            self.address = _allocate_zeros(self.free)
        self.address, self.free = self.address + nbytes, self.free - nbytes
        return self.address - nbytes


@lru_cache(maxsize=64)
def _pool(device: int) -> _Pool:
    return _Pool()


def get_flags(device: int, stream: int, nbytes: int) -> int:
    """Return the address of at least `nbytes` zeroed bytes for a launch on the stream. Raises DeviceError."""
    from cuda.bindings import driver

    pool = _pool(device)
    with pool.lock, device_guard(device):
        if is_capturing(stream):
            return pool.allocate(nbytes)
        stream_id = int(check(driver.cuStreamGetId(stream), f"cuStreamGetId({stream:#x})"))  # handles are reused
        address, size = pool.streams.get(stream_id, (0, 0))
        if size < nbytes:
            address, size = pool.streams[stream_id] = pool.allocate(nbytes), nbytes
        return address


def _allocate_zeros(nbytes: int) -> int:
    """Allocate zeroed device memory, also while some stream is being captured."""
    from cuda.bindings import driver

    with relaxed_capture_mode():
        address = int(check(driver.cuMemAlloc(nbytes), f"cuMemAlloc({nbytes})"))
        stream = Stream()
        check(driver.cuMemsetD8Async(address, 0, nbytes, stream.handle), f"cuMemsetD8Async({nbytes})")
        check(driver.cuStreamSynchronize(stream.handle), "cuStreamSynchronize")
    return address
