"""gemmsmith.torch on a GPU: as exact as torch in the same dtype, against float64; compiled; streams and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import gemmsmith

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

F = torch.nn.functional
Function = Callable[..., Any]


def gated(acc: Any, bias: Any) -> Any:
    gate, up = gemmsmith.deinterleave(acc + bias)
    return F.silu(gate) * up


CASES: dict[str, tuple[Function, dict[str, Any]]] = {
    "none": (lambda acc: acc, {}),
    "relu": (lambda acc, bias: (acc + bias).relu(), {"bias": ("n",)}),
    "gelu": (lambda acc, bias, r: F.gelu(acc + bias) + r, {"bias": ("n",), "r": ("m", "n")}),
    "tanh": (lambda acc, c, s: (acc * c).tanh() * s, {"c": ("m", 1), "s": ()}),
    "gated": (gated, {"bias": ("n",)}),
    "stats": (lambda acc: (acc.relu(), acc.square().mean(-1), acc.logsumexp(-1)), {}),
    "most": (lambda acc: (acc, acc.abs().amax(-1)), {}),
    "loss": (lambda acc, y: ((y - 1) * acc + acc.sigmoid().clamp(1e-3, 1 - 1e-3).log()).sum(), {"y": ("m", "n")}),
}


def as_exact(actual: list[Any], plain: list[Any], exact: list[Any]) -> None:
    """By the norm of the error, within twice that of torch."""
    for x, y, z in zip(actual, plain, exact, strict=True):
        assert x.shape == z.shape
        assert x.dtype == y.dtype
        error, allowed = ((v.double() - z).norm() for v in (x, y))
        assert error <= 2 * allowed + 1e-3 * z.norm(), (float(error), float(allowed), float(z.norm()))


def judge(run: Function, plain: Function, *draws: list[Any]) -> None:
    """Values and gradients of a function of these tensors, of all draws together."""
    result = [of_draw(run, plain, inputs) for inputs in draws]
    as_exact(*([torch.stack(each) for each in zip(*lists, strict=True)] for lists in zip(*result, strict=True)))


def of_draw(run: Function, plain: Function, inputs: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Values and gradients: ours, torch's, and exact ones."""
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    result = []
    cotangents: list[Any] = []
    for function, given in ((plain, wide), (plain, inputs), (run, inputs)):
        y = function(*given)
        results = list(y) if isinstance(y, tuple) else [y]
        cotangents = cotangents or [torch.randn_like(r) for r in results]
        gradients = torch.autograd.grad(
            results, given, [g.to(r.dtype) for g, r in zip(cotangents, results, strict=True)]
        )
        result.append([*(r.detach() for r in results), *gradients])
    exact, ours, actual = result
    for i, x in enumerate(actual):
        ours[i] = ours[i].to(x.dtype)  # reductions are fp32
    return actual, ours, exact


def tensors(shapes: list[tuple[int, ...]], dtype: Any) -> list[Any]:
    return [torch.randn(s, device="cuda", dtype=dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("m", [64, 200])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, m: int, recompute: bool, dtype: Any) -> None:
    from gemmsmith.torch import gemm

    if recompute and name == "most":
        return  # refused
    function, shapes = CASES[name]
    extents = {"m": m, "n": 256}
    sizes = [(m, 128), (128, 256), *(tuple(extents.get(i, i) for i in s) for s in shapes.values())]
    draws = 32 if () in sizes else 1  # one sum's error may be small by chance
    judge(
        lambda a, b, *x: gemm(a, b, epilogue=function, recompute=recompute, **dict(zip(shapes, x, strict=True))),
        lambda a, b, *x: function(a @ b, *x), *(tensors(sizes, dtype) for _ in range(draws)),
    )  # fmt: skip


def test_a_batch() -> None:
    from gemmsmith.torch import gemm

    for a, b in [((3, 64, 128), (128, 256)), ((3, 64, 128), (3, 128, 256)), ((2, 3, 64, 128), (128, 256))]:
        inputs = tensors([a, b, (256,)], torch.bfloat16)
        epilogue = lambda acc, bias: (F.gelu(acc + bias), acc.sum(-2))  # noqa: E731
        judge(
            lambda a, b, x, f=epilogue: gemm(a, b, epilogue=f, bias=x), lambda a, b, x, f=epilogue: f(a @ b, x), inputs
        )


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "relu"])
@pytest.mark.parametrize("compiled", [False, True])
def test_mlp(activation: str, compiled: bool) -> None:
    from gemmsmith.torch import FusedMLP

    module = FusedMLP(256, 512, activation, bias=True, device="cuda", dtype=torch.bfloat16)
    names = [name for name, _ in module.named_parameters()]
    run = torch.compile(module, fullgraph=True) if compiled else module

    def fused(x: Any, *parameters: Any) -> Any:
        return torch.func.functional_call(run, dict(zip(names, parameters, strict=True)), (x,))

    def plain(x: Any, *parameters: Any) -> Any:
        p = dict(zip(names, parameters, strict=True))
        up = F.linear(x, p["up.weight"], p["up.bias"])
        h = (
            F.silu(F.linear(x, p["gate.weight"], p["gate.bias"])) * up
            if activation == "swiglu"
            else getattr(F, activation)(up)
        )
        return F.linear(h, p["down.weight"], p["down.bias"])

    if compiled:
        fused = lambda x, *_: run(x)  # noqa: E731
    judge(fused, plain, [*tensors([(2, 100, 256)], torch.bfloat16), *module.parameters()])


@pytest.mark.parametrize(("reduction", "low_memory"), [("mean", False), ("sum", False), ("none", False), ("sum", True)])
def test_cross_entropy(reduction: Any, low_memory: bool) -> None:
    from gemmsmith.torch import FusedLinearCrossEntropy

    module = FusedLinearCrossEntropy(128, 1000, -100, reduction, 8, low_memory, "cuda", torch.bfloat16)
    target = torch.randint(1000, (200,), device="cuda")
    target[::7] = -100

    def plain(x: Any, weight: Any) -> Any:
        return F.cross_entropy(x @ weight.T, target, reduction=reduction)

    judge(lambda x, _: module(x, target), plain, [*tensors([(200, 128)], torch.bfloat16), module.weight])


def test_without_gradients_the_kernel_is_launched_at_once() -> None:
    import gemmsmith
    from gemmsmith.torch import gemm

    a, b, bias = (x.detach() for x in tensors([(200, 128), (128, 256), (256,)], torch.bfloat16))
    epilogue = lambda acc, bias: (acc + bias).relu()  # noqa: E731
    assert torch.equal(gemm(a, b, epilogue=epilogue, bias=bias), gemmsmith.gemm(a, b, epilogue=epilogue, bias=bias))


def test_the_dtype_of_a_bare_product() -> None:
    from gemmsmith.torch.ops import call_op

    a, b = (x.detach() for x in tensors([(64, 128), (128, 256)], torch.bfloat16))
    for dtype, word in ((torch.bfloat16, ""), (torch.float32, " fp32"), (torch.float16, " fp16")):
        assert call_op(f" | accumulator | out 0{word}", a, b, [], []).dtype == dtype


def test_on_side_streams_and_in_cuda_graphs() -> None:
    from gemmsmith.torch import FusedMLP

    module = FusedMLP(256, 512, device="cuda", dtype=torch.bfloat16)
    x = tensors([(128, 256)], torch.bfloat16)[0]
    expected = [y.clone() for y in torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.compile(module, mode="reduce-overhead", fullgraph=True)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        again = torch.autograd.grad(captured(x).square().sum(), [x, *module.parameters()])
    for i, y in enumerate(expected):
        torch.testing.assert_close(aside[i], y, rtol=0, atol=0)
        torch.testing.assert_close(again[i], y, rtol=2**-6, atol=2**-6 * float(y.abs().max()))


@pytest.mark.parametrize("max_autotune_gemm", [False, True])
def test_matmuls_without_an_epilogue_in_a_compiled_layer(max_autotune_gemm: bool) -> None:
    from gemmsmith.torch import options

    more = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN"} if max_autotune_gemm else {}
    x, w = tensors([(4096, 4096), (4096, 4096)], torch.bfloat16)
    torch._dynamo.reset()
    with torch._inductor.utils.fresh_cache():
        compiled = torch.compile(lambda x, w: x @ w.T, options=options(**more), fullgraph=True)
        _, codes = torch._inductor.utils.run_and_get_code(compiled, x, w)
        judge(compiled, lambda x, w: x @ w.T, [x, w])
    assert max_autotune_gemm or any("gemmsmith.gemm_1" in code for code in codes)


def test_the_faster_kernel_of_a_matmul_is_chosen_by_measured_times() -> None:
    from gemmsmith.torch import explain

    x, w = tensors([(4096, 4096), (4096, 4096)], torch.bfloat16)
    random_state = torch.cuda.get_rng_state()
    explanation = explain(lambda x, w: F.relu(x @ w.T), x, w, measure=True)
    assert torch.equal(torch.cuda.get_rng_state(), random_state)
    assert len(explanation.matmuls) == 3
    for outcome in explanation.matmuls:
        times = outcome.times
        assert times.measured
        assert 50 < times.plain < 1000
        assert 50 < times.torch < 1000
        if times.fused is None:
            assert outcome.replaced == (times.plain < times.torch)
        else:
            assert bool(outcome.epilogue) == (times.fused < times.unfused)
    assert explanation.fused
    again = explain(lambda x, w: F.relu(x @ w.T), x, w, measure=True)
    assert [x.times for x in again.matmuls] == [x.times for x in explanation.matmuls]  # cached
