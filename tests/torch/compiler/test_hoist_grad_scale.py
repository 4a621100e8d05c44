"""The scalar gradient of a loss hoisted out of matmuls: values, gradients, and where they are computed."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.torch.compiler.passed import compiled
from torch.nn import functional

M, N, K = 24, 32, 16


@pytest.fixture(autouse=True)
def _seed(rng):
    torch.manual_seed(int(rng.integers(2**31)))


def trained(loss, inputs, dtype=torch.float64, factor=3.0):
    """Return gradients of factor * loss with the pass, after comparing them with torch's."""
    given = [x.to(dtype).requires_grad_() for x in inputs]
    actual, passed = compiled(loss)
    results = []
    for f in (actual, loss):
        value = f(*given)
        results.append([value, *torch.autograd.grad(value, given, torch.full_like(value, factor))])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, **({} if dtype == torch.float16 else {"rtol": 1e-11, "atol": 1e-11}))
    return passed


def drawn(*shapes):
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def scaled(passed):
    """Return how many matmuls of the backward pass are multiplied by the scalar."""
    return sum(written.startswith("x0 one") for written in passed.texts)


def squared(x, w, y):
    return functional.mse_loss(x @ w, y)


def masked(x, w, y):
    z = x @ w
    return torch.where(y > 0, functional.binary_cross_entropy_with_logits(z, y.sigmoid(), reduction="none"), 0.0).sum()


def with_a_bias(x, w, y):
    return (torch.tanh(x @ w + y.sum(0)) * y).sum() / 7


def several(x, w, y):
    z = (x @ w).sigmoid()
    return z.square().mean() - (z * y).sum()


@pytest.mark.parametrize("loss", [squared, masked, with_a_bias, several])
def test_the_gradient_is_computed_with_the_loss(loss):
    passed = trained(loss, drawn((M, K), (K, N), (M, N)))
    forward, _ = passed.graphs
    (written,) = [node.args[5] for node in forward.nodes if "gemmsmith" in str(node.target)]
    assert " all" in written
    assert scaled(passed) >= 1
    assert not any(str(node.target) == "aten.mm.default" for graph in passed.graphs for node in graph.nodes)


def test_two_products_one_after_the_other():
    passed = trained(
        lambda x, v, w, y: ((torch.relu(x @ v) @ w - y).abs()).mean(), drawn((M, K), (K, K), (K, N), (M, N))
    )
    assert scaled(passed) == 2  # of the second; the first's follow from these


def test_a_loss_whose_gradient_needs_a_whole_row_is_left_as_it_is():
    targets = torch.randint(N, (M,))
    passed = trained(lambda x, w: functional.cross_entropy(x @ w, targets), drawn((M, K), (K, N)))
    assert not scaled(passed)


def test_a_value_that_is_a_result_too():
    def loss(x, w, y):
        return (x @ w - y).square().mean()

    given = [x.requires_grad_() for x in drawn((M, K), (K, N), (M, N))]
    function = lambda x, w, y: (loss(x, w, y), (x @ w).sum(), x @ w)  # noqa: E731
    actual, _ = compiled(function)
    results = []
    for f in (actual, function):
        outputs = f(*given)
        tangents = [torch.cos(torch.arange(x.numel(), dtype=x.dtype)).reshape(x.shape) + 0.5 for x in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, given, tangents)])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


def test_fp16_is_left_to_loss_scaling():
    inputs = [x / 4 for x in drawn((M, K), (K, N), (M, N))]
    assert not scaled(trained(squared, inputs, torch.float16))


class Floored(torch.autograd.Function):
    """Its gradient is no multiple of the upstream gradient."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return torch.div(g, 0.01, rounding_mode="floor")


@pytest.mark.parametrize("function", [Floored.apply, lambda y: functools.reduce(lambda y, _: y * 1.001, range(900), y)])
def test_what_is_not_linear_and_long_chains(function):
    given = [x.requires_grad_() for x in drawn((M, K), (K, N))]
    plain = lambda x, w: function(torch.relu(x @ w)).sum()  # noqa: E731
    results = [torch.autograd.grad(f(*given) * 2.503, given) for f in (compiled(plain)[0], plain)]
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)
