"""Models of gemmsmith's own modules, whose matmuls the pass extends."""

from __future__ import annotations

import torch
from tests.torch.compiler import models
from tests.torch.compiler.passed import compiled
from torch import nn

import gemmsmith.torch as gt


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = gt.FusedLinear(16, 32, activation="gelu"), gt.FusedLinear(32, 16, activation=None)
        self.norm, self.mlp = models.RMSNorm(16), gt.FusedMLP(16, 32, activation="swiglu")

    def forward(self, x):
        x = x + self.two(self.one(x)) * 0.5
        x = x + self.mlp(self.norm(x))
        return torch.log_softmax(x, -1)[..., 0].mean()


def test_what_follows_modules_is_fused_with_their_products(rng):
    torch.manual_seed(int(rng.integers(2**31)))
    model, inputs = Layer().double(), (torch.randn(2, 12, 16, dtype=torch.float64),)
    expected = models.trained(model, model, inputs)
    forward, passed = compiled(model)
    actual = models.trained(forward, model, inputs)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-11, atol=1e-11)
    assert ["add" in x.operations or "fma" in x.operations for x in passed.fused[:2]] == [True, True]  # the residuals
