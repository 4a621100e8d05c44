"""The optimization passes over an epilogue graph, in order. Each returns an equivalent graph."""

from __future__ import annotations

from collections.abc import Callable

from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.graph.passes.cse import cse, share
from gemmsmith.graph.passes.fold import fold
from gemmsmith.graph.passes.fuse import fission, fuse, multiply_add
from gemmsmith.graph.passes.rewrite import eliminate_dead_code

Pass = Callable[[EpilogueGraph], EpilogueGraph]

PASSES: tuple[tuple[str, Pass], ...] = (
    ("dce", eliminate_dead_code), ("fold", fold), ("cse", cse), ("fission", fission), ("cse", cse), ("fuse", fuse),
)  # fmt: skip
"""(name, pass), repeated until nothing changes."""
FINAL_PASSES: tuple[tuple[str, Pass], ...] = (
    ("share", share), ("cse", cse), ("multiply_add", multiply_add), ("fold", fold), ("cse", cse),
)  # fmt: skip
"""(name, pass), run once at the end: a fused multiply-add hides its multiplication from the patterns of `fuse`."""
_MAX_ROUNDS = 8
"""Limit of the repetitions of PASSES. Chosen; not measured."""


def optimize(graph: EpilogueGraph) -> EpilogueGraph:
    """Run all passes and return the resulting graph."""
    changes = trace_passes(graph)
    return changes[-1][1] if changes else graph


def trace_passes(graph: EpilogueGraph) -> list[tuple[str, EpilogueGraph]]:
    """Run all passes and return (pass name, graph after it) of each pass that changed the graph, in order."""
    changes: list[tuple[str, EpilogueGraph]] = []
    for _ in range(_MAX_ROUNDS):
        before, graph = graph, _run(PASSES, graph, changes)
        if graph == before:
            break
    _run(FINAL_PASSES, graph, changes)
    return changes


def _run(
    passes: tuple[tuple[str, Pass], ...], graph: EpilogueGraph, changes: list[tuple[str, EpilogueGraph]]
) -> EpilogueGraph:
    """Run passes; append (name, graph after it) of each that changed the graph to `changes`."""
    for name, run_pass in passes:
        after = run_pass(graph)
        if after != graph:
            changes.append((name, after))
            graph = after
    return graph
