"""FusedMLP with a gate in 16 bits: gate and up are one product, forward and backward against float64."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gemmsmith.torch import FusedMLP  # noqa: E402
from gemmsmith.torch.mlp import gemm_then_linear as module  # noqa: E402

ACTIVATIONS = {
    "swiglu": torch.nn.functional.silu,
    "geglu": torch.nn.functional.gelu,
    "geglu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "reglu": torch.nn.functional.relu,
}


def layer_of(activation: str, dtype: Any, dim: int = 24, hidden: int = 40, recompute: bool = False) -> Any:
    layer = FusedMLP(dim, hidden, activation, dtype=dtype, recompute=recompute)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=p.shape[1] ** -0.5)
    return layer


def exact(layer: Any, activation: str, x: Any) -> tuple[Any, list[Any]]:
    """Return the layer's output of x, and its parameters, in float64."""
    gate, up, down = (
        w.detach().double().requires_grad_() for w in (layer.gate.weight, layer.up.weight, layer.down.weight)
    )
    return (ACTIVATIONS[activation](x @ gate.mT) * (x @ up.mT)) @ down.mT, [gate, up, down]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("recompute", [False, True])
def test_results_and_gradients(recompute: bool, activation: str, dtype: Any) -> None:
    layer, x = layer_of(activation, dtype, recompute=recompute), torch.randn(3, 10, 24).to(dtype).requires_grad_()
    y, g = layer(x), torch.randn(3, 10, 24).to(dtype)
    y.backward(g)
    x64 = x.detach().double().requires_grad_()
    want, parameters = exact(layer, activation, x64)
    want.backward(g.double())
    tolerance = 2.0**-5 if dtype == torch.bfloat16 else 2.0**-8
    pairs = [(y, want), (x.grad, x64.grad)]
    pairs += [(p.weight.grad, q.grad) for p, q in zip((layer.gate, layer.up, layer.down), parameters, strict=True)]
    for got, expected in pairs:
        assert (got.double() - expected).norm() <= tolerance * expected.norm()
    with torch.no_grad():
        assert torch.equal(layer(x), y)


@pytest.mark.parametrize("frozen", ["gate", "up", "down", "input"])
def test_what_needs_no_gradient_has_none(frozen: str) -> None:
    layer, x = layer_of("swiglu", torch.bfloat16), torch.randn(16, 24, dtype=torch.bfloat16)
    x.requires_grad_(frozen != "input")
    if frozen != "input":
        getattr(layer, frozen).weight.requires_grad_(False)
    layer(x).sum().backward()
    for name in ("gate", "up", "down"):
        assert (getattr(layer, name).weight.grad is None) == (name == frozen)
    assert (x.grad is None) == (frozen == "input")


def test_no_gradient_is_copied() -> None:
    """Autograd keeps a gradient whose strides are its parameter's."""
    layer = layer_of("swiglu", torch.bfloat16)
    returned: dict[str, int] = {}
    for name, p in layer.named_parameters():
        p.register_hook(lambda g, name=name: returned.update({name: g.data_ptr()}))
    layer(torch.randn(16, 24, dtype=torch.bfloat16)).sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad.data_ptr() == returned[name], name


@pytest.mark.parametrize("recompute", [False, True])
def test_it_is_compiled_as_one_graph(recompute: bool) -> None:
    layer = layer_of("swiglu", torch.bfloat16, recompute=recompute)
    x = torch.randn(16, 24, dtype=torch.bfloat16)
    want = layer(x)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(got, want)
    got.sum().backward()
    compiled = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer(x).sum().backward()
    for p, q in zip(layer.parameters(), compiled, strict=True):
        assert torch.equal(p.grad, q)


def test_autocast_and_one_row() -> None:
    layer, x = layer_of("swiglu", torch.float32), torch.randn(24)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.shape == (24,)
    assert y.dtype == torch.bfloat16
    want, _ = exact(layer, "swiglu", x.double())
    assert (y.double() - want).norm() <= 2.0**-5 * want.norm()


def test_second_derivatives_are_refused() -> None:
    layer, x = layer_of("swiglu", torch.bfloat16), torch.randn(16, 24, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(Exception, match="create_graph: got True"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_both_are_one_product(monkeypatch: Any) -> None:
    seen: list[Any] = []
    call_op = module.call_op
    monkeypatch.setattr(module, "call_op", lambda *args: seen.append(args[2]) or call_op(*args))
    layer_of("swiglu", torch.bfloat16)(torch.randn(16, 24, dtype=torch.bfloat16))
    assert [isinstance(b, tuple) for b in seen] == [True, False]
