"""gemmsmith.torch's grouped products and FusedMoE on a GPU, against float64."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from gemmsmith.torch import FusedMoE, grouped_gemm  # noqa: E402
from gemmsmith.torch.expert_sort import sort_slots  # noqa: E402
from gemmsmith.torch.experts import gated_experts  # noqa: E402

pytestmark = pytest.mark.gpu


def near(got: Any, want: Any, tolerance: float = 0.01) -> bool:
    return bool((got.double() - want).norm() <= tolerance * want.norm()) and bool(got.isfinite().all())


def one_at_a_time(x: Any, experts: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    y = torch.zeros_like(x)
    for e in range(len(gate_up)):
        token, slot = torch.where(experts == e)
        gate, up = (x[token] @ gate_up[e].T).chunk(2, -1)
        y = y.index_add(0, token, (torch.nn.functional.silu(gate) * up @ down[e].T) * weights[token, slot, None])
    return y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_experts_and_their_gradients(dtype: Any, tokens: int) -> None:
    """Some experts are other ranks'."""
    dim, hidden, count, top_k = 256, 192, 24, 4
    x, gate_up, down = (
        (torch.randn(shape, device="cuda") * shape[-1] ** -(0.5 ** (len(shape) > 2))).to(dtype).requires_grad_()
        for shape in ((tokens, dim), (count, 2 * hidden, dim), (count, dim, hidden))
    )
    weights = torch.rand(tokens, top_k, device="cuda", requires_grad=True)
    experts = torch.rand(tokens, count + 4, device="cuda").topk(top_k).indices - 2
    arrays = (x, weights, gate_up, down)
    exact = [a.detach().double().requires_grad_() for a in arrays]
    want = one_at_a_time(exact[0], experts, *exact[1:])
    got = gated_experts(x, experts, weights, gate_up, down)
    assert near(got, want)
    upstream = torch.randn(tokens, dim, device="cuda").to(dtype)
    wanted = torch.autograd.grad(want, exact, upstream.double())
    for a, b in zip(torch.autograd.grad(got, arrays, upstream), wanted, strict=True):
        assert near(a, b, 0.02)
    with torch.no_grad():  # rows are gathered and scattered
        assert near(gated_experts(x, experts, weights, gate_up, down), want)


def sorted_by_torch(experts: Any, weights: Any, count: int) -> dict[str, Any]:
    flat = experts.flatten()
    is_one = (flat >= 0) & (flat < count)
    order = torch.where(is_one, flat, count).argsort(stable=True)
    return {
        "offsets": torch.bincount(flat[is_one], minlength=count).cumsum(0),
        "slot_of_row": order,
        "token_of_row": order // experts.shape[1],
        "row_of_slot": order.argsort(),
        "row_weights": weights.flatten()[order],
    }


def routed(tokens: int, top_k: int, count: int, dtype: Any) -> tuple[Any, Any]:
    """Some experts are none of them."""
    experts = torch.randint(-2, count + 3, (tokens, top_k), device="cuda").to(dtype)
    if dtype == torch.int64:
        experts[::5, 0] += 1 << 32
    return experts, torch.rand(tokens, top_k, device="cuda")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [1, 3, 8, 128, 256, 1024])
@pytest.mark.parametrize("tokens", [1, 5, 128, 300, 1000, 1024, 1025])
def test_slots_are_sorted(tokens: int, count: int, dtype: Any) -> None:
    for top_k in (1, 6, 8):
        experts, weights = routed(tokens, top_k, count, dtype)
        got = sort_slots(experts, weights, count)._asdict()
        for name, want in sorted_by_torch(experts, weights, count).items():
            assert torch.equal(got[name], want.to(got[name].dtype)), name


def test_slots_are_sorted_in_a_graph() -> None:
    experts, weights = routed(200, 8, 64, torch.int64)
    sort_slots(experts, weights, 64)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = sort_slots(experts, weights, 64)._asdict()
    for _ in range(20):
        for x, new in zip((experts, weights), routed(200, 8, 64, torch.int64), strict=True):
            x.copy_(new)
        for x in got.values():
            x.fill_(-7)
        graph.replay()
        for name, want in sorted_by_torch(experts, weights, 64).items():
            assert torch.equal(got[name], want.to(got[name].dtype)), name


def test_a_layer_in_a_graph_and_compiled() -> None:
    layer = FusedMoE(256, 128, 16, 2, shared_hidden=128, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(3, 50, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        want = layer(x)
        torch.testing.assert_close(torch.compile(layer)(x), want, rtol=0.05, atol=0.05)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = layer(x)
        x.normal_()
        graph.replay()
        assert torch.equal(got, layer(x))


def test_an_epilogue_of_groups_and_its_gradients() -> None:
    offsets = torch.tensor([100, 100, 230, 257], device="cuda", dtype=torch.int32)
    a = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    b = torch.randn(4, 64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(64, device="cuda", requires_grad=True)

    def epilogue(acc: Any, bias: Any) -> Any:
        return torch.nn.functional.gelu(acc * 0.1 + bias)

    got = grouped_gemm(a, b.mT, offsets=offsets, epilogue=epilogue, bias=bias)
    exact = [x.detach().double().requires_grad_() for x in (a, b, bias)]
    parts = [x @ y.T for x, y in zip(exact[0][:257].split([100, 0, 130, 27]), exact[1], strict=True)]
    want = torch.cat([epilogue(torch.cat(parts), exact[2]), exact[0].new_zeros(43, 64)])
    assert near(got, want)
    upstream = torch.randn_like(got)
    wanted = torch.autograd.grad(want, exact, upstream.double())
    for x, y in zip(torch.autograd.grad(got, (a, b, bias), upstream), wanted, strict=True):
        assert near(x, y, 0.02)
