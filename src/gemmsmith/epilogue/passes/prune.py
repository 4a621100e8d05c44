"""Pruning: removes nodes that no result depends on, and operands that no node reads."""

from __future__ import annotations

from gemmsmith.core.graph import Graph
from gemmsmith.epilogue.passes.rewrite import pruned


def prune(graph: Graph) -> Graph:
    """The graph without the nodes and operands that no result needs."""
    return pruned(graph)
