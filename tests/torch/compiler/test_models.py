"""Training steps with the pass against plain torch: in float64, where they agree to its precision, and in bf16."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.torch.compiler import models
from tests.torch.compiler.passed import compiled

MODELS = ["llama", "gpt", "classifier"]


@pytest.fixture(autouse=True)
def _seed(rng):
    torch.manual_seed(int(rng.integers(2**31)))


def close(got, want, rtol):
    assert got.keys() == want.keys()
    for name in want:
        error, size = (got[name].double() - want[name].double()).norm(), want[name].double().norm()
        assert error <= rtol * size, f"{name}: {error / size:.3g}"


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_in_float64_is_torchs(name):
    model, inputs = models.model(name, torch.float64)
    want = models.trained(model, model, inputs)
    forward, passed = compiled(model)
    close(models.trained(forward, model, inputs), want, 1e-12)
    assert passed.fused


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_in_bf16_is_as_near_to_float64_as_torchs(name):
    model, inputs = models.model(name, torch.bfloat16)
    exact = copy.deepcopy(model).double()
    exact_inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    reference = models.trained(exact, exact, exact_inputs)
    plain = models.trained(model, model, inputs)
    bound = max(float((plain[x].double() - y).norm() / y.norm()) for x, y in reference.items())
    forward, _ = compiled(model)
    close(models.trained(forward, model, inputs), reference, 1.25 * bound)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_that_is_one_graph(name, monkeypatch):
    monkeypatch.setattr(models, "attention", lambda q, k, v: (q @ k.mT / 4).softmax(-1) @ v)  # has a second derivative
    model, inputs = models.model(name, torch.float64)
    want = models.trained(model, model, inputs)
    step, passed = compiled(models.whole_step(model))
    close(step({n: p.detach() for n, p in model.named_parameters()}, inputs), want, 1e-12)
    assert len(passed.graphs) == 1


def test_what_is_fused_of_the_33_products_of_a_llama_like_step():
    """Six going forward: not the first layer's output, whose sum with the residual and which itself are stored for
    the backward, so that as many bytes move either way. Seven going backward: none of 11 gradients of weights."""
    model, inputs = models.model("llama", torch.bfloat16)
    forward, passed = compiled(model)
    models.trained(forward, model, inputs)
    assert len(passed.outcomes) == 33
    assert len(passed.fused) >= 13


def test_the_mean_and_the_gradient_of_a_classifiers_loss_are_one_kernel():
    model, inputs = models.model("classifier", torch.bfloat16)
    step, passed = compiled(models.whole_step(model))
    step({n: p.detach() for n, p in model.named_parameters()}, inputs)
    assert any("mean all" in text and "out1" in text for text in passed.texts)
