"""Memories as bytes: global buffers at made-up addresses, and each CTA's shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SHARED_BASE = 1024
"""Where a CTA's dynamic shared memory starts: the system keeps the first kilobyte."""
RANK_SHIFT = 24
"""A CTA's shared addresses carry its cluster rank from this bit on, as on hardware."""
OFFSET_MASK = (1 << RANK_SHIFT) - 1
WIDEST = 16
"""Bytes that one thread moves at once, at most."""
_KINDS = {step: np.dtype(f"u{step}") for step in (2, 4, 8)} | {16: np.dtype("V16")}
_FIRST, _APART = 0x7F00_0000_0000, 1 << 36


@dataclass(eq=False)
class Buffer:
    """Global memory from `address` on."""

    name: str
    address: int
    data: np.ndarray
    writable: bool
    unwritten: bool


class GlobalMemory:
    """Buffers far apart from one another. Accesses outside of them are hazards."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []

    def place(
        self, data: np.ndarray, name: str, *, alignment_offset: int = 0, writable: bool = True, unwritten: bool = False
    ) -> int:
        """Puts a numpy array of bytes at an address that is `alignment_offset` past a multiple of 256.

        The array is used as it is, not copied. `unwritten` bytes may not be read before the kernel writes them.
        """
        raw = data.reshape(-1).view(np.uint8)
        address = _FIRST + len(self.buffers) * _APART + alignment_offset
        self.buffers.append(Buffer(name, address, raw, writable, unwritten))
        return address

    def find(self, address: int) -> Buffer | None:
        """The buffer whose neighborhood an address is in."""
        index = (address - _FIRST) // _APART
        return self.buffers[index] if 0 <= index < len(self.buffers) else None


def alignment(offsets: np.ndarray, width: int) -> int:
    """The widest word, up to WIDEST, that accesses of `width` bytes from each of `offsets` are made of."""
    common = int(np.bitwise_or.reduce(offsets)) | width
    return min(WIDEST, common & -common) if common else 1


def gather(data: np.ndarray, offsets: np.ndarray, width: int, step: int) -> np.ndarray:
    """(len(offsets), width) bytes, in words of `step`, which is their `alignment`."""
    if step == 1 or data.nbytes % step:
        return data[offsets[:, None] + np.arange(width)]
    picked = data.view(_KINDS[step])[_words(offsets, width, step)]
    return np.ascontiguousarray(picked).view(np.uint8).reshape(len(offsets), width)


def scatter(data: np.ndarray, offsets: np.ndarray, values: np.ndarray, step: int) -> None:
    """data[offsets[i] + j] = values[i, j], in words of `step`, which is their `alignment`."""
    width = values.shape[1]
    if step == 1 or data.nbytes % step:
        data[offsets[:, None] + np.arange(width)] = values
        return
    words = np.ascontiguousarray(values).view(_KINDS[step])
    data.view(_KINDS[step])[_words(offsets, width, step)] = words.reshape(-1) if width == step else words


def _words(offsets: np.ndarray, width: int, step: int) -> np.ndarray:
    first = offsets // step
    return first if width == step else first[:, None] + np.arange(width // step)
