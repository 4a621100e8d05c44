"""Shared memory: buffers of equal slots, laid out while the kernel is built."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gemmsmith.core.errors import KernelError
from gemmsmith.core.tile import Tile
from gemmsmith.lang.recording import recorder
from gemmsmith.lang.types import I32, U32
from gemmsmith.lang.values import Constant, Value, ValueLike, as_value


@dataclass(frozen=True)
class SharedBuffer:
    """`count` slots of `slot_bytes` each, `offset` bytes into the CTA's shared memory.

    `partial_writes`: where nobody wrote, what is read does not matter.
    """

    name: str
    offset: int
    slot_bytes: int
    count: int
    tile: Tile | None = None
    partial_writes: bool = False

    @property
    def bytes(self) -> int:
        return self.slot_bytes * self.count

    @property
    def start(self) -> Constant:
        """The offset, by the buffer's name."""
        return Constant(U32, self.offset, f"{self.name}_OFFSET".upper())

    def __getitem__(self, slot: ValueLike) -> SharedView:
        return SharedView(self.start, 0, (), self.tile).at(slot, self.slot_bytes)


@dataclass(frozen=True)
class SharedView:
    """A place in shared memory, `start` + `constant` + the sum of value x step bytes behind its first byte, and the
    tile there, if any.

    It is kept as a sum so that it can be had in other units without arithmetic in the kernel.
    """

    start: Constant
    constant: int
    terms: tuple[tuple[Value, int], ...]
    tile: Tile | None = None

    @property
    def address(self) -> Value:
        """u32, in bytes."""
        return self._sum(recorder().smem, 1)

    @property
    def chunk(self) -> Value:
        """u32, in 16-byte chunks, 14 bits: what matrix descriptors hold."""
        return self._sum(recorder().smem_chunk, 16)

    def _sum(self, base: Value, unit: int) -> Value:
        if any(x % unit for x in (self.start.number, self.constant, *(step for _, step in self.terms))):
            raise KernelError(f"a place in shared memory that is no multiple of {unit} bytes")
        total = base
        for value, step in self.terms:
            total = total + (value * (step // unit)).to(U32)
        return total + self.start // unit + self.constant // unit

    def at(self, count: ValueLike, step: int = 1) -> SharedView:
        """The same view, `count` x `step` bytes further."""
        value = as_value(count, count.type if isinstance(count, Value) else I32)
        if isinstance(value, Constant):
            return replace(self, constant=self.constant + value.number * step)
        return replace(self, terms=(*self.terms, (value, step)))

    def rows(self, first: ValueLike, count: int) -> SharedView:
        """The `count` rows (of M or N) from `first` on; `first` is a multiple of `count`."""
        tile = self.tile
        if tile is None:
            raise KernelError("rows of a buffer that holds no tile")
        if tile.major == "K":
            if count % 8:
                raise KernelError(f"{count} rows cut a swizzle atom of 8")
            step = tile.pitch
        else:
            if count % tile.box_inner:
                raise KernelError(f"{count} rows cut a box of {tile.box_inner}")
            step = tile.box_bytes // tile.box_inner
        # A part of several boxes keeps the tile's box stride, a part of one K-major box is a tile of its own.
        part = replace(tile, mn=count) if tile.major == "K" and tile.boxes == 1 else tile
        return replace(self.at(first, step), tile=part)
