"""The optimization passes over an epilogue graph, in order. Each returns an equivalent graph."""

from __future__ import annotations

from collections.abc import Callable

from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.graph.passes.cse import cse
from gemmsmith.graph.passes.fission import fission
from gemmsmith.graph.passes.fold import fold
from gemmsmith.graph.passes.fuse import fuse, multiply_add
from gemmsmith.graph.passes.rewrite import eliminate_dead_code
from gemmsmith.graph.passes.share import share

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
    return _run(graph)[0]


def trace_passes(graph: EpilogueGraph) -> list[tuple[str, EpilogueGraph]]:
    """Run all passes and return (pass name, graph after it) of each pass that changed the graph, in order."""
    return _run(graph)[1]


def _run(graph: EpilogueGraph) -> tuple[EpilogueGraph, list[tuple[str, EpilogueGraph]]]:
    """Return the graph after all passes, and (pass name, graph after it) of each pass that changed it."""
    history: list[tuple[str, EpilogueGraph]] = []

    def apply(passes: tuple[tuple[str, Pass], ...]) -> bool:
        """Run passes once; return whether the graph has changed."""
        nonlocal graph
        before = graph
        for name, run_pass in passes:
            after = run_pass(graph)
            if after != graph:
                history.append((name, after))
                graph = after
        return graph != before

    for _ in range(_MAX_ROUNDS):
        if not apply(PASSES):
            break
    apply(FINAL_PASSES)
    return graph, history
