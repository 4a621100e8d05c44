"""Pruning: nodes whose result nobody asked for, and operands nobody reads."""

from __future__ import annotations

from gemmsmith.core.graph import Graph
from gemmsmith.epilogue.passes.rewrite import pruned


def prune(graph: Graph) -> Graph:
    """Without the nodes and operands that no result needs."""
    return pruned(graph)
