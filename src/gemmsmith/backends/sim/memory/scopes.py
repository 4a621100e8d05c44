"""Memory scopes (PTX ISA, "Scope")."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol


class ScopeLevel(IntEnum):
    """The threads that a synchronization includes: those of the CTA, of its cluster, or of the GPU."""

    CTA = 0
    CLUSTER = 1
    GPU = 2


class HasClusterRank(Protocol):
    """A CTA, with its index in the grid and its rank in the cluster."""

    index: int
    rank: int


def scope_of(name: str) -> ScopeLevel:
    """Return the level of a PTX scope qualifier: cta, cluster or gpu."""
    return ScopeLevel[name.upper()]


def narrowest_common_scope(one: HasClusterRank, other: HasClusterRank) -> ScopeLevel:
    """Return the narrowest scope that contains both CTAs: that of the CTA, of the cluster, or of the GPU."""
    if one is other:
        return ScopeLevel.CTA
    is_one_cluster = one.index - one.rank == other.index - other.rank  # the index of the cluster's first CTA
    return ScopeLevel.CLUSTER if is_one_cluster else ScopeLevel.GPU
