"""Stubs for the GPU's timing: a graph is what it calls, and a replay takes as many microseconds as it is told to."""

from __future__ import annotations

from typing import Any

import pytest


def on_the_cpu(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> list[str]:
    """Replace the timing of modules, and return the names of what was replayed, in order."""
    from benchmarks import contest

    replayed: list[str] = []

    class Graph:
        def __init__(self, call: Any, sets: list[Any]) -> None:
            for s in sets:
                call(*s)
            self.us = 10.0 * len(sets)

        def replay(self) -> None:
            replayed.append("load")

    def replay(graph: Graph, times: int) -> float:
        return graph.us * times

    for module in (contest, *modules):
        monkeypatch.setattr(module, "captured", Graph)
        monkeypatch.setattr(module, "replayed", replay)
    monkeypatch.setattr(contest, "L2_BYTES", 0)
    monkeypatch.setattr(contest, "sm_clock", lambda: 1500)
    monkeypatch.setattr(contest, "fastest", lambda graphs, *_: next(iter(graphs), None))
    monkeypatch.setattr(contest.torch.cuda, "synchronize", lambda: None)
    return replayed
