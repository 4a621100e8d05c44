"""Training steps with the pass against plain PyTorch: in float64, to its precision, and in bf16."""

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


def close(actual, expected, rtol):
    assert actual.keys() == expected.keys()
    for name in expected:
        error, size = (actual[name].double() - expected[name].double()).norm(), expected[name].double().norm()
        assert error <= rtol * size, f"{name}: {error / size:.3g}"


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_in_float64_is_torchs(name):
    model, inputs = models.model(name, torch.float64)
    expected = models.trained(model, model, inputs)
    forward, passed = compiled(model)
    close(models.trained(forward, model, inputs), expected, 1e-12)
    assert passed.fused


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_with_any_batch(name):
    model, inputs = models.model(name, torch.float64)
    forward, passed = compiled(model)
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0)
    for given in (inputs, tuple(torch.cat([x, x[1:]]) for x in inputs)):
        close(models.trained(forward, model, given), models.trained(model, model, given), 1e-12)
    assert len(passed.graphs) == 2
    assert passed.fused


@pytest.mark.parametrize(("name", "products", "fused"), [("llama", 31, 13), ("gpt", 15, 7), ("classifier", 5, 3)])
def test_a_training_step_in_bf16_is_as_near_to_float64_as_torchs(name, products, fused):
    """Of llama's 33 matmuls two pairs, gate and up of each layer, are one kernel; four others are fused in forward.

    The first layer's output is not: it is stored for backward in addition to its sum with the residual, so that as many
    bytes move either way. Seven are fused in backward, none of which is one of the 11 gradients of weights.
    """
    model, inputs = models.model(name, torch.bfloat16)
    exact = copy.deepcopy(model).double()
    exact_inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    reference = models.trained(exact, exact, exact_inputs)
    plain = models.trained(model, model, inputs)
    bound = max(float((plain[x].double() - y).norm() / y.norm()) for x, y in reference.items())
    forward, passed = compiled(model)
    close(models.trained(forward, model, inputs), reference, 1.25 * bound)
    assert len(passed.outcomes) == products
    assert len(passed.fused) >= fused


@pytest.mark.parametrize("name", MODELS)
def test_a_step_that_is_one_graph(name, monkeypatch):
    monkeypatch.setattr(models, "attention", lambda q, k, v: (q @ k.mT / 4).softmax(-1) @ v)  # has a second derivative
    model, inputs = models.model(name, torch.float64)
    expected = models.trained(model, model, inputs)
    step, passed = compiled(models.whole_step(model))
    close(step({n: p.detach() for n, p in model.named_parameters()}, inputs), expected, 1e-12)
    assert len(passed.graphs) == 1
    if name == "classifier":  # the mean and the gradient of the loss are one kernel
        assert any("mean all" in text and "out1" in text for text in passed.texts)


@pytest.mark.parametrize("name", ["gpt", "classifier"])
def test_fifty_steps_of_training_lose_as_torchs_and_inductors_do(name):
    model, inputs = models.model(name, torch.float32)
    losses = []
    for compile in (lambda of: compiled(of)[0], torch.compile, lambda of: of):
        of = copy.deepcopy(model)
        forward = compile(of)
        optimizer = torch.optim.Adam(of.parameters(), lr=0.01)
        losses.append([])
        for _ in range(50):
            losses[-1].append(models.trained(forward, of, inputs)["loss"])
            optimizer.step()
    actual, inductors, expected = (torch.stack(x) for x in losses)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=0)
    torch.testing.assert_close(actual, inductors, rtol=1e-3, atol=0)
    assert expected[-1] < 0.9 * expected[0]
