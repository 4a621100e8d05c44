"""The pass on random functions: their results and gradients agree with torch's in float64."""

from __future__ import annotations

import random

import pytest
import torch
from tests.torch.compiler.passed import compiled
from torch.nn import functional

ROWS, K, N = (2, 6), 8, 16
UNARY = [
    torch.relu, torch.sigmoid, torch.tanh, torch.abs, torch.neg, torch.square, functional.silu, functional.gelu,
    functional.softplus, lambda x: x.clamp(-1, 1), lambda x: x * 0.5, lambda x: torch.exp(-x.abs()),
    lambda x: functional.leaky_relu(x, 0.1), lambda x: x.softmax(-1), lambda x: x.log_softmax(-1),
    lambda x: x / (1 + x.square().mean(-1, keepdim=True)).sqrt(), lambda x: x.flatten(0, -2).reshape(x.shape),
    lambda x: functional.layer_norm(x, x.shape[-1:]), lambda x: x.flip(-1), lambda x: x.clone(),
    lambda x: x.clone().mul_(2).relu_(), lambda x: x.mT.contiguous().mT, lambda x: x * torch.arange(N),
    lambda x: x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool).tril(), 0.5), lambda x: x - x.detach(),
    lambda x: torch.cat(x.chunk(2, -1)[::-1], -1), lambda x: x @ (x.mT @ x) / N,
    lambda x: torch.addmm(x[0, 0], x.flatten(0, 1), x.new_ones(N, N) / N, beta=2, alpha=0.5).view_as(x),
    lambda x: x.transpose(0, 1).reshape(x.shape),
]  # fmt: skip
BINARY = [
    torch.add, torch.sub, torch.mul, torch.maximum, lambda x, y: torch.where(x > y, x, y * 2),
    lambda x, y: x / (2 + y.abs()), lambda x, y: torch.where(y > 0, x, 0.0), lambda x, y: x + (x > y),
]  # fmt: skip
REDUCTIONS = [
    lambda x: x.sum(-1), lambda x: x.sum((0, 1)), lambda x: x.mean(), lambda x: x.amax(-1, keepdim=True),
    lambda x: x.logsumexp(-1), lambda x: x.flatten(0, 1).amin(0), lambda x: x.mean(0), lambda x: x.sum(1, keepdim=True),
]  # fmt: skip
SHAPES = [(N,), (*ROWS, 1), (), (*ROWS, N), (1, N), (ROWS[1], N), (ROWS[0], 1, 1), (ROWS[0], 1, N), (1, 1)]


def drawn(r, inputs):
    """Return a random function of the inputs, to which it adds operands.

    Its steps are on values of shape (*ROWS, N); some of these and some reductions are returned.
    """
    steps = []
    count = 1
    for _ in range(r.randint(1, 7)):
        kind = r.choice(["unary", "operand", "operand", "values", "product"])
        x = r.randrange(count)
        if kind == "unary":
            f = r.choice(UNARY)
            steps.append(lambda given, values, f=f, x=x: f(values[x]))
        elif kind == "values":
            f, y = r.choice(BINARY), r.randrange(count)
            steps.append(lambda given, values, f=f, x=x, y=y: f(values[x], values[y]))
        elif kind == "operand":
            f, before = r.choice(BINARY), r.choice([lambda x: x, torch.cos, torch.sigmoid])
            inputs.append(torch.randn(r.choice(SHAPES), dtype=torch.float64))
            i = len(inputs) - 1
            steps.append(lambda given, values, f=f, b=before, x=x, i=i: f(values[x], b(given[i])))
        else:
            inputs.append(torch.randn(N, N, dtype=torch.float64) / 4)
            i = len(inputs) - 1
            steps.append(lambda given, values, x=x, i=i: values[x] @ given[i])
        count += 1
    saved = sorted({count - 1, *(r.randrange(count) for _ in range(r.randint(0, 2)))})
    reduced = [(r.choice(REDUCTIONS), r.randrange(count)) for _ in range(r.randint(0, 2))]

    def function(*given):
        values = [functional.linear(given[0], given[1], given[2])]
        for step in steps:
            values.append(step(given, values))
        return [values[i] for i in saved] + [f(values[i]) for f, i in reduced]

    return function


@pytest.mark.parametrize("_", range(12))
def test_a_random_function(_, rng):
    seed = int(rng.integers(2**31))
    torch.manual_seed(seed)
    shapes = [(*ROWS, K), (N, K), (N,)]
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    function = drawn(random.Random(seed), inputs)
    for x in inputs:
        x.requires_grad_()
    actual, _passed = compiled(function)
    results = []
    for f in (actual, function):
        outputs = f(*inputs)
        numbers = [torch.cos(torch.arange(x.numel(), dtype=x.dtype)).reshape(x.shape) for x in outputs]
        # AOTAutograd copies tangents of other strides, which gradients then have
        tangents = [torch.empty_like(x).copy_(y) for x, y in zip(outputs, numbers, strict=True)]
        gradients = torch.autograd.grad(outputs, inputs, tangents, allow_unused=True)
        results.append([*outputs, *(x for x in gradients if x is not None)])
    for x, y in zip(*results, strict=True):
        assert x.shape == y.shape
        assert x.stride() == y.stride()
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9, equal_nan=True)
