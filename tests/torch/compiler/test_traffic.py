"""The model of Inductor's kernels: correct after each change of the graph, in time linear in the graph's size."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch
from tests.torch.compiler import models
from tests.torch.compiler.passed import compiled

from gemmsmith.torch.compiler import fuse, nodes
from gemmsmith.torch.compiler.fuse import insert_fused_op
from gemmsmith.torch.compiler.traffic import InductorTraffic


def step(model, inputs):
    forward, passed = compiled(model)
    models.trained(forward, model, inputs)
    return passed


@pytest.mark.parametrize("name", ["llama", "gpt", "classifier"])
def test_update_matches_a_new_model(name, monkeypatch):
    known = InductorTraffic.update
    checked = []

    def update(self, changed):
        known(self, changed)
        graph = next(iter(changed)).graph
        fresh = InductorTraffic.__new__(InductorTraffic)
        fresh.opaque_depths, fresh.materialized, fresh.work = dict(self.opaque_depths), set(), defaultdict(set)
        fresh.materialized_sources, fresh.reader_kernels, fresh.must_materialize = {}, {}, {}
        known(fresh, graph.nodes)
        for node in graph.nodes:
            assert self.must_materialize[node] == fresh.must_materialize[node]
            assert self.reader_kernels[node] == fresh.reader_kernels[node]
            assert len(self.materialized_sources[node]) == len(fresh.materialized_sources[node])
            assert (node in self.materialized) == (node in fresh.materialized)
            assert (node in self.work[self.kernel(node)]) == (node in fresh.work[self.kernel(node)])
        checked.append(graph)

    monkeypatch.setattr(InductorTraffic, "update", update)
    passed = step(*models.model(name, torch.bfloat16))
    assert len(checked) == len(passed.fused) + len(passed.graphs)


def test_twice_as_many_layers_are_twice_the_work(monkeypatch):
    known, calls = nodes._target_info, []
    monkeypatch.setattr(nodes, "_target_info", lambda node: calls.append(None) or known(node))
    work = []
    for layers in (2, 4, 6):
        calls.clear()
        step(models.Llama(layers=layers).bfloat16(), (torch.randint(96, (2, 16)), torch.randint(96, (2, 16))))
        work.append(len(calls))
    first, second = (b - a for a, b in itertools.pairwise(work))
    assert second < 1.05 * first


def test_kernels_saved():
    a, b, c = torch.randn(24, 16), torch.randn(16, 32), torch.randn(24, 32)

    def kernels_saved(function):
        savings = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                fuse,
                "insert_fused_op",
                lambda region, candidate: savings.append(candidate.kernels_saved) or insert_fused_op(region, candidate),
            )
            compiled(function)[0](a, b, c)
        return savings

    assert kernels_saved(lambda a, b, c: torch.relu(a @ b) + c) == [1]
    assert kernels_saved(lambda a, b, c: ((y := torch.relu(a @ b)) @ c.t(), y.sum(0))) == [2]
    assert kernels_saved(lambda a, b, c: ((y := torch.relu(a @ b + c)).softmax(-1), y.sum(0))) == [
        1
    ]  # the softmax's is left
