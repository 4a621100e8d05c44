"""FusedMoE and transformers' experts interface, against one expert at a time and against transformers' blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.torch.kinds_of_experts import KINDS, OAI, RELU2, KindOfExperts  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from gemmsmith import ArgumentError  # noqa: E402
from gemmsmith.core.dtypes import as_dtype  # noqa: E402
from gemmsmith.moe.launch import route  # noqa: E402
from gemmsmith.moe.launch import sort_by_expert as sort_by_expert_kernel  # noqa: E402
from gemmsmith.moe.route import RouteSpec  # noqa: E402
from gemmsmith.torch import FusedMoE, fallback, register_experts  # noqa: E402
from gemmsmith.torch.mlp.gated_epilogues import ACTIVATIONS, Gate, width  # noqa: E402
from gemmsmith.torch.moe import experts as experts_module  # noqa: E402
from gemmsmith.torch.moe.experts import _run_inference, gated_experts  # noqa: E402
from gemmsmith.torch.moe.slots import (  # noqa: E402
    SortedSlots,
    select_experts,
    sort_slots,
    sum_slots,
)
from gemmsmith.torch.moe.training import BACKWARD, FORWARD, gate_gradients  # noqa: E402

pytestmark = pytest.mark.torch
DIM, HIDDEN, EXPERTS, TOP_K = 16, 24, 6, 2


def one_at_a_time(
    x: Any, experts: Any, weights: Any, gate_up: Any, down: Any, activation: Any = torch.nn.functional.silu
) -> Any:
    y = torch.zeros_like(x)
    for e in range(len(gate_up)):
        token, slot = torch.where(experts == e)
        gate, up = (x[token] @ gate_up[e].T).chunk(2, -1)
        h = activation(gate) * up
        y = y.index_add(0, token, (h @ down[e].T) * weights[token, slot, None])
    return y


def inputs(tokens: int, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)

    experts = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices
    return [normal(tokens, DIM), experts, normal(tokens, TOP_K), normal(EXPERTS, 2 * HIDDEN, DIM),
            normal(EXPERTS, DIM, HIDDEN)]  # fmt: skip


@pytest.mark.parametrize("tokens", [0, 1, 3, 40])
def test_experts_and_their_gradients(tokens: int) -> None:
    x, experts, weights, gate_up, down = inputs(tokens)
    arrays, upstream = (x, weights, gate_up, down), torch.randn(tokens, DIM, dtype=torch.float64)
    got, want = gated_experts(x, experts, weights, gate_up, down), one_at_a_time(x, experts, weights, gate_up, down)
    torch.testing.assert_close(got, want)
    for a, b in zip(
        torch.autograd.grad(got, arrays, upstream), torch.autograd.grad(want, arrays, upstream), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str) -> None:
    act = {"gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh")}.get(
        activation, getattr(torch.nn.functional, activation.removesuffix("_tanh"))
    )
    x, experts, weights, gate_up, down = inputs(20)
    arrays = (x, weights, gate_up, down)
    got = gated_experts(x, experts, weights, gate_up, down, Gate(activation))
    want = one_at_a_time(x, experts, weights, gate_up, down, act)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got.sum(), arrays), torch.autograd.grad(want.sum(), arrays), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("absent", [-1, EXPERTS, 1000])
def test_experts_of_other_ranks_count_for_nothing(absent: int) -> None:
    x, experts, weights, gate_up, down = inputs(20)
    experts[::3, 0], experts[5] = absent, absent
    arrays = (x, weights, gate_up, down)
    got, want = gated_experts(x, experts, weights, gate_up, down), one_at_a_time(x, experts, weights, gate_up, down)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got.sum(), arrays), torch.autograd.grad(want.sum(), arrays), strict=True):
        torch.testing.assert_close(a, b)


def test_sorting_is_stable() -> None:
    order = sort_slots(torch.tensor([[2, 0], [0, -1], [2, 5]]), torch.ones(3, 2), 4)
    assert order.slot_of_row.tolist() == [1, 2, 0, 4, 3, 5]
    assert order.offsets.tolist() == [2, 2, 4, 4]
    assert order.offsets.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("count", [1, 5, 200])
def test_the_operator_that_sorts(count: int, dtype: Any) -> None:
    """It gives what its kernel gives, also to the compiler."""
    experts, weights = torch.randint(0, count + 2, (70, 3)).to(dtype), torch.rand(70, 3)
    got = sort_slots(experts, weights, count)
    by_kernel = sort_by_expert_kernel(experts.long(), weights, count, "sim")
    for name, x in by_kernel.items():
        torch.testing.assert_close(getattr(got, name), x, rtol=0, atol=0)
    for values in (weights, weights.double(), weights.bfloat16()):
        torch.library.opcheck(torch.ops.gemmsmith.sort_by_expert.default, (experts, values, count))
    assert sort_slots(experts, weights.double(), count).row_weights.dtype == torch.float64


@pytest.mark.parametrize(
    ("scores", "groups", "dtype"),
    [("softmax", 1, torch.bfloat16), ("softmax", 4, torch.float32), ("sigmoid", 1, torch.float16),
     ("sigmoid", 8, torch.float32)],
)  # fmt: skip
def test_the_operator_that_routes(scores: Any, groups: int, dtype: Any) -> None:
    """It gives what its kernel gives, also to the compiler."""
    logits = torch.stack([torch.randperm(40) for _ in range(30)]).to(dtype) * 0.25 - 4  # no equal ones
    bias = torch.randn(40) if scores == "sigmoid" else None
    options = (5, scores, True, 2.5, groups, min(groups, 3))
    names = ("experts", "weights", *SortedSlots._fields)
    got = dict(zip(names, torch.ops.gemmsmith.route(logits, bias, *options), strict=True))
    spec = RouteSpec(40, 5, scores, True, groups, min(groups, 3), as_dtype(dtype, "logits"))
    by_kernel = route(logits, bias, spec, 2.5, "sim")
    assert by_kernel.keys() == got.keys()
    for name, x in by_kernel.items():
        torch.testing.assert_close(got[name], x, rtol=1e-6, atol=1e-9)
    torch.library.opcheck(torch.ops.gemmsmith.route.default, (logits, bias, *options))
    torch.library.opcheck(torch.ops.gemmsmith.route.default, (logits[:0], bias, *options))


@pytest.mark.parametrize(("groups", "top_k_groups", "top_k"), [(1, 1, 5), (4, 2, 5), (4, 1, 6)])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_cpu_selects_what_the_kernel_does(scores: Any, groups: int, top_k_groups: int, top_k: int) -> None:
    """With equal scores, NaN, infinities, scores of zero, and biases that exclude experts, too."""
    generator = torch.Generator().manual_seed(0)  # others may have scores that are equal after one of them is rounded
    random, uniform = (f(8, 24, generator=generator) for f in (torch.randn, torch.rand))
    few = torch.where(uniform < 0.2, random, -torch.inf)
    biases = [random[0], torch.zeros(24), torch.where(uniform[0] < 0.2, 0.3, -torch.inf)]
    for logits in (
        random, (random * 4).round().half(), torch.zeros(8, 24).bfloat16(), few, -few, random - 200, random * 1000,
        torch.where(uniform > 0.9, torch.nan, random),
    ):  # fmt: skip
        for bias in biases if scores == "sigmoid" else [None]:
            normalize = bias is None or not bias.isinf().any()
            spec = RouteSpec(24, top_k, scores, normalize, groups, top_k_groups, as_dtype(logits.dtype, "logits"))
            by_kernel = route(logits, bias, spec, 2.5, "sim")
            got = select_experts(logits, bias, top_k, scores, normalize, 2.5, groups, top_k_groups)
            assert torch.equal(got[0].int(), by_kernel["experts"])
            torch.testing.assert_close(got[1], by_kernel["weights"], rtol=1e-5, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_groups_against_each_token(scores: Any) -> None:
    """A token's groups are those whose two best scores have the largest sum, in float64, one by one."""
    router = FusedMoE(DIM, HIDDEN, 12, 4, scores=scores, groups=4, top_k_groups=2, dtype=torch.float64).gate
    if scores == "sigmoid":
        router.e_score_correction_bias.normal_()
    x = torch.randn(30, DIM, dtype=torch.float64)
    experts, weights = router(x)
    logits = x @ router.weight.T
    values = logits.softmax(-1) if scores == "softmax" else logits.sigmoid()
    choice = values + router.e_score_correction_bias if scores == "sigmoid" else values
    for token in range(30):
        of_group = [sum(sorted(choice[token, 3 * g : 3 * g + 3].tolist())[1:]) for g in range(4)]
        best = sorted(range(4), key=of_group.__getitem__)[2:]
        candidates = sorted((e for e in range(12) if e // 3 in best), key=choice[token].tolist().__getitem__)
        assert experts[token].tolist() == candidates[:-5:-1]
        of_experts = values[token, candidates[:-5:-1]]
        torch.testing.assert_close(weights[token], of_experts / of_experts.sum())


def cast_ways() -> dict[str, Any]:
    return {
        "to": lambda layer: layer.to(torch.bfloat16), "to a device": lambda layer: layer.to("cpu", torch.float16),
        "bfloat16": lambda layer: layer.bfloat16(), "half": lambda layer: layer.half(),
        "double": lambda layer: layer.double(), "type": lambda layer: layer.type(torch.bfloat16),
        "a parent": lambda layer: torch.nn.Sequential(layer).bfloat16()[0],
        "a copy": lambda layer: copy.deepcopy(layer).bfloat16(),
        "there and back": lambda layer: layer.bfloat16().float(),
    }  # fmt: skip


@pytest.mark.parametrize("way", [*cast_ways()])
def test_casts_leave_the_correction_bias(way: str) -> None:
    """They are less than bf16's spacing apart from each other."""
    layer = FusedMoE(DIM, HIDDEN, 4, 2, scores="sigmoid")
    biases = torch.tensor([4.0, 4.001, 4.002, 4.003])
    layer.gate.e_score_correction_bias.copy_(biases)
    layer.gate.weight.data.zero_()
    cast = cast_ways()[way](layer)
    assert torch.equal(cast.gate.e_score_correction_bias, biases)
    assert way == "there and back" or cast.gate.weight.dtype != torch.float32
    x = torch.randn(3, DIM, dtype=cast.gate.weight.dtype)
    assert cast.gate(x)[0].tolist() == [[3, 2]] * 3


def test_the_correction_bias_on_meta_and_from_state_dicts() -> None:
    layer = FusedMoE(DIM, HIDDEN, 4, 2, scores="sigmoid", device="meta").bfloat16().to_empty(device="cpu")
    assert layer.gate.e_score_correction_bias.dtype == torch.float32
    state = FusedMoE(DIM, HIDDEN, 4, 2, scores="sigmoid", dtype=torch.bfloat16).state_dict()
    state["gate.e_score_correction_bias"] = torch.tensor([0.5, 1, 2, 3], dtype=torch.bfloat16)
    for assign in (False, True):
        layer.load_state_dict(state, assign=assign)
        assert layer.gate.e_score_correction_bias.dtype == torch.float32
        assert layer.gate.e_score_correction_bias.tolist() == [0.5, 1, 2, 3]


def test_logits_for_sigmoids_are_in_fp32_under_autocast() -> None:
    router, x = FusedMoE(DIM, HIDDEN, EXPERTS, TOP_K, scores="sigmoid").gate, torch.randn(20, DIM)
    want = router(x)
    with torch.autocast("cpu", torch.bfloat16):
        for got in (router(x), torch.compile(router, fullgraph=True, backend="aot_eager")(x)):
            assert torch.equal(got[0], want[0])
            torch.testing.assert_close(got[1], want[1])


def routed_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers on the CPU call the operator that routes."""
    monkeypatch.setattr(FusedMoE, "_is_routed_by_kernel", lambda self, x: True)


@pytest.mark.parametrize("experts_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_routing_by_the_operator(monkeypatch: pytest.MonkeyPatch, scores: Any, experts_dtype: Any) -> None:
    options = {"groups": 2, "shared_hidden": 128, "experts_dtype": experts_dtype}
    layer, x = FusedMoE(128, 128, EXPERTS, TOP_K, scores=scores, **options), torch.randn(2, 9, 128)
    state = FusedMoE(128, 128, EXPERTS, TOP_K, scores=scores, **options | {"experts_dtype": None}).state_dict()
    layer.load_state_dict(state)
    with torch.no_grad():
        want = layer(x)
        routed_by_kernel(monkeypatch)
        torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), want, rtol=1e-4, atol=1e-5)
        assert layer(x[:0]).shape == (0, 9, 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_router_in_inference(dtype: Any) -> None:
    """Logits for sigmoids are in fp32, without fp32 copies of x and weight."""
    router, x = (
        FusedMoE(DIM, HIDDEN, EXPERTS, TOP_K, scores="sigmoid", dtype=dtype).gate,
        torch.randn(20, DIM).to(dtype),
    )
    router.e_score_correction_bias.normal_()
    with torch.no_grad():
        experts, weights, order = router.route(x)
        want = router(x)
    assert torch.equal(experts, want[0].int())
    torch.testing.assert_close(weights, want[1].float(), rtol=1e-5, atol=1e-6)
    assert torch.equal(order.row_weights[order.row_of_slot].view(20, TOP_K), weights)


def test_gradients_of_what_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router and the experts are frozen, the shared MLP is not."""
    layer, x = FusedMoE(DIM, HIDDEN, EXPERTS, TOP_K, shared_hidden=8), torch.randn(9, DIM)
    layer.gate.requires_grad_(False)
    layer.experts.requires_grad_(False)
    assert layer.shared_experts is not None
    parameters = list(layer.shared_experts.parameters())
    want = torch.autograd.grad(layer(x).square().sum(), parameters)
    routed_by_kernel(monkeypatch)
    for a, b in zip(torch.autograd.grad(layer(x).square().sum(), parameters), want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_sums_of_slots(tokens: int, dtype: Any) -> None:
    slots, addend = torch.randn(tokens * 3, 24).to(dtype), torch.randn(tokens, 24).to(dtype)
    for added in (None, addend):
        got = sum_slots(slots, tokens, added)
        want = slots.double().view(tokens, 3, 24).sum(1) + (0 if added is None else added.double())
        torch.testing.assert_close(got, want.to(dtype), rtol=0.02, atol=0.02)
        assert got.dtype == dtype


def test_autocast() -> None:
    layer, x = FusedMoE(DIM, HIDDEN, EXPERTS, TOP_K), torch.randn(9, DIM)
    routed = layer.gate(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = layer.experts(x, *routed)
    assert got.dtype == torch.bfloat16
    got.sum().backward()
    assert layer.experts.gate_up_proj.grad.dtype == torch.float32
    want = layer.experts(x, *routed)
    assert (got.float() - want).norm() < 0.02 * want.norm()


def test_compiled() -> None:
    layer = FusedMoE(DIM, HIDDEN, EXPERTS, TOP_K, shared_hidden=8, dtype=torch.float64)
    x = torch.randn(3, 5, DIM, dtype=torch.float64)
    compiled = torch.compile(layer, fullgraph=True)
    want, got = layer(x), compiled(x)
    torch.testing.assert_close(got, want)
    parameters = list(layer.parameters())
    for a, b in zip(
        torch.autograd.grad(got.sum(), parameters), torch.autograd.grad(want.sum(), parameters), strict=True
    ):
        torch.testing.assert_close(a, b)


def mixtral(dtype: Any) -> tuple[Any, FusedMoE]:
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=DIM, intermediate_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = "eager"
    return MixtralSparseMoeBlock(config).to(dtype), FusedMoE(DIM, HIDDEN, EXPERTS, TOP_K, dtype=dtype)


def qwen3_moe(dtype: Any) -> tuple[Any, FusedMoE]:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=DIM, moe_intermediate_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        norm_topk_prob=False,
    )  # fmt: skip
    config._experts_implementation = "eager"
    return Qwen3MoeSparseMoeBlock(config).to(dtype), FusedMoE(DIM, HIDDEN, EXPERTS, TOP_K, normalize=False, dtype=dtype)


def deepseek_v3(dtype: Any) -> tuple[Any, FusedMoE]:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE

    config = DeepseekV3Config(
        hidden_size=DIM, moe_intermediate_size=HIDDEN, n_routed_experts=8, num_experts_per_tok=3, n_group=4,
        topk_group=2, n_shared_experts=1, routed_scaling_factor=2.5, norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = "eager"
    ours = FusedMoE(
        DIM, HIDDEN, 8, 3, scores="sigmoid", scale=2.5, groups=4, top_k_groups=2, shared_hidden=HIDDEN, dtype=dtype
    )
    return DeepseekV3MoE(config).to(dtype), ours


@pytest.mark.parametrize("make", [mixtral, qwen3_moe, deepseek_v3])
@pytest.mark.parametrize("single", [False, True])
def test_transformers_state_dicts(make: Any, single: bool) -> None:
    """Also those of checkpoints, with a tensor for each expert."""
    pytest.importorskip("transformers", minversion="5.0")
    theirs, ours = make(torch.float64)
    with torch.no_grad():
        for name, x in [*theirs.named_parameters(), *theirs.named_buffers()]:
            x.copy_(torch.randn(x.shape, dtype=x.dtype) * (0.1 if "bias" in name else 0.5))
    state = theirs.state_dict()
    if single:
        names = ("w1", "w3", "w2") if make is mixtral else ("gate_proj", "up_proj", "down_proj")
        gate_up, down = state.pop("experts.gate_up_proj"), state.pop("experts.down_proj")
        for e in range(len(down)):
            for name, x in zip(names, (*gate_up[e].chunk(2), down[e]), strict=True):
                state[f"experts.{e}.{name}.weight"] = x
    ours.load_state_dict(state)
    x = torch.randn(4, 7, DIM, dtype=torch.float64)
    tolerance = {"rtol": 1e-5, "atol": 1e-5}  # transformers' routers compute in float32
    torch.testing.assert_close(ours(x), theirs(x), **tolerance)


def named_as_in_checkpoints(state: dict[str, Any], prefix: str, names: tuple[str, str, str]) -> dict[str, Any]:
    """Return a layer's state with a tensor for each expert, and with transformers' names of the shared MLP."""
    renamed: dict[str, Any] = {}
    for name, x in state.items():
        own = name.removeprefix(prefix)
        if own == "experts.gate_up_proj":
            for e, both in enumerate(x):
                for projection, half in zip(names[:2], both.chunk(2), strict=True):
                    renamed[f"{prefix}experts.{e}.{projection}.weight"] = half
        elif own == "experts.down_proj":
            renamed |= {f"{prefix}experts.{e}.{names[2]}.weight": w for e, w in enumerate(x)}
        elif own.startswith("shared_experts."):
            renamed[f"{prefix}shared_experts.{own.split('.')[1]}_proj.weight"] = x
        else:
            renamed[name] = x
    return renamed


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
@pytest.mark.parametrize(
    "path",
    ["", "mlp", "ffn_proj", "gate_proj.up", "block_sparse_moe", "experts.0.w1", "shared_experts", "layers.3.down_proj"],
)
def test_state_dicts_below_parents_of_any_name(path: str, names: tuple[str, str, str]) -> None:
    def model() -> Any:
        module: Any = FusedMoE(DIM, HIDDEN, EXPERTS, TOP_K, shared_hidden=8)
        for name in reversed(path.split(".") if path else []):
            parent = torch.nn.Module()
            parent.add_module(name, module)
            module = parent
        return module

    source, target, prefix = model(), model(), f"{path}." if path else ""
    state, unknown = named_as_in_checkpoints(source.state_dict(), prefix, names), f"{prefix}shared_experts.up_proj.bias"
    assert not state.keys() & source.state_dict().keys() - {f"{prefix}gate.weight"}
    got = target.load_state_dict(state | {unknown: torch.zeros(8)}, strict=False)
    assert (got.missing_keys, got.unexpected_keys) == ([], [unknown])
    for name, x in target.state_dict().items():
        assert torch.equal(x, source.state_dict()[name])


@pytest.mark.parametrize("experts_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_reset_parameters(scores: Any, experts_dtype: Any) -> None:
    """It draws what the constructor does, also after a layer was on meta."""
    options = {"scores": scores, "shared_hidden": 128, "experts_dtype": experts_dtype}
    torch.manual_seed(5)
    want = FusedMoE(DIM, 128, EXPERTS, TOP_K, **options)
    layer = FusedMoE(DIM, 128, EXPERTS, TOP_K, device="meta", **options).to_empty(device="cpu")
    for x in layer.state_dict().values():
        x.copy_(torch.randn(x.shape))
    torch.manual_seed(5)
    layer.reset_parameters()
    for a, b in zip(layer.state_dict().values(), want.state_dict().values(), strict=True):
        assert torch.equal(a.float(), b.float())
    assert want.gate.weight.std() < 2 * DIM**-0.5
    assert all(hasattr(x, "reset_parameters") for x in layer.modules() if x._parameters)  # as FSDP's users call them


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_on_meta(scores: Any, dtype: Any) -> None:
    layer = FusedMoE(DIM, HIDDEN, EXPERTS, TOP_K, scores=scores, shared_hidden=8, device="meta", dtype=dtype)
    y = layer(torch.randn(2, 3, DIM, device="meta", dtype=dtype))
    assert (y.shape, y.dtype, y.is_meta) == ((2, 3, DIM), dtype, True)
    y.sum().backward()
    assert layer.experts.down_proj.grad.shape == layer.experts.down_proj.shape


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dim": 0}, "dim: got 0; use an integer from 1 on"),
        ({"hidden": 0}, "hidden: got 0; use an integer from 1 on"),
        ({"hidden": 24.0}, "hidden: got 24.0; use an integer"),
        ({"experts": True}, "experts: got True; use an integer"),
        ({"experts": -1}, "experts: got -1; use an integer"),
        ({"top_k": 2.0}, "top_k: got 2.0; use an integer"),
        ({"top_k": 7}, "top_k: got 7 of 6 experts"),
        ({"groups": 2.0}, "groups: got 2.0; use an integer"),
        ({"groups": 6, "top_k_groups": 3}, "groups: got 6 for 6 experts; use 1, or equal groups of two experts or"),
        ({"groups": 3, "top_k": 3}, "top_k: got 3, and 1 of 3 groups have 2 experts; use at most 2"),
        ({"groups": 3, "top_k_groups": 4}, "top_k_groups: got 4 of 3 groups"),
        ({"top_k_groups": "2"}, "top_k_groups: got '2'; use an integer"),
        ({"shared_hidden": -1}, "shared_hidden: got -1; use an integer from 0 on"),
        ({"shared_hidden": None}, "shared_hidden: got None; use an integer"),
        ({"scale": "2"}, "scale: got '2'; use a number"),
        ({"normalize": 1}, "normalize: got 1; use True or False"),
        ({"multiply_in_fp8": None}, "multiply_in_fp8: got None; use True or False"),
        ({"dtype": torch.int32}, "dtype: got torch.int32; use one of torch.bfloat16"),
        ({"activation": ["silu"]}, r"activation: got \['silu'\]; use one of"),
    ],
)
def test_wrong_arguments_of_the_layer(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        FusedMoE(**{"dim": DIM, "hidden": HIDDEN, "experts": EXPERTS, "top_k": TOP_K} | changed)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("by_kernel", [False, True])
def test_wrong_inputs_of_the_layer(monkeypatch: pytest.MonkeyPatch, by_kernel: bool, scores: Any) -> None:
    layer, x = FusedMoE(DIM, HIDDEN, EXPERTS, TOP_K, scores=scores), torch.randn(3, DIM)
    if by_kernel:
        routed_by_kernel(monkeypatch)
    for wrong, message in (
        (torch.randn(3, 8), r"input: got shape \(3, 8\); use \(..., 16\)"),
        (torch.randn(2, 3, 0), r"input: got shape \(6, 0\); use \(..., 16\)"),
        (torch.tensor(1.0), r"input: got shape \(1, 1\); use"),
        (x.bfloat16(), "input: got torch.bfloat16 with a weight of torch.float32; use the same for both"),
        (x.double(), "input: got torch.float64 with a weight of torch.float32"),
        ([1.0] * DIM, "input: got list; use a tensor"),
    ):
        with torch.no_grad(), pytest.raises(ArgumentError, match=message):
            layer(wrong)
    with torch.no_grad():
        torch.testing.assert_close(layer(x[0]), layer(x)[0])
        assert layer(torch.randn(2, 0, DIM)).shape == (2, 0, DIM)


@pytest.mark.parametrize("compiled", [False, True])
def test_transforms_of_the_layer_are_refused(compiled: bool) -> None:
    layer, x = FusedMoE(DIM, HIDDEN, EXPERTS, TOP_K), torch.randn(2, 3, DIM)
    call = torch.compile(layer, backend="aot_eager") if compiled else layer
    want = call(x)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            with pytest.raises(ArgumentError, match=r"input: got torch.func.vmap, .* use a batch \(..., dim\)"):
                torch.func.vmap(call)(x)
            with pytest.raises(ArgumentError, match="input: got forward mode, .* use torch.autograd.grad"):
                torch.func.jvp(call, (x,), (x,))
    with pytest.raises(ArgumentError, match="torch.func: got a gradient of a function without second derivatives"):
        torch.func.grad(lambda x: call(x).sum())(x)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ArgumentError, match="input: got forward mode"):
        call(torch.autograd.forward_ad.make_dual(x, x))
    torch.testing.assert_close(call(x), want)


def test_transforms_in_compiled_code_are_refused() -> None:
    """Dynamo reports our exceptions as those of user code."""
    layer, x = FusedMoE(DIM, HIDDEN, EXPERTS, TOP_K), torch.randn(3, DIM)

    def loss(parameters: Any) -> Any:
        return torch.func.functional_call(layer, parameters, (x,)).sum()

    with pytest.raises(torch._dynamo.exc.Unsupported, match="Observed exception"):
        torch.compile(torch.func.grad(loss), fullgraph=True)(dict(layer.named_parameters()))


def test_the_experts_interface_of_transformers() -> None:
    pytest.importorskip("transformers", minversion="5.0")
    register_experts()
    theirs, _ = mixtral(torch.float64)
    with torch.no_grad():
        for x in theirs.parameters():
            x.copy_(torch.randn(x.shape, dtype=x.dtype))
    x = torch.randn(2, 9, DIM, dtype=torch.float64)
    want = theirs(x)
    theirs.experts.config._experts_implementation = "gemmsmith"
    got = theirs(x)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(got.sum(), theirs.experts.down_proj),
        torch.autograd.grad(want.sum(), theirs.experts.down_proj),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_second_derivatives_are_refused() -> None:
    x, experts, weights, gate_up, down = inputs(20)
    y = gated_experts(x.requires_grad_(), experts, weights, gate_up, down)
    with pytest.raises(ArgumentError, match="create_graph: got True"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(ArgumentError, match="torch.func: got a gradient .* use torch.autograd.grad"):
        torch.func.grad(lambda x: gated_experts(x, experts, weights, gate_up, down).sum())(x.detach())


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="top_k: got 7 of 6 experts"):
        FusedMoE(DIM, HIDDEN, EXPERTS, 7)
    with pytest.raises(ArgumentError, match="scores: got 'relu'"):
        FusedMoE(DIM, HIDDEN, EXPERTS, 2, scores="relu")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="groups: got 4 for 6 experts"):
        FusedMoE(DIM, HIDDEN, EXPERTS, 2, groups=4, top_k_groups=2)
    with pytest.raises(ArgumentError, match="activation: got 'tanh'"):
        FusedMoE(DIM, HIDDEN, EXPERTS, 2, activation="tanh", shared_hidden=8)
    layer = FusedMoE(DIM, HIDDEN, 2, 1)
    with pytest.raises(ArgumentError, match=r"state_dict: got experts \[1\]"):
        layer.load_state_dict({"experts.1.gate_proj.weight": torch.zeros(HIDDEN, DIM)})
    x, experts, weights, gate_up, down = inputs(3)
    with pytest.raises(ArgumentError, match="x, experts, weights, gate_up, down: got shapes"):
        gated_experts(x[:2], experts, weights, gate_up, down)
    with pytest.raises(ArgumentError, match=r"biases: got shape \(16,\) for down; use \(6, 16\)"):
        gated_experts(x, experts, weights, gate_up, down, biases=(None, torch.zeros(DIM)))


LAYERS = {
    "bf16": {"dtype": torch.bfloat16}, "fp32, unaligned": {"hidden": 20, "shared_hidden": 8},
    "sigmoid": {"scores": "sigmoid", "dtype": torch.bfloat16}, "fp8 training": {"multiply_in_fp8": True},
    "fp8": {"experts_dtype": torch.float8_e4m3fn, "hidden": 128},
}  # fmt: skip


def a_layer(name: str) -> tuple[FusedMoE, Any]:
    """Return a layer and its inputs by their numbers of rows; gradients are recorded unless it has none."""
    options = {"hidden": HIDDEN, "dtype": torch.float32, **LAYERS[name]}
    made = FusedMoE(DIM, experts=EXPERTS, top_k=TOP_K, **options)
    made.requires_grad_(name != "fp8")
    return made, lambda rows: torch.randn(rows, DIM, dtype=options["dtype"])


@pytest.mark.parametrize("name", LAYERS)
def test_compiled_for_any_number_of_rows(name: str) -> None:
    torch._dynamo.reset()
    made, inputs_of = a_layer(name)
    graphs = CompileCounterWithBackend("aot_eager")
    dynamic, marked = (torch.compile(made, backend=graphs, fullgraph=True, dynamic=x) for x in (True, None))
    for rows in (9, 12, 10, 17, 33):
        x = inputs_of(rows)
        torch.testing.assert_close(dynamic(x), made(x))
    assert graphs.frame_count == 1
    torch._dynamo.reset()
    for rows in (9, 12, 10, 16):
        x = inputs_of(rows)
        torch._dynamo.mark_dynamic(x, 0)
        y, want = marked(x), made(x)
        torch.testing.assert_close(y, want)
        if name != "fp8":
            weight = made.experts.down_proj
            got, wanted = (torch.autograd.grad(a.float().sum(), weight) for a in (y, want))
            torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)
    assert graphs.frame_count == 2


def test_inference_compiled_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an operator routes."""
    routed_by_kernel(monkeypatch)
    torch._dynamo.reset()
    made, inputs_of = a_layer("sigmoid")
    graphs, counts = CompileCounterWithBackend("aot_eager"), set()
    run = torch.compile(made, backend=graphs, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (9, 12, 10, 17):
            x = inputs_of(rows)
            torch.testing.assert_close(run(x), made(x))
            counts.add(graphs.frame_count)
    assert len(counts) == 1  # Dynamo starts anew in the first call, since `scale` is a float


@pytest.mark.parametrize("name", LAYERS)
def test_exported_for_any_number_of_rows(name: str) -> None:
    made, inputs_of = a_layer(name)
    exported = torch.export.export(made, (inputs_of(16),), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    for rows in (2, 9, 40):
        x = inputs_of(rows)
        torch.testing.assert_close(exported.module()(x), made(x))


@pytest.mark.parametrize("backend", ["", "aot_eager_decomp_partition"])
@pytest.mark.parametrize("in_fp8", [False, True])
def test_what_a_training_step_saves(in_fp8: bool, backend: str) -> None:
    """Little more than x, gate and up: neither gathered rows nor what down multiplies; compiled, too."""
    tokens, dim, hidden, top_k = 64, 256, 96, 8
    made = FusedMoE(dim, hidden, 16, top_k, dtype=torch.bfloat16, multiply_in_fp8=in_fp8)
    run = torch.compile(made, backend=backend) if backend else made
    sizes = {x.untyped_storage().data_ptr(): 0 for x in made.parameters()}

    def pack(x: Any) -> Any:
        sizes.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = run(torch.randn(tokens, dim, dtype=torch.bfloat16, requires_grad=True))
    assert y.requires_grad
    assert sum(sizes.values()) <= 1.1 * tokens * 2 * (dim + 2 * hidden * top_k)


def test_dynamo_warns_of_nothing_on_a_gpu(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    """Whether kernels run there is cached."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    fallback.kernels_unsupported.cache_clear()
    run = torch.compile(lambda x: x + experts_module._kernels_run(0), backend="eager", fullgraph=True)
    assert run(torch.ones(1)) == 2
    fallback.kernels_unsupported.cache_clear()
    assert not [x for x in recwarn if "lru_cache" in str(x.message)]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_operators_of_training(transposed: bool, interleaved: bool) -> None:
    x, experts, weights, gate_up, down = (t.detach() for t in inputs(9))
    if transposed:
        gate_up, down = (w.mT.contiguous().mT for w in (gate_up, down))
    order, bias = sort_slots(experts, weights, EXPERTS), torch.randn(EXPERTS, 2 * HIDDEN).double()
    arrays = [order.offsets, order.token_of_row, order.row_of_slot], order.row_weights, gate_up, down
    for sums in (False, True):
        options = "silu", interleaved, sums, False
        torch.library.opcheck(FORWARD, (x, *arrays, bias, *options))
        y, halves = FORWARD(x, *arrays, bias, *options)
        for needs in ([True, False, True, False], [False, True, False, True]):
            torch.library.opcheck(BACKWARD, (torch.randn_like(y), x, halves, *arrays, *options, needs))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gate", ["silu", OAI, RELU2], ids=["silu", "oai", "relu2"])
def test_the_kernels_of_gates(gate: str, biased: bool) -> None:
    """In the simulator, against float64; some experts are other ranks'."""
    tokens, dim, hidden, count = 20, 64, 48, width(gate)
    experts, weights = torch.rand(tokens, EXPERTS + 1).topk(TOP_K).indices, torch.rand(tokens, TOP_K)
    x, gate_up, down, bias = (torch.randn(shape).bfloat16() for shape in (
        (tokens, dim), (EXPERTS, count * hidden, dim), (EXPERTS, dim, hidden), (EXPERTS, count * hidden),
    ))  # fmt: skip
    gate_up, down, order = gate_up * dim**-0.5, down * hidden**-0.5, sort_slots(experts, weights, EXPERTS)
    got = _run_inference(x, order, gate_up, down, bias if biased else None, None, gate, False, "sim")
    want = gated_experts(
        x.double(), experts, weights.double(), gate_up.double(), down.double(), Gate(gate),
        biases=(bias.double() if biased else None, None),
    )  # fmt: skip
    assert (got.double() - want).norm() <= 0.01 * want.norm()
    gradient = torch.randn(tokens * TOP_K, dim).bfloat16()
    for interleaved in (False, True)[: count if biased else 1]:
        shapes = [(tokens * TOP_K, count * hidden)] if interleaved else [(tokens * TOP_K, hidden)] * count
        halves, end = [torch.randn(shape).bfloat16() for shape in shapes], order.offsets[-1]
        others = order.offsets, gate, interleaved
        of_kernel = gate_gradients({"a": gradient, "b": down}, halves, order.row_weights, *others, backend="sim")
        exact, arrays = [x.double() for x in halves], {"a": gradient.double(), "b": down.double()}
        wanted = gate_gradients(arrays, exact, order.row_weights.double(), *others)
        for a, b in zip(of_kernel, wanted, strict=True):
            assert (a[:end].double() - b[:end]).norm() <= 0.01 * b.norm()


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_experts(kind: str, exported: bool) -> None:
    made = KindOfExperts(*KINDS[kind], DIM, HIDDEN, EXPERTS).double()
    x, experts, weights, *_ = inputs(20)
    run, parameters = made, list(made.parameters())
    if exported:
        rows = ({0: torch.export.Dim("rows", min=2)},) * 3
        run = torch.export.export(made, tuple(inputs(9)[:3]), dynamic_shapes=rows).module()
    experts[::3, 0] = EXPERTS  # of another rank
    got, want = run(x, experts, weights), made.one_at_a_time(x, experts, weights)
    torch.testing.assert_close(got, want)
    grads = torch.autograd.grad(got.square().sum(), (x, weights, *run.parameters()))
    for a, b in zip(grads, torch.autograd.grad(want.square().sum(), (x, weights, *parameters)), strict=True):
        torch.testing.assert_close(a, b)
