"""Every class of experts that the installed transformers dispatches, against its own eager forward."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
from torch import nn  # noqa: E402

from gemmsmith import ArgumentError  # noqa: E402
from gemmsmith.torch import register_experts  # noqa: E402
from gemmsmith.torch.transformers_experts import gate_of  # noqa: E402

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
