"""Memory accesses of a lockstep group: addresses are resolved to bytes, and every access is checked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gemmsmith.backends.sim.memory.clocks import (
    ASYNC_PROXY_FENCED,
    GLOBAL_PROXY_FENCED,
    PREREQUISITE_GRIDS_BIT,
    VectorClock,
)
from gemmsmith.backends.sim.memory.events import Event
from gemmsmith.backends.sim.memory.memory import OFFSET_MASK, SHARED_BASE, Buffer, gather, scatter, widest_word
from gemmsmith.backends.sim.memory.shadow import MAX_ACCESS_BYTES, CheckedAccess
from gemmsmith.backends.sim.state.lockstep_group import LockstepGroup
from gemmsmith.machine import Access


@dataclass(slots=True)
class ResolvedAccess:
    """An access resolved to bytes: `access.width` bytes at each of `offsets` into `data`.

    `data`: the bytes of a global `buffer`, or a CTA's shared memory (then `buffer` is None). `aligned`: a power of two
    that divides all offsets and the width, at most MAX_ACCESS_BYTES.
    """

    access: Access
    data: np.ndarray
    offsets: np.ndarray
    buffer: Buffer | None
    aligned: int

    def read(self) -> np.ndarray:
        return gather(self.data, self.offsets, self.access.width, self.aligned)

    def write(self, values: np.ndarray) -> None:
        scatter(self.data, self.offsets, values, self.aligned)


class CheckedMemory:
    """Memory that reports accesses that are misaligned, out of bounds, or in a race."""

    def __init__(self, group: LockstepGroup) -> None:
        self.group = group

    def peek(self, access: Access) -> np.ndarray:
        resolved = self.resolve(access)
        return resolved.read() if resolved else np.zeros((len(access.addresses), access.width), np.uint8)

    def poke(self, access: Access, values: np.ndarray) -> None:
        resolved = self.resolve(access)
        if resolved:
            resolved.write(values)

    def resolve(self, access: Access) -> ResolvedAccess | None:
        """Return the bytes that an access means; None if it is empty or, which is reported, out of bounds."""
        if not len(access.addresses) or not access.width:
            return None
        if access.space == "shared":
            buffer, data, minimum, name = None, self.group.peer(access.rank).shared, SHARED_BASE, "shared memory"
            begin = access.first & ~OFFSET_MASK
        else:
            buffer = self.group.state.memory.buffer_at(access.first)
            if buffer is None:
                self.group.report("out of bounds", f"global address {access.first:#x} is outside every buffer")
                return None
            data, minimum, name, begin = buffer.data, 0, buffer.name, buffer.address
        low, high = access.first - begin, access.last - begin + access.width
        if low < minimum or high > len(data):
            self.group.report(
                "out of bounds", f"access to bytes {low}..{high} of {name}, whose size is {len(data)} bytes"
            )
            return None
        offsets = access.addresses - begin if begin else access.addresses
        bits = int(np.bitwise_or.reduce(offsets)) if begin % MAX_ACCESS_BYTES else access.bits
        return ResolvedAccess(access, data, offsets, buffer, widest_word(bits | access.width))

    def check_aligned(self, access: Access, width: int) -> None:
        """Report an access at an address that is not a multiple of `width` bytes: the hardware traps."""
        if access.bits % width:
            self.group.report("alignment", f"misaligned access of {width} bytes")

    def record(self, resolved: ResolvedAccess, event: Event, clock: VectorClock, part: slice = slice(None)) -> None:
        """Check an access against the earlier ones, and record it, so that later ones are checked against it.

        Reported are races, and accesses that the buffer does not allow. `clock`: the events that happen before it.
        `part`: that of the access's addresses which `event` accesses, such as one warp's.
        """
        access, buffer, state = resolved.access, resolved.buffer, self.group.state
        if buffer is None:
            shadow, fenced_row = self.group.peer(access.rank).shadow, ASYNC_PROXY_FENCED
        else:
            self._check_buffer(buffer, event, clock)
            if not buffer.writable:  # reads alone are in no race
                return
            shadow, fenced_row = buffer.shadow, GLOBAL_PROXY_FENCED

        def name() -> str:
            return buffer.name if buffer else state.describe_address(int(access.addresses[part][0]))[0]

        offsets = resolved.offsets[part]
        shadow.access(
            CheckedAccess(offsets, access.width, resolved.aligned, event, clock, fenced_row, name, state.hazards)
        )

    def _check_buffer(self, buffer: Buffer, event: Event, clock: VectorClock) -> None:
        """Report an access to global memory before griddepcontrol.wait, and a write to a read-only buffer."""
        if not clock.completed_bits & PREREQUISITE_GRIDS_BIT:
            message = f"{event} of {buffer.name} is not ordered after the prerequisite grids"
            self.group.report("race", f"{message}: griddepcontrol.wait must come first")
        if not event.is_read and not buffer.writable:
            self.group.report("out of bounds", f"write to read-only buffer {buffer.name}")
