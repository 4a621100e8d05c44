"""Pointer: a kernel argument that is an address known only at launch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pointer:
    """The address `offset` bytes into the array `name`; if that operand is a number, the number."""

    name: str
    offset: int = 0

    def __add__(self, nbytes: int) -> Pointer:
        return Pointer(self.name, self.offset + nbytes)
