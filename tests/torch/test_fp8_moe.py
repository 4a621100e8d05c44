"""FusedMoE with experts in FP8, against float64 of the dequantized weights, and checkpoints with scales."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.torch.fp8_bounds import dequantized, fp8_experts_and_bound, fp8_mlp_and_bound  # noqa: E402

import gemmsmith  # noqa: E402
from gemmsmith import ArgumentError  # noqa: E402
from gemmsmith.torch import FusedMoE, register_experts  # noqa: E402
from gemmsmith.torch.mlp.gated_epilogues import ACTIVATIONS  # noqa: E402
from gemmsmith.torch.moe.fp8_experts import Fp8MLP, _run_experts, _run_mlp, fp8_gated_experts  # noqa: E402
from gemmsmith.torch.moe.slots import sort_slots  # noqa: E402

pytestmark = pytest.mark.torch
DIM, HIDDEN, EXPERTS, TOP_K = 208, 128, 6, 2
FP8 = torch.float8_e4m3fn


def inputs(tokens: int, dtype: Any = torch.bfloat16) -> list[Any]:
    experts = torch.rand(tokens, EXPERTS).topk(TOP_K).indices
    gate_up = gemmsmith.quantize(torch.randn(EXPERTS, 2 * HIDDEN, DIM) * DIM**-0.5, "128x128")
    down = gemmsmith.quantize(torch.randn(EXPERTS, DIM, HIDDEN) * HIDDEN**-0.5, "128x128")
    return [torch.randn(tokens, DIM).to(dtype), experts, torch.randn(tokens, TOP_K), *gate_up, *down]


def check(got: Any, x: Any, experts: Any, weights: Any, *scaled: Any, activation: Any = None) -> None:
    activation = activation or torch.nn.functional.silu
    want, bound = fp8_experts_and_bound(
        x, experts, weights, dequantized(*scaled[:2]), dequantized(*scaled[2:]), activation
    )
    assert got.dtype == x.dtype
    assert ((got.double() - want).abs() <= bound).all()
    assert (got.double() - want).norm() <= 0.07 * want.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_experts(tokens: int, dtype: Any) -> None:
    arrays = inputs(tokens, dtype)
    check(fp8_gated_experts(*arrays), *arrays)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str) -> None:
    act = {"gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh")}.get(
        activation, getattr(torch.nn.functional, activation.removesuffix("_tanh"))
    )
    arrays = inputs(20)
    check(fp8_gated_experts(*arrays, activation), *arrays, activation=act)


@pytest.mark.parametrize("absent", [-1, EXPERTS, 1000])
def test_the_kernels(absent: int) -> None:
    """In the simulator; some experts are other ranks'."""
    arrays = inputs(23)
    arrays[1][::3, 0], arrays[1][5] = absent, absent
    x, experts, weights, *scaled = arrays
    order = sort_slots(experts, weights, EXPERTS)
    got = _run_experts(
        x, order, *scaled, None, "silu", False, backend="sim",
    )  # fmt: skip
    check(got, *arrays)
    check(fp8_gated_experts(*arrays), *arrays)
    assert not got[5].any()


@pytest.mark.parametrize("hidden", [128, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_of_an_mlp(dtype: Any, hidden: int) -> None:
    mlp, x = Fp8MLP(DIM, hidden, "silu", None), torch.randn(21, DIM).to(dtype)
    wide = []
    for layer in (mlp.gate, mlp.up, mlp.down):
        values, scales = gemmsmith.quantize(torch.randn(layer.weight.shape) * layer.weight.shape[1] ** -0.5, "128x128")
        layer.load_state_dict({"weight": values, "weight_scale_inv": scales})
        wide.append(dequantized(values, scales))
    arrays = [t for layer in (mlp.gate, mlp.up, mlp.down) for t in (layer.weight, layer.weight_scale_inv)]
    want, bound = fp8_mlp_and_bound(x, *wide)
    for got in (mlp(x), _run_mlp(x, *arrays, "silu", backend="sim")):
        assert got.dtype == dtype
        assert ((got.double() - want).abs() <= bound).all()
        assert (got.double() - want).norm() <= 0.07 * want.norm()


def layer(**options: Any) -> FusedMoE:
    return FusedMoE(
        DIM, HIDDEN, EXPERTS, TOP_K, scores="sigmoid", scale=2.5, groups=2, top_k_groups=1, shared_hidden=256,
        **options,
    )  # fmt: skip


def checkpoint(stacked: bool) -> dict[str, Any]:
    """A state dict as DeepSeek-V3 has it: e4m3 with weight_scale_inv, but for the router."""
    state = {"gate.weight": torch.randn(EXPERTS, DIM) * 0.1, "gate.e_score_correction_bias": torch.randn(EXPERTS) * 0.1}
    shapes = {f"{name}_proj": (HIDDEN, DIM) for name in ("gate", "up")} | {"down_proj": (DIM, HIDDEN)}
    for prefix, hidden in [*((f"experts.{e}", HIDDEN) for e in range(EXPERTS)), ("shared_experts", 256)]:
        for name, shape in shapes.items():
            shape = tuple(hidden if extent == HIDDEN else extent for extent in shape)
            weight, scale = gemmsmith.quantize(torch.randn(shape) * shape[1] ** -0.5, "128x128")
            state[f"{prefix}.{name}.weight"] = weight.contiguous()
            state[f"{prefix}.{name}.weight_scale_inv"] = scale.contiguous()
    for suffix in ("", "_scale_inv") if stacked else ():
        gate, up, down = (
            torch.stack([state.pop(f"experts.{e}.{name}.weight{suffix}") for e in range(EXPERTS)]) for name in shapes
        )
        state |= {f"experts.gate_up_proj{suffix}": torch.cat([gate, up], 1), f"experts.down_proj{suffix}": down}
    return state


@pytest.mark.parametrize("stacked", [False, True])
def test_checkpoints_with_scales(stacked: bool) -> None:
    """In a layer with experts in FP8, and dequantized in one without."""
    state, x = checkpoint(stacked), torch.randn(30, DIM)
    ours, wide = layer(experts_dtype=FP8), layer()
    for each in (ours, wide):
        each.load_state_dict(dict(state), strict=True)
    experts = ours.experts
    names = [f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")]
    gate, up, shared_down = (dequantized(state[name], state[f"{name}_scale_inv"]) for name in names)
    gate_up = dequantized(experts.gate_up_proj, experts.gate_up_proj_scale_inv)
    down = dequantized(experts.down_proj, experts.down_proj_scale_inv)
    with torch.no_grad():
        want, bound = fp8_experts_and_bound(x, *ours.gate(x), gate_up, down)
        of_shared, bound_of_shared = fp8_mlp_and_bound(x, gate, up, shared_down)
        got, by_wide = ours(x), wide(x)
    want, bound = want + of_shared, bound + bound_of_shared
    assert ((got.double() - want).abs() <= bound).all()
    assert (got.double() - want).norm() <= 0.07 * want.norm()
    torch.testing.assert_close(by_wide.double(), want, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.state_dict()["experts.gate_up_proj"].float(), experts.gate_up_proj.float())


@pytest.mark.parametrize("hidden", [64, 96, 192])
def test_checkpoints_whose_last_blocks_are_partial(hidden: int) -> None:
    """With a tensor for each expert, gate and up have scales of their own."""
    wide, state, want = FusedMoE(DIM, hidden, 2, 1), {"gate.weight": torch.randn(2, DIM)}, {}
    for e in range(2):
        for name, shape, scale in (("gate", (hidden, DIM), 1), ("up", (hidden, DIM), 100), ("down", (DIM, hidden), 1)):
            weight, scales = gemmsmith.quantize(torch.randn(shape) * scale, "128x128")
            state |= {f"experts.{e}.{name}_proj.weight": weight, f"experts.{e}.{name}_proj.weight_scale_inv": scales}
            want[e, name] = dequantized(weight[None], scales[None])[0].float()
    wide.load_state_dict(state)
    for e in range(2):
        torch.testing.assert_close(wide.experts.gate_up_proj[e], torch.cat([want[e, "gate"], want[e, "up"]]))
        torch.testing.assert_close(wide.experts.down_proj[e], want[e, "down"])


def test_weights_without_scales_are_quantized() -> None:
    wide, ours, x = layer(dtype=torch.bfloat16), layer(dtype=torch.bfloat16, experts_dtype=FP8), torch.randn(9, DIM)
    ours.load_state_dict(wide.state_dict())
    values, scales = gemmsmith.quantize(wide.experts.down_proj.detach(), "128x128")
    assert torch.equal(ours.experts.down_proj.float(), values.float())
    assert torch.equal(ours.experts.down_proj_scale_inv, scales)
    again = layer(dtype=torch.bfloat16, experts_dtype=FP8)
    again.load_state_dict(ours.state_dict())
    with torch.no_grad():
        got, want = ours(x.bfloat16()), wide(x.bfloat16())
        assert torch.equal(again(x.bfloat16()), got)
    assert (got - want).norm() < 0.1 * want.norm()


def transformers_experts(**options: Any) -> Any:
    """FP8 experts of transformers, with gemmsmith's implementation."""
    pytest.importorskip("transformers", minversion="5.0")
    from transformers.integrations.moe import use_experts_implementation
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config

    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    except ImportError:
        pytest.skip("this transformers has no interface for experts in FP8")
    register_experts()
    config = DeepseekV3Config(hidden_size=DIM, moe_intermediate_size=HIDDEN, n_routed_experts=EXPERTS)
    config.num_experts, config._experts_implementation = EXPERTS, "gemmsmith"
    made = use_experts_implementation(experts_class=FP8Experts, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    return made(config=config, **{"block_size": (128, 128), "activation_scheme": "dynamic", **options})


def test_the_experts_interface_of_transformers() -> None:
    theirs, (x, experts, weights, *scaled) = transformers_experts(), inputs(20)
    names = ("gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv")
    theirs.load_state_dict(dict(zip(names, scaled, strict=True)), strict=False)
    experts[::3, 0] = EXPERTS  # of another rank
    with torch.no_grad():
        check(theirs(x, experts, weights), x, experts, weights, *scaled)
        for options, message in (
            ({"block_size": (64, 64)}, "FP8Experts with scales of blocks"),
            ({"activation_scheme": "static"}, "FP8Experts with activation_scheme=static"),
        ):  # fmt: skip
            with pytest.raises(ArgumentError, match=message):
                transformers_experts(**options)(x, experts, weights)


class Config:
    """What FP8Experts reads of a configuration, with a gate of some model."""

    num_experts, hidden_size, moe_intermediate_size, hidden_act, _experts_implementation = (
        EXPERTS, DIM, HIDDEN, "silu", "gemmsmith",
    )  # fmt: skip

    def __init__(self, **gate: Any) -> None:
        vars(self).update(gate)


@pytest.mark.parametrize(
    ("gate", "has_gate"),
    [({"swiglu_limit": 0.5}, True), ({"swiglu_limit": 0.5, "swiglu_alpha": 1.7}, True),
     ({"mlp_gate_softcap": 0.7, "mlp_up_softcap": 0.3}, True), ({"hidden_act": "relu2"}, False)],
)  # fmt: skip
def test_gates_of_transformers_in_fp8(gate: dict[str, float], has_gate: bool) -> None:
    plain = transformers_experts()
    theirs = type(plain)(Config(**gate), block_size=(128, 128), has_gate=has_gate)
    theirs.has_gate = has_gate
    reason = "this transformers computes no such gate in FP8"
    if not all(hasattr(theirs, name.removeprefix("mlp_")) for name in gate.keys() - {"hidden_act"}):
        pytest.skip(reason)
    x, experts, weights, gate_up, gate_up_scale, down, down_scale = inputs(20)
    if not has_gate:
        gate_up, gate_up_scale = gate_up[:, :HIDDEN], gate_up_scale[:, : HIDDEN // 128]
    name = "gate_up_proj" if has_gate else "up_proj"
    arrays = {name: gate_up, f"{name}_scale_inv": gate_up_scale, "down_proj": down, "down_proj_scale_inv": down_scale}
    theirs.load_state_dict(arrays, strict=False)
    with torch.no_grad():
        got = theirs(x, experts, weights)
    want = torch.zeros(x.shape, dtype=torch.float64)
    for e in range(EXPERTS):
        token, slot = torch.where(experts == e)
        product = x[token].double() @ dequantized(gate_up, gate_up_scale)[e].T
        h = theirs._apply_gate(product) if has_gate else theirs.act_fn(product)
        want.index_add_(
            0, token, (h.double() @ dequantized(down, down_scale)[e].T) * weights[token, slot, None].double()
        )
    assert (got.double() - want).norm() <= 0.07 * want.norm()


def test_compiled() -> None:
    ours, x = layer(experts_dtype=FP8), torch.randn(3, 5, DIM)
    ours.load_state_dict(checkpoint(True))
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(ours, fullgraph=True)(x), ours(x))


def test_hooks_load_weights() -> None:
    """As accelerate's offloading: parameters are on meta except in their module's forward."""
    layer, x = FusedMoE(128, 128, 4, 2, shared_hidden=128, experts_dtype=torch.float8_e4m3fn), torch.randn(9, 128)
    layer.load_state_dict(FusedMoE(128, 128, 4, 2, shared_hidden=128).state_dict())

    def offload(module: Any) -> None:
        own = {name: y.detach().clone() for name, y in module.named_parameters(recurse=False)}

        def put(device: str) -> None:
            for name, y in own.items():
                setattr(module, name, torch.nn.Parameter(y.to(device), requires_grad=False))

        module.register_forward_pre_hook(lambda *_: put("cpu"))
        module.register_forward_hook(lambda *_: put("meta"))
        put("meta")

    with torch.no_grad():
        want = layer(x)
        for module in layer.modules():
            offload(module)
        assert all(y.is_meta for y in layer.parameters())
        assert torch.equal(layer(x), want)


def test_what_is_refused() -> None:
    with pytest.raises(ArgumentError, match="hidden: got 96 with experts in fp8; use a multiple of 128"):
        FusedMoE(DIM, 96, EXPERTS, TOP_K, experts_dtype=FP8)
    with pytest.raises(ArgumentError, match=r"experts_dtype: got torch.float8_e5m2; use torch.float8_e4m3fn"):
        FusedMoE(DIM, HIDDEN, EXPERTS, TOP_K, experts_dtype=torch.float8_e5m2)
    ours, x = layer(experts_dtype=FP8), torch.randn(4, DIM)
    with pytest.raises(ArgumentError, match="requires a gradient; FP8 experts have none"):
        ours(x)
    with torch.no_grad(), pytest.raises(ArgumentError, match="gate_up: got torch.bfloat16; use torch.float8_e4m3fn"):
        ours.bfloat16()(x.bfloat16())
    with pytest.raises(RuntimeError, match="Missing key.*down_proj_scale_inv"):
        ours.load_state_dict({name: w for name, w in checkpoint(True).items() if "down_proj_scale" not in name})
    x, experts, weights, *scaled = inputs(3)
    with pytest.raises(ArgumentError, match="x, experts, weights, gate_up, down: got shapes"):
        fp8_gated_experts(x[:2], experts, weights, *scaled)
    with pytest.raises(ArgumentError, match="activation: got 'tanh'; use one of silu, gelu, gelu_tanh, relu"):
        fp8_gated_experts(x, experts, weights, *scaled, "tanh")
    with pytest.raises(ArgumentError, match="scale_b: got dtype bf16"):
        fp8_gated_experts(x, experts, weights, scaled[0], scaled[1].bfloat16(), *scaled[2:])
