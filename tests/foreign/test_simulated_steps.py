"""The kernels of a forward and a backward pass, as they are launched on a GPU, in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from tests.foreign import comparison

import gemmsmith

torch = pytest.importorskip("torch")
gt = pytest.importorskip("gemmsmith.torch")
ops = pytest.importorskip("gemmsmith.torch.ops")
modes = pytest.importorskip("torch.utils._python_dispatch")
F = torch.nn.functional
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("poisoned")]

M, K, N = 41, 40, 48
same_gradients = partial(comparison.same_gradients, backend="sim", of_gradients=4)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the epilogues of the kernels that ran."""
    ran: list[str] = []

    class Simulated(modes.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace != "gemmsmith":
                return func(*args, **(kwargs or {}))
            ran.append(next(x for x in args if isinstance(x, str)))
            return ops._cuda_kernel(*args)

    run_cached = ops.run_cached
    monkeypatch.setattr(ops, "run_cached", lambda request: run_cached(request._replace(backend="sim")))
    monkeypatch.setattr(ops.fallback, "kernels_unsupported", lambda device: False)
    with Simulated():
        yield ran


def drawn(*shape: int, by: float = 1.0) -> Any:
    return (torch.randn(shape) * by).bfloat16().requires_grad_()


def gelu(acc: Any, bias: Any) -> Any:
    return F.gelu(acc + bias, approximate="tanh")


def relu_sq(acc: Any, bias: Any) -> Any:
    return F.relu(acc + bias).square()


def with_sums(acc: Any, bias: Any) -> Any:
    z = F.silu(acc + bias)
    return z, z.square().sum(-1)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("function", [gelu, relu_sq, with_sums])
def test_linear(function: Callable[..., Any], recompute: bool, kernels: list[str]) -> None:
    def fused(x: Any, w: Any, bias: Any) -> Any:
        return gt.gemm(x, w.mT, epilogue=function, recompute=recompute, bias=bias)

    inputs = drawn(2, M, K), drawn(N, K, by=K**-0.5), drawn(N)
    same_gradients(fused, lambda x, w, bias: function(x @ w.mT, bias), *inputs)
    assert len(kernels) >= 3


@pytest.mark.parametrize("recompute", [False, True])
def test_gated(recompute: bool, kernels: list[str]) -> None:
    def swiglu(acc: Any) -> Any:
        gate, up = gemmsmith.deinterleave(acc)
        return F.silu(gate) * up

    def fused(x: Any, w: Any) -> Any:
        return gt.gemm(x, gemmsmith.interleave(*w.mT.chunk(2, -1)), epilogue=swiglu, recompute=recompute)

    def plain(x: Any, w: Any) -> Any:
        gate, up = (x @ w.mT).chunk(2, -1)
        return F.silu(gate) * up

    same_gradients(fused, plain, drawn(M, K), drawn(2 * N, K, by=K**-0.5))
    assert len(kernels) >= 3


def test_mlp(kernels: list[str]) -> None:
    mlp = gt.FusedMLP(K, N, "swiglu", dtype=torch.bfloat16)

    def fused(x: Any, *weights: Any) -> Any:
        names = ("gate.weight", "up.weight", "down.weight")
        return torch.func.functional_call(mlp, dict(zip(names, weights, strict=True)), (x,))

    def plain(x: Any, gate: Any, up: Any, down: Any) -> Any:
        return (F.silu(x @ gate.mT) * (x @ up.mT)) @ down.mT

    weights = drawn(N, K, by=K**-0.5), drawn(N, K, by=K**-0.5), drawn(K, N, by=N**-0.5)
    same_gradients(fused, plain, drawn(M, K), *weights, roundings=3, of_gradients=6)
    assert len(kernels) >= 8


@pytest.mark.parametrize(("reduction", "low_memory"), [("mean", False), ("none", False), ("mean", True)])
def test_loss(reduction: str, low_memory: bool, kernels: list[str]) -> None:
    classes, target = 123, torch.randint(123, (M,))
    target[::5] = -100
    module = gt.FusedLinearCrossEntropy(K, classes, -100, reduction, 2, low_memory, dtype=torch.bfloat16)

    def fused(x: Any, w: Any) -> Any:
        return torch.func.functional_call(module, {"weight": w}, (x, target))

    def plain(x: Any, w: Any) -> Any:
        return F.cross_entropy(x @ w.mT, target, reduction=reduction)

    in_fp16 = 2**13 if low_memory else 0  # units of fp32
    same_gradients(fused, plain, drawn(M, K), drawn(classes, K, by=2 * K**-0.5), roundings=in_fp16)
    assert len(kernels) >= 3
