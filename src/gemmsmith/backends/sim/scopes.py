"""How far an order reaches. PTX ISA, "Scope"."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol


class Scope(IntEnum):
    """Which threads take part in an order: those of the CTA, of its cluster, of the GPU."""

    CTA = 0
    CLUSTER = 1
    GPU = 2


class Placed(Protocol):
    """A CTA: its index in the grid and its rank in the cluster."""

    index: int
    rank: int


def scope_of(name: str) -> Scope:
    """By PTX's name: cta, cluster, gpu."""
    return Scope[name.upper()]


def between(one: Placed, other: Placed) -> Scope:
    """The least scope that has threads of both CTAs."""
    if one is other:
        return Scope.CTA
    return Scope.CLUSTER if one.index - one.rank == other.index - other.rank else Scope.GPU
