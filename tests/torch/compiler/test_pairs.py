"""Matmuls of one input, such as gate and up, that one kernel computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.torch.compiler.passed import compiled
from torch import nn
from torch.nn import functional as F  # noqa: N812


class Gated(nn.Module):
    def __init__(self, dim: int, hidden: int, activation: Any = F.silu, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, hidden, bias) for _ in range(2))
        self.down, self.activation = nn.Linear(hidden, dim, False), activation

    def forward(self, x: Any) -> Any:
        return self.down(self.activation(self.gate(x)) * self.up(x))


def trained(forward: Any, module: nn.Module, x: Any) -> list[Any]:
    for t in (x, *module.parameters()):
        t.grad = None
    y = forward(x)
    (y.float() ** 2).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("activation", [F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.relu])
@pytest.mark.parametrize("dynamic", [False, True])
def test_gate_and_up_are_one_kernel(activation: Any, dynamic: bool) -> None:
    torch.manual_seed(0)
    model, x = Gated(64, 128, activation).bfloat16(), torch.randn(48, 64).bfloat16().requires_grad_()
    wide = Gated(64, 128, activation).double()
    wide.load_state_dict(model.state_dict())
    exact = trained(wide, wide, x.detach().double().requires_grad_())
    plain = trained(model, model, x)
    forward, passed = compiled(model, dynamic=dynamic)
    for got, eager, want in zip(trained(forward, model, x), plain, exact, strict=True):
        assert (got.double() - want).norm() <= 1.25 * (eager.double() - want).norm() + 1e-3 * want.norm()
    pairs = [x for x in passed.fused if ", " in x.matmul]
    assert len(pairs) == 1
    assert len(passed.graphs[0].find_nodes(op="call_function", target=torch.ops.aten.mm.default)) == 1  # down's
    with torch.no_grad():
        forward, passed = compiled(model, dynamic=dynamic)
        assert (forward(x).double() - exact[0]).norm() <= 1.25 * (plain[0].double() - exact[0]).norm()
    assert [", " in x.matmul for x in passed.fused] == [True]


def test_what_is_no_pair() -> None:
    """Other inputs, other shapes, and results that nothing reads together, stay products of their own."""
    torch.manual_seed(0)
    x, y = (torch.randn(48, 64).bfloat16() for _ in range(2))
    v, w = (torch.randn(128, 64).bfloat16() for _ in range(2))
    odd, rows = torch.randn(124, 64).bfloat16(), torch.randn(64, 128).bfloat16()
    functions = [
        lambda: F.silu(x @ v.T) * (y @ w.T),
        lambda: (F.silu(x @ v.T), (x @ w.T).relu()),
        lambda: F.silu(x @ odd.T) * (x @ (odd + 1).T),
        lambda: F.silu(x @ rows) * (x @ (rows + 1)),
        lambda: F.silu(x.float() @ v.float().T) * (x.float() @ w.float().T),
    ]
    for function in functions:
        want = function()
        forward, passed = compiled(function)
        assert not any(", " in x.matmul for x in passed.outcomes)
        got = forward()
        for a, b in zip(*((t if isinstance(t, tuple) else (t,)) for t in (got, want)), strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


def test_a_third_of_one_input() -> None:
    """Two of three are a pair; the third reads the result."""
    torch.manual_seed(0)
    x, (u, v, w) = torch.randn(48, 64).bfloat16(), torch.randn(3, 128, 64).bfloat16()

    def function() -> Any:
        return F.silu(x @ u.T) * (x @ v.T) + (x @ w.T)

    want = function()
    forward, passed = compiled(function)
    torch.testing.assert_close(forward(), want, rtol=0.02, atol=0.05)
    assert sum(", " in x.matmul for x in passed.fused) == 1
