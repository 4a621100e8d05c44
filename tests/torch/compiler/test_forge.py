"""Kernels of what is fused: planned and compiled without a GPU, and refused where the model says that they lose."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.torch.compiler import models
from tests.torch.compiler.passed import compiled

from gemmsmith.torch.compiler import forge, fuse


@pytest.fixture
def regions(monkeypatch):
    """What the pass rewrites, recorded."""
    found = []

    def rewrite(region, choice):
        found.append((region, choice, forge.fused_plan(region, choice), forge.bare_plan(region)))
        return known(region, choice)

    known = fuse.replace
    monkeypatch.setattr(fuse, "replace", rewrite)
    return found


@pytest.mark.parametrize("name", ["llama", "classifier"])
def test_every_fused_product_of_a_step_has_a_kernel(name, regions):
    model, inputs = models.model(name, torch.bfloat16)
    forward, passed = compiled(model)
    models.trained(forward, model, inputs)
    assert len(regions) == len(passed.fused)
    for _, _, fused, bare in regions:
        assert fused.estimate > 0
        assert bare.binding.shape == fused.binding.shape
    largest = max((fused for _, _, fused, _ in regions), key=lambda x: len(x.binding.graph.nodes))
    assert not largest.resources.spill_stores


def test_products_that_would_take_longer_are_left_to_inductor(regions, monkeypatch):
    a, b = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    compiled(lambda a, b: torch.relu(a @ b))[0](a, b)
    ((region, choice, fused, bare),) = regions
    assert fused.estimate >= bare.estimate
    started = []
    monkeypatch.setattr(forge, "forge", started.append)
    worse = replace(choice, saved=-choice.beside, spared=0)
    assert "us longer, and spare other kernels 0.0 us" in forge.refusal(region, worse)
    assert not started
    assert choice.spared == 1
    assert forge.refusal(region, choice) == ""  # the launch of relu is spared
    assert started[0].source == fused.source


def test_forging_compiles_for_the_cache(regions):
    a, b = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    compiled(lambda a, b: (torch.relu(y := a @ b), y.sum(0)))[0](a, b)
    ((_, _, fused, _),) = regions
    futures = forge.forge(fused)
    assert len(futures) == 2  # the product's, and the second step of the sum
    assert futures[0].result().cubin == fused.compiled.cubin
