"""Linear layers, gated ones and MLPs with their gradients: what QuACK's tests of linear layers cover."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.foreign.comparison import close, same_gradients

import gemmsmith

torch = pytest.importorskip("torch")
gt = pytest.importorskip("gemmsmith.torch")
F = torch.nn.functional
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("poisoned")]

DTYPES = [torch.float64, torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 8, 16), (7, 33, 5), (40, 48, 72), (33, 17, 64), (65, 96, 51)]
"""M, K, N; of some, rows are not aligned to 16 bytes."""
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "none": lambda x: x, "relu": F.relu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu_sq": lambda x: F.relu(x).square(), "silu": F.silu,
}  # fmt: skip


def swiglu_oai(gate: Any, up: Any, limit: float = 3 + 2**-7) -> Any:
    """The limit is between two bf16 numbers, so that no rounding exceeds it."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


GATED: dict[str, Callable[[Any, Any], Any]] = {
    "swiglu": lambda gate, up: F.silu(gate) * up, "swiglu_oai": swiglu_oai,
    "reglu": lambda gate, up: F.relu(gate) * up, "geglu": lambda gate, up: F.gelu(gate) * up,
    "geglu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "glu": lambda gate, up: torch.sigmoid(gate) * up,
}  # fmt: skip
STORED = ["returned", "stored", "recomputed"]
"""The value before the activation: a result, kept for the backward pass, or computed there again."""


def drawn(*shape: int, dtype: Any, by: float = 1.0, trained: bool = True) -> Any:
    return (torch.randn(shape, dtype=torch.float64) * by).to(dtype).requires_grad_(trained)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_linear(m: int, k: int, n: int, dtype: Any, bias: bool) -> None:
    """The GEMM, the two of the backward pass, and the bias's gradient."""
    layer = gt.FusedLinear(k, n, bias, dtype=dtype)

    def fused(x: Any, *parameters: Any) -> Any:
        names = ("weight", "bias")[: len(parameters)]
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    vectors = [drawn(n, dtype=dtype)] if bias else []
    same_gradients(fused, F.linear, drawn(m, k, dtype=dtype), drawn(n, k, dtype=dtype, by=k**-0.5), *vectors)


def laid_out(x: Any, layout: str) -> Any:
    """Return the same numbers, row-major, column-major, or in every other column of a matrix of NaN."""
    if layout == "columns":
        return x.detach().mT.contiguous().mT.requires_grad_()
    if layout == "rows":
        return x
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan, dtype=x.dtype)
    wide[..., 1::2] = x.detach()
    return wide[..., 1::2].requires_grad_()


@pytest.mark.parametrize("slope", ["rows", "columns", "apart", "one"])
@pytest.mark.parametrize("layout", ["rows", "columns", "apart"])
def test_layouts(layout: str, slope: str) -> None:
    """Of x and the weight, and of the result's gradient, which is one number after a sum."""
    x, w = (laid_out(drawn(*shape, dtype=torch.bfloat16), layout) for shape in ((33, 17), (51, 17)))
    exact = [y.detach().double().requires_grad_() for y in (x, w)]
    y, expected = gt.gemm(x, w.mT, epilogue=F.silu), F.silu(exact[0] @ exact[1].mT)
    close(y.detach(), expected.detach())
    g = torch.ones((), dtype=y.dtype).expand(y.shape) if slope == "one" else laid_out(torch.randn_like(y), slope)
    rights = torch.autograd.grad(expected, exact, g.detach().double())
    for actual, right in zip(torch.autograd.grad(y, [x, w], g), rights, strict=True):
        close(actual, right, 4)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen(frozen: int) -> None:
    inputs = [drawn(*s, dtype=torch.bfloat16, trained=i != frozen) for i, s in enumerate([(2, 9, 24), (24, 33), (33,)])]

    def function(x: Any, w: Any, bias: Any) -> Any:
        return gt.gemm(x, w, epilogue=lambda acc, bias: F.relu(acc + bias), bias=bias)

    same_gradients(function, lambda x, w, bias: F.relu(x @ w + bias), *inputs)
    with torch.no_grad():
        assert not function(*inputs).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: Any) -> None:
    """fp32 weights, multiplied in 16 bits; the gradients are fp32."""
    layer, x = gt.FusedLinear(40, 24, activation="gelu_tanh"), drawn(10, 40, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
    assert y.dtype == dtype
    slope = torch.randn_like(y)
    actual = torch.autograd.grad(y, [x, *layer.parameters()], slope)
    exact = [z.detach().double().requires_grad_() for z in (x, *layer.parameters())]
    expected = F.gelu(F.linear(*exact), approximate="tanh")
    close(y.detach(), expected.detach(), 3)
    for g, right in zip(actual, torch.autograd.grad(expected, exact, slope.double()), strict=True):
        assert g.dtype == torch.float32
        assert (g.double() - right).norm() < 3 * torch.finfo(dtype).eps * right.norm()


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str, dtype: Any, stored: str) -> None:
    activation = ACTIVATIONS[name]

    def layer(product: Callable[..., Any]) -> Callable[..., Any]:
        def before(acc: Any, bias: Any) -> Any:
            z = acc + bias
            return (activation(z), z) if stored == "returned" else activation(z)

        return lambda x, w, bias: product(x, w, before, bias)

    def fused(x: Any, w: Any, function: Any, bias: Any) -> Any:
        return gt.gemm(x, w.mT, epilogue=function, recompute=stored == "recomputed", bias=bias)

    m, k, n = 37, 40, 51
    inputs = drawn(m, k, dtype=dtype), drawn(n, k, dtype=dtype, by=k**-0.5), drawn(n, dtype=dtype)
    same_gradients(layer(fused), layer(lambda x, w, f, bias: f(x @ w.mT, bias)), *inputs)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("name", GATED)
def test_gated(name: str, dtype: Any, stored: str) -> None:
    """With a weight that has gate and up one after the other, and so has its gradient."""
    activation = GATED[name]

    def epilogue(acc: Any) -> Any:
        gate, up = gemmsmith.deinterleave(acc)
        h = activation(gate, up)
        return (h, gate, up) if stored == "returned" else h

    def fused(x: Any, w: Any) -> Any:
        b = gemmsmith.interleave(*w.mT.chunk(2, -1))
        return gt.gemm(x, b, epilogue=epilogue, recompute=stored == "recomputed")

    def plain(x: Any, w: Any) -> Any:
        gate, up = (x @ w.mT).chunk(2, -1)
        return (activation(gate, up), gate, up) if stored == "returned" else activation(gate, up)

    m, k, n = 19, 31, 24
    same_gradients(fused, plain, drawn(m, k, dtype=dtype), drawn(2 * n, k, dtype=dtype, by=2 * k**-0.5), of_gradients=4)


@pytest.mark.parametrize("beta", ["number", "tensor", "column"])
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(("m", "k", "n"), [(33, 17, 64), (40, 48, 72)])
def test_added(m: int, k: int, n: int, dtype: Any, beta: str) -> None:
    """alpha * A @ B + beta * C."""
    b = {"number": torch.tensor(0.5), "tensor": drawn(dtype=dtype), "column": drawn(m, 1, dtype=dtype)}[beta]
    inputs = drawn(m, k, dtype=dtype), drawn(k, n, dtype=dtype), drawn(m, n, dtype=dtype), b

    def function(acc: Any, c: Any, beta: Any) -> Any:
        return 0.75 * acc + beta * c

    def fused(x: Any, y: Any, c: Any, beta: Any) -> Any:
        return gt.gemm(x, y, epilogue=function, c=c, beta=beta if beta.requires_grad else beta.item())

    same_gradients(fused, lambda x, y, c, beta: function(x @ y, c, beta), *inputs)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_batched(batch: tuple[int, ...]) -> None:
    """One weight for all batches, and one for each."""
    inputs = drawn(*batch, 9, 21, dtype=torch.bfloat16), drawn(21, 34, dtype=torch.bfloat16)
    same_gradients(lambda x, w: gt.gemm(x, w, epilogue=F.silu), lambda x, w: F.silu(x @ w), *inputs)
    if len(batch) == 1:
        inputs = inputs[0], drawn(*batch, 21, 34, dtype=torch.bfloat16)
        same_gradients(lambda x, w: gt.gemm(x, w, epilogue=F.silu), lambda x, w: F.silu(x @ w), *inputs)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("c", [False, True])
@pytest.mark.parametrize(("m", "k"), [(24, 40), (33, 17)])
def test_symmetric(m: int, k: int, c: bool, dtype: Any) -> None:
    """X X^T, computed as any GEMM: the result is symmetric to the bit, X has both gradients."""
    x = drawn(m, k, dtype=dtype)
    s = gt.gemm(x, x.mT)
    assert torch.equal(s, s.mT)
    more = [drawn(m, m, dtype=dtype)] if c else []

    def function(acc: Any, c: Any = 0.0) -> Any:
        return 1.5 * acc - 0.5 * c

    def fused(x: Any, *c: Any) -> Any:
        return gt.gemm(x, x.mT, epilogue=function, **dict(zip("c", c, strict=False)))

    same_gradients(fused, lambda x, *c: function(x @ x.mT, *c), x, *more, of_gradients=4)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["swiglu", "geglu", "geglu_tanh", "reglu", "relu", "gelu_tanh", "silu", "relu_sq"])
def test_mlp(name: str, bias: bool, dtype: Any) -> None:
    """down(activation(gate(x)) * up(x)), as Liger's too, or without a gate."""
    dim, hidden = 40, 72
    mlp = gt.FusedMLP(dim, hidden, ACTIVATIONS[name] if name == "relu_sq" else name, bias, dtype=dtype)
    names = [key for key, _ in mlp.named_parameters()]

    def fused(x: Any, *parameters: Any) -> Any:
        return torch.func.functional_call(mlp, dict(zip(names, parameters, strict=True)), (x,))

    def plain(x: Any, *parameters: Any) -> Any:
        of = dict(zip(names, parameters, strict=True))

        def layer(part: str, x: Any) -> Any:
            return F.linear(x, of[f"{part}.weight"], of.get(f"{part}.bias"))

        def rounded(y: Any) -> Any:
            """Round `y` as the module stores it, but not its gradient. It may cross relu's kink."""
            return y + (y.to(dtype).double() - y).detach()

        up = layer("up", x)
        gate = rounded(F.linear(x, of["gate.weight"])) + of.get("gate.bias", 0.0) if name in GATED else None
        h = GATED[name](gate, up) if name in GATED else ACTIVATIONS[name](up)
        return layer("down", h)

    inputs = [drawn(2, 7, dim, dtype=dtype), *[y.detach().clone().requires_grad_() for y in mlp.parameters()]]
    same_gradients(fused, plain, *inputs, roundings=2, of_gradients=6)
