"""`b` as a tuple of two tensors in gemmsmith.torch: results and gradients are those of the interleaved tensor."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gemmsmith  # noqa: E402
import gemmsmith.torch as gt  # noqa: E402
from gemmsmith import ArgumentError  # noqa: E402

OFFSETS = torch.tensor([3, 3, 10], dtype=torch.int32)


def swiglu(acc: Any, bias: Any) -> Any:
    gate, up = gemmsmith.deinterleave(acc)
    return gate.silu() * up + bias


def leaf(*shape: int) -> Any:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_results_and_gradients(groups: bool, is_compiled: bool) -> None:
    leading = (3,) if groups else ()
    a, gate, up, bias = leaf(12, 20), leaf(*leading, 20, 16), leaf(*leading, 20, 16), leaf(16)
    operands = (a, gate, up, bias)
    function = gt.grouped_gemm if groups else gt.gemm
    options = {"offsets": OFFSETS} if groups else {}

    def step(a: Any, gate: Any, up: Any, bias: Any) -> Any:
        return function(a, (gate, up), epilogue=swiglu, bias=bias, **options)

    run = torch.compile(step, backend="aot_eager", fullgraph=True) if is_compiled else step
    got = run(*operands)
    want = function(a, gemmsmith.interleave(gate, up), epilogue=swiglu, bias=bias, **options)
    torch.testing.assert_close(got, want)
    g = torch.randn_like(got)
    for x, y in zip(*(torch.autograd.grad(y, operands, g) for y in (got, want)), strict=True):
        torch.testing.assert_close(x, y)


def test_what_is_refused() -> None:
    a, b = torch.randn(12, 20), torch.randn(20, 16)
    with pytest.raises(ArgumentError, match=r"b: got a tuple of \(20, 16\), \(20, 8\); use one tensor, or two"):
        gt.gemm(a, (b, b[:, :8]))
    with pytest.raises(ArgumentError, match=r"b: got a tuple of \(20, 16\); use one tensor"):
        gt.gemm(a, (b,))
    with pytest.raises(ArgumentError, match="b: got two tensors of 12 columns; use a multiple of 8"):
        gt.gemm(a, (b[:, :12], b[:, 4:]))
    scales = torch.ones(1, 1), torch.ones(1, 1)
    for weights in (b, (b, b)):
        with pytest.raises(
            ArgumentError, match="scale_b: got a tuple; use one with a tuple b, and block scales with no_gr"
        ):
            gt.gemm(a, weights, scale_b=scales)


def test_autocast() -> None:
    a, gate, up = torch.randn(12, 24), torch.randn(24, 16), torch.randn(24, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y = gt.gemm(a, (gate, up))
    assert y.dtype == torch.bfloat16
    want = a.double() @ gemmsmith.interleave(gate, up).double()
    assert (y.double() - want).norm() <= 2.0**-6 * want.norm()
