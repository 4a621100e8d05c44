"""An address that is known when a kernel runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pointer:
    """`offset` bytes into the array `name`; for a number, the number."""

    name: str
    offset: int = 0

    def __add__(self, nbytes: int) -> Pointer:
        return Pointer(self.name, self.offset + nbytes)
