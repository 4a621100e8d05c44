"""The passes over a graph, in order. Each takes a graph and gives one of the same meaning."""

from __future__ import annotations

from collections.abc import Callable

from gemmsmith.core.graph import Graph
from gemmsmith.epilogue.passes.fission import fission
from gemmsmith.epilogue.passes.fold import fold
from gemmsmith.epilogue.passes.fuse import fuse, multiply_add
from gemmsmith.epilogue.passes.rewrite import pruned
from gemmsmith.epilogue.passes.share import share

Pass = Callable[[Graph], Graph]

PASSES: tuple[tuple[str, Pass], ...] = (
    ("prune", pruned),
    ("fold", fold),
    ("share", share),
    ("fission", fission),
    ("share", share),
    ("fuse", fuse),
)
"""Repeated until nothing changes."""
LAST: tuple[tuple[str, Pass], ...] = (("multiply_add", multiply_add), ("fold", fold), ("share", share))
"""Once, at the end: a fused multiply-add hides its multiplication from the patterns of `fuse`."""
_MOST_ROUNDS = 8


def optimize(graph: Graph) -> Graph:
    """The graph after all passes."""
    return _run(graph)[0]


def steps(graph: Graph) -> list[tuple[str, Graph]]:
    """(pass, graph after it) for every pass that changed something, in order."""
    return _run(graph)[1]


def _run(graph: Graph) -> tuple[Graph, list[tuple[str, Graph]]]:
    done: list[tuple[str, Graph]] = []

    def apply(passes: tuple[tuple[str, Pass], ...]) -> bool:
        nonlocal graph
        before = graph
        for name, step in passes:
            after = step(graph)
            if after != graph:
                done.append((name, after))
                graph = after
        return graph != before

    for _ in range(_MOST_ROUNDS):
        if not apply(PASSES):
            break
    apply(LAST)
    return graph, done
