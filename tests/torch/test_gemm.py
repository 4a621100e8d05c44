"""gemmsmith.torch.gemm in eager mode: the function's semantics with any leading dimensions, scales, and errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import gemmsmith
from gemmsmith.core.errors import ArgumentError, EpilogueError
from gemmsmith.torch import gemm, gemm_then_linear

M, N, K = 5, 16, 8


def tensor(*shape: int, dtype: Any = torch.float64) -> Any:
    return torch.randn(shape, dtype=dtype, requires_grad=dtype == torch.float64)


def stats(acc: Any, bias: Any, residual: Any) -> Any:
    z = F.gelu(acc + bias) + residual
    return z, z.square().sum(-1), z.mean()


def swiglu(acc: Any, bias: Any) -> Any:
    gate, up = gemmsmith.deinterleave(acc + bias)
    return F.silu(gate) * up, gemmsmith.interleave(up, gate)


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "none": (lambda acc: acc, {}),
    "stats": (stats, {"bias": (N,), "residual": (..., M, N)}),
    "columns": (lambda acc, c: (acc * c, acc.mean(-1, keepdim=True)), {"c": (..., M, 1)}),
    "the same in every batch": (lambda acc, pos: (acc + pos).tanh(), {"pos": (M, N)}),
    "one in all": (lambda acc: acc.amax(), {}),
    "over rows": (lambda acc, bias: ((acc + bias).sum(-2), (acc * bias).logsumexp(-2, keepdim=True)), {"bias": (N,)}),
    "broadcast": (lambda acc, x: acc * x, {"x": (..., 1, 1)}),
    "halves": (swiglu, {"bias": (N,)}),
    "a row a batch": (lambda acc, x: acc * x, {"x": (..., 1, N)}),
}


@pytest.mark.parametrize("leading", [(), (2,), (2, 3)])
@pytest.mark.parametrize("name", CASES)
def test_the_meaning_is_that_of_the_function(name: str, leading: tuple[int, ...]) -> None:
    """In the first call, and in later ones that are cached."""
    for _ in range(2):
        function, shapes = CASES[name]
        a, b = tensor(*leading, M, K), tensor(K, N)
        operands = {
            n: tensor(*(leading if s[0] is ... else ()), *(x for x in s if x is not ...)) for n, s in shapes.items()
        }
        actual = gemm(a, b, epilogue=None if name == "none" else function, **operands)
        expected = function(a @ b, **operands)
        actual, expected = (x if isinstance(x, tuple) else (x,) for x in (actual, expected))
        cotangents, inputs = [torch.randn_like(x) for x in expected], [a, b, *operands.values()]
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y)
            assert x.is_contiguous()
        pairs = (torch.autograd.grad(results, inputs, cotangents) for results in (actual, expected))
        for x, y in zip(*pairs, strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("own", [(1, N), (M, 1), (M, N), (1, 1)])
@pytest.mark.parametrize("leading", [(1,), (1, 1), (2, 1), (1, 3), (3,), (2, 3)])
def test_leading_indices_are_broadcast(leading: tuple[int, ...], own: tuple[int, int]) -> None:
    a, b, x = tensor(2, 3, M, K), tensor(K, N), tensor(*leading, *own)
    pairs = gemm(a, b, epilogue=lambda acc, x: (acc * x).tanh(), x=x), ((a @ b) * x).tanh()
    torch.testing.assert_close(*pairs)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), (a, b, x)) for y in pairs))


def test_results_by_name() -> None:
    a, b = tensor(2, M, K), tensor(K, N)
    outputs = gemm(a, b, epilogue=lambda acc: {"y": acc.relu(), "total": acc.sum(keepdim=True)})
    assert list(outputs) == ["y", "total"]
    assert outputs["total"].shape == (1, 1, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_those_of_gemmsmith(dtype: Any) -> None:
    a, b, bias, residual = (tensor(*s, dtype=dtype) for s in ((M, K), (K, N), (N,), (M, N)))
    actual = gemm(a, b, epilogue=stats, bias=bias, residual=residual)
    for x, y in zip(actual, gemmsmith.gemm(a, b, epilogue=stats, bias=bias, residual=residual), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_scales() -> None:
    a, b = (torch.randn(s).to(torch.float8_e4m3fn) for s in ((M, K), (K, N)))
    for a_, b_ in [((), ()), ((M, 1), (1, N)), ((1,), (1, N))]:
        x, y = torch.rand(a_) + 0.5, torch.rand(b_) + 0.5
        actual = gemm(a, b, scale_a=x, scale_b=y, epilogue=lambda acc, bias: acc + bias, bias=torch.ones(N))
        expected = gemmsmith.gemm(a, b, scale_a=x, scale_b=y, epilogue=lambda acc, bias: acc + bias, bias=torch.ones(N))
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    a, b, x, y = tensor(M, K), tensor(K, N), tensor(M, 1), tensor(1, N)
    assert torch.autograd.gradcheck(lambda a, b, x, y: gemm(a, b, scale_a=x, scale_b=y), (a, b, x, y), fast_mode=True)


@pytest.mark.parametrize("backend", [None, "eager"])
def test_an_operand_may_have_the_name_of_a_scale(backend: str | None) -> None:
    """It is that operand, with and without a scale, with gradients and without."""

    def run(a: Any, b: Any, x: Any, scale: Any) -> Any:
        return gemm(a, b, epilogue=lambda acc, scale_a: acc + scale_a, operands={"scale_a": x}, scale_a=scale)

    call = torch.compile(run, backend=backend, fullgraph=True) if backend else run
    a, b, x, scale = tensor(M, K), tensor(K, N), tensor(M, 1), tensor(M, 1)
    for _ in range(2):  # the second time the signature is known
        for of, expected in ((scale, a @ b * scale + x), (None, a @ b + x)):
            actual, inputs = call(a, b, x, of), [a, b, x] if of is None else [a, b, x, of]
            torch.testing.assert_close(actual, expected)
            pairs = (torch.autograd.grad(y.square().sum(), inputs, retain_graph=True) for y in (actual, expected))
            for y, z in zip(*pairs, strict=True):
                torch.testing.assert_close(y, z)
            with torch.no_grad():
                torch.testing.assert_close(call(a, b, x, of), expected)


def test_autocast() -> None:
    a, b = (torch.randn(s, requires_grad=True) for s in ((M, K), (K, N)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        d = gemm(a, b, epilogue=lambda acc: acc.relu())
    assert d.dtype == torch.bfloat16
    d.sum().backward()
    assert a.grad.dtype == torch.float32


def test_a_chain_stores_no_gradient_of_what_is_between() -> None:
    a, b, down, bias, gate = tensor(2, M, K), tensor(K, N), tensor(N, K), tensor(N), tensor(2, M, N)

    def run(a: Any, b: Any, down: Any, bias: Any, gate: Any) -> Any:
        def epilogue(acc: Any, bias: Any, gate: Any) -> Any:
            return F.silu(gate) * (acc + bias)

        return gemm_then_linear(a, b, down, epilogue=epilogue, operands={"bias": bias, "gate": gate})

    inputs = a, b, down, bias, gate
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    calls: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.extend([func.name()] * ("gemm" in func.name()))
            return func(*args, **(kwargs or {}))

    with Watch():
        run(*inputs).sum().backward()
    assert len(calls) == 2 + 4  # two products; their four gradients
    with pytest.raises(ArgumentError, match="create_graph: got True"):
        torch.autograd.grad(run(*inputs).sum(), inputs, create_graph=True)
    frozen = [x.detach() for x in inputs]
    torch.testing.assert_close(run(*frozen), run(*inputs))


def refused(message: str, call: Callable[[], Any], kind: type[Exception] = ArgumentError) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_refused() -> None:
    a, b, x = tensor(M, K), tensor(K, N), tensor(N)
    plus = lambda acc, bias: acc + bias  # noqa: E731
    refused(r"a, b: got 1 and 2 dimensions", lambda: gemm(a[0], b))
    refused(r"a, b: got 4 and 3 dimensions", lambda: gemm(a.expand(2, 2, M, K), b.expand(2, K, N)))
    refused(r"a, b: got shapes \(5, 8\) and \(16, 8\)", lambda: gemm(a, b.T))
    refused("b: got list; use a tensor", lambda: gemm(a, [1.0]))
    refused("bias: got str; use a tensor", lambda: gemm(a, b, epilogue=plus, bias="x"))
    refused("bias: got a torch.sparse_coo tensor", lambda: gemm(a, b, epilogue=plus, bias=x.detach().to_sparse()))
    refused("bias: got a tensor of torch.complex128", lambda: gemm(a, b, epilogue=plus, bias=x + 0j))
    refused("bias: got a tensor on meta with a on cpu", lambda: gemm(a, b, epilogue=plus, bias=x.to("meta")))
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(4)])
    refused("bias: got a nested tensor", lambda: gemm(a, b, epilogue=plus, bias=nested))
    refused(r"bias: got shape \(5,\), one value per row", lambda: gemm(a, b, epilogue=plus, bias=tensor(M)))
    refused("bias: no operand has this name", lambda: gemm(a, b, epilogue=plus), EpilogueError)
    refused(r"scale_a: got shape \(3, 1\); use \(\) or \(5, 1\)", lambda: gemm(a, b, scale_a=tensor(3, 1)))
    refused("got a tensor|make it a parameter", lambda: gemm(a, b, epilogue=lambda acc: acc + x), EpilogueError)
    many = {f"x{i}": tensor(N) for i in range(9)}
    refused(
        "operands: got 9 tensors; use at most 8",
        lambda: gemm(a.detach(), b.detach(), epilogue=lambda acc, **xs: acc + sum(xs.values()),
                     operands={n: y.detach() for n, y in many.items()}),
    )  # fmt: skip
    seven = {f"x{i}": tensor(N) for i in range(8)}
    refused(
        "operands: got 9 tensors; use at most 8|operands: got 10 tensors",
        lambda: gemm(a, b, epilogue=lambda acc, **xs: (acc * sum(xs.values())).gelu(), operands=seven),
    )  # fmt: skip
    for name in ("out", "config", "backend"):
        refused(f"{name}: got an argument of gemmsmith.gemm, which has no", lambda n=name: gemm(a, b, **{n: x}))
    halves = lambda acc: (lambda gate, up: F.silu(gate) * up)(*acc.chunk(2, -1))  # noqa: E731
    refused("chunk cannot be part .*; no tile", lambda: gemm(a, b, epilogue=halves), EpilogueError)
    refused("bias: operands need an `epilogue` that reads them", lambda: gemm(a, b, bias=x))
    refused("scale: operands need .*; did you mean scale_b", lambda: gemm(a, b, scale=x))
    for call in (gemm, lambda a, b, **given: gemm_then_linear(a, b, tensor(N, K), **given)):
        refused("operands: got list; use a dict", lambda f=call: f(a, b, epilogue=plus, operands=[x]))
        refused("operands: got the name 1; use a Python", lambda f=call: f(a, b, epilogue=plus, operands={1: x}))
    refused("bias: got it in `operands` and by name", lambda: gemm(a, b, epilogue=plus, bias=x, operands={"bias": x}))
    for given in ("yes", 1, None):
        refused("recompute: got .*; use True or False", lambda r=given: gemm(a, b, recompute=r))


def test_dtypes_and_devices_that_are_refused() -> None:
    """The CPU rejects what a GPU rejects, too."""
    a, b = tensor(M, K), tensor(K, N)
    plus = lambda acc, bias: acc + bias  # noqa: E731
    refused("a: got torch.int64; use one of torch.bfloat16, ", lambda: gemm(a.long(), b.long()))
    refused("b: got torch.float32 with a of torch.float64; use the same", lambda: gemm(a, b.float()))
    for dtype in (torch.float32, torch.bfloat16):
        refused(r"bias: got torch.float64; use one of torch.float32, .*torch.bfloat16, such as x.float\(\)$",
                lambda dtype=dtype: gemm(a.to(dtype), b.to(dtype), epilogue=plus, bias=tensor(N)))  # fmt: skip
    refused("bias: got torch.uint8", lambda: gemm(a, b, epilogue=plus, bias=torch.ones(N, dtype=torch.uint8)))
    refused("b: got a tensor on cpu with a on meta; use one device", lambda: gemm(a.to("meta"), b))
    refused("a: got a torch.sparse_csr tensor", lambda: gemm(a.detach().to_sparse_csr(), b))
    refused("a: got a tensor of torch.complex128", lambda: gemm(a + 0j, b))
    assert gemm(a.to("meta"), b.to("meta"), epilogue=plus, bias=tensor(N).to("meta")).shape == (M, N)


def test_scales_of_powers_of_two() -> None:
    """As values and as bytes."""
    a, b = (torch.randn(s).to(torch.float8_e4m3fn) for s in ((M, K), (K, N)))
    scale = torch.rand(M, 1).to(torch.float8_e8m0fnu)
    expected = gemm(a, b, scale_a=scale.float())
    for x in (scale, scale.view(torch.uint8)):
        torch.testing.assert_close(gemm(a, b, scale_a=x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("trained", range(6))
def test_a_chain_of_which_one_operand_is_trained(trained: int) -> None:
    shapes = ((M, K), (K, N), (N, K), (N,), (M, N), (K,))
    inputs = [tensor(*s).detach() for s in shapes]
    inputs[trained].requires_grad_()

    def run(fused: bool) -> Any:
        a, b, down, bias, gate, last = inputs
        if fused:
            return gemm_then_linear(a, b, down, epilogue=lambda acc, bias, gate: F.silu(gate) * (acc + bias),
                         operands={"bias": bias, "gate": gate}, bias=last)  # fmt: skip
        return (F.silu(gate) * (a @ b + bias)) @ down + last

    actual, expected = run(True), run(False)
    torch.testing.assert_close(actual, expected)
    pairs = (torch.autograd.grad(x.square().sum(), inputs[trained]) for x in (actual, expected))
    torch.testing.assert_close(*pairs)


@pytest.mark.parametrize("function", [
    lambda acc, x: acc.detach() * x, lambda acc, x: acc * x.detach(), lambda acc, x: (acc > x).to(acc.dtype),
])  # fmt: skip
def test_a_chain_whose_middle_has_few_gradients(function: Callable[..., Any]) -> None:
    a, b, down, x = inputs = [tensor(*s) for s in ((M, K), (K, N), (N, K), (N,))]
    actual, expected = gemm_then_linear(a, b, down, epilogue=function, operands={"x": x}), function(a @ b, x) @ down
    torch.testing.assert_close(actual, expected)
    pairs = (torch.autograd.grad(y.sum(), inputs, allow_unused=True) for y in (actual, expected))
    for y, right in zip(*pairs, strict=True):
        assert (y is None) == (right is None)
        if y is not None:
            torch.testing.assert_close(y, right)


def test_gemm_then_linear_rejects() -> None:
    a, b, down = tensor(M, K), tensor(K, N), tensor(N, K)
    two = lambda acc: (acc, acc)  # noqa: E731
    relu = lambda acc: acc.relu()  # noqa: E731
    refused(
        "epilogue: got a function with 2 results; use one",
        lambda: gemm_then_linear(a, b, down, epilogue=two, operands={}),
    )
    refused("weight2: got 1 dimensions", lambda: gemm_then_linear(a, b, down[0], epilogue=relu, operands={}))
    refused(r"bias: got shape \(16,\); use \(8,\)",
            lambda: gemm_then_linear(a, b, down, epilogue=relu, operands={}, bias=tensor(N)))  # fmt: skip


FIRST_IN_A_PROCESS = """
import torch
from gemmsmith.torch import gemm
a, b = torch.randn(8, 16), torch.randn(16, 24)
for function in (lambda x: torch.where(x > 0, x, 0.0), lambda x: torch.pow(x, 2.0)):
    actual = gemm(a, b, epilogue=function)
    torch.testing.assert_close(actual, function(a @ b))
"""


def test_a_function_that_torch_parses_first_in_a_process() -> None:
    """Torch's parser of arguments imports torch at its first use, by the caller's builtins."""
    subprocess.run([sys.executable, "-c", FIRST_IN_A_PROCESS], check=True)


def test_dynamo_is_not_imported() -> None:
    """It takes seconds. Before torch 2.13 a default of its config is changed, so it is."""
    if torch.__version__ < (2, 13):
        pytest.skip("its config is changed")
    code = "import sys, gemmsmith.torch; print({'torch._dynamo', 'torch._inductor', 'matplotlib'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
