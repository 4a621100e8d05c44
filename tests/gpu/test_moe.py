"""gemmsmith.torch's grouped products and FusedMoE on a GPU, against float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.torch.kinds_of_experts import KINDS, KindOfExperts  # noqa: E402

from gemmsmith.core.dtypes import as_dtype  # noqa: E402
from gemmsmith.moe.route import RouteSpec  # noqa: E402
from gemmsmith.torch import FusedMoE, grouped_gemm  # noqa: E402
from gemmsmith.torch.moe.experts import gated_experts  # noqa: E402
from gemmsmith.torch.moe.slots import (  # noqa: E402
    SortedSlots,
    sort_slots,
    sum_slots,
)

pytestmark = pytest.mark.gpu


def near(got: Any, want: Any, tolerance: float = 0.01, roundings: int = 0) -> bool:
    """Relative to the norm; and twice what that many roundings of subnormal numbers deviate from each element.

    A rounding of numbers whose spacing is s, the smallest subnormal, deviates by s / sqrt(12).
    """
    spacing = torch.finfo(got.dtype).tiny * torch.finfo(got.dtype).eps
    allowed = tolerance * want.norm() + 2 * spacing * (roundings * want.numel() / 12) ** 0.5
    return bool((got.double() - want).norm() <= allowed) and bool(got.isfinite().all())


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
        (torch.randn(shape, device="cuda") * (shape[-1] ** -0.5 if len(shape) > 2 else 1)).to(dtype).requires_grad_()
        for shape in ((tokens, dim), (count, 2 * hidden, dim), (count, dim, hidden))
    )
    weights = torch.rand(tokens, top_k, device="cuda", requires_grad=True)
    experts = torch.rand(tokens, count + 4, device="cuda").topk(top_k).indices - 2
    arrays = (x, weights, gate_up, down)
    exact = [a.detach().double().requires_grad_() for a in arrays]
    want = one_at_a_time(exact[0], experts, *exact[1:])
    got = gated_experts(x, experts, weights, gate_up, down)
    of_token = 2 * top_k + 1  # h and a product of each slot, and their sum; h is small enough to be subnormal in fp16
    assert near(got, want, roundings=of_token)
    upstream = torch.randn(tokens, dim, device="cuda").to(dtype)
    wanted = torch.autograd.grad(want, exact, upstream.double())
    for a, b in zip(torch.autograd.grad(got, arrays, upstream), wanted, strict=True):
        assert near(a, b, 0.02, roundings=tokens + 1)  # h of each token, and their sum
    with torch.no_grad():  # rows are gathered and scattered
        assert near(gated_experts(x, experts, weights, gate_up, down), want, roundings=of_token)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_experts(kind: str, tokens: int, dtype: Any) -> None:
    """Some experts are other ranks'."""
    dim, count, top_k = 256, 12, 4
    made = KindOfExperts(*KINDS[kind], dim, 192, count).to("cuda", dtype)
    exact = copy.deepcopy(made).double()
    x, weights = torch.randn(tokens, dim, device="cuda").to(dtype), torch.rand(tokens, top_k, device="cuda")
    experts = torch.rand(tokens, count + 4, device="cuda").topk(top_k).indices - 2
    arrays = x.requires_grad_(), weights.requires_grad_()
    exact_arrays = [a.detach().double().requires_grad_() for a in arrays]
    want = exact.one_at_a_time(exact_arrays[0], experts, exact_arrays[1], saved=dtype)
    got = made(x, experts, weights)
    assert near(got, want)
    upstream = torch.randn(tokens, dim, device="cuda").to(dtype)
    wanted = torch.autograd.grad(want, (*exact_arrays, *exact.parameters()), upstream.double())
    for a, b in zip(torch.autograd.grad(got, (*arrays, *made.parameters()), upstream), wanted, strict=True):
        assert near(a, b, 0.02)
    with torch.no_grad():
        assert near(made(x, experts, weights), want)
        assert near(torch.compile(made, fullgraph=True)(x, experts, weights), want)


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


def choices(logits: Any, bias: Any, spec: RouteSpec) -> tuple[Any, Any, Any]:
    """The scores, what experts are selected by, and in which rows rounding cannot select another group."""
    x = logits.double()
    scores = x.softmax(-1) if spec.scores == "softmax" else x.sigmoid()
    choice = scores if bias is None else scores + bias.double()
    if spec.groups == spec.top_k_groups:
        return scores, choice, torch.ones_like(choice[:, 0], dtype=torch.bool)
    grouped = choice.unflatten(-1, (spec.groups, -1))
    values, best = grouped.topk(2, -1).values.sum(-1).topk(spec.top_k_groups + 1, -1)
    outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best[:, :-1], False)
    is_clear = values[:, -2] - values[:, -1] > 1e-5 * values[:, -2].abs()
    return scores, grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(-2), is_clear


def check_routed(logits: Any, bias: Any, spec: RouteSpec, got: Any) -> None:
    """Of equal scores any experts are right."""
    (experts, weights, *order), count = got, logits.shape[1]
    assert (experts.dtype, weights.dtype) == (torch.int32, torch.float32)
    index = experts.long()
    assert bool(((index >= 0) & (index < count)).all())
    assert bool((index.sort(-1).values.diff(dim=-1) > 0).all())
    scores, choice, is_clear = choices(logits, bias, spec)
    found, best = choice.gather(-1, index), choice.topk(spec.top_k, -1).values
    torch.testing.assert_close(found[is_clear], best[is_clear], rtol=2e-6, atol=5e-7)
    want = scores.gather(-1, index)
    if spec.normalize:
        want = want / (want.sum(-1, keepdim=True) + 1e-20 * (bias is not None))
    torch.testing.assert_close(weights.double(), want * 2.5, rtol=2e-6, atol=0)
    for name, x in sorted_by_torch(experts, weights, count).items():
        x_got = order[SortedSlots._fields.index(name)]
        assert torch.equal(x_got, x.to(x_got.dtype)), name


def routing_inputs(tokens: int, spec: RouteSpec, dtype: Any) -> tuple[Any, Any]:
    logits = (torch.randn(tokens, spec.experts, device="cuda") * 2).to(dtype)
    return logits, torch.randn(spec.experts, device="cuda") if spec.scores == "sigmoid" else None


ROUTED = [(1, 1, 1, 1), (3, 2, 1, 1), (8, 2, 1, 1), (60, 4, 1, 1), (128, 8, 1, 1), (255, 6, 1, 1), (256, 8, 8, 4),
          (60, 5, 6, 2), (512, 10, 1, 1), (1024, 16, 32, 4)]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("count", "top_k", "groups", "top_k_groups"), ROUTED)
@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 300, 1030])
def test_experts_are_selected(tokens: int, count: int, top_k: int, groups: int, top_k_groups: int, dtype: Any) -> None:
    for scores in ("softmax", "sigmoid"):
        for normalize in (False, True):
            spec = RouteSpec(count, top_k, scores, normalize, groups, top_k_groups, as_dtype(dtype, "logits"))  # type: ignore[arg-type]
            logits, bias = routing_inputs(tokens, spec, dtype)
            options = (top_k, scores, normalize, 2.5, groups, top_k_groups)
            check_routed(logits, bias, spec, torch.ops.gemmsmith.route(logits, bias, *options))


@pytest.mark.parametrize("tokens", [17, 200])
def test_experts_are_selected_in_a_graph(tokens: int) -> None:
    """What comes before is a kernel, or clears memory."""
    spec = RouteSpec(128, 8, "softmax", True, 1, 1, as_dtype(torch.bfloat16, "logits"))
    logits, _ = routing_inputs(tokens, spec, torch.bfloat16)
    source, options = logits.clone(), (8, "softmax", True, 2.5, 1, 1)
    torch.ops.gemmsmith.route(logits, None, *options)
    torch.cuda.synchronize()
    for prepare in (lambda: logits.copy_(source * 1), lambda: logits.zero_()):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            prepare()
            got = torch.ops.gemmsmith.route(logits, None, *options)
        for _ in range(20):
            source.normal_()
            for x in got:
                x.fill_(-7)
            graph.replay()
            check_routed(logits, None, spec, got)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_logits_that_are_not_finite(scores: str) -> None:
    """Experts are different ones."""
    logits = torch.randn(40, 64, device="cuda")
    logits[5:9, 3], logits[9:12], logits[12:15], logits[15], logits[16, 4:] = (
        float("nan"), float("nan"), -float("nan"), float("inf"), float("-inf")
    )  # fmt: skip
    bias = torch.randn(64, device="cuda") if scores == "sigmoid" else None
    experts, weights, *_ = torch.ops.gemmsmith.route(logits, bias, 8, scores, True, 1.0, 1, 1)
    assert bool(((experts >= 0) & (experts < 64)).all())
    assert bool((experts.sort(-1).values.diff(dim=-1) > 0).all())
    assert bool(weights[5:15].isnan().all())
    assert bool(weights[:5].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("top_k", [1, 2, 6, 8, 16])
def test_sums_of_slots(top_k: int, dtype: Any) -> None:
    for tokens, n in ((1, 8), (1, 2816), (7, 264), (1000, 1024), (4096, 2816)):
        slots = torch.randn(tokens * top_k, n, device="cuda").to(dtype)
        addend = torch.randn(tokens, n, device="cuda").to(dtype)
        for added in (None, addend):
            want = slots.view(tokens, top_k, n)[:, 0].float()
            for i in range(1, top_k):
                want = want + slots.view(tokens, top_k, n)[:, i].float()
            want = (want if added is None else want + added.float()).to(dtype)
            assert torch.equal(sum_slots(slots, tokens, added), want)
        row_of_slot = torch.randperm(len(slots), device="cuda", dtype=torch.int32)
        rows = torch.empty_like(slots).index_copy_(0, row_of_slot.long(), slots)
        assert torch.equal(torch.ops.gemmsmith.sum_rows(rows, row_of_slot, tokens), sum_slots(slots, tokens))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("shared_hidden", [0, 128])
@pytest.mark.parametrize("tokens", [1, 40, 200])
def test_inference_of_a_layer(tokens: int, shared_hidden: int, scores: Any) -> None:
    """A router with a hook is called; then torch selects the experts."""
    options = {"scores": scores, "groups": 8, "top_k_groups": 4, "scale": 2.5} if scores == "sigmoid" else {}
    layer = FusedMoE(
        256, 128, 64, 6, shared_hidden=shared_hidden, device="cuda", dtype=torch.bfloat16, **options
    )  # fmt: skip
    if scores == "sigmoid":
        layer.gate.e_score_correction_bias.normal_(std=0.1)
    x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        got = layer(x)
        experts, weights, _ = layer.gate.route(x)
        arrays = (x, layer.experts.gate_up_proj, layer.experts.down_proj)
        x_, gate_up, down = (a.double() for a in arrays)
        want = one_at_a_time(x_, experts, weights.double(), gate_up, down)
        if layer.shared_experts is not None:
            want = want + layer.shared_experts(x).double()
        assert near(got, want)
        calls = []
        layer.gate.register_forward_hook(lambda *_: calls.append(1))
        other = layer(x)
        assert len(calls) == 1
        assert scores == "softmax" or near(other, got.double())  # logits in bf16 may be equal


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


@pytest.mark.parametrize("in_fp8", [False, True])
def test_backward_frees_what_no_later_step_reads(in_fp8: bool) -> None:
    """The peak is that of the gradients, one gathered matrix, gate and up and their gradients, and h, with its copy."""
    dim, hidden, count, top_k, tokens = 1024, 256, 4, 8, 4096
    layer = FusedMoE(dim, hidden, count * 2, top_k, device="cuda", dtype=torch.bfloat16, multiply_in_fp8=in_fp8)
    x = torch.randn(tokens, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn_like(x)
    for _ in range(2):
        layer.zero_grad(set_to_none=True)
        x.grad = None
        y = layer(x)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y.backward(upstream)
    gradients = sum(p.numel() * p.element_size() for p in [x, *layer.parameters()])
    row = 2 * tokens * top_k  # bytes of a column of all rows
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 1.1 * (gradients + row * (2 * dim + 4 * hidden))
