"""Shared memory: buffers of equal slots, laid out while the kernel is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmsmith.core.errors import KernelError
from gemmsmith.core.tile import Tile
from gemmsmith.lang.types import I32, U32
from gemmsmith.lang.values import Value, ValueLike, as_value

if TYPE_CHECKING:
    from gemmsmith.lang.builder import Builder


@dataclass(frozen=True)
class SharedBuffer:
    """`count` slots of `slot_bytes` each, `offset` bytes into the CTA's shared memory."""

    kernel: Builder
    name: str
    offset: int
    slot_bytes: int
    count: int
    tile: Tile | None = None

    @property
    def bytes(self) -> int:
        return self.slot_bytes * self.count

    def __getitem__(self, slot: ValueLike) -> SharedView:
        index = as_value(slot, I32)
        address = self.kernel.smem + self.offset + (index * self.slot_bytes).to(U32)
        return SharedView(address, self.tile)


@dataclass(frozen=True)
class SharedView:
    """A place in shared memory: its address (u32, in bytes) and the tile that lies there, if it is one."""

    address: Value
    tile: Tile | None = None

    def at(self, nbytes: ValueLike) -> SharedView:
        """The same view, `nbytes` further."""
        return SharedView(self.address + nbytes, self.tile)

    def rows(self, first: ValueLike, count: int) -> SharedView:
        """The `count` rows (of M or N) from `first` on; `first` is a multiple of `count`."""
        tile = self.tile
        if tile is None:
            raise KernelError("rows of a buffer that holds no tile")
        if tile.major == "K":
            if count % 8:
                raise KernelError(f"{count} rows cut a swizzle atom of 8")
            step = tile.swizzle
        else:
            if count % tile.box_inner:
                raise KernelError(f"{count} rows cut a box of {tile.box_inner}")
            step = tile.box_bytes // tile.box_inner
        # A part of an MN-major tile keeps the tile's box stride, a K-major one its row pitch.
        part = Tile(tile.dtype, count, tile.k, tile.major) if tile.major == "K" and tile.boxes == 1 else tile
        return SharedView(self.address + (as_value(first, I32) * step).to(U32), part)
