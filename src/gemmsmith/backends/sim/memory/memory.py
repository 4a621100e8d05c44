"""Memory as bytes: global buffers at made-up addresses, and shared-memory addresses of a CTA."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gemmsmith.backends.sim.memory.shadow import MAX_ACCESS_BYTES, Shadow
from gemmsmith.machine import CLUSTER_RANK_SHIFT

SHARED_BASE = 1024
"""Offset in bytes of a CTA's dynamic shared memory: CUDA reserves the first 1024 bytes."""
OFFSET_MASK = (1 << CLUSTER_RANK_SHIFT) - 1
_WORD_DTYPES = {step: np.dtype(f"u{step}") for step in (2, 4, 8)} | {16: np.dtype("V16")}
_FIRST_ADDRESS = 0x7F00_0000_0000
_BUFFER_STRIDE = 1 << 36
"""Bytes between the addresses of two buffers, so that an address out of bounds is in no other buffer."""


@dataclass(eq=False)
class Buffer:
    """A buffer of global memory that starts at `address`."""

    name: str
    address: int
    data: np.ndarray
    writable: bool
    shadow: Shadow


class GlobalMemory:
    """The buffers of global memory.

    The gaps between them are large, so an access outside of all of them is detected.
    """

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []

    def add_buffer(
        self, data: np.ndarray, name: str, *, alignment_offset: int = 0, writable: bool = True,
        uninitialized: bool = False,
    ) -> int:  # fmt: skip
        """Add a numpy array at an address that is `alignment_offset` bytes past a multiple of 256; return the address.

        The array is used in place, not copied. Bytes of an `uninitialized` buffer must be written, by
        any launch, before they are read.
        """
        raw = data.reshape(-1).view(np.uint8)
        address = _FIRST_ADDRESS + len(self.buffers) * _BUFFER_STRIDE + alignment_offset
        self.buffers.append(Buffer(name, address, raw, writable, Shadow(len(raw), initialized=not uninitialized)))
        return address

    def buffer_at(self, address: int) -> Buffer | None:
        """Return the buffer whose address range, with its guard space, contains `address`."""
        index = (address - _FIRST_ADDRESS) // _BUFFER_STRIDE
        return self.buffers[index] if 0 <= index < len(self.buffers) else None


def widest_word(bits: int) -> int:
    """Return the widest word, in bytes, in which an access can be copied.

    `bits`: the bitwise or of all its offsets and widths, so its lowest set bit divides all of them.
    """
    return min(MAX_ACCESS_BYTES, bits & -bits)


def gather(data: np.ndarray, offsets: np.ndarray, width: int, word_bytes: int) -> np.ndarray:
    """Return (len(offsets), width) bytes of `data`, `width` from each offset on.

    They are copied in words of `word_bytes`, which divides all offsets and the width; wider words are faster.
    """
    if word_bytes == 1 or data.nbytes % word_bytes:
        return data[offsets[:, None] + np.arange(width)]
    words = data.view(_WORD_DTYPES[word_bytes])[_word_indices(offsets, width, word_bytes)]
    return np.ascontiguousarray(words).view(np.uint8).reshape(len(offsets), width)


def scatter(data: np.ndarray, offsets: np.ndarray, values: np.ndarray, word_bytes: int) -> None:
    """Set data[offsets[i] + j] = values[i, j].

    The bytes are copied in words of `word_bytes`, which divides all offsets and the row size; wider words are faster.
    """
    width = values.shape[1]
    if word_bytes == 1 or data.nbytes % word_bytes:
        data[offsets[:, None] + np.arange(width)] = values
        return
    words = np.ascontiguousarray(values).view(_WORD_DTYPES[word_bytes])
    data.view(_WORD_DTYPES[word_bytes])[_word_indices(offsets, width, word_bytes)] = (
        words.reshape(-1) if width == word_bytes else words
    )


def _word_indices(offsets: np.ndarray, width: int, word_bytes: int) -> np.ndarray:
    first = offsets // word_bytes
    return first if width == word_bytes else first[:, None] + np.arange(width // word_bytes)
