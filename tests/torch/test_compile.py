"""Under torch.compile: one graph for all numbers of rows, forward and backward, never stale; export; other
processes.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F  # noqa: N812
from tests.torch.twice import assert_the_second_finds_both_graphs

import gemmsmith
from gemmsmith.core.errors import ArgumentError, EpilogueError
from gemmsmith.torch import FusedLinear, FusedLinearCrossEntropy, FusedMLP, FusedMoE, gemm
from gemmsmith.torch import loss as losses

M, N, K = 5, 16, 8
STANDS_FOR_A_GLOBAL = 2.0
FUNCTIONS = [lambda acc: acc * 2.0]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensor(*shape: int, dtype: Any = torch.float64) -> Any:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def compiled(function: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    return torch.compile(function, backend=backend, fullgraph=True)


def everything(acc: Any, bias: Any, residual: Any, scale: Any) -> Any:
    """Use functions, methods, operators, casts, sizes and reductions, by torch's names."""
    z = F.gelu(acc + bias, approximate="tanh") * scale + residual / 3
    z = torch.where(z > 0, z, F.leaky_relu(z, 0.2)).clamp(min=-4, max=4.0) - z.square() / acc.shape[-1]
    gate, up = gemmsmith.deinterleave(z)
    values, _ = z.detach().abs().max(dim=-1), None
    z = gemmsmith.interleave(up, gate)
    return {"h": (F.silu(gate) * up).to(acc.dtype), "total": z.sum(), "rows": torch.logsumexp(z, -1), "most": values}


def gated(acc: Any, gate: Any) -> Any:
    return F.silu(gate) * acc


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_forward_and_backward_for_any_number_of_rows(backend: str) -> None:
    def step(a: Any, b: Any, bias: Any, residual: Any, scale: float) -> Any:
        return gemm(a, b, epilogue=everything, bias=bias, residual=residual, scale=scale)

    run = compiled(step, backend)
    b, bias = tensor(K, N), tensor(N)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (5, 7, 12):
            inputs = [tensor(m, K), b, bias, tensor(m, N)]
            for x in inputs[0], inputs[3]:
                torch._dynamo.mark_dynamic(x, 0)
            actual, expected = (f(*inputs, 0.7) for f in (run, step))
            for x, y in zip(actual.values(), expected.values(), strict=True):
                torch.testing.assert_close(x, y)
                assert x.requires_grad == y.requires_grad
            assert not actual.pop("most").requires_grad  # of what is detached
            assert not expected.pop("most").requires_grad
            cotangents = [torch.randn_like(x) for x in expected.values()]
            pairs = (torch.autograd.grad(list(x.values()), inputs, cotangents) for x in (actual, expected))
            for x, y in zip(*pairs, strict=True):
                torch.testing.assert_close(x, y)


def test_inductor() -> None:
    def step(a: Any, b: Any, bias: Any) -> Any:
        return gemm(a, b, epilogue=lambda acc, bias: (F.gelu(acc + bias), acc.sum(-1)), bias=bias)

    inputs = [tensor(2, M, K), tensor(K, N), tensor(N)]
    actual, expected = compiled(step, "inductor")(*inputs), step(*inputs)
    for x, y in zip(actual, expected, strict=True):
        assert x.stride() == y.stride()
        torch.testing.assert_close(x, y)
    pairs = (torch.autograd.grad([x.sum() for x in results], inputs) for results in (actual, expected))
    for x, y in zip(*pairs, strict=True):
        torch.testing.assert_close(x, y)


MODULES: dict[str, Callable[[], Any]] = {
    "linear": lambda: FusedLinear(K, N, activation="gelu", dtype=torch.float64),
    "swiglu": lambda: FusedMLP(K, N, bias=True, dtype=torch.float64),
    "gelu": lambda: FusedMLP(K, N, "gelu", dtype=torch.float64),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    module = MODULES[name]()
    run = compiled(module)
    for leading in ((M,), (2, 3)):
        x = tensor(*leading, K)
        parameters = [x, *module.parameters()]
        pairs = [torch.autograd.grad(f(x).square().sum(), parameters) for f in (run, module)]
        for actual, expected in zip(*pairs, strict=True):
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("low_memory", [False, True])
def test_a_loss(low_memory: bool) -> None:
    loss = FusedLinearCrossEntropy(K, N, low_memory=low_memory, dtype=torch.float64)
    x, target = tensor(3, 7, K), torch.randint(N, (3, 7))
    pairs = [torch.autograd.grad(f(x, target), [x, loss.weight]) for f in (compiled(loss), loss)]
    for actual, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("chunks", [None, 1, 3])
def test_a_loss_of_any_number_of_rows(backend: str, chunks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for one chunk, and one for any larger number of them."""
    monkeypatch.setattr(losses, "MIN_ROWS", 2)
    loss = FusedLinearCrossEntropy(K, N, chunks=chunks, dtype=torch.float64)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    run = torch.compile(loss, backend=counter, fullgraph=True)
    counts = set()
    for rows in (40, 8, 9, 64, 11, 23):
        counts.add(losses._chunk_count(rows, K, 8, chunks or 0, False))
        x, target = tensor(rows, K), torch.randint(N, (rows,))
        for y in (x, target):
            torch._dynamo.mark_dynamic(y, 0)
        pairs = [(y, *torch.autograd.grad(y * 3, [x, loss.weight])) for y in (f(x, target) for f in (run, loss))]
        for actual, expected in zip(*pairs, strict=True):
            torch.testing.assert_close(actual, expected)
    assert len(counts) == (3 if chunks is None else 1)
    assert counter.frame_count == (2 if chunks is None else 1)


COMPILED_AUTOGRAD = {
    **MODULES,
    "gated at once": lambda: FusedMLP(K, N, dtype=torch.bfloat16),
    "experts": lambda: FusedMoE(K, N, 4, 2, dtype=torch.float64),
    "loss": lambda: FusedLinearCrossEntropy(K, N, dtype=torch.float64),
}


@pytest.mark.parametrize("name", COMPILED_AUTOGRAD)
def test_compiled_autograd(name: str) -> None:
    """A compiled step whose backward pass is compiled by compiled autograd."""
    module = COMPILED_AUTOGRAD[name]()
    x = torch.randn(M, K, dtype=next(module.parameters()).dtype)
    others = (torch.randint(N, (M,)),) if name == "loss" else ()
    compiled_module = torch.compile(module, backend="aot_eager")

    def step(module: Any, x: Any) -> None:
        module(x, *others).square().sum().backward()

    gradients = []
    for run, target in ((step, module), (torch.compile(step, backend="aot_eager"), compiled_module)):
        module.zero_grad()
        y = x.clone().requires_grad_()
        with torch._dynamo.config.patch(compiled_autograd=True):
            run(target, y)
        gradients.append([z.grad.clone() for z in (y, *module.parameters())])
    for expected, actual in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected)


def with_default(acc: Any, s: float = 2.0) -> Any:
    return acc * s


def with_keyword(acc: Any, *, s: float = 2.0) -> Any:
    return acc * s


class Scaling(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = 2.0

    def forward(self, acc: Any) -> Any:
        return acc * self.x


class Called:
    x = 2.0

    def __call__(self, acc: Any) -> Any:
        return acc * self.x


def closure() -> tuple[Callable[..., Any], Callable[[], None]]:
    x = 2.0

    def change() -> None:
        nonlocal x
        x = 3.0

    return lambda acc: acc * x, change


def sources() -> dict[str, tuple[Callable[..., Any], Callable[[], None]]]:
    """Return functions that multiply by 2, and what makes each multiply by 3."""
    module, called, method = Scaling(), Called(), Called()
    of_global = lambda acc: acc * STANDS_FOR_A_GLOBAL  # noqa: E731
    of_list = lambda acc: FUNCTIONS[0](acc)  # noqa: E731
    numbers = {"s": 2.0}
    return {
        "a default": (with_default, lambda: setattr(with_default, "__defaults__", (3.0,))),
        "a default of a keyword": (with_keyword, lambda: setattr(with_keyword, "__kwdefaults__", {"s": 3.0})),
        "a global": (of_global, lambda: globals().__setitem__("STANDS_FOR_A_GLOBAL", 3.0)),
        "a list": (of_list, lambda: FUNCTIONS.__setitem__(0, lambda acc: acc * 3.0)),
        "a dict": (lambda acc: acc * numbers["s"], lambda: numbers.__setitem__("s", 3.0)),
        "a closure": closure(),
        "a module": (module, lambda: setattr(module, "x", 3.0)),
        "an object": (called, lambda: setattr(called, "x", 3.0)),
        "a method": (method.__call__, lambda: setattr(method, "x", 3.0)),
    }


@pytest.mark.parametrize("name", sources())
def test_never_stale(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = with_default.__defaults__, with_keyword.__kwdefaults__, STANDS_FOR_A_GLOBAL, FUNCTIONS[0]
    a, b = tensor(M, K), tensor(K, N)
    function, change = sources()[name]
    run = compiled(lambda: gemm(a, b, epilogue=function), "eager")
    try:
        for factor in (2, 3):
            for f in (run, lambda: gemm(a, b, epilogue=function)):
                torch.testing.assert_close(f(), a @ b * factor)
            change()
    finally:
        with_default.__defaults__, with_keyword.__kwdefaults__, FUNCTIONS[0] = saved[0], saved[1], saved[3]
        globals()["STANDS_FOR_A_GLOBAL"] = saved[2]


def test_a_changed_activation_is_compiled_again() -> None:
    x, layer = tensor(M, K), FusedLinear(K, N, activation="relu", dtype=torch.float64)
    run = compiled(layer, "eager")
    for name in ("relu", "gelu"):
        layer.activation = name
        torch.testing.assert_close(run(x), getattr(F, name)(F.linear(x, layer.weight, layer.bias)))


def test_numbers() -> None:
    """As operands they are arguments; as arguments of a partial they are in the graph."""
    a, b = tensor(M, K), tensor(K, N)
    of_operand = compiled(lambda s: gemm(a, b, epilogue=lambda acc, s: acc * s, s=s), "eager")
    of_partial = compiled(lambda s: gemm(a, b, epilogue=functools.partial(with_keyword, s=s)), "eager")
    for s in (2.0, 0.1, 1e-30, 7):
        for run in (of_operand, of_partial):
            torch.testing.assert_close(run(s), a @ b * s)


@pytest.mark.parametrize("kind", [float, int])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_number_that_changes_makes_one_more_graph(kind: Any, backend: str) -> None:
    counted = torch._dynamo.testing.CompileCounterWithBackend(backend)
    run = torch.compile(lambda a, b, s: gemm(a, b, epilogue=lambda acc, s: (acc * s).tanh(), s=s, scale_a=s / s / 2),
                        backend=counted, fullgraph=True)  # fmt: skip
    a, b = tensor(M, K), tensor(K, N)
    for s in range(2, 14):
        actual, expected = run(a, b, kind(s)), (a @ b * s / 2).tanh()
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), (a, b)) for y in (actual, expected)))
    assert counted.frame_count == 2


def test_another_process_finds_the_compiled_graph(tmp_path: Path) -> None:
    program = """
import torch, torch.nn.functional as F, gemmsmith.torch as gt
a, b = (torch.ones(8, 8, requires_grad=True) for _ in range(2))
step = torch.compile(lambda: gt.gemm(a, b, epilogue=lambda acc: F.gelu(acc)), fullgraph=True)
step().sum().backward()
"""
    assert_the_second_finds_both_graphs(program, tmp_path)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    """The program has gradients when it runs with them, whether or not they are recorded at export."""
    module = torch.nn.Sequential(FusedLinear(K, N, activation="gelu"), FusedMLP(N, 2 * N)).double()
    rows = {0: torch.export.Dim("rows", min=2, max=64)}
    for recorded in (False, True):
        with torch.set_grad_enabled(recorded):
            program = torch.export.export(module, (tensor(4, K),), dynamic_shapes=(rows,), strict=strict).module()
        for m in (2, 9):
            same_with_gradients(program, module, tensor(m, K))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("in_fp8", "hidden", "dtype"), [
    (False, 24, torch.float64), (False, 20, torch.float64), (True, 24, torch.float32)
])  # fmt: skip
def test_exported_experts(in_fp8: bool, hidden: int, dtype: Any, strict: bool) -> None:
    """The router has gradients, too."""
    module = FusedMoE(K, hidden, 4, 2, shared_hidden=16, multiply_in_fp8=in_fp8, dtype=dtype)
    for recorded in (False, True):
        with torch.set_grad_enabled(recorded):
            program = torch.export.export(module, (tensor(5, K, dtype=dtype),), strict=strict).module()
        same_with_gradients(program, module, tensor(5, K, dtype=dtype))


def same_with_gradients(program: Any, module: Any, *inputs: Any) -> None:
    """Check values, and gradients of the first input and of the parameters."""
    with torch.no_grad():
        torch.testing.assert_close(program(*inputs), module(*inputs))
    outputs_and_grads = []
    for f in (program, module):
        y, parameters = f(*inputs), dict(f.named_parameters())
        named = [parameters[name] for name, _ in module.named_parameters()]
        outputs_and_grads.append((y, *torch.autograd.grad(y.square().sum(), [inputs[0], *named])))
    for actual, expected in zip(*outputs_and_grads, strict=True):
        torch.testing.assert_close(actual, expected)


def test_an_exported_loss() -> None:
    module, target = FusedLinearCrossEntropy(K, N, dtype=torch.float64), torch.randint(N, (4,))
    x = tensor(4, K)
    program = torch.export.export(module, (x, target)).module()
    same_with_gradients(program, module, x, target)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("recorded", [False, True])
def test_jit_trace(recorded: bool) -> None:
    x, target = tensor(4, K), torch.randint(N, (4,))
    modules: list[tuple[Any, ...]] = [(make(), x) for make in MODULES.values()]
    for module, *inputs in [*modules, (FusedLinearCrossEntropy(K, N, dtype=torch.float64), x, target)]:
        with torch.set_grad_enabled(recorded):
            program = torch.jit.trace(module, tuple(inputs))
        for m in (4, 3):
            same_with_gradients(program, module, *[y[:m].detach().requires_grad_(y is x) for y in inputs])


@pytest.mark.parametrize("module", [FusedLinear(K, N), FusedMLP(K, N), FusedLinearCrossEntropy(K, N)])
def test_symbolic_trace_is_refused(module: Any) -> None:
    with pytest.raises(ArgumentError, match=r"input: got a Proxy of torch\.fx\.symbolic_trace; use torch\.export"):
        torch.fx.symbolic_trace(module)
    with pytest.raises(ArgumentError, match=r"a: got a Proxy of torch\.fx\.symbolic_trace; use torch\.export"):
        torch.fx.symbolic_trace(lambda a: gemm(a, torch.ones(K, N)))


def test_a_package_of_aot_inductor(tmp_path: Path) -> None:
    """It is called from Python, where the operators are."""
    module = FusedLinear(K, N, activation="gelu").bfloat16()
    with torch.no_grad():
        rows = ({0: torch.export.Dim("rows", min=2, max=64)},)
        program = torch.export.export(module, (torch.randn(4, K).bfloat16(),), dynamic_shapes=rows)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
        run = torch._inductor.aoti_load_package(path)
        for m in (2, 9):
            x = torch.randn(m, K).bfloat16()
            torch.testing.assert_close(run(x), module(x))


IN_8_BITS: dict[str, Callable[..., Any]] = {
    "a cast": lambda acc: (acc.relu(), acc.to(torch.float8_e5m2)),
    "quantize": lambda acc: gemmsmith.quantize(acc.relu(), "1x128"),
    "top_k_softmax": lambda acc: gemmsmith.top_k_softmax(acc, 2),
}


@pytest.mark.parametrize("name", IN_8_BITS)
def test_what_has_no_gradient(name: str) -> None:
    """It compiles if no gradients are recorded, and is rejected otherwise."""
    a, b = (torch.randn(s, dtype=torch.bfloat16) for s in ((M, K), (K, 128)))
    run = compiled(lambda a, b: gemm(a, b, epilogue=IN_8_BITS[name]), "eager")
    actual, expected = run(a, b), gemm(a, b, epilogue=IN_8_BITS[name])
    for x, y in zip(*(x if isinstance(x, tuple) else (x,) for x in (actual, expected)), strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x.float(), y.float(), rtol=0, atol=0)
    with pytest.raises(Exception, match="has no gradient"):
        run(a.requires_grad_(), b)


def test_forward_mode_in_compiled_code_is_refused() -> None:
    """A tangent would be lost."""
    a, b = tensor(M, K).detach(), tensor(K, N).detach()
    with pytest.raises(Exception, match="got a dual tensor, of forward mode"):
        compiled(lambda a: torch.func.jvp(lambda a: gemm(a, b), (a,), (a,)), "eager")(a)


TRANSFORMED: dict[str, tuple[Callable[..., Any], int]] = {
    "no operand": (lambda a, b, c, d: gemm(a, b), 2),
    "a row": (lambda a, b, c, d: gemm(a, b, epilogue=lambda acc, c: F.gelu(acc + c), c=c), 3),
    "two operands": (lambda a, b, c, d: gemm(a, b, epilogue=lambda acc, c, d: (acc + c) * d, c=c, d=d), 4),
    "two results": (lambda a, b, c, d: gemm(a, b, epilogue=lambda acc, c: (acc * c, acc.sum(-1)), c=c)[0], 3),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_in_compiled_code(name: str, backend: str) -> None:
    """Gradients, those of each sample, and gradients of gradients, of every input."""
    f, count = TRANSFORMED[name]
    inputs = [torch.randn(s, dtype=torch.float64) for s in ((M, K), (K, N), (N,), (M, N))]
    of_sample = [torch.stack([inputs[0], -inputs[0]]), *inputs[1:]]
    argnums = tuple(range(count))

    def grad(*x: Any) -> Any:
        return torch.func.grad(lambda *x: f(*x).pow(3).sum(), argnums)(*x)

    def grad_of_grad(*x: Any) -> Any:
        return torch.func.grad(lambda *x: sum(g.square().sum() for g in grad(*x)), argnums)(*x)

    def per_sample(*x: Any) -> Any:
        return torch.func.vmap(grad, (0, None, None, None))(*x)

    for transformed, x in ((grad, inputs), (grad_of_grad, inputs), (per_sample, of_sample)):
        for actual, expected in zip(compiled(transformed, backend)(*x), transformed(*x), strict=True):
            assert expected.any()
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", [*MODULES, "loss"])
def test_gradients_of_modules_by_torch_func_in_compiled_code(name: str) -> None:
    module = FusedLinearCrossEntropy(K, N, dtype=torch.float64) if name == "loss" else MODULES[name]()
    parameters = {key: p.detach() for key, p in module.named_parameters()}
    others = (torch.randint(N, (M,)),) if name == "loss" else ()

    def grad(parameters: Any, x: Any) -> Any:
        return torch.func.grad(lambda p: torch.func.functional_call(module, p, (x, *others)).square().sum())(parameters)

    x = tensor(M, K).detach()
    actual, expected = compiled(grad)(parameters, x), grad(parameters, x)
    for key in parameters:
        assert expected[key].any()
        torch.testing.assert_close(actual[key], expected[key])


def branches(acc: Any) -> Any:
    return acc if acc > 0 else -acc


OUTSIDE = torch.ones(N)
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a branch": (branches, "a condition differs from element to element"),
    "a number": (lambda acc: float(acc), "a value has no number yet"),
    "a tensor": (lambda acc: acc + OUTSIDE, r"got a tensor of shape \(16,\); make it a parameter"),
    "softmax": (lambda acc: acc.softmax(-1), "softmax cannot be part of an epilogue"),
    "halves of all columns": (lambda acc: acc.chunk(2, -1)[0], r"use gate, up = gemmsmith\.deinterleave\(x\)"),
    "a transpose": (lambda acc: acc.T, r"\.T cannot be part of an epilogue"),
    "cumsum": (lambda acc: torch.cumsum(acc, -1), "its result would depend on other elements"),
    "in place": (lambda acc: acc.relu_(), "a value cannot be changed in place"),
    "an index": (lambda acc: acc[0], "a traced value cannot be indexed"),
    "a size": (lambda acc: acc * (acc + OUTSIDE[0]).shape[0], "make it a parameter|use the accumulator's"),
    "an object": (lambda acc: acc + "x", r"got \\?'x\\?'; use a traced value or a number"),
    "math": (lambda acc: math.exp(acc), "Failed to convert args/kwargs to proxy"),
    "numpy": (lambda acc: np.exp(acc), "Failed to convert args/kwargs to proxy"),
    "an integer": (lambda acc: acc * int(acc), "a value has no number yet"),
    "elements": (lambda acc: sum(acc), "a value has no elements yet"),
    "halves": (lambda acc: (lambda x, y: x * y)(*acc), "a value has no elements yet"),
    "a length": (lambda acc: acc * len(acc), "a value has no elements yet"),
    "a member": (lambda acc: acc * (3 in acc), "a value has no elements yet"),
    "too little": (lambda acc, bias: acc + bias, "failed to bind arguments|missing required positional argument: bias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, message = REFUSED[name]
    a, b = tensor(M, K), tensor(K, N)
    with pytest.raises(Exception, match=message):
        compiled(lambda: gemm(a, b, epilogue=function), "eager")()


@pytest.mark.parametrize("name", ["a branch", "softmax", "cumsum", "an object", "elements"])
def test_refused_without_fullgraph(name: str) -> None:
    """By the error that it raises where it is not compiled."""
    function, _ = REFUSED[name]
    a, b = tensor(M, K), tensor(K, N)
    errors = []
    for run in (gemm, torch.compile(gemm, backend="eager")):
        with pytest.raises(EpilogueError) as caught:
            run(a, b, epilogue=function)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("make", [
    lambda: lambda a, b: gemm(a, b, epilogue=lambda acc: (acc, acc.sum(-1)))[0], lambda: FusedMoE(K, N, 4, 2),
])  # fmt: skip
def test_compiling_warns_of_nothing(make: Callable[[], Any]) -> None:
    run, x = make(), torch.randn(M, K)
    inputs = (x,) if isinstance(run, torch.nn.Module) else (x, torch.randn(K, N))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.compile(run, backend="eager")(*inputs)


def test_symbols_for_all_extents() -> None:
    compiled = torch.compile(
        lambda a, b, bias: gemm(a, b, epilogue=lambda acc, bias: torch.relu(acc + bias), bias=bias),
        backend="aot_eager", dynamic=True, fullgraph=True,
    )  # fmt: skip
    for rows, n, k in ((6, 16, 8), (9, 24, 8), (9, 32, 16)):
        a, b, bias = torch.randn(2, 3, rows, k), torch.randn(k, n), torch.randn(n)
        torch.testing.assert_close(compiled(a, b, bias), torch.relu(a @ b + bias), rtol=1e-5, atol=1e-5)
