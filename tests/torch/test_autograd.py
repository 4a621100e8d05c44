"""gradcheck in float64: every function, reduction, operand and CUTLASS fusion, and random epilogues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from tests.epilogue.graphs import graphs
from tests.epilogues import POSITIVE

import gemmsmith
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.errors import ArgumentError, EpilogueError
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph, Node, Operand, Result
from gemmsmith.graph.frontend.fusions import NAMED_FUSIONS
from gemmsmith.graph.functions import FUNCTIONS
from gemmsmith.torch import gemm
from gemmsmith.torch.autograd import differentiable_gemm
from gemmsmith.torch.graph_serialization import serialize

M, N, K = 12, 32, 3
"""As in tests.epilogue.graphs."""
SHAPES: dict[str, tuple[int, ...]] = {"scalar": (), "device_scalar": (), "row": (N,), "column": (M, 1),
                                      "matrix": (M, N), "half": (M, N // 2)}  # fmt: skip


def tensor(*shape: int) -> Any:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def check(function: Callable[..., Any], *inputs: Any, **options: Any) -> None:
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True, **options)


def check_graph(graph: EpilogueGraph) -> None:
    """Check a graph with unrounded operands and results."""
    operands = tuple(replace(o, dtype=o.dtype and FP32) for o in graph.operands)
    graph = EpilogueGraph(graph.nodes, operands, tuple(replace(r, dtype=None) for r in graph.results))
    given = [tensor(*SHAPES[o.name]) for o in graph.operands if o.dtype is not None]
    numbers = [0.7 for o in graph.operands if o.dtype is None]
    check(lambda a, b, *x: differentiable_gemm(serialize(graph), a, b, numbers, x), tensor(M, K), tensor(K, N), *given)


@pytest.mark.parametrize("name", [n for n, f in FUNCTIONS.items() if f.has_gradient])
def test_every_function(name: str) -> None:
    """Of the accumulator and operands; if the function has bounds, of their absolute values."""
    operands = (
        Operand("row", BroadcastDims(columns_per_value=1), FP32),
        Operand("column", BroadcastDims(rows_per_value=1), FP32),
    )
    nodes = [Node("accumulator"), Node("operand", (), "row"), Node("operand", (), "column")]
    inputs = list(range(FUNCTIONS[name].arity))
    for i in inputs if name in {*POSITIVE, "pow", "log2", "log1p"} else []:
        nodes += [Node("abs", (i,)), Node("constant", (), 0.5), Node("add", (len(nodes), len(nodes) + 1))]
        inputs[i] = len(nodes) - 1
    if name == "where":
        nodes += [Node("gt", (0, 1))]
        inputs[0] = len(nodes) - 1
    if name == "softplus_of_sigmoid":  # of the same value
        nodes += [Node("sigmoid", (0,))]
        inputs[1] = len(nodes) - 1
    nodes.append(Node(name, tuple(inputs)))
    read = {nodes[i].attribute for i in range(FUNCTIONS[name].arity)}
    graph = EpilogueGraph(tuple(nodes), tuple(o for o in operands if o.name in read), (Result("out", len(nodes) - 1),))
    check_graph(graph)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("axis", ["n", "m", "all"])
@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min", "logsumexp"])
def test_every_reduction(kind: str, axis: str, keepdim: bool) -> None:
    nodes = (Node("accumulator"), Node("operand", (), "row"), Node("mul", (0, 1)), Node("reduce", (2,), (kind, axis)))
    operands, results = (
        (Operand("row", BroadcastDims(columns_per_value=1), FP32),),
        (Result("out", 3, keepdim=keepdim),),
    )
    check_graph(EpilogueGraph(nodes, operands, results))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("kind", ["scalar", "row", "column", "matrix"])
def test_every_operand(kind: str, batch: tuple[int, ...], recompute: bool) -> None:
    """With and without a's leading dimensions."""
    for leading in {(), batch if kind != "scalar" else ()}:
        shape = (*leading, *((1,) * (2 - len(SHAPES[kind])) if leading else ()), *SHAPES[kind])

        def function(a: Any, b: Any, x: Any) -> Any:
            return gemm(a, b, epilogue=lambda acc, x: (acc * x).tanh() * x, recompute=recompute, x=x)

        check(function, tensor(*batch, M, K), tensor(K, N), tensor(*shape))


def test_a_batch_of_b_and_reductions_within_the_batch() -> None:
    def function(a: Any, b: Any, row: Any) -> Any:
        return gemm(a, b, epilogue=lambda acc, row: (acc * row, (acc + row).mean(-2), acc.sum()), row=row)

    for a, b in [((2, M, K), (2, K, N)), ((M, K), (2, K, N)), ((1, M, K), (2, K, N)), ((2, M, K), (K, N))]:
        check(function, tensor(*a), tensor(*b), tensor(N))


DIFFERENTIABLE = {n: f for n, f in NAMED_FUSIONS.items() if n not in ("block_quantized", "LinCombTopKSoftmaxCol")}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_every_ready_made_fusion(name: str) -> None:
    fusion = DIFFERENTIABLE[name]
    try:
        function = fusion.make("gelu")
    except (TypeError, ArgumentError):  # there is no activation to choose
        function = fusion.make()
    # with the two of a backward pass there are at most eight tensors
    numbers = {"alpha": 0.7, "beta": 1.3} if len(fusion.operands) > 6 else {}
    names = [name for name in fusion.operands if name not in numbers]

    def run(a: Any, b: Any, *operands: Any) -> Any:
        return gemm(a, b, epilogue=function, operands={**dict(zip(names, operands, strict=True)), **numbers})

    inputs = [tensor(M, K), tensor(K, N), *[tensor(*SHAPES[fusion.operands[n]]) for n in names]]
    if name.endswith("AmaxAux"):  # what it has the maxima of are more results than there may be
        with pytest.raises(EpilogueError, match="max: its gradient needs its input"):
            run(*inputs)
    else:
        check(run, *inputs)


@settings(max_examples=15, deadline=None)
@given(graph=graphs())
def test_random_epilogues(graph: EpilogueGraph) -> None:
    if not any(node.op in ("floor", "sign", "where") for node in graph.nodes):  # differences would step over edges
        check_graph(graph)


def test_equal_maxima_share_the_gradient() -> None:
    a, b = (torch.ones(s, dtype=torch.float64, requires_grad=True) for s in ((2, 1), (1, 8)))
    actual = torch.autograd.grad(gemm(a, b, epilogue=lambda acc: acc.amax(-1)).sum(), [a, b])
    expected = torch.autograd.grad((a @ b).amax(-1).sum(), [a, b])
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_maximum_of_rounded_values_is_found_again(dtype: Any) -> None:
    """Exactly one element of a row, though it is stored with few bits."""
    a, b = (torch.randn(s, dtype=dtype, requires_grad=True) for s in ((M, 64), (64, N)))
    d = gemm(a, b, epilogue=lambda acc: (acc * 1.7).abs().amax(-1))
    (b_grad,) = torch.autograd.grad(d.sum(), [b])
    x = (a.double() @ b.double()).detach() * 1.7
    near = x.abs() >= x.abs().amax(-1, keepdim=True) * (1 - 2 * torch.finfo(dtype).eps)
    bound = 1.7 * (a.detach().double().abs().T @ near.double())
    assert (b_grad.double().abs() <= bound * 1.01).all()
    assert b_grad.any(dim=0).any()


def losses(acc: Any, labels: Any) -> Any:
    return acc.logsumexp(-1), (acc * F.one_hot(labels, acc.shape[-1])).sum(-1)


def losses_and_logits(acc: Any, labels: Any) -> Any:
    return (*losses(acc, labels), acc)


def losses_of_halves(acc: Any, labels: Any) -> Any:
    z = acc * 0.5
    return (*losses(z * 2, labels), z)


@pytest.mark.parametrize("function", [losses, losses_and_logits, losses_of_halves])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("size", [5, 50])
def test_a_softmax_is_of_what_its_logsumexp_is_of(function: Any, recompute: bool, size: int) -> None:
    """A model that is sure: errors are torch's, and where the loss is 0 so is its gradient."""
    x, w = (torch.randn(64, 128) * size / 128**0.5).bfloat16(), torch.randn(200, 128).bfloat16()
    x[0], w[:, 0] = 0, 0
    x[0, 0], w[0, 0] = 1 + 2**-7, 100.5
    exact, plain, fused = (y.requires_grad_() for y in (x.double(), x.clone(), x.clone()))
    target = (exact @ w.double().T).argmax(-1)
    F.cross_entropy(exact @ w.double().T, target, reduction="sum").backward()
    F.cross_entropy((plain @ w.T).float(), target, reduction="sum").backward()
    lse, of_label, *_ = gemm(fused, w.T, epilogue=function, labels=target[:, None], recompute=recompute)
    each = lse - of_label
    each.sum().backward()
    assert each[0] == 0
    assert (each >= -1e-5 * lse.abs()).all()
    assert not fused.grad[0].any()
    of_torch = (plain.grad.double() - exact.grad).norm()
    assert (fused.grad.double() - exact.grad).norm() < 1.1 * of_torch + 1e-2 * exact.grad.norm()


@pytest.mark.parametrize("trained", ["a", "bias", "mask"])
def test_results_require_grad_that_have_one(trained: str) -> None:
    """As torch's own: the others are constants."""

    def function(acc: Any, bias: Any, mask: Any) -> Any:
        return acc.where(bias > 0, mask), (acc > bias).float(), (bias * acc.detach()).sum(-1), acc

    given = {"a": torch.randn(M, K), "bias": torch.randn(N), "mask": torch.randn(M, N)}
    given[trained].requires_grad_()
    a, b = given.pop("a"), torch.randn(K, N)
    for _ in range(2):
        actual, expected = gemm(a, b, epilogue=function, **given), function(a @ b, **given)
        assert [x.requires_grad for x in actual] == [x.requires_grad for x in expected]
        pairs = [[x.sum() for x in outputs if x.requires_grad] for outputs in (actual, expected)]
        inputs = {"a": a, **given}[trained]
        for x, y in zip(*(torch.autograd.grad(outputs, inputs) for outputs in pairs), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_maximum_without_a_gradient_needs_nothing(recompute: bool) -> None:
    """Neither its input is saved nor its ties are counted."""
    a, b, bias = torch.randn(M, K), torch.randn(K, N), torch.randn(N, requires_grad=True)
    sizes: list[Any] = []

    def function(acc: Any, bias: Any) -> Any:
        return acc.amax(-1), (acc - bias.detach()).amin(), acc.abs().amax(-2), acc * bias

    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(tuple(t.shape)) or t, lambda t: t):
        actual = gemm(a, b, epilogue=function, bias=bias, recompute=recompute)
    assert (M, N) not in sizes or not recompute
    assert len(sizes) <= 3
    assert [x.requires_grad for x in actual] == [False, False, False, True]
    (outputs,) = torch.autograd.grad(actual[3].sum(), bias)
    torch.testing.assert_close(outputs, (a @ b).sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_half_precision(dtype: Any) -> None:
    """The errors against float64 are as small as torch's."""

    def epilogue(acc: Any, bias: Any, residual: Any) -> Any:
        return torch.nn.functional.gelu(acc + bias) * residual

    inputs = [torch.randn(s, dtype=dtype, requires_grad=True) for s in ((M, 64), (64, N), (N,), (M, N))]
    g = torch.randn(M, N, dtype=dtype)

    def gradients(run: Callable[..., Any], inputs: list[Any]) -> list[Any]:
        return list(torch.autograd.grad(run(*inputs), inputs, g.to(inputs[0].dtype)))

    exact = gradients(lambda a, b, x, y: epilogue(a @ b, x, y), [x.detach().double().requires_grad_() for x in inputs])
    actual = gradients(lambda a, b, x, y: gemm(a, b, epilogue=epilogue, bias=x, residual=y), inputs)
    plain = gradients(lambda a, b, x, y: epilogue(a @ b, x, y), inputs)
    for x, y, z in zip(actual, plain, exact, strict=True):
        assert x.dtype == y.dtype
        assert (x.double() - z).norm() <= 1.5 * (y.double() - z).norm() + 1e-3 * z.norm()


def test_second_derivatives() -> None:
    def product_of_halves(acc: Any, row: Any) -> Any:
        gate, up = gemmsmith.deinterleave(acc)
        return (gate * up).tanh()

    inputs = (tensor(M, K), tensor(K, N), tensor(N))
    for function in (lambda acc, row: (acc + row).gelu(), product_of_halves):
        names = [] if function is product_of_halves else ["row"]

        def run(a: Any, b: Any, row: Any, function: Any = function, names: Any = names) -> Any:
            return gemm(
                a, b, epilogue=function if names else lambda acc: function(acc, None), **dict.fromkeys(names, row)
            )

        used = inputs if names else inputs[:2]
        assert torch.autograd.gradgradcheck(lambda *x, run=run: run(*x, *inputs[len(x) :]), used, fast_mode=True)


def test_only_what_is_needed_is_saved() -> None:
    """a, b, and at most one (M, N) matrix."""

    def saved(epilogue: Callable[..., Any], recompute: bool = False, **operands: Any) -> int:
        a, b = tensor(M, K), tensor(K, N)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            gemm(a, b, epilogue=epilogue, recompute=recompute, **operands)
        return sizes.count(M * N)

    row = tensor(N)
    assert saved(lambda acc, row: acc * 2 + row, row=row) == 0
    assert saved(lambda acc, row: (acc + row).relu(), row=row) == 1
    assert saved(lambda acc, row: (acc + row).gelu(), row=row) == 1
    assert saved(lambda acc, row: (acc + row).gelu(), recompute=True, row=row) == 0
    assert saved(lambda acc, row: acc * row, row=row.detach()) == 0


def test_a_frozen_operand_gets_no_gradient() -> None:
    a, b, row = tensor(M, K), tensor(K, N).detach(), tensor(N)
    d = gemm(a, b, epilogue=lambda acc, row: (acc + row).sigmoid(), row=row)
    d.sum().backward()
    assert a.grad is not None
    assert row.grad is not None
    assert b.grad is None


def test_only_one_result_is_used() -> None:
    a, b = tensor(M, K), tensor(K, N)
    _, total, _ = gemm(a, b, epilogue=lambda acc: (acc.exp(), acc.square().sum(-1), acc.amax()))
    actual = torch.autograd.grad(total.sum(), [a, b])
    for x, y in zip(actual, torch.autograd.grad((a @ b).square().sum(), [a, b]), strict=True):
        torch.testing.assert_close(x, y)


def test_transforms_of_functions() -> None:
    def loss(a: Any, b: Any, row: Any) -> Any:
        return gemm(a, b, epilogue=lambda acc, row: ((acc + row).gelu(), acc.square().sum(-1)), row=row)[0].sum()

    def total(a: Any, b: Any) -> Any:
        return gemm(a, b, epilogue=lambda acc: acc.square().mean())

    a, b, row = tensor(4, M, K).detach(), tensor(K, N).detach(), tensor(N).detach()
    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims=(0, None, None))(a, b, row)
    of_rows = torch.func.vmap(torch.func.grad(loss, argnums=2), in_dims=(None, None, 0))(a[0], b, row.expand(4, N))
    summed = torch.func.vmap(total, in_dims=(0, None))(a, b)
    for i in range(4):
        inputs = [x.clone().requires_grad_() for x in (a[i], b, row)]
        for actual, expected in zip(each, torch.autograd.grad(loss(*inputs), inputs), strict=True):
            torch.testing.assert_close(actual[i], expected)
        torch.testing.assert_close(summed[i], (a[i] @ b).square().mean())
    torch.testing.assert_close(of_rows[0], each[2][0])


def test_jacobians() -> None:
    """Batched gradients."""
    a, b = tensor(2, 3), tensor(3, 4).detach()
    expected = torch.autograd.functional.jacobian(lambda a: torch.nn.functional.gelu(a @ b), a)
    for vectorize in (False, True):
        actual = torch.autograd.functional.jacobian(
            lambda a: gemm(a, b, epilogue=lambda acc: acc.gelu()), a, vectorize=vectorize
        )
        torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.func.jacrev(lambda a: gemm(a, b, epilogue=lambda acc: acc.gelu()))(a), expected)


def test_one_tensor_in_several_places() -> None:
    check(lambda a: gemm(a, a.mT, epilogue=lambda acc, r: acc * r, r=a), tensor(5, 5))
    check(lambda a, x: gemm(a, a, epilogue=lambda acc, r, q: (acc + r).tanh() * q, r=x, q=x), tensor(6, 6), tensor(6))


def test_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    inputs = [tensor(M, K), tensor(K, N), tensor(N)]

    def run(a: Any, b: Any, row: Any) -> Any:
        return gemm(a, b, epilogue=lambda acc, row: (acc + row).gelu(), row=row)

    actual = torch.autograd.grad(checkpoint(run, *inputs, use_reentrant=False).sum(), inputs)
    for x, y in zip(actual, torch.autograd.grad(run(*inputs).sum(), inputs), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_forward_mode_is_refused() -> None:
    a, b = tensor(M, K).detach(), tensor(K, N).detach()
    with pytest.raises(ArgumentError, match="forward mode"):
        torch.func.jvp(lambda a: gemm(a, b), (a,), (a,))
    with pytest.raises(ArgumentError, match="forward mode"):  # of reverse mode
        torch.func.hessian(lambda a: gemm(a, b, epilogue=lambda acc: acc.square().sum()))(a)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, a)
        with pytest.raises(ArgumentError, match="a: got a dual tensor, of forward mode"):
            gemm(dual, b)


def test_what_has_no_gradient_is_refused_at_the_call() -> None:
    import gemmsmith

    a, b = (torch.randn(s, dtype=torch.bfloat16, requires_grad=True) for s in ((M, 16), (16, N)))
    refused = {
        "out: got a result in fp8_e4m3, which has no gradient": lambda acc: gemmsmith.quantize(acc),
        "top_k_softmax: it has no gradient": lambda acc: gemmsmith.top_k_softmax(acc, 2),
        "out1: got a result in fp8_e5m2": lambda acc: (acc, acc.to("fp8_e5m2")),
    }
    for message, epilogue in refused.items():
        with pytest.raises(EpilogueError, match=message):
            gemm(a, b, epilogue=epilogue)
        with torch.no_grad():
            gemm(a, b, epilogue=epilogue)
    with pytest.raises(EpilogueError, match="max: its gradient needs its input"):
        gemm(a, b, epilogue=lambda acc: acc.amax(-1), recompute=True)
    with pytest.raises(ArgumentError, match=r"a: got torch\.float8_e4m3fn, with something that requires grad"):
        gemm(a.detach().to(torch.float8_e4m3fn), b.detach().to(torch.float8_e4m3fn),
             epilogue=lambda acc, row: acc + row, row=torch.ones(N, requires_grad=True))  # fmt: skip


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        lambda x, dim, keepdim: x.sum(dim, keepdim),
        lambda x, dim, keepdim: x.mean(dim, keepdim),
        lambda x, dim, keepdim: x.amax(dim, keepdim),
        lambda x, dim, keepdim: x.logsumexp(dim, keepdim),
    ],
    ids=["sum", "mean", "amax", "logsumexp"],
)
@pytest.mark.parametrize(("shape", "dims"), [
    ((3, M, K), [0, (0, 1), (0, 2), (1, 2), (-3, -2, -1)]), ((2, 3, M, K), [2, (0, 1), (0, 1, 2), (-1, -2), None]),
])  # fmt: skip
def test_every_set_of_indices(shape: tuple[int, ...], dims: list[Any], kind: Any, keepdim: bool) -> None:
    """Values, shapes and gradients agree with torch's, with a matrix and without."""
    a, b, bias = tensor(*shape), tensor(K, N), tensor(N)
    for dim in dims:
        index = tuple(range(len(shape))) if dim is None else dim

        def reduced(x: Any, bias: Any, index: Any = index) -> Any:
            x = (x + bias).tanh()
            return x, kind(x, index, keepdim)

        def alone_grads(x: Any, bias: Any, reduced: Any = reduced) -> Any:
            return reduced(x, bias)[1:]

        for function in (reduced, alone_grads):
            outputs, wants = gemm(a, b, epilogue=function, bias=bias), function(a @ b, bias)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            gradients = [torch.randn_like(expected) for expected in wants]
            for actual, expected in zip(outputs, wants, strict=True):
                torch.testing.assert_close(actual, expected)
            grads = torch.autograd.grad(outputs, (a, b, bias), gradients)
            for actual, expected in zip(grads, torch.autograd.grad(wants, (a, b, bias), gradients), strict=True):
                torch.testing.assert_close(actual, expected)
