"""The layout of a tile in shared memory: its TMA boxes, its swizzle, and each element's byte offset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from gemmsmith.core.dtypes import DType
from gemmsmith.core.frozen import cached_property
from gemmsmith.core.scalars import round_up

SWIZZLES = (128, 64, 32)
LINE_BYTES = 128
"""L2 cache line, as wide as the widest swizzle: TMA loads a box of such rows with one request per line."""
SECTOR_BYTES = 32
"""L2 sector."""
ATOM_ROWS = 8
"""A swizzle atom is 8 rows of `swizzle` bytes."""
MIN_TILE_ALIGNMENT_BYTES = 128
"""Alignment of what TMA reads and writes in shared memory (PTX ISA, "cp.async.bulk.tensor")."""
SWIZZLE_ALIGNMENT_BYTES = ATOM_ROWS * LINE_BYTES
"""Alignment of tiles with the widest swizzle in shared memory."""


def swizzled(address: Any, swizzle: int) -> Any:
    """Return where TMA and wgmma put the byte whose address is `address`, an int or array, without a swizzle.

    `swizzle`: 128, 64, 32, or 0 for none. The lowest 3, 2 or 1 bits of the index of a 16-byte vector (address bits 4
    up) are xor-ed with the index of the 128-byte line (bits 7 up). So vectors below one another are in different banks.

    Source: PTX ISA, "Tensor swizzling modes"; CUTLASS Swizzle<B,4,3>. The pattern follows absolute addresses,
    so a swizzled tile starts at a multiple of 8 * swizzle bytes.
    """
    return address ^ ((address >> 7 & max(swizzle // 16 - 1, 0)) << 4)


def widest_swizzle(nbytes: int) -> int:
    """Return the widest swizzle, in bytes, that divides rows of `nbytes` bytes; 0 if none does."""
    return next((s for s in SWIZZLES if nbytes % s == 0), 0)


@dataclass(frozen=True)
class Tile:
    """One operand's tile: `mn` rows (of M or N) by `k`, contiguous along K ("K") or along M/N ("MN").

    It is stored as consecutive boxes along the contiguous dimension, each `swizzle` bytes wide.
    """

    dtype: DType
    mn: int
    k: int
    major: Literal["K", "MN"]

    @cached_property
    def inner(self) -> int:
        """Elements along the contiguous dimension.

        Those of an MN-major tile are padded to whole swizzle rows: to a multiple of 128 bytes, or to 32 or 64 bytes if
        they are fewer.
        """
        if self.major == "K":
            return self.k
        nbytes = self.dtype.bytes_of(self.mn)
        row = next((s for s in reversed(SWIZZLES) if nbytes <= s), LINE_BYTES)
        return self.dtype.elements_in(round_up(nbytes, row))

    @property
    def padded_mn(self) -> int:
        """Rows of M or N that a copy of the tile reads, padding included."""
        return self.inner if self.major == "MN" else self.mn

    @property
    def outer(self) -> int:
        """Rows of a box: elements along the dimension that is not contiguous."""
        return self.mn if self.major == "K" else self.k

    @cached_property
    def swizzle(self) -> int:
        """Width of the swizzle in bytes: 128, 64, 32, or 0 for none."""
        return widest_swizzle(self.dtype.bytes_of(self.inner))

    @cached_property
    def pitch(self) -> int:
        """Bytes of a box row: the swizzle's width, or the whole row if there is no swizzle."""
        return self.swizzle or self.dtype.bytes_of(self.inner)

    @cached_property
    def box_inner(self) -> int:
        """Elements of a box along the contiguous dimension."""
        return self.dtype.elements_in(self.pitch)

    @cached_property
    def boxes(self) -> int:
        """Number of boxes."""
        return self.inner // self.box_inner

    @property
    def box_bytes(self) -> int:
        """Bytes of a box."""
        return self.outer * self.pitch

    @property
    def row_granularity(self) -> int:
        """Rows of M or N in a swizzle atom (K-major) or in a box (MN-major)."""
        return ATOM_ROWS if self.major == "K" else self.box_inner

    @property
    def row_step(self) -> int:
        """Bytes per row of M or N: r rows, a multiple of `row_granularity`, are r * row_step bytes apart."""
        return self.pitch if self.major == "K" else self.box_bytes // self.box_inner

    @property
    def bytes(self) -> int:
        """Bytes of the tile, padding included."""
        return self.boxes * self.box_bytes

    @property
    def alignment(self) -> int:
        """Required alignment of the tile in bytes: a swizzle atom, and at least TMA's."""
        return max(ATOM_ROWS * self.swizzle, MIN_TILE_ALIGNMENT_BYTES)

    def offset(self, mn: Any, k: Any) -> Any:
        """Return the byte offset of element (mn, k) from a tile base aligned to `alignment`. Accepts ints or arrays."""
        inner, outer = (k, mn) if self.major == "K" else (mn, k)
        box, column = inner // self.box_inner, inner % self.box_inner
        return box * self.box_bytes + swizzled(outer * self.pitch + self.dtype.bytes_of(column), self.swizzle)
