"""The layout of a tile in shared memory: its TMA boxes, its swizzle, and each element's byte offset."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from gemmsmith.core.dtypes import DType

SWIZZLES = (128, 64, 32)
LINE_BYTES, SECTOR_BYTES = 128, 32
"""Of the L2. A line is also as wide as the widest swizzle: TMA reads a box of rows of these in as few requests as there
are lines."""
ATOM_ROWS = 8
"""A swizzle atom is 8 rows of `swizzle` bytes."""


def swizzle_bits(swizzle: int) -> int:
    """How many 16-byte-chunk bits a swizzle of that width exchanges: 128 -> 3, 64 -> 2, 32 -> 1, 0 -> 0."""
    return {128: 3, 64: 2, 32: 1, 0: 0}[swizzle]


def swizzled(address: Any, swizzle: int) -> Any:
    """The byte address TMA and WGMMA use for `address`: bits 4.. are xor-ed with bits 7... Takes ints or arrays.

    Source: PTX ISA, "Tensor swizzling modes"; CUTLASS Swizzle<B,4,3>. The pattern follows absolute addresses,
    so a swizzled tile starts at a multiple of 8 * swizzle bytes.
    """
    return address ^ (((address >> 7) & ((1 << swizzle_bits(swizzle)) - 1)) << 4)


def widest_swizzle(nbytes: int) -> int:
    """The widest swizzle whose row divides `nbytes`, 0 where none does."""
    return next((s for s in SWIZZLES if nbytes % s == 0), 0)


@dataclass(frozen=True)
class Tile:
    """One operand's tile: `mn` rows (of M or N) by `k`, contiguous along K ("K") or along M/N ("MN").

    It is stored as boxes side by side along the contiguous index, each `swizzle` bytes wide.
    """

    dtype: DType
    mn: int
    k: int
    major: Literal["K", "MN"]

    @cached_property
    def inner(self) -> int:
        """Elements along the contiguous index. Those of an MN-major tile are padded to whole lines, or, where they are
        fewer, to the next swizzle."""
        if self.major == "K":
            return self.k
        nbytes = self.mn * self.dtype.bytes
        row = next((s for s in reversed(SWIZZLES) if nbytes <= s), LINE_BYTES)
        return -(-nbytes // row) * row // self.dtype.bytes

    @property
    def outer(self) -> int:
        return self.mn if self.major == "K" else self.k

    @cached_property
    def swizzle(self) -> int:
        return widest_swizzle(self.inner * self.dtype.bytes)

    @cached_property
    def pitch(self) -> int:
        """Bytes of a box row: the swizzle's width, or the whole row where nothing is swizzled."""
        return self.swizzle or self.inner * self.dtype.bytes

    @cached_property
    def box_inner(self) -> int:
        """Elements of a box along the contiguous index."""
        return self.pitch // self.dtype.bytes

    @cached_property
    def boxes(self) -> int:
        return self.inner // self.box_inner

    @property
    def box_bytes(self) -> int:
        return self.outer * self.pitch

    @property
    def bytes(self) -> int:
        return self.boxes * self.box_bytes

    @property
    def alignment(self) -> int:
        return max(ATOM_ROWS * self.swizzle, 128)

    def offset(self, mn: Any, k: Any) -> Any:
        """Byte offset of element (mn, k) from a tile base aligned to `alignment`. Takes ints or arrays."""
        inner, outer = (k, mn) if self.major == "K" else (mn, k)
        box, column = inner // self.box_inner, inner % self.box_inner
        return box * self.box_bytes + swizzled(outer * self.pitch + column * self.dtype.bytes, self.swizzle)
