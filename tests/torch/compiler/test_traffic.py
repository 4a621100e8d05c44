"""The model of Inductor's kernels: right after each change of the graph, in a time that grows as the graph does."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch
from tests.torch.compiler import models
from tests.torch.compiler.passed import compiled

from gemmsmith.torch.compiler import fuse, nodes
from gemmsmith.torch.compiler.rewrite import replace
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
        fresh.levels, fresh.written, fresh.work = dict(self.levels), set(), defaultdict(set)
        fresh.sources, fresh.readers, fresh.needed = {}, {}, {}
        known(fresh, graph.nodes)
        for node in graph.nodes:
            assert self.needed[node] == fresh.needed[node]
            assert self.readers[node] == fresh.readers[node]
            assert len(self.sources[node]) == len(fresh.sources[node])
            assert (node in self.written) == (node in fresh.written)
            assert (node in self.work[self.kernel(node)]) == (node in fresh.work[self.kernel(node)])
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


def test_kernels_that_are_spared():
    a, b, c = torch.randn(24, 16), torch.randn(16, 32), torch.randn(24, 32)

    def spared(function):
        found = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                fuse, "replace", lambda region, choice: found.append(choice.spared) or replace(region, choice)
            )
            compiled(function)[0](a, b, c)
        return found

    assert spared(lambda a, b, c: torch.relu(a @ b) + c) == [1]
    assert spared(lambda a, b, c: ((y := torch.relu(a @ b)) @ c.t(), y.sum(0))) == [2]
    assert spared(lambda a, b, c: ((y := torch.relu(a @ b + c)).softmax(-1), y.sum(0))) == [1]  # the softmax's is left
