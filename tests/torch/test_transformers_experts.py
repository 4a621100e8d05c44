"""Every class of experts that the installed transformers dispatches, against its own eager forward."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
from torch import nn  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from gemmsmith import ArgumentError  # noqa: E402
from gemmsmith.torch import register_experts  # noqa: E402

pytestmark = pytest.mark.torch
DIM, HIDDEN, EXPERTS, TOP_K, TOKENS = 16, 24, 5, 2, 9
MODELS = Path(transformers.__file__).parent / "models"
NAMES = sorted(
    file.parent.name for file in MODELS.glob("*/modeling_*.py") if "@use_experts_implementation" in file.read_text()
)
SIZES = {"experts": EXPERTS, "intermediate": HIDDEN, "hidden_size": DIM}


class Small:
    """A model's configuration with small sizes."""

    def __init__(self, config: Any) -> None:
        self._config, self._experts_implementation = config, "eager"

    def __getattr__(self, name: str) -> Any:
        config = self._config
        exists = name in vars(config) or hasattr(type(config), name) or name in config.attribute_map
        sizes = [size for part, size in SIZES.items() if part in name and exists]
        return sizes[0] if sizes else getattr(config, name)


def experts_classes(name: str) -> list[Any]:
    """Return the decorated classes of a model."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    classes = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__]
    return [x for x in classes if hasattr(x, "_apply_gate") and hasattr(x.__init__, "__wrapped__")]


def make(kind: Any) -> tuple[Any, Small]:
    """Return experts in float64 with random weights, and their configuration: the first of the model that they take."""
    module = importlib.import_module(kind.__module__.replace("modeling_", "configuration_"))
    base = transformers.PreTrainedConfig
    configs = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, base) and x is not base]
    for config in map(Small, (x() for x in configs)):
        try:
            made = kind(config).double()
        except (AttributeError, TypeError):
            continue
        for parameter in made.parameters():
            nn.init.normal_(parameter)
        return made, config
    raise AssertionError(f"{kind.__name__}: none of {configs} makes it")


def inputs(tokens: int = TOKENS) -> tuple[Any, Any, Any]:
    x, weights = torch.randn(tokens, DIM, dtype=torch.float64), torch.rand(tokens, TOP_K, dtype=torch.float64)
    return x.requires_grad_(), torch.rand(tokens, EXPERTS).topk(TOP_K).indices, weights.requires_grad_()


@pytest.mark.parametrize("name", NAMES)
def test_every_class_is_as_its_own_forward(name: str) -> None:
    register_experts()
    classes = experts_classes(name)
    assert classes
    for kind in classes:
        module, config = make(kind)
        x, experts, weights = inputs()
        arrays = x, weights, *module.parameters()
        want = module(x, experts, weights)
        upstream = torch.randn_like(want)
        wanted = torch.autograd.grad(want, arrays, upstream)
        config._experts_implementation = "gemmsmith"
        got = module(x, experts, weights)
        with torch.no_grad():
            torch.testing.assert_close(module(x, experts, weights), got)
        for a, b in zip((got, *torch.autograd.grad(got, arrays, upstream)), (want, *wanted), strict=True):
            assert (a - b).norm() <= 1e-6 * b.norm()  # some compute a part in fp32


KINDS = ("mixtral", "gpt_oss", "deepseek_v4", "nemotron_h", "muse_spark", "openai_privacy_filter")
"""Models whose experts differ in kind: plain, alternating with biases, clamped, without a gate, with a norm, biases."""


def experts_of(name: str) -> tuple[Any, Small]:
    if name not in NAMES:
        pytest.skip(f"this transformers has no experts of {name}")
    register_experts()
    return make(experts_classes(name)[0])


@pytest.mark.parametrize("name", KINDS)
def test_experts_of_other_ranks_count_for_nothing(name: str) -> None:
    module, config = experts_of(name)
    x, experts, weights = inputs()
    present = torch.rand(experts.shape) < 0.7
    arrays, upstream = (x, weights, *module.parameters()), torch.randn(TOKENS, DIM, dtype=torch.float64)
    want = module(x, experts, weights * present)
    wanted = torch.autograd.grad(want, arrays, upstream)
    config._experts_implementation = "gemmsmith"
    got = module(x, torch.where(present, experts, EXPERTS), weights)
    for a, b in zip((got, *torch.autograd.grad(got, arrays, upstream)), (want, *wanted), strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()
    assert module(*inputs(0)).shape == (0, DIM)


@pytest.mark.parametrize("name", KINDS)
def test_autocast(name: str) -> None:
    module, config = experts_of(name)
    module, (x, experts, weights) = module.float(), inputs()
    config._experts_implementation = "gemmsmith"
    x, weights = x.detach().float(), weights.float()
    want = module(x, experts, weights)
    with torch.autocast("cpu", torch.bfloat16):
        got = module(x, experts, weights)
    assert got.dtype == x.dtype
    assert (got - want).norm() < 0.02 * want.norm()
    got.sum().backward()
    assert module.down_proj.grad.dtype == torch.float32


@pytest.mark.parametrize("name", KINDS)
def test_compiled_for_any_number_of_rows(name: str) -> None:
    module, config = experts_of(name)
    config._experts_implementation = "gemmsmith"
    torch._dynamo.reset()
    graphs, counts = CompileCounterWithBackend("aot_eager"), set()
    compiled = torch.compile(module, backend=graphs, fullgraph=True, dynamic=True)
    for tokens in (4, 7, 9, 12):
        x, experts, weights = inputs(tokens)
        arrays = x, weights, *module.parameters()
        want, got = module(x, experts, weights), compiled(x, experts, weights)
        torch.testing.assert_close(got, want)
        for a, b in zip(torch.autograd.grad(got.sum(), arrays), torch.autograd.grad(want.sum(), arrays), strict=True):
            torch.testing.assert_close(a, b)
        counts.add(graphs.frame_count)
    assert len(counts) == 1  # Dynamo starts anew in the first call, where a gate reads floats


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gate_follows_what_it_reads(compiled: bool) -> None:
    module, config = experts_of("gpt_oss")
    x, experts, weights = inputs()
    run = torch.compile(module, backend="eager") if compiled else module
    for limit in (7.0, 0.5, 7.0):
        module.limit, config._experts_implementation = limit, "eager"
        want = module(x, experts, weights)
        config._experts_implementation = "gemmsmith"
        torch.testing.assert_close(run(x, experts, weights), want)


def mixtral_config(**options: Any) -> Any:
    return transformers.MixtralConfig(
        hidden_size=DIM, intermediate_size=HIDDEN, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=32, num_local_experts=EXPERTS, **options,
    )  # fmt: skip


def test_models_refuse_a_gate_that_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """When they are made, and when the implementation is set."""
    register_experts()
    (kind,) = experts_classes("mixtral")
    model, tokens = (
        transformers.MixtralForCausalLM(mixtral_config(experts_implementation="eager")),
        torch.arange(9)[None],
    )
    want = model(tokens).logits
    model.set_experts_implementation("gemmsmith")
    torch.testing.assert_close(model(tokens).logits, want, rtol=1e-3, atol=1e-4)
    model.set_experts_implementation("eager")
    for gate in (
        lambda self, x: x.sort(-1)[0], lambda self, x: x.chunk(2, -1)[0] * self.down_proj[0, 0, 0],
        lambda self, x: (x.chunk(2, -1)[0] * x.chunk(2, -1)[1]).sum(-1), lambda self, x: x.chunk(2, -1),
        lambda self, x: x.chunk(2, -1)[0],
    ):  # fmt: skip
        monkeypatch.setattr(kind, "_apply_gate", gate)
        with pytest.raises(ArgumentError, match="experts_implementation: got MixtralExperts, whose"):
            model.set_experts_implementation("gemmsmith")
        assert model.config._experts_implementation == "eager"
        with pytest.raises(ArgumentError, match=r"(?s)got MixtralExperts, whose gate is no epilogue .*; use eager"):
            transformers.MixtralForCausalLM(mixtral_config(experts_implementation="gemmsmith"))


def test_hooks_of_an_activation_are_refused() -> None:
    module, config = experts_of("mixtral")
    module.act_fn.register_forward_hook(lambda *_: None)
    config._experts_implementation = "gemmsmith"
    with pytest.raises(ArgumentError, match="got MixtralExperts, whose gate is no epilogue .*act_fn has hooks"):
        module(*inputs())
