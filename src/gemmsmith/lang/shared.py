"""Shared memory: buffers of equal slots, which are laid out when the kernel is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from gemmsmith.core.errors import KernelError
from gemmsmith.core.frozen import cached_property
from gemmsmith.core.scalars import round_up
from gemmsmith.core.tile import MIN_TILE_ALIGNMENT_BYTES, Tile
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import I32, U32
from gemmsmith.lang.values import Constant, Value, ValueLike, as_value, shared_slot


@dataclass(frozen=True, eq=False)
class SharedBuffer:
    """`count` slots of `slot_bytes` each in the CTA's shared memory, at an offset that `lay_out` sets.

    `alignment`: of each slot, in bytes. `tile`: what a slot holds, or None. `allow_uninitialized_reads`: unwritten
    bytes may be read; their values are not used. `over`: buffers, adjacent in memory, whose bytes it reuses; it lies
    after earlier buffers over the same ones.
    """

    name: str
    slot_bytes: int
    count: int
    alignment: int
    tile: Tile | None = None
    allow_uninitialized_reads: bool = False
    over: tuple[SharedBuffer, ...] = ()

    @property
    def bytes(self) -> int:
        """Size of all slots in bytes."""
        return self.slot_bytes * self.count

    @property
    def offset(self) -> int:
        """The offset in bytes, once the kernel is complete."""
        return int(self.offset_constant.value)

    @cached_property
    def offset_constant(self) -> Constant:
        """The offset as a constant named after the buffer."""
        return Constant(U32, 0, f"{self.name}_OFFSET".upper())

    @property
    def address(self) -> NoReturn:
        """Raise KernelError: each slot has an address."""
        raise KernelError(f"shared buffer {self.name}: its slots have addresses; use [0].address for the first")

    def __getitem__(self, slot: ValueLike) -> SharedView:
        return SharedView(self, 0, (), self.tile).at(slot, self.slot_bytes)


@dataclass(frozen=True)
class SharedView:
    """A location in shared memory: `constant` + sum(value * step) bytes into a buffer.

    `tile`: what is stored there, or None. `terms`: the (value, step) pairs, values known at run time and their steps in
    bytes. They are kept apart, so that the offset can be expressed in units of 16 bytes without a division at run time.
    """

    buffer: SharedBuffer
    constant: int
    terms: tuple[tuple[Value, int], ...]
    tile: Tile | None = None

    @property
    def address(self) -> Value:
        """The address in bytes (u32).

        If the first term is a slot of the buffer, it prints as `buffer[slot]`, with the other terms added.
        """
        smem, slot_bytes = current_builder().smem, self.buffer.slot_bytes
        if not self.terms or self.terms[0][1] != slot_bytes:
            return self.sum(smem)
        (slot, _), *others = self.terms
        nbytes = [(value * step).to(U32) for value, step in others]
        offset = sum(nbytes[1:], nbytes[0]) if nbytes else None
        return shared_slot(smem, slot, slot_bytes, self.buffer.offset_constant, offset) + self.constant

    def sum(self, base: Value, unit: int = 1) -> Value:
        """Return base + offset / unit (u32), for an offset that is a multiple of `unit` bytes; else raises KernelError.

        The division is done at build time, since it divides each part of the offset.
        """
        if any(x % unit for x in (self.buffer.alignment, self.constant, *(step for _, step in self.terms))):
            raise KernelError(f"shared-memory offset is not a multiple of {unit} bytes")
        total = base
        for value, step in self.terms:
            total = total + (value * (step // unit)).to(U32)
        return total + self.buffer.offset_constant // unit + self.constant // unit

    def at(self, count: ValueLike, step: int = 1) -> SharedView:
        """Return this view advanced by `count` * `step` bytes. A run-time `count` becomes a term of the offset."""
        value = as_value(count, count.type if isinstance(count, Value) else I32)
        if isinstance(value, Constant):
            return replace(self, constant=self.constant + value.value * step)
        return replace(self, terms=(*self.terms, (value, step)))

    def rows(self, first: ValueLike, count: int) -> SharedView:
        """Return the view of `count` rows (of M or N) of the tile, from row `first` on, a multiple of `count`.

        Raises KernelError if the rows are not whole atoms or boxes.
        """
        tile = self.tile
        if tile is None:
            raise KernelError("rows(): this buffer has no tile layout")
        if count % tile.row_granularity:
            raise KernelError(f"rows(): count {count} is not a multiple of {tile.row_granularity} rows")
        # Rows of several boxes keep the box stride of the tile; rows of a single K-major box are a tile of their own.
        sub_tile = replace(tile, mn=count) if tile.major == "K" and tile.boxes == 1 else tile
        return replace(self.at(first, tile.row_step), tile=sub_tile)


def lay_out(buffers: Sequence[SharedBuffer]) -> None:
    """Set the offsets of a kernel's buffers: tiles first, then what needs less alignment, in the order of declaration.

    So the mainloop's stages are adjacent, and begin at 0, where addresses need no addition. Buffers over others come
    last, since the others' offsets must be known.
    """
    ends: dict[tuple[SharedBuffer, ...], int] = {(): 0}
    for buffer in sorted(buffers, key=lambda x: (bool(x.over), -min(x.alignment, MIN_TILE_ALIGNMENT_BYTES))):
        end = ends[buffer.over] if buffer.over in ends else buffer.over[0].offset
        buffer.offset_constant.value = round_up(end, buffer.alignment)
        ends[buffer.over] = buffer.offset + buffer.bytes
        if buffer.over:
            _check_over(buffer, buffers)


def _check_over(buffer: SharedBuffer, buffers: Sequence[SharedBuffer]) -> None:
    """Raise KernelError if a buffer reaches beyond those that it is over, or into another one that lies among them."""
    begin, end, last = buffer.over[0].offset, buffer.offset + buffer.bytes, buffer.over[-1]
    between = [
        x for x in buffers if not x.over and x not in buffer.over and x.offset < end and begin < x.offset + x.bytes
    ]
    if between or end > last.offset + last.bytes:
        raise KernelError(f"{buffer.name}: it reaches beyond the buffers that it is over")
