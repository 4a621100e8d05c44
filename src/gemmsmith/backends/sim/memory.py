"""Memories as bytes: global buffers at made-up addresses, and each CTA's shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SHARED_BASE = 1024
"""Where a CTA's dynamic shared memory starts: the system keeps the first kilobyte."""
RANK_SHIFT = 24
"""A CTA's shared addresses carry its cluster rank from this bit on, as on hardware."""
OFFSET_MASK = (1 << RANK_SHIFT) - 1
_FIRST, _APART = 0x7F00_0000_0000, 1 << 36


@dataclass(eq=False)
class Buffer:
    """Global memory from `address` on."""

    name: str
    address: int
    data: np.ndarray
    writable: bool
    unwritten: bool
    granule: int


class GlobalMemory:
    """Buffers far apart from one another. Accesses outside of them are hazards."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []

    def place(
        self, data: np.ndarray, name: str, *, alignment_offset: int = 0, writable: bool = True,
        unwritten: bool = False, granule: int = 2,
    ) -> int:  # fmt: skip
        """Puts a numpy array of bytes at an address that is `alignment_offset` past a multiple of 256.

        The array is used as it is, not copied. `unwritten` bytes may not be read before the kernel writes them.
        `granule` is the bytes of the narrowest access to it, which hazards are told apart by.
        """
        raw = data.reshape(-1).view(np.uint8)
        address = _FIRST + len(self.buffers) * _APART + alignment_offset
        self.buffers.append(Buffer(name, address, raw, writable, unwritten, granule))
        return address

    def find(self, address: int) -> Buffer | None:
        """The buffer whose neighbourhood an address is in."""
        index = (address - _FIRST) // _APART
        return self.buffers[index] if 0 <= index < len(self.buffers) else None


def gather(data: np.ndarray, offsets: np.ndarray, width: int) -> np.ndarray:
    """(len(offsets), width) bytes."""
    step = _word(offsets, width)
    if step == 1 or data.nbytes % step:
        return data[offsets[:, None] + np.arange(width)]
    words = data.view(f"u{step}") if step <= 8 else data.view("V16")
    picked = words[(offsets // step)[:, None] + np.arange(width // step)]
    return np.ascontiguousarray(picked).view(np.uint8).reshape(len(offsets), width)


def scatter(data: np.ndarray, offsets: np.ndarray, values: np.ndarray) -> None:
    """data[offsets[i] + j] = values[i, j]."""
    width = values.shape[1]
    step = _word(offsets, width)
    if step == 1 or data.nbytes % step:
        data[offsets[:, None] + np.arange(width)] = values
        return
    kind = f"u{step}" if step <= 8 else "V16"
    data.view(kind)[(offsets // step)[:, None] + np.arange(width // step)] = np.ascontiguousarray(values).view(kind)


def _word(offsets: np.ndarray, width: int) -> int:
    """The widest word, up to 16 bytes, that all accesses are made of."""
    common = width
    if len(offsets):
        common |= int(np.bitwise_or.reduce(offsets))
    return min(16, common & -common) if common else 1
