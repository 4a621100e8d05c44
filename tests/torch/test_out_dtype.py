"""out_dtype of gt.gemm and gt.grouped_gemm: results and gradients, eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gemmsmith.torch as gt
from gemmsmith import ArgumentError

M, N, K = 24, 40, 32
ENDS = torch.tensor([8, 8, 20, M], dtype=torch.int32)


def tensors(dtype: torch.dtype, groups: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b and a bias, which require gradients."""
    shape = (groups, K, N) if groups else (K, N)
    made = [torch.randn(s, dtype=torch.float64) for s in ((M, K), shape, (N,))]
    return tuple(x.to(dtype).requires_grad_() for x in made)  # type: ignore[return-value]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """In float64, of groups too."""
    a, b = a.double(), b.double()
    if b.dim() == 2:
        return a @ b
    ends = [0, *ENDS.tolist()]
    return torch.cat([a[i:j] @ x for i, j, x in zip(ends, ends[1:], b, strict=False)])


def bias_silu(acc: Any, bias: Any) -> Any:
    return torch.nn.functional.silu(acc + bias)


def gradients(value: torch.Tensor, inputs: Any, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad((value.double() * like).sum(), inputs)


@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("dtype", "out_dtype"), [
    (torch.bfloat16, torch.float32), (torch.float16, "fp32"), (torch.float32, torch.bfloat16),
    (torch.float64, torch.float64), (torch.bfloat16, "bf16"),
])  # fmt: skip
def test_results_and_gradients(dtype: Any, out_dtype: Any, fused: bool, compiled: bool, groups: int) -> None:
    torch._dynamo.reset()
    a, b, bias = tensors(dtype, groups)
    operands = {"bias": bias} if fused else {}
    inputs = a, b, *operands.values()
    function = gt.grouped_gemm if groups else gt.gemm
    options = {"offsets": ENDS} if groups else {}

    def call(a: Any, b: Any, **operands: Any) -> Any:
        return function(a, b, epilogue=bias_silu if fused else None, out_dtype=out_dtype, **options, **operands)

    actual = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(a, b, **operands)
    stored = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(out_dtype, out_dtype)
    assert actual.dtype == stored
    exact = product(a, b)
    expected = bias_silu(exact, bias.double()) if fused else exact
    eps = max(torch.finfo(stored).eps, 1e-13 if dtype == torch.float64 else 1e-5)
    torch.testing.assert_close(actual.double(), expected, rtol=2 * eps, atol=4 * eps)
    like = torch.randn(M, N, dtype=torch.float64)
    eps = 8 * max(torch.finfo(dtype).eps, torch.finfo(stored).eps)
    for x, want in zip(gradients(actual, inputs, like), gradients(expected, inputs, like), strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x.double(), want.double(), rtol=eps, atol=eps * float(want.abs().max()))


def test_it_is_of_what_the_epilogue_does_not_convert() -> None:
    a, b, _ = tensors(torch.bfloat16)
    for _ in range(2):  # the second call finds what the first one has cached
        whole, half, total = gt.gemm(
            a, b, epilogue=lambda acc: (acc.relu(), acc.half(), acc.sum(-1)), out_dtype=torch.float32
        )
        assert (whole.dtype, half.dtype, total.dtype) == (torch.float32, torch.float16, torch.float32)
        assert gt.gemm(a, b).dtype == torch.bfloat16
        assert gt.gemm(a, b, out_dtype="fp32").dtype == torch.float32
    assert gt.gemm(a, torch.cat([b, b], 1).chunk(2, 1), out_dtype="fp32").dtype == torch.float32


@pytest.mark.parametrize(("out_dtype", "stored"), [
    (None, torch.int32), (torch.int32, torch.int32), ("int32", torch.int32), (torch.float32, torch.float32),
    ("bf16", torch.bfloat16),
])  # fmt: skip
def test_int8(out_dtype: Any, stored: torch.dtype) -> None:
    a, b = torch.randint(-9, 9, (M, K), dtype=torch.int8), torch.randint(-9, 9, (K, N), dtype=torch.int8)
    actual = gt.gemm(a, b, out_dtype=out_dtype)
    assert actual.dtype == stored
    torch.testing.assert_close(actual, product(a, b).to(stored))
    with pytest.raises(ArgumentError, match="out_dtype: got 'int32'; use one of bf16"):
        gt.gemm(a, b, epilogue=lambda acc: acc.relu(), out_dtype="int32")


def test_leading_dimensions_and_scales() -> None:
    a, b, _ = tensors(torch.bfloat16)
    folded = gt.gemm(a.reshape(2, 3, M // 6, K), b, scale_a=0.5, out_dtype=torch.float32)
    assert folded.shape == (2, 3, M // 6, N)
    torch.testing.assert_close(folded.reshape(M, N), (0.5 * product(a, b)).float())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("function", ["gemm", "grouped_gemm"])
def test_refusals(function: str, compiled: bool) -> None:
    torch._dynamo.reset()
    a, b, _ = tensors(torch.bfloat16, 4 if function == "grouped_gemm" else 0)
    options = {"offsets": ENDS} if function == "grouped_gemm" else {}

    def call(**more: Any) -> Any:
        f = getattr(gt, function)
        run = torch.compile(f, backend="eager", fullgraph=True) if compiled else f
        return run(a, b, **options, **more)

    for wrong in ("fp33", torch.int32, torch.complex64):
        with pytest.raises(Exception, match="out_dtype: got .*; use one of .*bf16") as raised:
            call(out_dtype=wrong)
        assert compiled or raised.type is ArgumentError
    arguments = {"precision": "torch.set_float32_matmul_precision", "config": "gemmsmith.tune", "backend": "call that"}
    for argument, instead in arguments.items():
        with pytest.raises(Exception, match=rf"{argument}: got an argument of gemmsmith\.{function}, .*{instead}"):
            call(**{argument: None})
    if function == "grouped_gemm":
        with pytest.raises(ArgumentError, match='out_dtype: got torch.float32 with along="k"'):
            gt.grouped_gemm(a, b[0], offsets=ENDS, along="k", out_dtype=torch.float32)
        with pytest.raises(ArgumentError, match=r"gather: .*; use a\[gather\]"):
            gt.grouped_gemm(a, b, offsets=ENDS, gather=ENDS)
