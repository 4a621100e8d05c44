"""Kernels of fused matmuls: planned and compiled without a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.torch.compiler import models
from tests.torch.compiler.passed import compiled

from gemmsmith import Plan
from gemmsmith.torch.compiler import fuse, kernel_choice


@pytest.fixture
def regions(monkeypatch):
    """Record what the pass rewrites."""
    recorded = []

    def record(region, candidate):
        fused = kernel_choice.plan_operator(region.epilogue, candidate.outputs)
        unfused = kernel_choice.plan_operator(*kernel_choice.unfused_epilogue(region))
        recorded.append((region, candidate, fused, unfused))
        return known(region, candidate)

    known = fuse.insert_fused_op
    monkeypatch.setattr(fuse, "insert_fused_op", record)
    return recorded


@pytest.mark.parametrize("name", ["llama", "classifier"])
def test_every_fused_matmul_of_a_step_has_a_kernel(name, regions):
    model, inputs = models.model(name, torch.bfloat16)
    forward, passed = compiled(model)
    models.trained(forward, model, inputs)
    assert len(regions) == len(passed.fused)
    for region, _, fused, unfused in regions:
        assert Plan(fused).estimated_us > 0
        m, n = unfused.binding.shape
        assert fused.binding.shape == (m, n * len(region.matmul.nodes))
    largest = max((fused for _, _, fused, _ in regions), key=lambda x: len(x.binding.graph.nodes))
    assert not largest.compiled.resources.spill_store_bytes


def test_compile_async_fills_the_cache(regions):
    a, b = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    compiled(lambda a, b: (torch.relu(y := a @ b), y.sum(0)))[0](a, b)
    ((_, _, fused, _),) = regions
    futures = kernel_choice.compile_async(fused)
    assert len(futures) == 2  # the GEMM's, and the second step of the sum
    assert futures[0].result().cubin == fused.compiled.cubin
