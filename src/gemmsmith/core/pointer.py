"""Pointer: a kernel argument that is an address known only at launch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pointer:
    """The address `offset` bytes into the array `name`; the value itself if the operand `name` is a scalar.

    `reaches_other`: the address is that of the second of two arrays whose columns alternate. `offset` is then their
    distance, which a launch with other arrays replaces by the distance of those.
    """

    name: str
    offset: int = 0
    reaches_other: bool = False

    def __add__(self, nbytes: int) -> Pointer:
        return Pointer(self.name, self.offset + nbytes, self.reaches_other)
