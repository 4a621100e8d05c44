"""The passes in Inductor, as options and as a backend, and its caches."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from tests.torch.twice import assert_the_second_finds_both_graphs
from torch._dynamo.backends import registry
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import gemmsmith.torch as gt
from gemmsmith.core.errors import ArgumentError
from gemmsmith.torch.compiler import backend
from gemmsmith.tuning import measured_configs

GROUP = "torch_dynamo_backends"


@pytest.fixture(autouse=True)
def _fresh():
    with fresh_cache():
        torch._dynamo.reset()
        counters.clear()
        yield


@pytest.fixture
def installed(monkeypatch):
    """Return the backend that pyproject.toml names."""
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    ((name, value),) = re.findall(rf'\[project.entry-points.{GROUP}\]\n(\w+) = "(.*)"', project)
    monkeypatch.setitem(registry._BACKENDS, name, EntryPoint(name, value, GROUP))
    yield name
    registry._COMPILER_FNS.pop(name, None)


def function(x, w, bias):
    return torch.relu(x @ w + bias)


@pytest.fixture
def inputs():
    return torch.randn(24, 16), torch.randn(16, 32), torch.randn(32)


@pytest.mark.parametrize("more", [{}, {"mode": "max-autotune-no-cudagraphs"}, {"options": {"epilogue_fusion": False}}])
def test_the_backend_by_its_name(installed, inputs, more):
    compiled = torch.compile(function, backend=installed, **more)
    actual, (code,) = torch._inductor.utils.run_and_get_code(compiled, *inputs)
    torch.testing.assert_close(actual, function(*inputs))
    assert "gemmsmith.gemm_1" in code


def test_options_for_inductor_and_a_second_graph_from_its_cache(inputs):
    for hits in (0, 1):
        torch._dynamo.reset()
        compiled = torch.compile(function, options=gt.options(epilogue_fusion=True), fullgraph=True)
        torch.testing.assert_close(compiled(*inputs), function(*inputs))
        assert counters["inductor"]["fxgraph_cache_hit"] == hits
        assert counters["inductor"]["fxgraph_cache_bypass"] == 0


def test_a_graph_that_was_chosen_by_the_rule_is_not_found_with_max_autotune(inputs):
    for more in ({}, {"max_autotune_gemm": True}):
        torch._dynamo.reset()
        torch.compile(function, options=gt.options(**more), fullgraph=True)(*inputs)
        assert counters["inductor"]["fxgraph_cache_hit"] == 0


def test_a_pass_of_the_users_is_not_replaced_in_silence():
    with pytest.raises(ArgumentError, match=r"post_grad_custom_pre_pass: got .*; leave it out"):
        gt.options(post_grad_custom_pre_pass=lambda graph: None)


def test_the_uuid_changes_with_what_the_pass_depends_on(monkeypatch):
    first = backend.PostGradPass().uuid()
    assert backend.PostGradPass().uuid() == first
    others = (backend, "_package_digest", "b"), (backend, "_gpus", ["H200"]), (measured_configs, "state", b"a config")
    for module, name, other in others:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda other=other: other)
            assert backend.PostGradPass().uuid() != first
    assert backend.PostGradPass(autotune=True).uuid() != first


def test_the_uuid_covers_the_packages_sources(monkeypatch, tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "one.py").write_text("1")
    (tmp_path / "table.json").write_text("{}")
    monkeypatch.setattr(backend.resources, "files", lambda _: tmp_path)
    digests = [backend._package_digest.__wrapped__()]
    for file, written in (("part/one.py", "2"), ("table.json", "[]"), ("part/two.py", "")):
        (tmp_path / file).write_text(written)
        digests.append(backend._package_digest.__wrapped__())
    monkeypatch.setattr(backend.gemmsmith, "__version__", "0.0.0")
    assert len({*digests, backend._package_digest.__wrapped__()}) == 5


def test_another_process_finds_the_fused_graphs(tmp_path):
    program = """
import torch, gemmsmith.torch as gt
a, b = torch.ones(24, 16, requires_grad=True), torch.ones(16, 32)
step = torch.compile(lambda a, b: torch.relu(a @ b) @ b.t(), options=gt.options(), fullgraph=True)
step(a, b).sum().backward()
"""
    assert_the_second_finds_both_graphs(program, tmp_path)
