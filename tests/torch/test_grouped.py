"""gemmsmith.torch.grouped_gemm on the CPU: results, gradients and second derivatives against one group at a time."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from gemmsmith import ArgumentError  # noqa: E402
from gemmsmith.torch import grouped_gemm  # noqa: E402

pytestmark = pytest.mark.torch
SIZES = [3, 0, 7, 1]
OFFSETS = torch.tensor(SIZES).cumsum(0).to(torch.int32)
M, N, K = 13, 6, 5


def inputs(*shapes: tuple[int, ...]) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes]


def rows_of_groups(a: Any, b: Any) -> Any:
    """Return the product one group at a time, with zeros behind the last group."""
    parts = [x @ y for x, y in zip(a[: sum(SIZES)].split(SIZES), b, strict=True)]
    return torch.cat([*parts, a.new_zeros(len(a) - sum(SIZES), b.shape[-1])])


def test_rows_of_groups_and_their_gradients() -> None:
    a, b = inputs((M, K), (len(SIZES), K, N))
    torch.testing.assert_close(grouped_gemm(a, b, offsets=OFFSETS), rows_of_groups(a, b))
    assert torch.autograd.gradcheck(lambda a, b: grouped_gemm(a, b, offsets=OFFSETS), (a, b))
    assert torch.autograd.gradgradcheck(lambda a, b: grouped_gemm(a, b, offsets=OFFSETS), (a, b))


def test_slices_of_k_and_their_gradients() -> None:
    a, b = inputs((K, M), (M, N))
    ends = OFFSETS.tolist()
    want = torch.stack([a[:, i:j] @ b[i:j] for i, j in zip([0, *ends], ends, strict=False)])
    torch.testing.assert_close(grouped_gemm(a, b, offsets=OFFSETS, along="k"), want)
    assert torch.autograd.gradcheck(lambda a, b: grouped_gemm(a, b, offsets=OFFSETS, along="k"), (a, b))
    assert torch.autograd.gradgradcheck(lambda a, b: grouped_gemm(a, b, offsets=OFFSETS, along="k"), (a, b))


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_an_epilogue(recompute: bool) -> None:
    """Rows behind the last group are constant: their gradients, which are not zero, count for nothing."""
    a, b, bias, weight, c = inputs((M, K), (len(SIZES), K, N), (N,), (M, 1), (M, N))

    def epilogue(acc: Any, bias: Any, weight: Any, c: Any) -> Any:
        return torch.nn.functional.silu(acc + bias) * weight + c

    def ours(*x: Any) -> Any:
        named = dict(zip(("bias", "weight", "c"), x[2:], strict=True))
        return grouped_gemm(*x[:2], offsets=OFFSETS, epilogue=epilogue, recompute=recompute, **named)

    def theirs(a: Any, b: Any, *others: Any) -> Any:
        inside = (torch.arange(M) < sum(SIZES)).unsqueeze(1)
        return torch.where(inside, epilogue(rows_of_groups(a, b), *others), 0)

    arrays = (a, b, bias, weight, c)
    torch.testing.assert_close(ours(*arrays), theirs(*arrays))
    upstream = torch.randn(M, N, dtype=torch.float64)
    for x, y in zip(
        torch.autograd.grad(ours(*arrays), arrays, upstream),
        torch.autograd.grad(theirs(*arrays), arrays, upstream),
        strict=True,
    ):
        torch.testing.assert_close(x, y)
    assert torch.autograd.gradcheck(ours, arrays)


def test_compiled() -> None:
    a, b, bias = inputs((M, K), (len(SIZES), K, N), (N,))

    def f(a: Any, b: Any, bias: Any, offsets: Any) -> Any:
        return grouped_gemm(a, b, offsets=offsets, epilogue=lambda acc, bias: torch.relu(acc + bias), bias=bias) * 2

    compiled = torch.compile(f, fullgraph=True)
    want, got = f(a, b, bias, OFFSETS), compiled(a, b, bias, OFFSETS)
    torch.testing.assert_close(got, want)
    for x, y in zip(
        torch.autograd.grad(got.sum(), (a, b, bias)), torch.autograd.grad(want.sum(), (a, b, bias)), strict=True
    ):
        torch.testing.assert_close(x, y)


def test_bf16_is_rounded_once() -> None:
    a, b = (x.detach().bfloat16() for x in inputs((M, K), (len(SIZES), K, N)))
    got = grouped_gemm(a, b, offsets=OFFSETS)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, rows_of_groups(a.double(), b.double()).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"offsets": OFFSETS.long()}, r"offsets: got torch.int64; use torch.int32"),
        ({"offsets": SIZES}, r"offsets: got list; use a tensor"),
        ({"offsets": OFFSETS[:2]}, r"a, b, offsets: got shapes \(13, 5\), \(4, 5, 6\) and \(2,\)"),
        ({"offsets": OFFSETS.flip(0)}, r"offsets: got .* use ends that do not decrease"),
        ({"along": "n"}, r"along: got 'n'"),
        ({"along": "k"}, r"a, b, offsets: got shapes .* use \(m, k\), \(k, n\) and \(groups,\)"),
        ({"along": "k", "epilogue": torch.relu}, r'epilogue: got one with along="k"'),
        ({"epilogue": lambda acc: acc.sum(0)}, "epilogue: got a reduction, which has no gradient here"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], message: str) -> None:
    a, b = inputs((M, K), (len(SIZES), K, N))
    with pytest.raises(ArgumentError, match=message):
        grouped_gemm(a, b, **{"offsets": OFFSETS, **wrong})
