"""The model of Inductor's kernels: right after each change of the graph, in a time that grows as the graph does."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.torch.compiler import models
from tests.torch.compiler.passed import compiled

from gemmsmith.torch.compiler import nodes
from gemmsmith.torch.compiler.traffic import Traffic


def step(model, inputs):
    forward, passed = compiled(model)
    models.trained(forward, model, inputs)
    return passed


@pytest.mark.parametrize("name", ["llama", "gpt", "classifier"])
def test_what_is_updated_is_what_would_be_worked_out_anew(name, monkeypatch):
    known = Traffic.update
    checked = []

    def update(self, changed):
        known(self, changed)
        graph = next(iter(changed)).graph
        fresh = Traffic.__new__(Traffic)
        fresh.__dict__ = {"levels": dict(self.levels), "sources": {}, "readers": {}, "needed": {}, "written": set()}
        known(fresh, graph.nodes)
        for node in graph.nodes:
            assert self.needed[node] == fresh.needed[node]
            assert self.readers[node] == fresh.readers[node]
            assert len(self.sources[node]) == len(fresh.sources[node])
            assert (node in self.written) == (node in fresh.written)
        checked.append(graph)

    monkeypatch.setattr(Traffic, "update", update)
    passed = step(*models.model(name, torch.bfloat16))
    assert len(checked) == len(passed.fused) + len(passed.graphs)


def test_twice_as_many_layers_are_twice_the_work(monkeypatch):
    known, calls = nodes._known, []
    monkeypatch.setattr(nodes, "_known", lambda node: calls.append(None) or known(node))
    work = []
    for layers in (2, 4, 6):
        calls.clear()
        step(models.Llama(layers=layers).bfloat16(), (torch.randint(96, (2, 16)), torch.randint(96, (2, 16))))
        work.append(len(calls))
    first, second = (b - a for a, b in itertools.pairwise(work))
    assert second < 1.05 * first
