"""The modules under accelerate's hooks, which replace `forward` of layers, and compiled for it and for a Trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._inductor.utils import run_and_get_code

import gemmsmith.torch as gt

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")

DIM, HIDDEN, CLASSES = 16, 32, 8


class Model(nn.Module):
    """Every module, with a loss."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.first = gt.FusedLinear(DIM, DIM, activation="gelu", dtype=dtype)
        self.mlp = gt.FusedMLP(DIM, HIDDEN, dtype=dtype)
        self.moe = gt.FusedMoE(DIM, HIDDEN, 4, 4, shared_hidden=HIDDEN, dtype=dtype)  # all, so rounding selects none
        self.head = gt.FusedLinearCrossEntropy(DIM, CLASSES, dtype=dtype)

    def forward(self, x: Any, target: Any) -> Any:
        x = x + self.first(x)
        x = x + self.mlp(x)
        x = x + self.moe(x)
        return x, self.head(x, target)


def everywhere(model: nn.Module, folder: Path) -> dict[str, Any]:
    """Return functions that offload a copy of the model, by name."""
    places = {"first": "disk", "mlp": "disk", "moe": "cpu", "head": "disk"}

    def load() -> Any:
        checkpoint = str(folder / "model.bin")
        torch.save(model.state_dict(), checkpoint)
        with accelerate.init_empty_weights():
            empty = Model(model.first.weight.dtype)
        return accelerate.load_checkpoint_and_dispatch(
            empty, checkpoint, places, offload_folder=folder / "loaded", force_hooks=True
        )

    return {
        "cpu": lambda: accelerate.cpu_offload(copy.deepcopy(model), "cpu"),
        "disk": lambda: accelerate.disk_offload(copy.deepcopy(model), folder / "disk", "cpu"),
        "dispatch": lambda: accelerate.dispatch_model(
            copy.deepcopy(model), places, "cpu", offload_dir=folder / "dispatch", force_hooks=True
        ),
        "load": load,
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("place", ["cpu", "disk", "dispatch", "load"])
def test_offloading(place: str, dtype: Any, tmp_path: Path) -> None:
    model, x, target = Model(dtype), torch.randn(5, DIM).to(dtype), torch.randint(CLASSES, (5,))
    expected = copy.deepcopy(model).double()(x.double(), target)
    offloaded = everywhere(model, tmp_path)[place]()
    assert offloaded.mlp.down.weight.is_meta
    tolerance = 2.0**-5 if dtype == torch.bfloat16 else 2.0**-18
    for is_recorded in (False, True):
        with torch.set_grad_enabled(is_recorded):
            for y, want in zip(offloaded(x, target), expected, strict=True):
                assert (y.double() - want).norm() <= tolerance * want.norm()


def test_offloading_in_fp8() -> None:
    moe = gt.FusedMoE(128, 128, 4, 4, shared_hidden=128, experts_dtype=torch.float8_e4m3fn)
    moe.load_state_dict(gt.FusedMoE(128, 128, 4, 4, shared_hidden=128).state_dict())
    x = torch.randn(5, 128)
    with torch.no_grad():
        expected = moe(x)
        offloaded = accelerate.cpu_offload(copy.deepcopy(moe), "cpu")
        assert offloaded.experts.down_proj.is_meta
        assert offloaded.shared_experts.down.weight.is_meta
        assert torch.equal(offloaded(x), expected)


def test_gradients_through_offloaded_layers() -> None:
    model, target = Model(torch.float32), torch.randint(CLASSES, (5,))
    x = torch.randn(5, DIM)
    gradients = []
    for m in (model, accelerate.cpu_offload(copy.deepcopy(model), "cpu")):
        own = x.clone().requires_grad_()
        m(own, target)[1].backward()
        gradients.append(own.grad)
    torch.testing.assert_close(*gradients)


def test_layerwise_casting() -> None:
    """Weights are stored in bf16 and multiplied in fp32."""
    mlp, x = gt.FusedMLP(DIM, HIDDEN), torch.randn(3, DIM)
    rounded = copy.deepcopy(mlp).bfloat16().double()
    accelerate.big_modeling.attach_layerwise_casting_hooks(mlp, torch.bfloat16, torch.float32)
    assert mlp.gate.weight.dtype == torch.bfloat16
    torch.testing.assert_close(mlp(x).double(), rounded(x.double()), rtol=1e-5, atol=1e-5)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Any, labels: Any) -> Any:
        return {"loss": F.cross_entropy(self.out(self.hidden(x).relu()), labels)}


@pytest.fixture
def labeled() -> Any:
    torch._dynamo.reset()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield torch.randn(24, DIM), torch.randint(CLASSES, (24,))
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("by_plugin", [False, True])
def test_a_compiled_model_is_prepared(labeled: Any, by_plugin: bool) -> None:
    model, plain = Classifier(), {}
    expected = copy.deepcopy(model)
    if by_plugin:
        plain["dynamo_plugin"] = accelerate.utils.TorchDynamoPlugin(backend="inductor", options=gt.options())
    else:
        model.compile(options=gt.options())
    prepared = accelerate.Accelerator(cpu=True, **plain).prepare(model)

    def step() -> Any:
        loss = prepared(*labeled)["loss"]
        loss.backward()
        return loss

    loss, codes = run_and_get_code(step)
    assert "gemmsmith.gemm" in codes[0]
    expected_loss = expected(*labeled)["loss"]
    expected_loss.backward()
    torch.testing.assert_close(loss, expected_loss)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_compiled_model_in_a_trainer(labeled: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    x, labels = labeled
    rows, losses = [{"x": x[i], "labels": labels[i]} for i in range(24)], []
    model = Classifier()
    plain = copy.deepcopy(model)
    model.compile(options=gt.options())
    for m in (model, plain):
        arguments = transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, per_device_train_batch_size=24, max_steps=3, learning_rate=1e-2,
            report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(m, arguments, train_dataset=rows)
        result, codes = run_and_get_code(trainer.train)
        losses.append(result.training_loss)
        assert any("gemmsmith.gemm" in code for code in codes) == (m is model)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
